"""A resumed training is one uninterrupted run, with every callback and optimizer of Keras's own
that has a state; or it is refused by name.
"""

import contextlib
import dataclasses
import itertools
import logging
import shutil

import keras
import numpy as np
import pytest
from conftest import TF_DATA, at_night, refused, spec_of, write_dataset
from models import Crash, make_model, save_at, stop_at

from dali_tf_input import DaliOptions, Preprocess, Resume, load

EPOCHS = 4  # of 3 steps
MID_EPOCH, EPOCH_BEGIN = ("on_train_batch_end", 5), ("on_epoch_begin", 3)
Callback, schedules = keras.callbacks.Callback, keras.optimizers.schedules
SGD = keras.optimizers.SGD


class Custom(Callback):
    """Keeps what Python and NumPy have, and begins an epoch by a relative change."""

    def __init__(self, factor=0.5, given=1.0):
        super().__init__()
        self.factor, self.begun, self.lists, self.named = factor, 0, [], {"steps": 0}
        self.array, self.given = np.zeros(2), given

    def on_epoch_begin(self, epoch, logs=None):
        self.begun += 1
        self.given *= 0.5
        self.array += 1
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * self.factor

    def on_train_batch_end(self, batch, logs=None):
        self.lists.append(batch)
        self.named["steps"] += 1
        self.array[0] += batch

    def on_epoch_end(self, epoch, logs=None):
        self.array[1] += logs["loss"]


def halve(epoch, rate):
    return rate * 0.5


def early(**how):
    return keras.callbacks.EarlyStopping("loss", restore_best_weights=True, **how)


def checkpoint(folder, **how):
    return keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), "loss", **how)


# Of each of these callbacks one.
KINDS = ("averages", "lr of lr", "two early stoppings", "plateau", "best weights", "csv", "custom")
# Callbacks, whose files are in a folder.
CASES = {
    "all together": lambda folder: [one for kind in KINDS for one in CASES[kind](folder)],
    **dict.fromkeys(("nothing", "loss scale", "accumulation", "schedule", "cosine"), lambda _: []),
    "averages": lambda _: [keras.callbacks.SwapEMAWeights()],
    "lr of epoch": lambda _: [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    ],
    "lr of lr": lambda _: [keras.callbacks.LearningRateScheduler(halve)],
    "early stopping": lambda _: [early(patience=2, min_delta=9.0)],
    "two early stoppings": lambda _: [early(patience=5), early(patience=3, start_from_epoch=1)],
    "plateau": lambda _: [
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=9.0, cooldown=1)
    ],
    "best weights": lambda folder: [
        checkpoint(folder, save_best_only=True, save_weights_only=True)
    ],
    "csv": lambda folder: [
        keras.callbacks.CSVLogger(str(folder / f"{append}.csv"), append=append)
        for append in (False, True)
    ],
    "not a number": lambda _: [keras.callbacks.TerminateOnNaN()],
    "custom": lambda _: [Custom()],
}
# Of the others it is SGD(0.1).
OPTIMIZERS = {
    "all together": lambda: SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=4),
    "nothing": lambda: SGD(0.1, momentum=0.9),
    "averages": lambda: SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), dynamic_growth_steps=3),
    "accumulation": lambda: SGD(0.1, gradient_accumulation_steps=4, use_ema=True, ema_momentum=0.9),
    "schedule": lambda: SGD(schedules.ExponentialDecay(0.1, 2, 0.9)),
    "cosine": lambda: SGD(schedules.CosineDecay(0.0, 9, warmup_target=0.1)),
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("callbacks"), [5, 7])


def make_network(optimizer=None, **compiled):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.3)]
    compiled = {"metrics": ["accuracy"], "run_eagerly": True, **compiled}
    return make_model(8, 12, *layers, optimizer=optimizer or SGD(0.1), **compiled)


def fit(records, model, folder=None, *, stops=None, **how):
    """Trains; crashes after a step, or at the beginning of an epoch."""
    if stops:
        what, number = stops
        how["callbacks"] = [*how.get("callbacks", ()), stop_at(number, Crash, what)]
    options = how.pop("options", DaliOptions(device="cpu"))
    train = load(spec_of(records, "global", Preprocess.for_training(8)), options, batch_size=4)
    resume = how.pop("resume", None) or (folder and Resume(folder, save_every=1))
    return train.fit(model, **{"epochs": EPOCHS, "verbose": 0, "resume": resume, **how})


def save(records, model, folder, step):
    spec = spec_of(records, "global", Preprocess.for_training(8))
    return save_at(step, folder, model, spec, batch_size=4)


def find_public(callback):
    """Returns the public attributes of a callback that are values."""
    kinds = (bool, int, float, str, list, dict, np.ndarray, type(None))
    return {
        name: value
        for name, value in vars(callback).items()
        if not name.startswith("_") and isinstance(value, kinds) and name != "params"
    }


def run_whole_and_in_parts(records, folder, case, crashes, **how):
    """Trains as one run, and as one that crashes and goes on; compares all that is left."""
    results = []
    for place, stops in (("whole", [None]), ("parts", [*crashes, None])):
        own = folder / place
        own.mkdir()
        for stop in stops:
            model = make_network(OPTIMIZERS[case]() if case in OPTIMIZERS else None)
            callbacks = CASES[case](own)
            with pytest.raises(Crash) if stop else contextlib.nullcontext():
                more = {"callbacks": callbacks, "stops": stop, **how}
                history = fit(records, model, own / "run", **more)
        results.append((model, history, callbacks, own))
    (model, history, callbacks, whole), (again, other, others, parts) = results
    for variables in (lambda one: one.variables, lambda one: one.optimizer.variables):
        for one, two in zip(variables(model), variables(again), strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy(), one.path)
    assert (history.epoch, history.history) == (other.epoch, other.history)
    for one, two in zip(callbacks, others, strict=True):
        known, same = find_public(one), find_public(two)
        assert known.keys() == same.keys()
        for name in known.keys() - {"filepath", "filename", "append_header"}:
            np.testing.assert_equal(known[name], same[name], name)
    written = [sorted(file for file in one.glob("*.*")) for one in (whole, parts)]
    assert [file.name for file in written[0]] == [file.name for file in written[1]]
    for one, two in zip(*written, strict=True):
        assert one.suffix != ".csv" or one.read_text() == two.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "crashes"),
    [
        # Each count is of the run that crashes.
        ("all together", [MID_EPOCH, ("on_epoch_begin", 2)]),
        *at_night([], itertools.product(CASES, [[MID_EPOCH], [EPOCH_BEGIN]])),
    ],
)
def test_one_uninterrupted_run(records, tmp_path, case, crashes):
    """Weights to the bit, the History, the learning rate, and what callbacks know and write."""
    run_whole_and_in_parts(records, tmp_path, case, crashes)


@pytest.mark.nightly
def test_one_uninterrupted_run_by_tf_data(records, tmp_path):
    run_whole_and_in_parts(records, tmp_path, "averages", [EPOCH_BEGIN], options=TF_DATA)


@dataclasses.dataclass
class Unhashable(Callback):
    """Equal to others of its class."""

    seen: int = 0

    def __post_init__(self):
        super().__init__()

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1


@pytest.mark.slow
def test_models_and_callbacks_of_other_kinds(records, tmp_path):
    """Several optimizers, a drawn seed, callbacks that are equal, settings that are no number."""
    finals = []
    for place, epochs in (("whole", [2]), ("parts", [1, 2])):
        for count in epochs:
            keras.utils.set_random_seed(3)
            layers = [keras.layers.RandomCrop(6, 6), keras.layers.Flatten()]
            many = SGD(0.1)
            if hasattr(keras.optimizers, "OptimizerMap"):  # since Keras 3.13
                rates = keras.optimizers.OptimizerMap(many, {"dense.*": SGD(0.2)})
                many = keras.optimizers.MultiOptimizer(rates)
            model = make_model(8, 12, *layers, optimizer=many, run_eagerly=True)
            pair = [Unhashable(), Unhashable(), early(patience=9, baseline=float("nan"))]
            fit(records, model, tmp_path / place, epochs=count, callbacks=pair)
        finals.append((model.get_weights(), [one.seen for one in pair[:2]]))
    np.testing.assert_array_equal(finals[0][0][0], finals[1][0][0])
    assert finals[0][1] == finals[1][1] == [2, 2]


@pytest.mark.slow
def test_callbacks_that_are_refused(records, tmp_path):
    """Only with `resume`, and what is named is the other way."""
    for callback, message in (
        (
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
            "BackupAndRestore restores what `resume` restores",
        ),
        (
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            r"SwapEMAWeights\(swap_on_epoch=True\) does not work with `resume`",
        ),
    ):
        model = make_network(SGD(0.1, use_ema=True))
        with refused(message):
            fit(records, model, tmp_path / "run", callbacks=[callback])
        fit(records, model, callbacks=[callback], epochs=1)


@pytest.fixture(scope="module")
def saved_once(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    fit(records, make_network(SGD(schedules.CosineDecay(0.1, 9))), folder, epochs=1)
    return folder


@pytest.fixture
def saved(saved_once, tmp_path):
    """A folder of its own with the state of a training of one epoch."""
    return shutil.copytree(saved_once, tmp_path / "saved")


def test_what_is_compiled_otherwise_is_refused(records, saved):
    def cosine(steps=9, **fields):
        return SGD(schedules.CosineDecay(0.1, steps), **fields)

    frozen = make_network(cosine())
    frozen.layers[-1].trainable = False
    frozen.add(keras.layers.Dense(12, activation="softmax"))
    frozen.compile(cosine(), frozen.loss, metrics=["accuracy"])
    for model, message in (
        (
            make_network(cosine(), loss=keras.losses.SparseCategoricalCrossentropy()),
            "`loss.from_logits` was True, is False. Use",
        ),
        (make_network(cosine(momentum=0.5)), "`optimizer.momentum` was 0.0, is 0.5"),
        (make_network(cosine(7)), "`optimizer.learning_rate.decay_steps` was 9, is 7"),
        (make_network(SGD(0.1)), "`optimizer.learning_rate` was CosineDecay, is none"),
        (frozen, "`layer 2.trainable` was True"),
    ):
        with refused(f"belongs to training of another model, .*: {message}"):
            fit(records, model, saved)


def test_layers_that_are_connected_otherwise_are_refused(records, tmp_path):
    def connected(*, swapped):
        keras.utils.set_random_seed(0)
        image = keras.Input((8, 8, 3))
        first = keras.layers.Dense(4)(keras.layers.Flatten()(image))
        parts = [first, keras.layers.Dense(4)(first)]
        joined = keras.layers.Concatenate()(parts[::-1] if swapped else parts)
        model = keras.Model(image, keras.layers.Dense(12, activation="softmax")(joined))
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return model

    for step in (3, 6):
        save(records, connected(swapped=False), tmp_path, step)
    with refused(
        r"of another model, .*: `model 0, inputs of layer 4` was \['layer 2', 'layer 3'\], is"
    ):
        save(records, connected(swapped=True), tmp_path, 9)


@pytest.mark.slow
def test_other_metrics(records, tmp_path, caplog):
    """At the end of an epoch they are named; in the middle of one they are refused."""
    changed = {"metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]}
    save(records, make_network(), tmp_path, 5)
    with refused(
        r"`metrics` was \['accuracy'\], is \['accuracy', 'SparseTopK.*\. It is in the middle of an epoch"
    ):
        save(records, make_network(**changed), tmp_path, 6)
    shutil.rmtree(tmp_path)
    fit(records, make_network(), tmp_path, epochs=1)
    history = fit(records, make_network(**changed), tmp_path)
    assert "training goes on, and `metrics` was ['accuracy']" in caplog.text
    assert len(history.history["sparse_top_k_categorical_accuracy"]) == EPOCHS - 1


@pytest.mark.slow
def test_other_callbacks(records, tmp_path, caplog):
    """What is monitored must not change; other settings may, and are named."""
    fit(records, make_network(), tmp_path, epochs=1, callbacks=[early(patience=2)])
    changed = keras.callbacks.EarlyStopping("accuracy", restore_best_weights=True, patience=2)
    with refused("EarlyStopping's `monitor` was loss, is accuracy, and its best value is kept"):
        fit(records, make_network(), tmp_path, callbacks=[changed])
    with refused("EarlyStopping's `mode` was auto, is max"):
        fit(records, make_network(), tmp_path, callbacks=[early(patience=2, mode="max")])
    caplog.clear()
    new = [early(patience=3), keras.callbacks.TerminateOnNaN()]
    fit(records, make_network(), tmp_path, epochs=2, callbacks=new, initial_epoch=1)
    assert "`epochs` was 1, is 2; of EarlyStopping, `patience` was 2, is 3; T" in caplog.text
    assert "TerminateOnNaN is new" in caplog.text
    assert "`initial_epoch` was 0, is 1: training goes on after step 3" in caplog.text
    caplog.clear()
    fit(records, make_network(), tmp_path, epochs=3, initial_epoch=1)
    assert "EarlyStopping is gone; TerminateOnNaN is gone" in caplog.text
    caplog.clear()
    fit(records, make_network(), tmp_path, epochs=3, initial_epoch=1)
    assert not caplog.records


@pytest.mark.slow
def test_early_stoppings_in_another_order(records, tmp_path):
    """Each gets the value of the same settings, not of the same place."""
    pair = [early(patience=7, baseline=-1.0), early(patience=9)]
    fit(records, make_network(), tmp_path, epochs=2, callbacks=pair)
    waits = [one.wait for one in pair]
    assert waits[0] != waits[1]
    again = [early(patience=9), early(patience=7, baseline=-1.0)]
    fit(records, make_network(), tmp_path, epochs=2, callbacks=again)
    assert [one.wait for one in again] == waits[::-1]


@pytest.mark.slow
def test_a_run_that_was_stopped_says_so(records, tmp_path, caplog):
    """It goes on when what stopped it has changed."""
    fit(records, make_network(), tmp_path, callbacks=[early(patience=1, min_delta=9.0)])
    caplog.clear()
    history = fit(records, make_network(), tmp_path, callbacks=[early(patience=1, min_delta=9.0)])
    assert history.epoch == [0, 1]
    assert "A callback stopped this training after step 6, so it is done. To go" in caplog.text
    history = fit(records, make_network(), tmp_path, callbacks=[early(patience=2, min_delta=9.0)])
    assert history.epoch == [0, 1, 2]
    assert "of EarlyStopping, `patience` was 1, is 2" in caplog.text


@pytest.mark.slow
def test_an_epoch_that_a_callback_cut_short(records, tmp_path):
    """It is done when training goes on, and has one line in the History."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    assert fit(records, make_network(), tmp_path, callbacks=[Stop()]).epoch == [0]
    model = make_network()
    assert fit(records, model, tmp_path).epoch == [*range(EPOCHS)]
    assert int(model.optimizer.iterations) == 3 * EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("terminates", at_night([False], [False, True]))
def test_weights_that_are_not_finite_are_not_saved(records, tmp_path, caplog, terminates):
    """The last good state remains, and another learning rate goes on from there."""

    class Diverge(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 5:
                self.model.layers[-1].bias.assign(np.full(12, np.nan))

    callbacks = [Diverge(), *([keras.callbacks.TerminateOnNaN()] if terminates else [])]
    resume = Resume(tmp_path, save_every=2)
    with caplog.at_level(logging.WARNING):
        fit(records, make_network(), resume=resume, callbacks=callbacks)
    assert "The weights are not finite after step 5" in caplog.text or not terminates
    assert f"are not saved in {tmp_path}: the state of step 3 remains" in caplog.text
    model = make_network()
    history = fit(records, model, resume=Resume(tmp_path, save_every=2))
    assert history.epoch == [0, 1, 2, 3]
    assert np.isfinite(model.get_weights()[-1]).all()
    assert np.isfinite(history.history["loss"]).all()
