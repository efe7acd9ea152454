"""Strategies on two logical CPU devices: which records reach which replica, on which device, and
that `fit` trains.
"""

import contextlib
import functools
import gc
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    DALI,
    TF_DATA,
    at_night,
    backends,
    numbered_examples,
    refused,
    table,
    write_tfrecord,
)
from conftest import spec_of as make_spec
from models import FROM_LOGITS, make_model

import dali_tf_input as dti
from dali_tf_input import DaliOptions, Preprocess, make_dataset
from dali_tf_input.backends import dali as dali_backend
from dali_tf_input.backends.build import check_gpu
from dali_tf_input.training import strategies as strategies_module
from dali_tf_input.training.load import _say, load


def none():
    return None


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {none: ("CPU:0",), one_device: ("CPU:1",), mirrored: ("CPU:0", "CPU:1")}
strategies = pytest.mark.parametrize("make_strategy", STRATEGIES, ids=lambda make: make.__name__)


def spec_of(dataset, order="sequential"):
    return make_spec(dataset, order, Preprocess.for_training(8), buffer_size=8)


def per_replica(strategy, values):
    return strategy.experimental_local_results(values) if strategy else (values,)


@table(
    "options, make_strategy",
    [(DALI, mirrored), (DALI, one_device), (TF_DATA, mirrored), (TF_DATA, none)],
    [DALI, TF_DATA],
    STRATEGIES,
)
def test_an_epoch_is_every_record_once(dataset, options, make_strategy):
    """24 records in steps of 8: each once, each replica its part of each step, on its device."""
    strategy = make_strategy()
    fed = load(spec_of(dataset), options, strategy=strategy, batch_size=8)
    assert fed.devices == STRATEGIES[make_strategy]
    assert fed.steps_per_epoch == 3
    share = 8 // len(fed.devices)
    served = []
    for batch in fed:
        for values in batch:
            parts = per_replica(strategy, values)
            for value, device in zip(parts, fed.devices, strict=True):
                assert value.device.endswith(device)
                assert value.shape[0] == share
        served.append([label.numpy().tolist() for label in per_replica(strategy, batch[1])])
    assert served == [
        [[*range(8 * step, 8 * step + 8)][share * i :][:share] for i in range(len(fed.devices))]
        for step in range(3)
    ]


@pytest.mark.nightly
@table("options, make_strategy", [(DALI, mirrored)], [DALI, TF_DATA], STRATEGIES)
def test_iterators_come_and_go(dataset, options, make_strategy):
    """TensorFlow's MultiDeviceIterator over a DALIDataset ends the process when dropped."""
    strategy = make_strategy()
    for _ in range(2):
        fed = load(spec_of(dataset, "buffer"), options, strategy=strategy, batch_size=6)
        for _ in range(3):
            iterator = iter(fed.dataset)
            next(iterator)
            del iterator
            gc.collect()


KINDS = ["usual", "unfrozen", "named output", "own step"]


class OwnStep(keras.Model):
    """Trains a variable that is not its own."""

    other = None

    def train_step(self, data):
        images, labels, _ = data
        if OwnStep.other is None:
            OwnStep.other = keras.Variable(1.0)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(images, labels, OwnStep.other * self(images, training=True))
        variables = [*self.trainable_variables, OwnStep.other]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(images, labels, self(images), None)


class Unfreeze(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[-2].trainable = True


def train_small(kind, train, loss):
    """Trains a small model by Keras's `fit`, or by that of an input; returns what came of it."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Flatten(), keras.layers.Dense(24), keras.layers.Dense(24)]
    layers[1].trainable = kind != "unfrozen"
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    if kind == "own step":
        model, OwnStep.other = OwnStep(model.inputs, model.outputs), None
    if kind == "named output":
        model, loss = keras.Model(model.inputs, {"label": model.outputs[0]}), {"label": loss}
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=True)
    callbacks = [Unfreeze()] if kind == "unfrozen" else []
    if isinstance(train, dti.Input):
        fit = functools.partial(train.fit, model)
    else:
        fit = functools.partial(model.fit, train, shuffle=False)
    history = fit(epochs=1, callbacks=callbacks, verbose=0).history
    return history, model.get_weights(), len(model.optimizer.variables)


@pytest.mark.slow
@pytest.mark.parametrize("kind", at_night(KINDS[1:], KINDS))
def test_fit_trains_as_keras_does(dataset, kind):
    spec = make_spec(dataset, "global", Preprocess.for_training(8), class_weight={3: 2.0})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = train_small(kind, load(spec, DALI, batch_size=8), loss)
    expected = train_small(kind, load(spec, DALI, batch_size=8).dataset, loss)
    assert made[0] == expected[0]
    for ours, kerass in zip(made[1], expected[1], strict=True):
        np.testing.assert_array_equal(ours, kerass)
    assert made[2] == expected[2]


def test_the_default_strategy_is_none(dataset):
    fed = load(spec_of(dataset), strategy=tf.distribute.get_strategy(), batch_size=6)
    assert isinstance(fed.dataset, tf.data.Dataset)
    assert fed.devices == ("CPU:0",)


def test_no_options_chooses_and_says_so_once(dataset, caplog):
    """Where people see it: as a warning, unless the program shows more of what is logged."""
    _say.cache_clear()
    for _ in range(2):
        fed = load(spec_of(dataset), batch_size=6)
    assert fed.options == TF_DATA
    assert "by tf.data for CPU:0" in repr(fed)
    said = [record for record in caplog.records if record.name == "dali_tf_input"]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "`load` chose tf.data for the input" in caplog.text


@strategies
def test_a_gpu_where_there_is_none(dataset, make_strategy):
    spec, gpu = spec_of(dataset), DaliOptions(device="gpu")
    with refused(r"every replica on a GPU, but the replicas are on CPU:.*pip install .tensorflow"):
        load(spec, gpu, strategy=make_strategy(), batch_size=6)


class FakeGpus:
    """TensorFlow with a GPU made up: what it says of memory growth."""

    def __init__(self, *, growth, is_late=False):
        self.growth, self.is_late = growth, is_late

    def install(self, monkeypatch):
        for name in ("list_physical_devices", "get_visible_devices"):
            monkeypatch.setattr(tf.config, name, lambda kind: ["one"])
        experimental = tf.config.experimental
        monkeypatch.setattr(experimental, "get_memory_growth", lambda gpu: self.growth)
        monkeypatch.setattr(experimental, "set_memory_growth", self.set_growth)
        monkeypatch.setattr(dali_backend, "count_gpus", lambda: 1)

    def set_growth(self, gpu, value):
        if self.is_late:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growth = value


@pytest.mark.parametrize(
    ("gpus", "force", "message"),
    [
        (FakeGpus(growth=True), None, None),
        (FakeGpus(growth=False), None, None),
        (FakeGpus(growth=False, is_late=True), "true", None),
        (FakeGpus(growth=False, is_late=True), None, "too late .* TF_FORCE_GPU_"),
        (FakeGpus(growth=True), "false", "TF_FORCE_GPU_ALLOW_GROWTH=false makes TensorFlow take"),
    ],
)
def test_memory_growth_is_turned_on(monkeypatch, gpus, force, message):
    """Where it still can be; DALI would end the process where no memory is left."""
    gpus.install(monkeypatch)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if force:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", force)
    with refused(message) if message else contextlib.nullcontext():
        check_gpu(0)
    assert gpus.growth or message or force == "true"


def test_load_turns_memory_growth_on_in_time(monkeypatch, dataset):
    """To list logical devices initializes TensorFlow, and then it is too late."""
    gpus = FakeGpus(growth=False)
    gpus.install(monkeypatch)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind: setattr(gpus, "is_late", True)
    )
    fed = load(spec_of(dataset), dti.DaliOptions(device="gpu"), batch_size=4)
    assert gpus.growth
    assert fed.devices == ("GPU:0",)


def test_batches_of_the_cpu_for_gpus_are_warned_of(dataset, monkeypatch):
    """The warning names the caller's file, not that of the check."""
    monkeypatch.setattr(strategies_module, "list_devices", lambda *_: ("GPU:0",))
    with pytest.warns(RuntimeWarning, match="every batch is copied while its step waits") as caught:
        load(spec_of(dataset), DALI, batch_size=4)
    assert caught[0].filename == __file__


def test_several_hosts_have_their_own_way(dataset):
    for kind, said in (
        ("MultiWorkerMirroredStrategy", "Feed a custom loop on each host"),
        ("TPUStrategy", "got a TPUStrategyV2. Feed others"),
        ("experimental.CentralStorageStrategy", "got a CentralStorageStrategy. Feed others"),
        ("experimental.ParameterServerStrategy", "got a ParameterServerStrategyV2. Feed others"),
    ):
        made = functools.reduce(getattr, kind.split("."), tf.distribute)
        with refused(rf"{said} with make_dataset\(spec, batch_size=..., shard=Shard\(host, "):
            load(spec_of(dataset), TF_DATA, batch_size=4, strategy=object.__new__(made))


def test_what_is_typed_first(dataset, tmp_path):
    """One sentence each, that names the way."""
    spec = dti.InputSpec.for_training(dataset, 8)
    valid_spec = dti.InputSpec.for_evaluation(dataset, 8)
    train, valid = (load(one, TF_DATA, batch_size=6) for one in (spec, valid_spec))
    plain, strategy = make_model(8, 24), mirrored()
    scoped = make_model(8, 24, strategy=strategy)
    replicated = load(spec, TF_DATA, batch_size=6, strategy=strategy)
    several = make_model(8, 24, steps_per_execution=3)
    for message, call in {
        r"`spec` must be an InputSpec, such as InputSpec.for_training\(.*\), got 'records/train-\*'":
            lambda: load("records/train-*", batch_size=6),
        "multiple of the 2 replicas, got 7: use 6 or 8":
            lambda: load(spec, TF_DATA, batch_size=7, strategy=strategy),
        "`fit` needs an input for training.* train.fit\\(model, validation=valid\\)":
            lambda: valid.fit(plain),
        r"To evaluate or predict needs an input .*: InputSpec.for_evaluation\(":
            lambda: train.evaluate(plain),
        "To evaluate or predict needs an input": lambda: train.predict(plain),
        r"needs an input that serves each record once.*": lambda: train.fit(plain, validation=train),
        r"`validation` must be an Input, such as load\(InputSpec.for_evaluation\(": lambda: train.fit(plain, validation=valid.dataset),
        "under another strategy than this input: make and compile it in `with strat":
            lambda: replicated.fit(plain),
        r"load\(..., strategy=...\) needs the MirroredStrategy of the model": lambda: train.fit(scoped),
        "`steps_per_execution` must divide the 4 steps of an epoch .* got 3": lambda: train.fit(several),
        r"`model` must be a keras.Model, got .*model.fit\(train.dataset\)": lambda: train.fit("model"),
        "files have no index beside them .*, the first is .* Index them: ":
            lambda: dti.InputSpec.for_training(write_tfrecord(tmp_path / "new", numbered_examples(2))),
    }.items():  # fmt: skip
        with refused(message):
            call()
    assert int(plain.optimizer.iterations.numpy()) == 0


@backends
def test_from_files_to_a_trained_model(tmp_path, options):
    """The README's lines, once for each backend."""
    for split, count in (("train", 24), ("validation", 19)):
        write_tfrecord(tmp_path / f"{split}-00000-of-00001", numbered_examples(count))
    dti.build_index(f"{tmp_path}/*-of-*")
    train = dti.load(dti.InputSpec.for_training(f"{tmp_path}/train-*", 8), options, batch_size=8)
    valid = dti.load(dti.InputSpec.for_evaluation(f"{tmp_path}/valid*", 8), options, batch_size=8)
    model = make_model(8, 24, metrics=["accuracy"], run_eagerly=True)
    history = train.fit(model, validation=valid, resume=str(tmp_path / "run"), verbose=0)
    assert isinstance(history, keras.callbacks.History)
    assert len(history.history["val_accuracy"]) == len(history.history["loss"]) == 1
    assert int(model.optimizer.iterations.numpy()) == len(train)


@pytest.mark.slow
@table("options, make_strategy", [(DALI, mirrored)], [DALI, TF_DATA], STRATEGIES)
def test_both_fits_evaluate_alike(tmp_path, options, make_strategy):
    """This package's `fit` and Keras's, one after the other; both count as a loop would.

    The last step has one record, so that one of two replicas has none.
    """
    for split, count in (("train", 24), ("validation", 17)):
        write_tfrecord(tmp_path / f"{split}-00000-of-00001", numbered_examples(count))
    strategy = make_strategy()
    model = make_model(8, 24, strategy=strategy, metrics=["accuracy"])
    dti.build_index(f"{tmp_path}/*-of-*")
    shared = {"batch_size": 8, "strategy": strategy}
    train = dti.load(dti.InputSpec.for_training(f"{tmp_path}/train-*", 8), options, **shared)
    # Both backends filter a little differently.
    held_out = dti.InputSpec.for_evaluation(f"{tmp_path}/valid*", 8, antialias=False)
    valid = dti.load(held_out, options, **shared)
    history = train.fit(model, validation=valid, verbose=0)
    assert history.history["val_loss"] == pytest.approx([valid.evaluate(model, verbose=0)["loss"]])
    own = {"validation_data": valid.dataset, "shuffle": False, "verbose": 0}
    history = model.fit(train.dataset, **own)
    assert int(model.optimizer.iterations.numpy()) == 2 * len(train)
    logits = valid.predict(model, verbose=0)
    images = np.concatenate(
        [batch[0] for batch in make_dataset(valid.spec, TF_DATA, batch_size=17)]
    )
    np.testing.assert_allclose(logits, model(images, training=False), rtol=1e-3, atol=1e-3)
    expected = {
        "accuracy": np.mean(logits.argmax(axis=1) == np.arange(17)),
        "loss": float(FROM_LOGITS(np.arange(17), logits)),
    }
    assert valid.evaluate(model, verbose=0) == pytest.approx(expected, rel=1e-4)
    assert history.history["val_loss"][-1] == pytest.approx(expected["loss"], rel=1e-4)
    assert model.evaluate(valid.dataset, verbose=0, return_dict=True) == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.slow
def test_load_inside_a_function(dataset):
    @tf.function
    def step():
        return load(make_spec(dataset, "global", Preprocess.for_training(8)), batch_size=4).dataset

    text = "A dataset cannot be made inside a tf.function: make it before, and pass it in"
    with pytest.raises(Exception, match=text):  # TensorFlow wraps it
        step()
