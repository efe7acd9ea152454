"""No strategy takes a dataset of DALI's through TensorFlow's MultiDeviceIterator, which crashes."""

import itertools
import signal

import keras
import pytest
import tensorflow as tf
from commands import python
from conftest import at_night

from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, load, make_dataset

OPTIONS = DaliOptions(device="cpu")
STRATEGIES = [
    lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
]
MADE = {
    "distribute": lambda spec: load(spec, OPTIONS, batch_size=4).dataset,
    "make_dataset": lambda spec: make_dataset(spec, OPTIONS, batch_size=4),
    "mapped": lambda spec: make_dataset(spec, OPTIONS, batch_size=4).map(lambda *batch: batch),
}
# Without this package: a strategy reads numbers of DALI's, and its iterators are dropped.
UNGUARDED = """
import gc

import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia.dali import fn, pipeline_def

@pipeline_def(batch_size=4, num_threads=1, device_id=None)
def numbers():
    return fn.random.uniform(range=[0.0, 1.0], shape=[64, 64, 3])

def make(context):
    with tf.device("CPU:0"):
        return dali_tf.DALIDataset(
            numbers(), batch_size=4, num_threads=1, device_id=None,
            output_shapes=(4, 64, 64, 3), output_dtypes=tf.float32,
        )

strategy = tf.distribute.MirroredStrategy(["CPU:0"])
for _ in range(100):
    iterator = iter(strategy.distribute_datasets_from_function(make))
    next(iterator)
    del iterator
    gc.collect()
"""


@pytest.fixture
def spec(dataset):
    return InputSpec(records=dataset, preprocess=Preprocess.for_training(8), order="global")


ROWS = [*itertools.product(MADE, range(len(STRATEGIES)), [False, True])]


def make_classifier(*layers):
    layers = [*layers, keras.layers.Flatten(), keras.layers.Dense(24)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("make", "strategy", "built"),
    at_night([("distribute", 2, True), ("make_dataset", 0, False), ("mapped", 1, True)], ROWS),
)
def test_keras_cannot_distribute_dalis_dataset(spec, make, strategy, built):
    """What Keras does with a model that was made under a strategy's scope."""
    with tf.device("CPU:0"):
        batches = MADE[make](spec)
    with STRATEGIES[strategy]().scope():
        model = make_classifier(*[keras.layers.Input((8, 8, 3))] * built)
    with pytest.raises(InputError, match=r"Pass the strategy: load\(spec, options, batch_size"):
        model.fit(batches, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize("make_strategy", at_night(STRATEGIES[2:], STRATEGIES))
def test_nor_can_a_function_that_makes_it(spec, make_strategy):
    """Unless nothing is fetched, which needs no MultiDeviceIterator: what `load` does."""
    with pytest.raises(InputError, match="No strategy may distribute a dataset of DALI's"):
        make_strategy().distribute_datasets_from_function(
            lambda context: make_dataset(spec, OPTIONS, batch_size=4)
        )
    fed = load(spec, OPTIONS, strategy=make_strategy(), batch_size=4)
    assert len(next(iter(fed.dataset))) == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_tensorflow_still_needs_the_guard():
    """When this fails, the crash is cured: dali_guard.py can go. A busy machine may miss it."""
    codes = (python("-c", UNGUARDED).returncode for _ in range(5))
    assert any(code in (-signal.SIGSEGV, -signal.SIGABRT) for code in codes)


def test_other_datasets_are_distributed_as_before(spec):
    make_dataset(spec, OPTIONS, batch_size=4)
    strategy = STRATEGIES[1]()
    made = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert next(iter(made)).numpy().tolist() == [0, 1]
