"""Sets with bad records: left out by the index, they are read by neither backend, and training goes
through.
"""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import SCRIPTS, numbered_examples, write_tfrecord

from dali_tf_input import (
    Checks,
    DaliOptions,
    DatasetSpec,
    InputSpec,
    Preprocess,
    Shard,
    TfDataOptions,
    build_index,
)
from dali_tf_input.dataset import make_dataset
from dali_tf_input.distribution import distribute
from dali_tf_input.index.tfrecord import scan_records

BACKENDS = {"dali_cpu": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}


class Counting(keras.Model):
    """A small model that counts how often it is trained on each label."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = keras.layers.Dense(num_classes)
        self.seen = self.add_weight(shape=(num_classes,), initializer="zeros", trainable=False)

    def call(self, images):
        return self.layer(tf.reduce_mean(images, axis=(1, 2)))

    def train_step(self, data):
        images, labels = data
        self.seen.assign_add(
            tf.math.bincount(
                tf.cast(labels, tf.int32), minlength=self.seen.shape[0], dtype=tf.float32
            )
        )
        return super().train_step((images, labels))


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_through_one_percent_of_bad_records(tmp_path, backend):
    """Without `--on_bad=skip` each of these would end it. Every sound record is seen once in each
    epoch, no bad one ever.
    """
    num_records, bad = 303, {50: "truncated", 151: "text", 260: "flipped"}  # 1%
    examples = numbered_examples(num_records)
    examples[50]["image/encoded"] = examples[50]["image/encoded"][:-100]
    examples[151]["image/encoded"] = b"404 not found"
    files = [
        write_tfrecord(tmp_path / f"train-{part}", examples[101 * part : 101 * part + 101])
        for part in range(3)
    ]
    with open(files[2], "r+b") as stream:  # the length of record 260
        stream.seek(list(scan_records(files[2]))[260 - 202][0])
        stream.write(b"\xff")
    command = [
        sys.executable,
        SCRIPTS / "index_tfrecords.py",
        "--verify=decode",
        "--on_bad=skip",
        tmp_path / "train-?",
    ]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    dataset = DatasetSpec.from_files(tmp_path / "train-?")
    assert dataset.num_records == num_records - len(bad)
    spec = InputSpec(
        dataset=dataset, preprocess=Preprocess.for_training(8), order="buffer", buffer_size=64
    )
    train = distribute(spec, BACKENDS[backend], global_batch_size=30)
    assert train.steps_per_epoch == 10
    model = Counting(num_records)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        train.dataset, steps_per_epoch=train.steps_per_epoch, epochs=1, shuffle=False, verbose=0
    )
    # Keras builds the model on a batch of an iterator that it then drops: it trains on a whole pass
    # of the next one.
    expected = np.array([number not in bad for number in range(num_records)], float)
    np.testing.assert_array_equal(model.seen.numpy(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_both_backends_skip_the_same_records(tmp_path, backend, num_shards):
    examples = numbered_examples(30)
    for number in (0, 4, 5, 17, 29):
        examples[number]["image/encoded"] = examples[number]["image/encoded"][:-50]
    for position in range(3):
        write_tfrecord(tmp_path / f"train-{position}", examples[10 * position : 10 * position + 10])
    build_index(tmp_path / "train-?", Checks(verify="decode"), on_bad="skip", max_bad_fraction=0.5)
    spec = InputSpec(
        dataset=DatasetSpec.from_files(tmp_path / "train-?"),
        preprocess=Preprocess.for_evaluation(8),
        order="sequential",
    )
    seen = []
    for shard_id in range(num_shards):
        shard = Shard(shard_id, num_shards)
        count = len(shard.records(25))
        with tf.device("CPU:0"):
            dataset = make_dataset(spec, BACKENDS[backend], batch_size=count, shard=shard)
            _, labels = next(iter(dataset))
        seen += np.asarray(labels).tolist()
    assert seen == [number for number in range(30) if number not in (0, 4, 5, 17, 29)]
