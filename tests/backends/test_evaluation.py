"""A pass with `repeat=False` sees each record once: what Keras makes of it is what one plain pass
over the records gives.
"""

import pytest
import tensorflow as tf
from conftest import BACKENDS, DALI, TF_DATA, refused, spec_of, table

from dali_tf_input import Preprocess, Shard
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.training.load import load

PREPROCESS = Preprocess.for_evaluation(8)


def evaluation_spec(dataset, count):
    return spec_of(dataset.select(range(count)), "sequential", PREPROCESS, repeat=False)


def test_replicas_need_a_full_step(dataset):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with refused("`batch_size` must be at most the number of records, 7, got 8"):
        load(evaluation_spec(dataset, 7), TF_DATA, strategy=strategy, batch_size=8)
    assert load(evaluation_spec(dataset, 7), TF_DATA, batch_size=8).steps_per_epoch == 1


def test_a_remainder_is_divided_evenly(dataset):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    evaluation = load(evaluation_spec(dataset, 23), DALI, strategy=strategy, batch_size=12)
    *_, (_, labels) = evaluation
    parts = [part.numpy().tolist() for part in strategy.experimental_local_results(labels)]
    assert parts == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


@pytest.mark.slow
@table(
    "division, options",
    [((3, 3), DALI), ((1, 30), TF_DATA)],
    [(1, 1), (1, 23), (1, 30), (2, 4), (3, 3), (8, 16)],
    BACKENDS.values(),
)
def test_each_record_once(dataset, division, options):
    num_shards, batch_size = division
    served, spec = [], evaluation_spec(dataset, 23)
    for shard in (Shard(number, num_shards) for number in range(num_shards)):
        made = make_dataset(spec, options, batch_size=batch_size, shard=shard)
        sizes = [len(labels) for _, labels in made]
        assert len(sizes) == int(made.cardinality())
        assert sizes[:-1] == [batch_size] * (len(sizes) - 1)  # the last one has the remainder
        labels = [label for _, labels in made for label in labels.numpy().tolist()]
        assert len(labels) == sum(sizes)
        served += labels
    assert sorted(served) == list(range(23))
