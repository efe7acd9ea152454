"""Epochs that end: the same records by `fit`, by Keras's own `fit` and by a loop."""

import contextlib
import gc
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, refused, spec_of
from models import make_model

from dali_tf_input import Preprocess, load, make_dataset

NUM_RECORDS, BATCH = 24, 5  # 4 steps an epoch, and a remainder
SMALL = Preprocess.for_training(8)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


ALL_WAYS = [*itertools.product(["global", "buffer", "sequential"], [DALI, TF_DATA])]


def ways(*usual):
    """Orders and backends: the given ones usually, all of them at night."""
    return pytest.mark.parametrize(("order", "options"), at_night([*usual], ALL_WAYS))


def make_spec(dataset, order="global", **changes):
    return spec_of(
        dataset, order, SMALL, **({"buffer_size": 6} if order == "buffer" else {}), **changes
    )


def feed(dataset, options, order="global", strategy=None, **changes):
    batch_size = 2 * BATCH if strategy and strategy.num_replicas_in_sync > 1 else BATCH
    return load(
        make_spec(dataset, order), options, strategy=strategy, batch_size=batch_size, **changes
    )


class Recorder(keras.Model):
    """A model that notes the labels of each of its training steps, by replica."""

    def __init__(self):
        super().__init__()
        self.seen, self.flat, self.out = {}, keras.layers.Flatten(), keras.layers.Dense(24)

    def call(self, images):
        return self.out(self.flat(images))

    def note(self, replica, labels):
        self.seen.setdefault(int(replica), []).append(labels.tolist())
        return np.int64(0)

    def train_step(self, data):
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context else 0
        tf.numpy_function(self.note, [replica, data[1]], tf.int64)
        return super().train_step(data)

    def epochs(self, steps):
        """Returns the labels of each epoch's steps: those of all replicas together."""
        replicas = [self.seen[replica] for replica in sorted(self.seen)]
        batches = [list(itertools.chain(*step)) for step in zip(*replicas, strict=True)]
        assert len(batches) % steps == 0
        return [batches[start : start + steps] for start in range(0, len(batches), steps)]


def make_recorder(strategy=None, *, built=False):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Recorder()
        if built:
            model(np.zeros((1, 8, 8, 3)))
        model.compile("sgd", LOSS, run_eagerly=strategy is None)
    return model


def labels_of(strategy, batch):
    values = strategy.experimental_local_results(batch[1]) if strategy else (batch[1],)
    return list(itertools.chain(*(value.numpy().tolist() for value in values)))


def loop(train, most=None):
    """Returns the labels of the batches that a loop over an epoch takes."""
    return [labels_of(train.strategy, batch) for batch in itertools.islice(train, most)]


def count_batches(dataset):
    known = dataset.cardinality
    return int(known() if callable(known) else known)  # a strategy's dataset has a property


def check_epochs_three_ways(dataset, options, order, strategy=None):
    """Two epochs by `train.fit`, by `model.fit(train.dataset)` and by a loop."""
    # Keras takes a batch, and so an epoch, to build a model; `train.fit` does not mind.
    by_fit, by_keras = make_recorder(strategy), make_recorder(strategy, built=True)
    train = feed(dataset, options, order, strategy)
    steps = train.steps_per_epoch
    assert len(train) == count_batches(train.dataset) == steps
    train.fit(by_fit, epochs=2, verbose=0)
    first = by_fit.epochs(steps)
    own = feed(dataset, options, order, strategy)
    by_keras.fit(own.dataset, epochs=2, shuffle=False, verbose=0)
    second = by_keras.epochs(steps)
    looped = feed(dataset, options, order, strategy)
    epochs = [loop(looped) for _ in range(6)]
    assert len(first) == len(second) == 2
    for epoch in (*first, *second, *epochs):
        labels = list(itertools.chain(*epoch))
        assert len({*labels}) == len(labels) == steps * train.batch_size
    assert first == epochs[:2]
    if options == TF_DATA and strategy is None:
        assert second == first
    elif order != "sequential":
        # Keras builds a model under a strategy by a batch, and so by an epoch; and DALI starts ahead
        # of time, so that the second iterator that Keras makes takes an epoch too.
        served = [epochs.index(epoch) for epoch in second]
        assert served == sorted({*served})
    if order != "sequential":
        assert len({str(epoch) for epoch in epochs}) == 6


@pytest.mark.nightly
@pytest.mark.parametrize(("order", "options"), ALL_WAYS)
def test_epochs_three_ways(dataset, options, order):
    check_epochs_three_ways(dataset, options, order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_strategy", "options", "order"),
    at_night(
        [(mirrored, DALI, "global")],
        [
            *((mirrored, options, order) for order, options in ALL_WAYS),
            (one_device, DALI, "global"),
            (one_device, TF_DATA, "buffer"),
        ],
    ),
)
def test_epochs_three_ways_under_a_strategy(dataset, options, order, make_strategy):
    check_epochs_three_ways(dataset, options, order, make_strategy())


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_fit_and_loop_go_on_from_each_other(dataset, options):
    """From a start step on: the second epoch is the first here."""
    reference = feed(dataset, options)
    _, *expected = [loop(reference) for _ in range(7)]
    train, model = feed(dataset, options, start_step=4), make_recorder()
    train.fit(model, epochs=2, verbose=0)
    assert loop(train) == expected[2]
    assert loop(train, 1) == expected[3][:1]  # an epoch that is left is used up
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    train.fit(model, epochs=9, callbacks=[stop], verbose=0)  # which ends it after its second epoch
    assert model.epochs(4) == [*expected[:2], *expected[4:6]]


@pytest.mark.slow
@ways(("global", DALI), ("buffer", DALI))
def test_two_iterators_at_once_and_one_that_is_dropped(dataset, options, order):
    dataset = make_dataset(make_spec(dataset, order), options, batch_size=BATCH)
    reference = [[batch[1].numpy().tolist() for batch in dataset] for _ in range(2)]
    first, second = iter(dataset), iter(dataset)
    pairs = [(next(first)[1].numpy().tolist(), next(second)[1].numpy().tolist()) for _ in range(4)]
    for labels in zip(*pairs, strict=True):
        assert len({*itertools.chain(*labels)}) == 4 * BATCH
    if order == "global":
        assert pairs[0][0] != pairs[0][1]
        assert [one for one, _ in pairs] not in reference
    dropped = iter(dataset)
    next(dropped)
    del dropped
    gc.collect()
    assert len(list(dataset)) == 4


@pytest.mark.slow
@ways(("global", DALI))
def test_repeat_and_endless_are_the_epochs_in_turn(dataset, options, order):
    spec = make_spec(dataset, order)
    epochs = make_dataset(spec, options, batch_size=BATCH)
    expected = [batch[1].numpy().tolist() for _ in range(2) for batch in epochs]
    repeated = iter(make_dataset(spec, options, batch_size=BATCH).repeat())
    endless = make_dataset(spec, options, batch_size=BATCH, endless=True)
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    for iterator in (repeated, iter(endless)):
        assert [next(iterator)[1].numpy().tolist() for _ in range(8)] == expected


def test_a_start_step_of_a_buffer(dataset):
    """Whole epochs only: its order depends on what was drawn before."""
    reference = feed(dataset, DALI, "buffer")
    loop(reference)
    assert loop(feed(dataset, DALI, "buffer", start_step=4)) == loop(reference)
    with refused("can start at the first step of an epoch only, one in 4, got step 2"):
        loop(feed(dataset, DALI, "buffer", start_step=2))


def test_both_backends_serve_the_same_buffer(dataset):
    assert loop(feed(dataset, DALI, "buffer")) == loop(feed(dataset, TF_DATA, "buffer"))


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_steps_and_numbers_of_epochs_of_ones_own(dataset, options):
    """`steps_per_epoch` and `initial_epoch` mean what they mean in Keras."""
    reference = feed(dataset, options)
    expected = list(itertools.chain(*(loop(reference) for _ in range(3))))
    train, model = feed(dataset, options), make_recorder()
    history = train.fit(model, epochs=2, steps_per_epoch=3, verbose=0)
    train.fit(model, epochs=1, steps_per_epoch=3, verbose=0)
    assert history.epoch == [0, 1]
    assert list(itertools.chain(*model.epochs(3))) == expected[:9]
    late = make_recorder()
    history = feed(dataset, options).fit(late, epochs=3, initial_epoch=1, verbose=0)
    assert history.epoch == [1, 2]
    assert list(itertools.chain(*late.epochs(4))) == expected[4:]


def test_keras_says_what_it_takes(dataset):
    """`model.fit(train)` cannot work; its error is short and names what does."""
    train = feed(dataset, TF_DATA)
    with pytest.raises(ValueError, match=r"Keras takes its `dataset`: train\.dataset>") as caught:
        make_model(8, 24).fit(train)
    assert len(str(caught.value)) < 300
