"""Training that was stopped anywhere continues as if it had not been: to Keras's eyes too."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, jpeg, refused, spec_of, write_dataset, write_indexed
from disk import Disk
from models import Crash, make_model, stop_at

from dali_tf_input import Checks, Preprocess, ResizeRandomCrop, Resume, TfDataOptions, load
from dali_tf_input.storage.staging import Staging
from dali_tf_input.training import resume as writing
from dali_tf_input.training.schedule import describe_function

# Its fields are named, as losses that fall for two epochs depend on the pixels.
SMALL = Preprocess.for_training(8, crop=ResizeRandomCrop(resize=(9, 9)), antialias=False)
ANTIALIASED = dataclasses.replace(SMALL, antialias=True)
EPOCHS, BATCH, STEPS = 3, 5, 4  # 24 records


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("resume"), [5, 12, 7], Checks(verify="schema"))


def feed(records, options=DALI, *, batch_size=BATCH, strategy=None, order="global", **changes):
    spec = spec_of(records, order, changes.pop("preprocess", SMALL), **changes)
    return load(spec, options, batch_size=batch_size, strategy=strategy)


def make_network(strategy=None, *, use_ema=True, run_eagerly=True, **compiled):
    """Returns a model whose weights depend on everything: dropout, momentum, averages."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(8)]
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = keras.optimizers.Adam(0.01, use_ema=use_ema, ema_momentum=0.8)
    compiled |= {"optimizer": optimizer, "metrics": ["accuracy"], "run_eagerly": run_eagerly}
    return make_model(8, 24, *layers, strategy=strategy, **compiled)


class Watchers:
    """Keras's callbacks that know something of the epochs before, and what they have to show."""

    def __init__(self, folder):
        self.folder = folder
        best = str(folder / "best.weights.h5")
        self.stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        self.checkpoint = keras.callbacks.ModelCheckpoint(
            best, "accuracy", save_best_only=True, save_weights_only=True
        )
        self.slow_down = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
        self.log = keras.callbacks.CSVLogger(str(folder / "log.csv"))
        self.begun = []
        count = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.begun.append("begin"),
            on_train_end=lambda logs: self.begun.append("end"),
        )
        self.all = [self.stop, self.checkpoint, self.slow_down, self.log, count]

    def shown(self):
        """Returns all that can be compared; wall times and file times aside."""
        return {
            "stop": (self.stop.best, self.stop.wait, self.stop.best_epoch, self.stop.stopped_epoch),
            "best": self.checkpoint.best,
            "plateau": (self.slow_down.best, self.slow_down.wait),
            "csv": (self.folder / "log.csv").read_text(),
            "calls": self.begun,
        }


def run(records, folder, *, options=DALI, strategy=None, epochs=EPOCHS, first=(), **changes):
    """Trains until the end, or until it crashes; returns the model, its history and watchers."""
    folder.mkdir(exist_ok=True)
    resume = changes.pop("resume", None) or Resume(folder / "run", save_every=1)
    model, watchers = make_network(strategy, **changes), Watchers(folder)
    train = feed(records, options, strategy=strategy, batch_size=BATCH * (2 if strategy else 1))
    history = train.fit(
        model, epochs=epochs, resume=resume, callbacks=[*first, *watchers.all], verbose=0
    )
    return model, history, watchers


def crash_in(monkeypatch, owner, name, call):
    """Crashes in the n-th call of a function, before it does anything."""
    function, calls = getattr(owner, name), []

    def crash_or_call(*arguments, **more):
        calls.append(1)
        if len(calls) == call:
            raise Crash
        return function(*arguments, **more)

    monkeypatch.setattr(owner, name, crash_or_call)


def assert_same(whole, resumed):
    """Weights to the bit; History; what callbacks know and write."""
    (model, history, watchers), (again, other, others) = whole, resumed
    for variable, value in zip(model.variables, again.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value.numpy(), variable.path)
    pairs = zip(model.optimizer.variables, again.optimizer.variables, strict=True)
    for variable, value in pairs:
        np.testing.assert_array_equal(variable.numpy(), value.numpy(), variable.path)
    assert history.epoch == other.epoch
    assert history.history == other.history
    assert watchers.shown() == others.shown()


@pytest.fixture(scope="module")
def whole(records, tmp_path_factory):
    return run(records, tmp_path_factory.mktemp("whole"))


CRASHES = {
    # After the first step, in an epoch, at its end, in the second epoch, in the last step: steps
    # since the crash before, whose own step was not saved.
    "after steps": [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("step", 6)],
    # Before the first weights, between weights and arrays, before the first state, and later before
    # a state.
    "while it saves": [("replace", 1), ("replace", 2), ("replace", 3), ("replace", 9)],
    # Before old weights are removed; nothing is left that would be removed earlier.
    "while it removes": [("unlink", 3)],
}
SOME = [("replace", 1), ("step", 4), ("replace", 3), ("unlink", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("crashes", at_night([SOME], [SOME, *CRASHES.values()]))
def test_after_crashes(records, whole, tmp_path, monkeypatch, crashes):
    """One training that crashes again and again."""
    for what, number in crashes:
        first = [stop_at(number, Crash)] if what == "step" else ()
        with monkeypatch.context() as patch, pytest.raises(Crash):
            if what != "step":
                crash_in(patch, os, what, number)
            run(records, tmp_path, first=first)
    assert_same(whole, run(records, tmp_path))
    # A run that is done is called again: nothing changes.
    assert_same(whole, run(records, tmp_path))
    names = [name for name in os.listdir(tmp_path / "run") if name != ".lock"]
    left = {name.rpartition(".")[2] for name in names}
    assert left == {"json", "h5", "npz"}
    assert len(names) == 3


def test_a_crash_and_what_callbacks_see(records, tmp_path):
    """The resumed run is as one without a crash; its first epoch goes on at the next batch."""
    seen = []

    def note(what):
        return lambda number=None, logs=None: seen.append((what, number))

    watch = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_train_end=lambda logs: seen.append("end"),
        on_epoch_begin=note("epoch"),
        on_train_batch_begin=note("batch"),
    )
    whole = run(records, tmp_path / "whole", epochs=2)
    with pytest.raises(Crash):
        run(records, tmp_path / "parts", epochs=2, first=[stop_at(3, Crash)])
    assert_same(whole, run(records, tmp_path / "parts", epochs=2, first=[watch]))
    batches = [("batch", number) for number in range(STEPS)]
    assert seen == ["begin", ("epoch", 0), *batches[2:], ("epoch", 1), *batches, "end"]


class Scale(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.dynamic_scale.assign(4.0)


@pytest.fixture
def default_sigterm():
    """As in a program that does nothing about the signal."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize("step", at_night([2], [2, 4, 7]))
def test_after_sigterm(records, whole, tmp_path, caplog, default_sigterm, step):
    """In mid-epoch, at night also at an epoch's end: it ends after that step, and the state is of it."""
    seen = []

    def terminate(batch, logs):
        seen.append(batch)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGTERM)

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=terminate)
    with pytest.raises(SystemExit) as ended:
        run(records, tmp_path, first=[stop], resume=Resume(tmp_path / "run"))
    assert (ended.value.code, len(seen)) == (143, step)
    assert (
        f"ends after step {step}, and its state is in {tmp_path}/run. To go on, run the same program"
        in caplog.text
    )
    assert_same(whole, run(records, tmp_path, resume=Resume(tmp_path / "run")))


@pytest.mark.slow
def test_programs_that_handle_sigterm_themselves(records, tmp_path):
    """Their handler is called when the state is saved; without `resume` it stays as it is."""
    calls = []

    def kill(batch, logs):
        os.kill(os.getpid(), signal.SIGTERM)
        calls.append("step")

    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("handler"))
    try:
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
        for resume in (None, tmp_path / "run"):
            calls.clear()
            how = {"resume": resume, "steps_per_epoch": 2}
            feed(records).fit(make_network(), verbose=0, callbacks=[stop], **how)
            state = ["handler", "step"] * 2
            assert calls == (["step", "handler"] * 2 if resume else state)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_the_scale_of_the_loss_is_kept(records, tmp_path):
    """In mixed precision: by new models that resume, and by one that goes on."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        models = [make_network(use_ema=False) for _ in range(3)]
        for epochs, model in enumerate([*models, models[-1]], start=1):
            callbacks = [Scale()] if epochs == 1 else []
            resume = str(tmp_path / "run")
            feed(records).fit(model, epochs=epochs, resume=resume, callbacks=callbacks, verbose=0)
            assert float(model.optimizer.dynamic_scale) == 4
        feed(records).fit(model, verbose=0)
        assert float(model.optimizer.dynamic_scale) == 4
        assert len({len(model.optimizer.variables) for model in models}) == 1
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["two replicas", "tf_data", "mixed precision", "in a graph"])
def test_crashes_in_other_trainings(records, tmp_path, how):
    strategy, changes = None, {}
    if how == "tf_data":
        changes["options"] = TF_DATA
    if how in ("two replicas", "in a graph"):
        changes["run_eagerly"] = False
    if how == "two replicas":  # untuned: TensorFlow waits for the tuning thread of what crashed
        changes["options"] = TfDataOptions(autotune=False)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if how == "mixed precision":
        keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        changes["epochs"] = 2
        expected = run(records, tmp_path / "whole", strategy=strategy, **changes)
        for step in at_night((3,), (3, 2)):  # each counts from where the one before stopped
            with pytest.raises(Crash):
                first = [stop_at(step, Crash)]
                run(records, tmp_path / "crashed", strategy=strategy, first=first, **changes)
        assert_same(expected, run(records, tmp_path / "crashed", strategy=strategy, **changes))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.slow
def test_more_epochs_later(records, whole, tmp_path):
    """As in one run: also the averages of weights, which the end of a run puts in their place."""
    for epochs in (1, EPOCHS):
        model, again, _ = run(records, tmp_path, epochs=epochs, resume=Resume(tmp_path / "run"))
    for variable, value in zip(whole[0].variables, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value.numpy())
    assert again.history == whole[1].history


def save_state(records, folder, **changes):
    """Saves the state of a training of one epoch."""
    train = feed(records, **changes)
    train.fit(make_network(), resume=Resume(folder), verbose=0)


@pytest.fixture(scope="module")
def saved_once(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    save_state(records, folder)
    return folder


@pytest.fixture
def saved(saved_once, tmp_path):
    """A folder of its own with the state of a training of one epoch."""
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"batch_size": 6}, "`batch_size` was 5, is 6"),
        ({"preprocess": ANTIALIASED}, "`preprocess.antialias` was False, is True. Use the same"),
        (
            {"preprocess": Preprocess.for_training(8)},
            "`preprocess.crop` was ResizeRandomCrop.*, is Cov",
        ),
        ({"shuffle_block_size": 2}, "`shuffle_block_size` was 1, is 2"),
        ({"order": "buffer"}, "Resuming needs a fixed `order`, 'global', got 'buffer'"),
    ],
)
def test_what_changed_is_refused(records, saved, changes, message):
    with refused(message):
        save_state(records, saved, **changes)


def test_other_steps_and_other_records_are_refused(records, saved):
    with refused("belongs to training on other input: .*`subset` was"):
        save_state(records.exclude([3]), saved)
    with refused("belongs to training on other input: `labels` was as stored, is "):
        save_state(records.relabel({0: 1}), saved)
    with refused("`steps_per_epoch` was 4, is 3"):
        feed(records).fit(make_network(), epochs=2, steps_per_epoch=3, resume=str(saved))
    fewer = dataclasses.replace(records, files=records.files[:2])
    with refused("`records` was 24, is 17; .*`files` was"):
        save_state(fewer, saved)


def test_a_damaged_state_is_refused(records, saved):
    """And one of another version, with what to do about it."""
    file = saved / "state.json"
    state = json.loads(file.read_text())
    empty = json.dumps({name: state[name] for name in ("format", "version")})
    for text in ("", "{", "[]", '{"format": "x"}', empty):
        file.write_text(text)
        with refused("is not a state of training"):
            save_state(records, saved)
    for version, message in (
        (4, "is of an earlier version of dali_tf_input: finish .* in another folder"),
        (99, "is of version 99, written by a newer release of dali_tf_input"),
    ):
        file.write_text(json.dumps({**state, "version": version}))
        with refused(message):
            save_state(records, saved)


@pytest.mark.slow
def test_interrupted_and_resumed_in_one_process(records, tmp_path):
    """As in a notebook: steps after the saved state are done again, none is lost.

    A callback needs no list, and `initial_epoch` counts where nothing is saved.
    """
    model, resume = make_network(), Resume(tmp_path, save_every=3)
    given = {"epochs": 3, "resume": resume, "verbose": 0}
    train = feed(records)
    with pytest.raises(KeyboardInterrupt):
        train.fit(model, callbacks=stop_at(5), initial_epoch=1, **given)
    assert int(model.optimizer.iterations) == 5
    assert train.fit(model, **given).epoch == [1, 2]
    assert int(model.optimizer.iterations) == 8


@pytest.mark.slow
def test_steps_per_execution(records, tmp_path):
    model = make_model(8, 24, steps_per_execution=2)
    train = feed(records)
    train.fit(model, epochs=1, resume=Resume(tmp_path, save_every=2), verbose=0)
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 4
    with refused("must divide the 4 steps of an epoch and the 4 that are done, .* got 3"):
        model = make_model(8, 24, steps_per_execution=3)
        feed(records).fit(model, epochs=2, resume=str(tmp_path))


def test_files_of_others_stay(records, saved):
    """Also of a callback that names its files alike."""
    (saved / "step-3.weights.h5").write_text("a callback's")
    feed(records).fit(make_network(), epochs=2, resume=saved, verbose=0)
    names = [".lock", "state.json", "step-3.weights.h5", "step-8.npz", "step-8.weights.h5"]
    assert sorted(os.listdir(saved)) == names
    assert (saved / "step-3.weights.h5").read_text() == "a callback's"


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", ""])
def test_urls_are_no_folders(records, tmp_path, monkeypatch, url):
    """Nothing is written into a new folder of that name."""
    monkeypatch.chdir(tmp_path)
    train = feed(records)
    message = "must be a local path, got" if url else "must be a path, got ''"
    for call in (
        lambda: train.fit(make_model(8, 24), resume=url),
        lambda: Resume(url),
        lambda: train.blame(url, loss="mse"),
    ):
        with refused(f"`folder` {message}"):
            call()
    assert not os.listdir(tmp_path)


def one(image, seed):
    return image


def test_functions_are_compared_by_their_source(records, tmp_path):
    """Two lambdas have the same name; and a function may have been changed."""
    first, second = (lambda image, seed: image), (lambda image, seed: 255 - image)
    descriptions = [describe_function(function) for function in (first, second, one, len)]
    assert len({*descriptions}) == 4
    assert descriptions[2].startswith("one (")

    def around(number):
        return lambda image, seed: image + number

    assert describe_function(around(1)) == describe_function(around(1))
    assert describe_function(around(1)) != describe_function(around(2))
    assert descriptions == [describe_function(function) for function in (first, second, one, len)]


def test_weights_that_do_not_fit(records, saved):
    def make(optimizer, outputs=24, *, dropouts=(0.3,)):
        layers = [keras.layers.Flatten(), *map(keras.layers.Dropout, dropouts)]
        layers.append(keras.layers.Dense(8))
        return make_model(8, outputs, *layers, optimizer=optimizer, metrics=["accuracy"])

    def adam(**changes):
        return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, **changes)

    for model, message in (
        (make(adam(), 25), "`layer 3.units` was 24, is 25"),
        (make_model(8, 24), "training with Adam, the model is compiled with SGD"),
        (make(adam(amsgrad=True)), "`optimizer.amsgrad` was False, is True"),
        # Random layers have no weights, so the weights fit.
        (make(adam(), dropouts=()), "another model, .*: `layer 1` was Dropout, is Dense"),
        (make(adam(), dropouts=(0.3, 0.3)), "another model, .*: `layer 2` was Dense, is Dropout"),
        (make(adam(), dropouts=(0.2,)), "another model, .*: `layer 1.rate` was 0.3, is 0.2"),
        (keras.Sequential([keras.layers.Flatten()]), "`model` must be compiled: model.compile"),
    ):
        with refused(message):
            feed(records).fit(model, epochs=2, resume=str(saved), verbose=0)
    (saved / "file").write_text("")
    with refused("Cannot keep the state of training in"):
        save_state(records, saved / "file" / "run")


@pytest.mark.parametrize("name", ["step-4.weights.h5", "step-4.npz"])
def test_every_file_is_checked(records, saved, name):
    """Present, whole, and as it was saved, to the bit."""
    train, file = feed(records), saved / name
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (content[: len(content) // 2], b"", b"no state", flipped):
        file.write_bytes(damaged)
        with refused(f"{name} is damaged: it is not as it was saved"):
            train.fit(make_network(), epochs=2, resume=str(saved), verbose=0)
    file.unlink()
    with refused(rf"state.json names {name}, which cannot be read: .*No such file"):
        train.fit(make_network(), epochs=2, resume=str(saved), verbose=0)
    file.write_bytes(content)
    assert train.fit(make_network(), resume=str(saved), verbose=0).epoch == [0]  # it is done


def test_a_step_that_is_saved_again(records, tmp_path, monkeypatch):
    """As in a loop of one's own: the state before stays whole until the new one is.

    On a disk that is full, nothing half-written is left beside it.
    """
    model, spec = make_network(), feed(records).spec
    model.optimizer.build(model.trainable_variables)
    resume = Resume(tmp_path)
    state, _ = resume.restore(model, spec, batch_size=BATCH)
    state.step = 3
    resume.save(model, state)
    saved = [weight.copy() for weight in model.get_weights()]
    model.set_weights([weight + 1 for weight in saved])

    def fill(path, *_, **__):
        Path(path if path.endswith("h5") else f"{path}.new").write_text("half")
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(tmp_path))
    for owner, name in ((model, "save_weights"), (writing, "write_whole")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fill)
            with refused("cannot be saved in .*: .*No space left on device. The previous state re"):
                resume.save(model, state)
        left = sorted(os.listdir(tmp_path))
        assert not re.search(r"partial|\.new", " ".join(left))
        assert left == before or owner is writing  # then the new weights are whole
    again = make_network()
    Resume(tmp_path).restore(again, spec, batch_size=BATCH)
    for one, two in zip(saved, again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    for _ in range(3):
        resume.save(model, state)
    Resume(tmp_path).restore(again, spec, batch_size=BATCH)
    np.testing.assert_array_equal(again.get_weights()[0], saved[0] + 1)
    assert len([name for name in os.listdir(tmp_path) if name.startswith("step")]) <= 4


def test_records_in_another_order_are_refused(tmp_path):
    """The same names, sizes and number of records."""
    images = [jpeg(20, 20), jpeg(30, 30)]
    examples = [{"image": image, "label": label} for label, image in enumerate(images)]
    dataset = write_indexed(tmp_path / "train", examples)
    save_state(dataset, tmp_path / "run", batch_size=1)
    dataset = write_indexed(tmp_path / "train", examples[::-1], force=True)
    with refused("`index` was"):
        save_state(dataset, tmp_path / "run", batch_size=1)


@pytest.mark.slow
def test_a_loss_of_power_and_two_trainings_in_one_folder(records, whole, tmp_path, monkeypatch):
    """Weights are on the disk before the state that names them, and it before older ones go.

    A second training is refused while the first one runs, and changes nothing.
    """

    def train_too(batch, logs):
        with refused(f"Another training that runs now keeps its state in {tmp_path}/run: wait"):
            train.fit(network, resume=str(tmp_path / "run"), verbose=0)

    train, network = feed(records, batch_size=BATCH), make_network()
    disk = Disk(monkeypatch)
    first = [keras.callbacks.LambdaCallback(on_train_batch_end=train_too)]
    assert_same(whole, run(records, tmp_path, first=first))
    disk.check_is_before(".weights.h5", "state.json")
    calls = [(what, os.path.basename(path)) for what, path in disk.calls]
    removed = next(
        n for n, (what, name) in enumerate(calls) if (what, name[:4]) == ("unlink", "step")
    )
    assert ("rename", str(tmp_path / "run/state.json")) in disk.calls[:removed]
    assert disk.calls[removed - 1] == ("sync", str(tmp_path / "run"))


def test_a_folder_in_place_of_the_lock(records, tmp_path):
    (tmp_path / ".lock").mkdir()
    with refused(r"\.lock cannot be locked: Is a directory. Remove it"):
        feed(records).fit(make_network(), verbose=0, resume=tmp_path)


def test_the_folder_takes_other_files_while_training_holds_it(tmp_path):
    """As when a callback exports the model into it."""
    with Resume(tmp_path).hold(), Staging(str(tmp_path), "") as staging:
        (Path(staging.path("model"))).write_text("1")
        staging.commit("model")
    assert (tmp_path / "model").read_text() == "1"
