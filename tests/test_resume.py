"""Training that was killed goes on as if it had not been: the same records, and the same weights."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from conftest import write_dataset

from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, TfDataOptions
from dali_tf_input.distribute import distribute
from dali_tf_input.resume import Resume

BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}

# Trains, and writes a line for each step that was done: the labels, which number the records, and what the images add up to.
PROGRAM = textwrap.dedent("""
    import os, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras, numpy as np, tensorflow as tf
    from dali_tf_input import DaliOptions, DatasetSpec, InputSpec, Preprocess, TfDataOptions
    from dali_tf_input.distribute import distribute
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
    resume = Resume(folder, spec, train, global_batch_size=5, save_every=int(save_every))
    resume.fit(model, epochs=3, verbose=0, callbacks=[Log()])
""")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("resume"), [5, 12, 7])


def train(records, tmp_path, backend, *, save_every, kill_at):
    """Runs the program; returns its exit code."""
    files = os.path.join(os.path.dirname(records.files[0]), "train-*")
    command = [sys.executable, "-c", PROGRAM, files, tmp_path / "run", tmp_path / "log", backend, save_every, kill_at]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_at_any_step(records, tmp_path, backend):
    """Three kills, in the middle of epochs and at a bound; the last line of each step is that of training without a stop."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert train(records, whole, backend, save_every=1, kill_at=-1) == 0
    for kill_at in (2, 4, 9):
        assert train(records, killed, backend, save_every=2 if kill_at == 9 else 1, kill_at=kill_at) == -signal.SIGKILL
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
        stream.visititems(lambda name, item: found.__setitem__(name, item[()]) if isinstance(item, h5py.Dataset) else None)
    assert any("optimizer" in name for name in found)
    return found


def make(records, folder, *, global_batch_size=4, save_every=None, **changes):
    preprocess = changes.pop("preprocess", Preprocess.for_training(16))
    spec = InputSpec(dataset=records, preprocess=preprocess, order=changes.pop("order", "global"), **changes)
    made = distribute(spec, TfDataOptions(), global_batch_size=global_batch_size)
    return Resume(folder, spec, made, global_batch_size=global_batch_size, save_every=save_every)


def make_model():
    model = keras.Sequential([keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(24)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_epochs_in_all(records, tmp_path):
    model = make_model()
    assert [len(history.epoch) for history in make(records, tmp_path).fit(model, epochs=2, verbose=0)] == [2]
    again = make(records, tmp_path)
    assert again.step == 12
    assert [history.epoch for history in again.fit(model, epochs=5, verbose=0)] == [[2, 3, 4]]
    assert make(records, tmp_path).fit(model, epochs=5, verbose=0) == []
    half = make(records, tmp_path / "half", save_every=4)
    half._train.position.step = 4
    half.set_model(model)
    half.save()
    histories = make(records, tmp_path / "half").fit(make_model(), epochs=3, verbose=0)
    assert [history.epoch for history in histories] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"global_batch_size": 6}, "`global_batch_size` was 4, is 6"),
        ({"preprocess": Preprocess.for_training(16, antialias=True)}, "`preprocess` was .*antialias=False"),
        ({"fragment_size": 2}, "`fragment_size` was 1, is 2"),
        ({"order": "buffer"}, "To resume takes an `order` that is planned: 'global', got 'buffer'"),
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
        **{name: getattr(records, name)[:2] for name in ("files", "index_files", "records_per_file", "left_out_per_file")},
    )
    with pytest.raises(InputError, match=r"`records` was 24, is 17\. Go on with what it was, or start in another folder"):
        make(fewer, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', '{"format": "dali_tf_input training state", "version": 2}'])
def test_a_damaged_state_is_refused(records, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InputError, match="this is no state of training"):
        make(records, tmp_path)


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
