"""Sets with bad records: skipped by the index, they are read by neither backend, and training
succeeds.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, jpeg, scan_records, spec_of, write_tfrecord
from models import FROM_LOGITS, fit

from dali_tf_input import Checks, InputSpec, Preprocess, Records, Shard, build_index
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.training.load import load

pytestmark = pytest.mark.slow
NUM_RECORDS = 93
TRUNCATED, TEXT, FLIPPED = (0, 4, 5, 20, 92), 50, 70  # at the ends, side by side, and alone
BAD = {*TRUNCATED, TEXT, FLIPPED}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Three files of 31 records; the index skips those that would end training."""
    folder = tmp_path_factory.mktemp("bad")
    examples = [
        {"image/encoded": jpeg(16, 12, seed=number), "image/class/label": number}
        for number in range(NUM_RECORDS)
    ]
    for number in TRUNCATED:
        examples[number]["image/encoded"] = examples[number]["image/encoded"][:-100]
    examples[TEXT]["image/encoded"] = b"404 not found"
    for part in range(3):
        write_tfrecord(folder / f"train-{part}", examples[31 * part : 31 * part + 31])
    with open(folder / "train-2", "r+b") as stream:  # the length of the record
        stream.seek(list(scan_records(stream.name))[FLIPPED - 62][0])
        stream.write(b"\xff")
    checks = Checks(verify="decode", decoder="dali")
    build_index(folder / "train-?", checks, on_bad="skip", max_bad_fraction=0.1)
    return Records.from_files(folder / "train-?")


class Counting(keras.Model):
    """A small model that counts how often it is trained on each label."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = keras.layers.Dense(num_classes)
        self.seen = self.add_weight(shape=(num_classes,), initializer="zeros", trainable=False)

    def call(self, images):
        return self.layer(tf.reduce_mean(images, axis=(1, 2)))

    def train_step(self, data):
        labels = tf.cast(data[1], tf.int32)
        counts = tf.math.bincount(labels, minlength=self.seen.shape[0], dtype=tf.float32)
        self.seen.assign_add(counts)
        return super().train_step(data)


@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_training_through_bad_records(records, options):
    """Every valid record is seen once in each epoch, no bad one ever."""
    assert records.num_records == NUM_RECORDS - len(BAD)
    spec = spec_of(records, "buffer", Preprocess.for_training(8), buffer_size=32)
    train = load(spec, options, batch_size=43)
    assert train.steps_per_epoch == 2
    model = Counting(NUM_RECORDS)
    model.compile("sgd", FROM_LOGITS)
    fit(model, train)
    # Keras builds the model on a batch of an iterator that it then drops: it trains on a whole
    # epoch of the next one.
    expected = np.array([number not in BAD for number in range(NUM_RECORDS)], float)
    np.testing.assert_array_equal(model.seen.numpy(), expected)


@pytest.mark.parametrize(
    ("options", "num_shards"),
    at_night([(TF_DATA, 1), (DALI, 3)], [*itertools.product([DALI, TF_DATA], [1, 3])]),
)
def test_both_backends_skip_the_same_records(records, options, num_shards):
    spec = InputSpec.for_evaluation(records, 8)
    batch_size, seen = -(-records.num_records // num_shards), []
    for shard_id in range(num_shards):
        shard = Shard(shard_id, num_shards)
        with tf.device("CPU:0"):
            dataset = make_dataset(spec, options, batch_size=batch_size, shard=shard)
            seen += next(iter(dataset))[1].numpy().tolist()
    assert seen == [number for number in range(NUM_RECORDS) if number not in BAD]
