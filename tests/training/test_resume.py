"""Training that was killed continues as if it had not been: the same records and weights."""

import dataclasses
import json
import os
import signal
import textwrap

import h5py
import keras
import numpy as np
import pytest
import warm
from conftest import BACKENDS, TF_DATA, jpeg, refused, spec_of, write_dataset, write_indexed
from models import make_model

from dali_tf_input import Preprocess
from dali_tf_input.training.load import load
from dali_tf_input.training.resume import Resume

# Trains, and writes a line for each step that was done: the labels, which number the records, and
# what the images add up to.
PROGRAM = textwrap.dedent("""
    import os, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras, numpy as np, tensorflow as tf
    from dali_tf_input import DaliOptions, Records, InputSpec, Preprocess, TfDataOptions
    from dali_tf_input.training.load import load
    from dali_tf_input.training.resume import Resume

    files, folder, log, backend, save_every, kill_at = sys.argv[1:]
    options = DaliOptions(device="cpu") if backend == "dali" else TfDataOptions()
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    spec = InputSpec(records=Records.from_files(files), preprocess=Preprocess.for_training(16), order="global", seed=3)
    train = load(spec, options, batch_size=5)

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
    files = os.path.join(os.path.dirname(records.paths[0]), "train-*")
    folders = [tmp_path / "run", tmp_path / "log"]
    process = warm.run(["-c", PROGRAM, files, *folders, backend, save_every, kill_at])
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
    for kill_at, save_every in ((2, 1), (4, 1), (9, 2)):
        code = train(records, killed, backend, save_every=save_every, kill_at=kill_at)
        assert code == -signal.SIGKILL
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
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 12
    assert sorted(os.listdir(folder)) == ["state.json", state["weights"]]
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(folder / state["weights"]) as stream:
        stream.visititems(keep)
    assert any("optimizer" in name for name in found)
    return found


SMALL = Preprocess.for_training(16)
ANTIALIASED = dataclasses.replace(SMALL, antialias=True)


def make(records, folder, *, batch_size=4, save_every=None, order="global", **changes):
    spec = spec_of(records, order, changes.pop("preprocess", SMALL), **changes)
    fed = load(spec, TF_DATA, batch_size=batch_size)
    return Resume(folder, fed, save_every=save_every)


def small_model(outputs=24, optimizer="adam", **compiled):
    return make_model(16, outputs, optimizer=optimizer, **compiled)


def save_state(records, folder, **changes):
    """Saves a state of step 0."""
    first = make(records, folder, **changes)
    first.set_model(small_model())
    first.save()


def test_epochs_in_all(records, tmp_path):
    model, folder = small_model(), tmp_path / "half"

    def epochs(resume, num_epochs):
        return [history.epoch for history in resume.fit(model, epochs=num_epochs, verbose=0)]

    assert epochs(make(records, tmp_path), 2) == [[0, 1]]
    again = make(records, tmp_path)
    assert again.step == 12
    assert epochs(again, 5) == [[2, 3, 4]]
    assert epochs(make(records, tmp_path), 5) == []
    half = make(records, folder, save_every=4)
    half.train.start_step.step = 4
    half.set_model(model)
    half.save()
    model = small_model()
    assert epochs(make(records, folder), 3) == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"batch_size": 6}, "`batch_size` was 4, is 6"),
        ({"preprocess": ANTIALIASED}, "`preprocess.antialias` was False, is True. Use the same"),
        ({"shuffle_block_size": 2}, "`shuffle_block_size` was 1, is 2"),
        ({"order": "buffer"}, "Resuming needs a fixed `order`, 'global', got 'buffer'"),
        ({"save_every": 0}, "`save_every` must be at least 1 or None, got 0"),
    ],
)
def test_what_changed_is_refused(records, tmp_path, changes, message):
    save_state(records, tmp_path)
    make(records, tmp_path)
    with refused(message):
        make(records, tmp_path, **changes)


def test_other_records_are_refused(records, tmp_path):
    save_state(records, tmp_path)
    fewer = dataclasses.replace(records, files=records.files[:2])
    with refused(r"`records` was 24, is 17; `files` was .*\. Use the same input, or start in ano"):
        make(fewer, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "x"}', '{"format": "dali_tf_input training state", "version": 2}'],
)
def test_a_damaged_state_is_refused(records, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with refused("is not a state of training"):
        make(records, tmp_path)


def test_interrupted_and_resumed_in_one_process(records, tmp_path):
    """As in a notebook: what was done after the state is done again, no step is lost."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if resume.step == 9:
                raise KeyboardInterrupt

    resume, model = make(records, tmp_path, save_every=4), small_model()
    with pytest.raises(KeyboardInterrupt):
        resume.fit(model, epochs=2, verbose=0, callbacks=[Interrupt()])
    assert (resume.step, int(model.optimizer.iterations)) == (9, 9)
    resume.fit(model, epochs=2, verbose=0)
    assert (resume.step, int(model.optimizer.iterations)) == (12, 12)


def test_what_callbacks_change_at_an_epochs_end_is_saved(records, tmp_path):
    def slow_down(epoch, logs):
        model.optimizer.learning_rate = 1e-3 / 10 ** (epoch + 1)

    slower = keras.callbacks.LambdaCallback(on_epoch_end=slow_down)
    model, restored = small_model(), small_model()
    make(records, tmp_path).fit(model, epochs=2, verbose=0, callbacks=[slower])
    make(records, tmp_path).restore(restored)
    np.testing.assert_allclose(float(restored.optimizer.learning_rate), 1e-5)


def test_steps_per_execution(records, tmp_path):
    resume = make(records, tmp_path, save_every=2)
    resume.fit(small_model(steps_per_execution=3), epochs=1, verbose=0)
    assert resume.step == 6
    with refused("must divide the 6 steps of an epoch and the 6 that are done, got 4"):
        make(records, tmp_path).fit(small_model(steps_per_execution=4), epochs=2)


def test_files_that_a_kill_left_behind_go(records, tmp_path):
    (tmp_path / "step-3.weights.h5").write_text("left")
    (tmp_path / "mine.h5").write_text("not ours")
    make(records, tmp_path).fit(small_model(), epochs=1, verbose=0)
    assert sorted(os.listdir(tmp_path)) == ["mine.h5", "state.json", "step-6.weights.h5"]


def test_weights_that_do_not_fit(records, tmp_path):
    make(records, tmp_path).fit(small_model(), epochs=1, verbose=0)
    weights = tmp_path / "step-6.weights.h5"
    amsgrad = keras.optimizers.Adam(amsgrad=True)
    damaged = r"step-6.weights.h5 is damaged, or belongs to another model"
    for model, message in (
        (small_model(25), damaged),
        (small_model(optimizer="sgd"), "training with Adam, the model is compiled with SGD"),
        (small_model(optimizer=amsgrad), "damaged, or belongs to another model or optimizer"),
    ):
        with refused(message):
            make(records, tmp_path).fit(model, epochs=2)
    with refused("`steps_per_epoch` follows from the state: omit it"):
        make(records, tmp_path).fit(small_model(), epochs=2, steps_per_epoch=3)
    weights.write_bytes(weights.read_bytes()[:999])
    with refused(damaged):
        make(records, tmp_path).fit(small_model(), epochs=2)


def test_a_disk_that_is_full(records, tmp_path, monkeypatch):
    """The state before stays, and nothing half-written beside it."""
    resume, model = make(records, tmp_path), small_model()
    resume.fit(model, epochs=1, verbose=0)
    before = sorted(os.listdir(tmp_path))

    def fill(path, overwrite):
        with open(path, "w") as stream:
            stream.write("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_weights", fill)
    with refused(r"The state of training cannot be saved in .*: .*No space left on device"):
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
    examples = [{"image": image, "label": label} for label, image in enumerate(images)]
    dataset = write_indexed(tmp_path / "train", examples)
    save_state(dataset, tmp_path / "run", batch_size=1)
    dataset = write_indexed(tmp_path / "train", examples[::-1], force=True)
    with refused("`index` was"):
        make(dataset, tmp_path / "run", batch_size=1)


def test_a_model_without_variables(records, tmp_path):
    save_state(records, tmp_path)
    with refused("must be compiled and have its variables"):
        make(records, tmp_path).fit(keras.Sequential([keras.layers.Flatten()]), epochs=1)


def test_weights_that_are_gone(records, tmp_path):
    save_state(records, tmp_path)
    next(tmp_path.glob("*.h5")).unlink()
    with refused(r"the weights it names are gone: .*step-0.weights.h5"):
        make(records, tmp_path)
    (tmp_path / "file").write_text("")
    with refused("Cannot keep the state of training in"):
        make(records, tmp_path / "file" / "run")
