"""kill -9 at each change of the disk, one after the other: nothing half-written, and the next run
ends as if there had been none.

A few changes of each kind of run are tried, at night many.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import python
from conftest import at_night, jpeg, numbered_examples, write_dataset, write_tfrecord

from dali_tf_input import Records, build_index

POINTS = at_night(3, 30)
KILL = """
import os, signal, sys
changes, kill_at = 0, int(sys.argv.pop(1))

def watch(name):
    original = getattr(os, name)

    def change(*arguments, **more):
        global changes
        if changes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        changes += 1
        return original(*arguments, **more)

    setattr(os, name, change)

def watch_disk():
    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "utime"):
        watch(name)
"""
INDEX = """
from dali_tf_input import Checks, build_index
from dali_tf_input.index import build
checks = Checks(verify="crc")
build._COMMIT_SECONDS, build._COMMIT_RATIO = 0, 0  # each file by itself
watch_disk()
build_index(sys.argv[1], checks, num_processes=1, on_bad="skip", force=True, max_bad_fraction=0.5)
"""
CONVERT = """
from dali_tf_input.cli.convert import convert, writer
from dali_tf_input.cli.main import main

class InThisProcess:
    def call(self, function, *arguments, **_):
        return function(*arguments)

    def kill(self):
        pass

    close = kill

writer.Child = InThisProcess  # another process changes nothing, and takes a second to start
watch_disk()
assert main(sys.argv[1:]) == 0
"""
COPY = """
from obstore.store import MemoryStore
from dali_tf_input.storage import objects
from dali_tf_input.storage.copies import fetch_copies
store = MemoryStore()
objects._store = lambda *_: store
for number in range(4):
    store.put(f"set/{number}", bytes([number]) * 100_000)
listed = objects.find_objects("s3://bucket/set/*")
watch_disk()
fetch_copies(listed, sys.argv[1])
"""
RESUME = """
import json
import keras
from dali_tf_input import InputSpec, Preprocess, Resume, TfDataOptions, load

def fit(files, folder):
    watch_disk()
    keras.utils.set_random_seed(0)
    spec = InputSpec.for_training(files, Preprocess(image_size=(8, 8)), order="global")
    layers = [keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(12)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    train = load(spec, TfDataOptions(), batch_size=4)
    train.fit(model, epochs=3, resume=Resume(folder, save_every=1), verbose=0)
    return [value.tobytes().hex() for value in model.get_weights()]

for line in sys.stdin:  # a process for each training: to import TensorFlow takes longer
    kill_at, files, folder = json.loads(line)
    if not os.fork():
        print(json.dumps([fit(files, folder), changes]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""


def run(program, kill_at, *arguments):
    """Runs a program that is killed before change `kill_at`; returns its output and changes."""
    text = f"{KILL}\n{program}\nprint(changes)"
    process = python("-c", text, kill_at, *arguments)
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    if program is not COPY:  # whose threads may make one folder less
        assert (process.returncode == 0) == (kill_at < 0), f"no change {kill_at}"
    return process.stdout.splitlines()


def points(num_changes):
    """Returns at most POINTS changes, evenly spread."""
    return sorted({number * num_changes // POINTS for number in range(POINTS)})


@pytest.mark.slow
def test_index(tmp_path):
    for number in range(3):
        examples = numbered_examples(12)
        file = Path(write_tfrecord(tmp_path / f"train-{number}", examples))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    files = tmp_path / "train-?"

    def indexes():
        return {path.name: path.read_bytes() for path in tmp_path.glob("*.idx")}

    build_index(files)
    old = indexes()
    (*_, num_changes) = run(INDEX, -1, files)
    new = indexes()
    assert new != old
    for point in points(int(num_changes)):
        (tmp_path / "index_manifest.json").unlink(missing_ok=True)  # or they stay as deep
        build_index(files)
        run(INDEX, point, files)
        assert all(text in (old[name], new[name]) for name, text in indexes().items())
        json.loads((tmp_path / "index_manifest.json").read_text())
        run(INDEX, -1, files)
        assert indexes() == new
        assert Records.from_files(files).num_records == 33
        assert not list(tmp_path.glob(".staging-*"))


@pytest.mark.slow
def test_convert(tmp_path):
    """A new set takes the place of an earlier one, or the earlier one is still there."""
    for kind in ("old", "new"):
        for label in ("cat", "dog"):
            (tmp_path / kind / label).mkdir(parents=True)
            for number in range(4 if kind == "old" else 6):
                (tmp_path / kind / label / f"{number}.jpg").write_bytes(jpeg(20, 20, seed=number))
    out = tmp_path / "sets/photos"
    out.parent.mkdir()
    command = ["convert", "--num_processes=1", "--overwrite", "--decoder=none"]

    def read_set(folder):
        files = sorted(path for path in folder.glob("*-of-*") if path.suffix != ".idx")
        return [path.read_bytes() for path in files]

    def convert(kind, kill_at=-1):
        return run(CONVERT, kill_at, *command, tmp_path / kind, out)

    convert("old")
    old = read_set(out)
    shutil.copytree(out, tmp_path / "before")
    (*_, num_changes) = convert("new")
    new = read_set(out)
    assert new != old
    for point in points(int(num_changes)):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "before", out)
        convert("new", point)
        held = [read_set(path) for path in out.parent.iterdir() if path.name.startswith("photos")]
        assert old in held or new in held  # also if it was renamed aside
        convert("new")
        assert read_set(out) == new
        assert os.listdir(out.parent) == ["photos"]


@pytest.mark.slow
def test_copy(tmp_path):
    pytest.importorskip("obstore")
    (tmp_path / "dali_tf_input").mkdir()
    for mine in ("mine", "dali_tf_input/mine"):
        (tmp_path / mine).write_text("mine")
    (*_, num_changes) = run(COPY, -1, tmp_path)
    for point in points(int(num_changes)):
        for folder in (tmp_path / "dali_tf_input").glob("?" * 20):
            shutil.rmtree(folder)
        run(COPY, point, tmp_path)
        run(COPY, -1, tmp_path)
        copies = sorted((tmp_path / "dali_tf_input").glob("*/*"), key=lambda path: path.name[-1])
        assert [path.read_bytes() for path in copies] == [bytes([n]) * 100_000 for n in range(4)]
        assert (tmp_path / "mine").exists()
        assert (tmp_path / "dali_tf_input/mine").exists()


@pytest.mark.nightly
def test_resume(tmp_path):
    """Killed, and continued: the weights of the training that was not."""
    write_dataset(tmp_path / "set", [12])
    command = [sys.executable, "-c", KILL + RESUME, "-1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def fit(kill_at, name):
            """Returns weights and changes; None if the training was killed."""
            words = [kill_at, f"{tmp_path}/set/train-*-of-?????", f"{tmp_path}/{name}"]
            print(json.dumps(words), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        weights, num_changes = fit(-1, "whole")
        for point in points(num_changes)[1:]:  # before the first change it has not begun
            assert fit(point, "killed") is None
            assert fit(-1, "killed")[0] == weights
            shutil.rmtree(tmp_path / "killed")
        process.stdin.close()
    assert process.returncode == 0
