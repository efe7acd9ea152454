"""Training that was killed goes on as if it had not been: the same records, and the same weights."""

import dataclasses
import json
import os
import signal
import textwrap

import keras
import numpy as np
import pytest
import warm
from conftest import jpeg, write_dataset, write_tfrecord

from dali_tf_input import (
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    Preprocess,
    TfDataOptions,
    build_index,
)
from dali_tf_input.distribution import distribute
from dali_tf_input.resume import Resume

BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}

# Trains, and writes a line for each step that was done: the labels, which number the records, and
# what the images add up to.
PROGRAM = textwrap.dedent("""
    import os, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras, numpy as np, tensorflow as tf
    from dali_tf_input import DaliOptions, DatasetSpec, InputSpec, Preprocess, TfDataOptions
    from dali_tf_input.distribution import distribute
    from dali_tf_input.resume import Resume

    files, folder, log, backend, save_every, kill_at = sys.argv[1:]
    options = DaliOptions(device="cpu") if backend == "dali" else TfDataOptions()
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    spec = InputSpec(dataset=DatasetSpec.from_files(files), preprocess=Preprocess.for_training(16), order="global", seed=3)
    train = distribute(spec, options, global_batch_size=5)

    class Logged(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(24)
        def call(self, images):
            return self.dense(keras.ops.reshape(images, (-1, 768)))
        def train_step(self, data):
            images, labels = data
            note = tf.numpy_function(note_step, [labels, tf.reduce_sum(images)], tf.int64)
            with tf.control_dependencies([note]):
                return super().train_step(data)

    lines = []
    def note_step(labels, total):
        lines.append(f"{labels.tolist()} {total!r}")
        return np.int64(0)

    class Log(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with open(log, "a") as stream:
                stream.write(f"{resume.step} {lines[-1]}\\n")
            if resume.step == int(kill_at):
                os.kill(os.getpid(), 9)

    model = Logged()
    model(np.zeros((1, 16, 16, 3), np.float32))
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    resume = Resume(folder, train, save_every=int(save_every))
    resume.fit(model, epochs=3, verbose=0, callbacks=[Log()])
""")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("resume"), [5, 12, 7])


def train(records, tmp_path, backend, *, save_every, kill_at):
    """Runs the program; returns its exit code."""
    files = os.path.join(os.path.dirname(records.files[0]), "train-*")
    process = warm.run(
        ["-c", PROGRAM, files, tmp_path / "run", tmp_path / "log", backend, save_every, kill_at]
    )
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_at_any_step(records, tmp_path, backend):
    """Three kills, in the middle of epochs and at a bound; the last line of each step is that of
    training without a stop.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert train(records, whole, backend, save_every=1, kill_at=-1) == 0
    for kill_at in (2, 4, 9):
        assert (
            train(records, killed, backend, save_every=2 if kill_at == 9 else 1, kill_at=kill_at)
            == -signal.SIGKILL
        )
    assert train(records, killed, backend, save_every=1, kill_at=-1) == 0
    expected = dict(line.split(" ", 1) for line in (whole / "log").read_text().splitlines())
    assert list(expected) == [str(step) for step in range(1, 13)]
    lines = [line.split(" ", 1) for line in (killed / "log").read_text().splitlines()]
    assert {step for step, _ in lines} == set(expected)
    for step, line in lines:
        assert line == expected[step]  # records and pixels; a step that was done again too
    one, other = (weights_of(folder / "run") for folder in (whole, killed))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])  # the optimizer's state among them


def weights_of(folder):
    """Returns every array in the weights that a state names."""
    import h5py

    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 12
    assert sorted(os.listdir(folder)) == ["state.json", state["weights"]]
    found = {}
    with h5py.File(folder / state["weights"]) as stream:
        stream.visititems(
            lambda name, item: (
                found.__setitem__(name, item[()]) if isinstance(item, h5py.Dataset) else None
            )
        )
    assert any("optimizer" in name for name in found)
    return found


def make(records, folder, *, global_batch_size=4, save_every=None, **changes):
    preprocess = changes.pop("preprocess", Preprocess.for_training(16))
    spec = InputSpec(
        dataset=records, preprocess=preprocess, order=changes.pop("order", "global"), **changes
    )
    made = distribute(spec, TfDataOptions(), global_batch_size=global_batch_size)
    return Resume(folder, made, save_every=save_every)


def make_model():
    model = keras.Sequential(
        [keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(24)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_epochs_in_all(records, tmp_path):
    model = make_model()
    assert [
        len(history.epoch) for history in make(records, tmp_path).fit(model, epochs=2, verbose=0)
    ] == [2]
    again = make(records, tmp_path)
    assert again.step == 12
    assert [history.epoch for history in again.fit(model, epochs=5, verbose=0)] == [[2, 3, 4]]
    assert make(records, tmp_path).fit(model, epochs=5, verbose=0) == []
    half = make(records, tmp_path / "half", save_every=4)
    half._train.start_step.step = 4
    half.set_model(model)
    half.save()
    histories = make(records, tmp_path / "half").fit(make_model(), epochs=3, verbose=0)
    assert [history.epoch for history in histories] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"global_batch_size": 6}, "`global_batch_size` was 4, is 6"),
        (
            {"preprocess": Preprocess.for_training(16, antialias=True)},
            "`preprocess.antialias` was False, is True. Use the same",
        ),
        ({"shuffle_block_size": 2}, "`shuffle_block_size` was 1, is 2"),
        ({"order": "buffer"}, "Resuming needs a fixed `order`, 'global', got 'buffer'"),
        ({"save_every": 0}, "`save_every` must be at least 1 or None, got 0"),
    ],
)
def test_what_changed_is_refused(records, tmp_path, changes, message):
    first = make(records, tmp_path)
    first.set_model(make_model())
    first.save()
    make(records, tmp_path)
    with pytest.raises(InputError, match=message):
        make(records, tmp_path, **changes)


def test_other_records_are_refused(records, tmp_path):
    first = make(records, tmp_path)
    first.set_model(make_model())
    first.save()
    fewer = dataclasses.replace(
        records,
        **{
            name: getattr(records, name)[:2]
            for name in ("files", "index_files", "records_per_file", "skipped_per_file")
        },
    )
    with pytest.raises(
        InputError,
        match=(
            r"`records` was 24, is 17; `files` was .*\. Use the same input, or start in another"
            r" folder"
        ),
    ):
        make(fewer, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "x"}', '{"format": "dali_tf_input training state", "version": 2}'],
)
def test_a_damaged_state_is_refused(records, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InputError, match="is not a state of training"):
        make(records, tmp_path)


def test_interrupted_and_gone_on_with_in_one_process(records, tmp_path):
    """As in a notebook: what was done after the state is done again, no step is lost."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if resume.step == 9:
                raise KeyboardInterrupt

    resume, model = make(records, tmp_path, save_every=4), make_model()
    with pytest.raises(KeyboardInterrupt):
        resume.fit(model, epochs=2, verbose=0, callbacks=[Interrupt()])
    assert (resume.step, int(model.optimizer.iterations)) == (9, 9)
    resume.fit(model, epochs=2, verbose=0)
    assert (resume.step, int(model.optimizer.iterations)) == (12, 12)


def test_what_callbacks_change_at_an_epochs_end_is_saved(records, tmp_path):
    slower = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(
            model.optimizer, "learning_rate", 1e-3 / 10 ** (epoch + 1)
        )
    )
    model = make_model()
    make(records, tmp_path).fit(model, epochs=2, verbose=0, callbacks=[slower])
    restored = make_model()
    make(records, tmp_path).restore(restored)
    np.testing.assert_allclose(float(restored.optimizer.learning_rate), 1e-5)


def test_steps_per_execution(records, tmp_path):
    def compiled(steps):
        model = make_model()
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps,
        )
        return model

    resume = make(records, tmp_path, save_every=2)
    resume.fit(compiled(3), epochs=1, verbose=0)
    assert resume.step == 6
    with pytest.raises(
        InputError,
        match=(
            "`steps_per_execution` must divide the 6 steps of an epoch and the 6 that are done,"
            " got 4"
        ),
    ):
        make(records, tmp_path).fit(compiled(4), epochs=2)


def test_files_that_a_kill_left_behind_go(records, tmp_path):
    (tmp_path / "step-3.weights.h5").write_text("left")
    (tmp_path / "mine.h5").write_text("not ours")
    make(records, tmp_path).fit(make_model(), epochs=1, verbose=0)
    assert sorted(os.listdir(tmp_path)) == ["mine.h5", "state.json", "step-6.weights.h5"]


def test_weights_that_do_not_fit(records, tmp_path):
    make(records, tmp_path).fit(make_model(), epochs=1, verbose=0)
    other = keras.Sequential(
        [keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(25)]
    )
    other.compile("adam", "mse")
    with pytest.raises(
        InputError, match=r"step-6.weights.h5 is damaged, or belongs to another model"
    ):
        make(records, tmp_path).fit(other, epochs=2)
    model = make_model()
    model.compile("sgd", "mse")
    with pytest.raises(
        InputError, match="belongs to training with Adam, the model is compiled with SGD"
    ):
        make(records, tmp_path).fit(model, epochs=2)
    model.compile(keras.optimizers.Adam(amsgrad=True), "mse")
    with pytest.raises(InputError, match="is damaged, or belongs to another model or optimizer"):
        make(records, tmp_path).fit(model, epochs=2)
    with pytest.raises(InputError, match="`steps_per_epoch` follows from the state: omit it"):
        make(records, tmp_path).fit(make_model(), epochs=2, steps_per_epoch=3)
    (tmp_path / "step-6.weights.h5").write_bytes(
        (tmp_path / "step-6.weights.h5").read_bytes()[:999]
    )
    with pytest.raises(
        InputError, match=r"step-6.weights.h5 is damaged, or belongs to another model"
    ):
        make(records, tmp_path).fit(make_model(), epochs=2)


def test_a_disk_that_is_full(records, tmp_path, monkeypatch):
    """The state before stays, and nothing half-written beside it."""
    resume, model = make(records, tmp_path), make_model()
    resume.fit(model, epochs=1, verbose=0)
    before = sorted(os.listdir(tmp_path))

    def fill(path, overwrite):
        with open(path, "w") as stream:
            stream.write("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_weights", fill)
    with pytest.raises(
        InputError, match=r"The state of training cannot be saved in .*: .*No space left on device"
    ):
        resume.fit(model, epochs=2, verbose=0)
    assert sorted(os.listdir(tmp_path)) == before
    assert make(records, tmp_path).step == 6
    # there is space again: in the same process too it goes on from what was saved
    monkeypatch.undo()
    assert resume.step == 12
    resume.fit(model, epochs=2, verbose=0)
    assert (resume.step, int(model.optimizer.iterations)) == (12, 12)
    assert make(records, tmp_path).step == 12


def test_records_in_another_order_are_refused(tmp_path):
    """The same names, sizes and number of records."""
    images = [jpeg(20, 20), jpeg(30, 30)]
    for order in ([0, 1], [1, 0]):
        build_index(
            write_tfrecord(tmp_path / "train", [{"image": images[n], "label": n} for n in order]),
            force=True,
        )
        dataset = DatasetSpec.from_files(tmp_path / "train")
        if order == [0, 1]:
            first = make(dataset, tmp_path / "run", global_batch_size=1)
            first.set_model(make_model())
            first.save()
    with pytest.raises(InputError, match="`index` was"):
        make(dataset, tmp_path / "run", global_batch_size=1)


def test_a_model_without_variables(records, tmp_path):
    first = make(records, tmp_path)
    first.set_model(make_model())
    first.save()
    with pytest.raises(InputError, match="must be compiled and have its variables"):
        make(records, tmp_path).fit(keras.Sequential([keras.layers.Flatten()]), epochs=1)


def test_weights_that_are_gone(records, tmp_path):
    first = make(records, tmp_path)
    first.set_model(make_model())
    first.save()
    next(tmp_path.glob("*.h5")).unlink()
    with pytest.raises(InputError, match=r"the weights it names are gone: .*step-0.weights.h5"):
        make(records, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot keep the state of training in"):
        make(records, tmp_path / "file" / "run")
