"""Training that was stopped anywhere continues as if it had not been: to Keras's eyes too."""

import contextlib
import dataclasses
import json
import os
import signal
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import warm
from conftest import (
    DALI,
    TF_DATA,
    jpeg,
    nightly,
    refused,
    slowly,
    spec_of,
    write_dataset,
    write_indexed,
)
from disk import Disk
from models import make_model

from dali_tf_input import Preprocess, ResizeRandomCrop, Resume, TfDataOptions, load
from dali_tf_input.storage.staging import Staging
from dali_tf_input.training.schedule import describe_function

# Its fields are named, as losses that fall for two epochs depend on the pixels.
SMALL = Preprocess.for_training(16, crop=ResizeRandomCrop(resize=(18, 18)), antialias=False)
ANTIALIASED = dataclasses.replace(SMALL, antialias=True)
EPOCHS, BATCH, STEPS = 3, 5, 4  # 24 records


class Crash(BaseException):
    """What stands for kill -9: nothing catches it, so that nothing cleans up."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("resume"), [5, 12, 7])


def feed(records, options=TF_DATA, *, batch_size=BATCH, strategy=None, order="global", **changes):
    spec = spec_of(records, order, changes.pop("preprocess", SMALL), **changes)
    return load(spec, options, batch_size=batch_size, strategy=strategy)


def make_network(strategy=None, *, use_ema=True, **compiled):
    """Returns a model whose weights depend on everything: dropout, momentum, averages."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(8)]
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = keras.optimizers.Adam(0.01, use_ema=use_ema, ema_momentum=0.8)
    compiled |= {"optimizer": optimizer, "metrics": ["accuracy"]}
    return make_model(16, 24, *layers, strategy=strategy, **compiled)


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


def run(records, folder, *, options=TF_DATA, strategy=None, epochs=EPOCHS, first=(), **changes):
    """Trains until the end, or until it crashes; returns the model, its history and watchers."""
    folder.mkdir(exist_ok=True)
    resume = changes.pop("resume", None) or Resume(folder / "run", save_every=1)
    model, watchers = make_network(strategy, **changes), Watchers(folder)
    train = feed(records, options, strategy=strategy, batch_size=BATCH * (2 if strategy else 1))
    history = train.fit(
        model, epochs=epochs, resume=resume, callbacks=[*first, *watchers.all], verbose=0
    )
    return model, history, watchers


def crash_at_step(step):
    seen = []

    def count(batch, logs):
        seen.append(batch)
        if len(seen) == step:
            raise Crash

    return [keras.callbacks.LambdaCallback(on_train_batch_end=count)]


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
    return run(records, tmp_path_factory.mktemp("whole"), run_eagerly=True)


@pytest.mark.parametrize(
    "crashes",
    [
        # After the first step, in an epoch, at its end, in the second epoch, in the last step:
        # steps since the crash before, whose own step was not saved.
        [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("step", 6)],
        # Before the first weights, between weights and arrays, before the first state, and later
        # before a state.
        slowly([("replace", 1), ("replace", 2), ("replace", 3), ("replace", 9)]),
        # Before old weights are removed; nothing is left that would be removed earlier.
        slowly([("unlink", 3)]),
    ],
    ids=["after steps", "while it saves", "while it removes"],
)
def test_after_crashes(records, whole, tmp_path, monkeypatch, crashes):
    """One training that crashes again and again."""
    for what, number in crashes:
        first = crash_at_step(number) if what == "step" else ()
        with monkeypatch.context() as patch, pytest.raises(Crash):
            if what != "step":
                crash_in(patch, os, what, number)
            run(records, tmp_path, first=first, run_eagerly=True)
    assert_same(whole, run(records, tmp_path, run_eagerly=True))
    # A run that is done is called again: nothing changes.
    assert_same(whole, run(records, tmp_path, run_eagerly=True))
    names = [name for name in os.listdir(tmp_path / "run") if name != ".lock"]
    left = {name.rpartition(".")[2] for name in names}
    assert left == {"json", "h5", "npz"}
    assert len(names) == 3


class Scale(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.dynamic_scale.assign(4.0)


@pytest.fixture
def default_sigterm():
    """As in a program that does nothing about the signal."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_DFL


@pytest.mark.parametrize("step", [2, 4, 7])
def test_after_sigterm(records, whole, tmp_path, caplog, default_sigterm, step):
    """In mid-epoch and at an epoch's end: it ends after that step, and the state is of it."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["two replicas", *map(nightly, ("dali", "mixed precision", "in a graph"))]
)
def test_crashes_in_other_trainings(records, tmp_path, how):
    strategy, changes = None, {}
    if how == "dali":
        changes["options"] = DALI
    if how == "two replicas":  # untuned: TensorFlow waits for the tuning thread of what crashed
        changes["options"] = TfDataOptions(autotune=False)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if how == "mixed precision":
        keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        expected = run(records, tmp_path / "whole", strategy=strategy, **changes)
        for step in (1, 3, 2):  # each counts from where the one before stopped
            with pytest.raises(Crash):
                first = crash_at_step(step)
                run(records, tmp_path / "crashed", strategy=strategy, first=first, **changes)
        assert_same(expected, run(records, tmp_path / "crashed", strategy=strategy, **changes))
    finally:
        keras.mixed_precision.set_global_policy("float32")


# Trains in a process of its own, and ends it.
PROGRAM = textwrap.dedent("""
    import os, sys
    import keras, numpy as np
    import dali_tf_input as dti

    files, folder, backend, kill_at = sys.argv[1:]
    options = dti.DaliOptions(device="cpu") if backend == "dali" else dti.TfDataOptions()
    keras.utils.set_random_seed(0)
    train = dti.load(dti.InputSpec.for_training(files, 16, seed=3), options, batch_size=5)
    layers = [keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(24)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)

    def end(batch, logs):
        if model.optimizer.iterations == int(kill_at):
            os.kill(os.getpid(), 9)

    kill = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    resume = dti.Resume(folder, save_every=1)
    train.fit(model, epochs=3, resume=resume, callbacks=[kill], verbose=0)
    print([float(np.sum(np.abs(weight))) for weight in model.get_weights()])
""")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dali", nightly("tf_data")])
def test_killed(records, tmp_path, backend):
    """By kill -9, in the middle of epochs and at a bound."""
    files = os.path.join(os.path.dirname(records.paths[0]), "train-*-of-?????")

    def train(folder, kill_at):
        return warm.run(["-c", PROGRAM, files, tmp_path / folder, backend, kill_at])

    expected = train("whole", -1)
    assert expected.returncode == 0, expected.stderr
    for kill_at in (2, 4, 9):
        assert train("killed", kill_at).returncode == -signal.SIGKILL
    assert train("killed", -1).stdout == expected.stdout


def test_what_callbacks_see(records, tmp_path):
    """A resumed epoch goes on at its next batch; training begins and ends once."""
    seen = []

    def note(what):
        return lambda number=None, logs=None: seen.append((what, number))

    watch = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_train_end=lambda logs: seen.append("end"),
        on_epoch_begin=note("epoch"),
        on_train_batch_begin=note("batch"),
    )
    with pytest.raises(Crash):
        run(records, tmp_path, epochs=2, first=crash_at_step(3), run_eagerly=True)
    _, history, _ = run(records, tmp_path, epochs=2, first=[watch], run_eagerly=True)
    batches = [("batch", number) for number in range(STEPS)]
    assert seen == ["begin", ("epoch", 0), *batches[2:], ("epoch", 1), *batches, "end"]
    assert history.epoch == [0, 1]


def test_more_epochs_later(records, tmp_path):
    """As in one run: also the averages of weights, which the end of a run puts in their place."""

    def train(place, epochs):
        resume = Resume(tmp_path / place / "run")
        return run(records, tmp_path / place, epochs=epochs, resume=resume)

    expected, history, _ = train("whole", 3)
    train("parts", 1)
    model, again, _ = train("parts", 3)
    for variable, value in zip(expected.variables, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value.numpy())
    assert again.history == history.history


def test_a_training_that_was_stopped_early_is_done(records, tmp_path):
    def stop():
        return keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)

    def train(*callbacks):
        given = {"resume": str(tmp_path), "callbacks": [*callbacks], "verbose": 0}
        return feed(records).fit(make_network(run_eagerly=True), epochs=5, **given).epoch

    assert train(stop()) == [0, 1]
    assert train(stop()) == [0, 1]
    assert train() == [0, 1, 2, 3, 4]  # without what stopped it, it goes on


def test_one_callback_and_one_folder(records, tmp_path):
    """No list is needed, and text names the folder; initial_epoch counts where nothing is saved."""
    stop = keras.callbacks.TerminateOnNaN()
    given = {"resume": str(tmp_path), "callbacks": stop, "verbose": 0}

    def train(epochs, first):
        model = make_network(run_eagerly=True)
        return feed(records).fit(model, epochs=epochs, initial_epoch=first, **given).epoch

    assert train(2, 1) == [1]
    assert train(3, 0) == [1, 2]


def make_resume(folder, **changes):
    return Resume(folder, **changes)


def save_state(records, folder, **changes):
    """Saves the state of a training of one epoch."""
    train = feed(records, **changes)
    train.fit(make_network(run_eagerly=True), resume=Resume(folder), verbose=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"batch_size": 6}, "`batch_size` was 5, is 6"),
        ({"preprocess": ANTIALIASED}, "`preprocess.antialias` was False, is True. Use the same"),
        (
            {"preprocess": Preprocess.for_training(16)},
            r"`preprocess.crop` was ResizeRandomCrop\(resize=\(18, 18\)\), is CoverCrop",
        ),
        ({"shuffle_block_size": 2}, "`shuffle_block_size` was 1, is 2"),
        ({"order": "buffer"}, "Resuming needs a fixed `order`, 'global', got 'buffer'"),
    ],
)
def test_what_changed_is_refused(records, tmp_path, changes, message):
    save_state(records, tmp_path)
    with refused(message):
        save_state(records, tmp_path, **changes)


def test_other_steps_are_refused(records, tmp_path):
    save_state(records, tmp_path)
    with refused("`steps_per_epoch` was 4, is 3"):
        feed(records).fit(make_network(), epochs=2, steps_per_epoch=3, resume=str(tmp_path))
    with refused("`save_every` must be at least 1 or None, got 0"):
        Resume(tmp_path, save_every=0)


def test_other_records_are_refused(records, tmp_path):
    save_state(records, tmp_path)
    fewer = dataclasses.replace(records, files=records.files[:2])
    with refused(
        r"`records` was 24, is 17; .*`files` was .*\. Use the same input, or start in ano"
    ):
        save_state(fewer, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "x"}', '{"format": "dali_tf_input training state", "version": 6}'],
)
def test_a_damaged_state_is_refused(records, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with refused("is not a state of training"):
        save_state(records, tmp_path)


def test_interrupted_and_resumed_in_one_process(records, tmp_path):
    """As in a notebook: steps after the saved state are done again, none is lost."""
    model, resume, steps = make_network(), Resume(tmp_path, save_every=3), []

    def interrupt(batch, logs):
        steps.append(batch)
        if len(steps) == 5:
            raise KeyboardInterrupt

    given = {"epochs": 2, "resume": resume, "verbose": 0}
    train = feed(records)
    with pytest.raises(KeyboardInterrupt):
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        train.fit(model, callbacks=[stop], **given)
    assert int(model.optimizer.iterations) == 5
    assert train.fit(model, **given).epoch == [0, 1]
    assert int(model.optimizer.iterations) == 8


def test_steps_per_execution(records, tmp_path):
    model = make_model(16, 24, steps_per_execution=2)
    train = feed(records)
    train.fit(model, epochs=1, resume=Resume(tmp_path, save_every=2), verbose=0)
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 4
    with refused("must divide the 4 steps of an epoch and the 4 that are done, .* got 3"):
        model = make_model(16, 24, steps_per_execution=3)
        feed(records).fit(model, epochs=2, resume=str(tmp_path))


def test_files_of_others_stay(records, tmp_path):
    """Also of a callback that names its files alike."""
    (tmp_path / "step-3.weights.h5").write_text("a callback's")
    save_state(records, tmp_path)
    train = feed(records, batch_size=BATCH)
    train.fit(make_network(), epochs=3, resume=tmp_path, verbose=0)
    names = [".lock", "state.json", "step-12.npz", "step-12.weights.h5", "step-3.weights.h5"]
    assert sorted(os.listdir(tmp_path)) == names
    assert (tmp_path / "step-3.weights.h5").read_text() == "a callback's"


def test_a_state_of_an_earlier_version(records, tmp_path):
    save_state(records, tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "version": 4}))
    with refused("is of an earlier version of dali_tf_input: finish .* in another folder"):
        save_state(records, tmp_path)


def test_another_number_of_random_layers(records, tmp_path):
    """They have no weights, so the weights fit."""

    def make(*dropouts):
        layers = [keras.layers.Input((16, 16, 3)), keras.layers.Flatten()]
        model = keras.Sequential(
            [*layers, *map(keras.layers.Dropout, dropouts), keras.layers.Dense(24)]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    train = {"epochs": 1, "resume": tmp_path, "verbose": 0}
    feed(records).fit(make(0.1), **train)
    for dropouts, change in (
        ((), "`layer 1` was Dropout, is Dense"),
        ((0.1, 0.1), "`layer 2` was Dense, is Dropout"),
        ((0.2,), "`layer 1.rate` was 0.1, is 0.2"),
    ):
        with refused(f"belongs to training of another model, .*: {change}"):
            feed(records).fit(make(*dropouts), **{**train, "epochs": 2})


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", ""])
def test_urls_are_no_folders(records, tmp_path, monkeypatch, url):
    """Nothing is written into a new folder of that name."""
    monkeypatch.chdir(tmp_path)
    train = feed(records)
    message = "must be a local path, got" if url else "must be a path, got ''"
    for call in (
        lambda: train.fit(make_model(16, 24), resume=url),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": False}, "`resume` must be a Resume, text, a path or None, got False"),
        ({"epochs": "2"}, "`epochs` must be an integer, got '2'"),
        ({"epochs": 1.5}, "`epochs` must be an integer, got 1.5"),
        ({"epochs": -1}, "`epochs` must be at least 1, got -1"),
        ({"initial_epoch": -1}, "`initial_epoch` must be at least 0, got -1"),
        ({"steps_per_epoch": -2}, "`steps_per_epoch` must be at least 1 or None, got -2"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch` must be at least 1 or None, got 0"),
        ({"callbacks": [None]}, "`callbacks` must be keras.callbacks.Callback, or a list of them"),
        ({"callbacks": [5]}, "`callbacks` must be keras.callbacks.Callback, or a list of them"),
        ({"profile": "yes"}, "`profile` must be True or False, got 'yes'"),
    ],
)
def test_fit_refuses(records, arguments, message):
    with refused(message):
        feed(records).fit(make_model(16, 24), **arguments)


def test_weights_that_do_not_fit(records, tmp_path):
    save_state(records, tmp_path)
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(8)]

    def train(model, **arguments):
        feed(records).fit(model, epochs=2, resume=str(tmp_path), verbose=0, **arguments)

    adam, amsgrad = (
        keras.optimizers.Adam(amsgrad=amsgrad, use_ema=True, ema_momentum=0.8)
        for amsgrad in (False, True)
    )
    metrics = {"metrics": ["accuracy"]}
    for model, message in (
        (make_model(16, 25, *layers, optimizer=adam, **metrics), "`layer 3.units` was 24, is 25"),
        (make_model(16, 24), "training with Adam, the model is compiled with SGD"),
        (
            make_model(16, 24, *layers, optimizer=amsgrad, **metrics),
            "otherwise: `optimizer.amsgrad` was False, is True. Use the same model",
        ),
        (keras.Sequential([keras.layers.Flatten()]), "`model` must be compiled: model.compile"),
    ):
        with refused(message):
            train(model)
    (tmp_path / "file").write_text("")
    with refused("Cannot keep the state of training in"):
        save_state(records, tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["step-4.weights.h5", "step-4.npz"])
def test_every_file_is_checked(records, tmp_path, name):
    """Present, whole, and as it was saved, to the bit."""
    save_state(records, tmp_path)
    train, file = feed(records), tmp_path / name
    saved = file.read_bytes()
    flipped = bytearray(saved)
    flipped[len(saved) // 2] ^= 1
    for content in (saved[: len(saved) // 2], b"", b"no state", flipped):
        file.write_bytes(content)
        with refused(f"{name} is damaged: it is not as it was saved"):
            train.fit(make_network(), epochs=2, resume=str(tmp_path), verbose=0)
    file.unlink()
    with refused(rf"state.json names {name}, which cannot be read: .*No such file"):
        train.fit(make_network(), epochs=2, resume=str(tmp_path), verbose=0)
    file.write_bytes(saved)
    train.fit(make_network(run_eagerly=True), epochs=2, resume=str(tmp_path), verbose=0)


def test_a_disk_that_is_full(records, tmp_path, monkeypatch):
    """The state before stays, and nothing half-written beside it."""
    save_state(records, tmp_path)
    model, train = make_network(run_eagerly=True), feed(records)
    before = sorted(os.listdir(tmp_path))

    def fill(path, overwrite):
        with open(path, "w") as stream:
            stream.write("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model, "save_weights", fill)
        with refused(r"The state of training cannot be saved in .*: .*No space left on device"):
            train.fit(model, epochs=2, resume=str(tmp_path), verbose=0)
    assert sorted(os.listdir(tmp_path)) == before
    # There is space again.
    assert train.fit(model, epochs=2, resume=str(tmp_path), verbose=0).epoch == [0, 1]


def test_a_step_that_is_saved_again(records, tmp_path, monkeypatch):
    """As in a loop of one's own: the state before stays whole until the new one is."""
    model, spec = make_network(), feed(records).spec
    model.optimizer.build(model.trainable_variables)
    resume = Resume(tmp_path)
    state, _ = resume.restore(model, spec, batch_size=BATCH)
    state.step = 3
    resume.save(model, state)
    saved = [weight.copy() for weight in model.get_weights()]
    model.set_weights([weight + 1 for weight in saved])

    def fill(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dali_tf_input.training.resume.write_whole", fill)
        with refused("No space left on device. The previous state remains"):
            resume.save(model, state)
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


def test_a_loss_of_power(records, tmp_path, monkeypatch):
    """Weights are on the disk before the state that names them, and it before older ones go."""
    disk = Disk(monkeypatch)
    run(records, tmp_path, epochs=2, run_eagerly=True)
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


def test_two_trainings_in_one_folder(records, tmp_path):
    """The second one is refused while the first one runs, and changes nothing."""

    def train_too(batch, logs):
        with refused(f"Another training that runs now keeps its state in {tmp_path}/run: wait"):
            train.fit(network, resume=str(tmp_path / "run"), verbose=0)

    train, network = feed(records, batch_size=BATCH), make_network()
    whole = run(records, tmp_path / "alone", epochs=1, run_eagerly=True)
    first = [keras.callbacks.LambdaCallback(on_train_batch_end=train_too)]
    assert_same(whole, run(records, tmp_path, epochs=1, first=first, run_eagerly=True))


def test_the_folder_takes_other_files_while_training_holds_it(tmp_path):
    """As when a callback exports the model into it."""
    with Resume(tmp_path).hold(), Staging(str(tmp_path), "") as staging:
        (Path(staging.path("model"))).write_text("1")
        staging.commit("model")
    assert (tmp_path / "model").read_text() == "1"
