"""kill -9 at each change of the disk, one after the other: nothing half-written, and the next run
ends as if there had been none.

A few changes of each kind of run are tried, at night many.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import at_night, jpeg, numbered_examples, write_dataset, write_tfrecord

from dali_tf_input import Records, build_index

POINTS = at_night(3, 30)
KILL = """
import json, os, signal, sys
changes, kill_at = 0, -1

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
FORK = """
for line in sys.stdin:  # a process for each run: to import takes longer
    kill_at, *arguments = json.loads(line)
    if not os.fork():
        watch_disk()
        result = run(*arguments)
        print(json.dumps([result, changes]), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
"""
INDEX = """
from dali_tf_input import Checks, build_index
from dali_tf_input.index import build
checks = Checks(verify="crc")
build._COMMIT_SECONDS, build._COMMIT_RATIO = 0, 0  # each file by itself

def run(files):
    how = {"num_processes": 1, "on_bad": "skip", "force": True, "max_bad_fraction": 0.5}
    build_index(files, checks, **how)
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

def run(*words):
    with open(os.devnull, "w") as sys.stdout:
        assert main([*words]) == 0
    sys.stdout = sys.__stdout__
"""
COPY = """
from obstore.store import MemoryStore
from dali_tf_input.storage import objects
from dali_tf_input.storage.copies import fetch_copies

def run(folder):
    store = MemoryStore()
    objects._store = lambda *_: store
    for number in range(4):
        store.put(f"set/{number}", bytes([number]) * 100_000)
    fetch_copies(objects.find_objects("s3://bucket/set/*"), folder)
"""
RESUME = """
import keras
from dali_tf_input import InputSpec, Preprocess, Resume, TfDataOptions, load

def run(files, folder):
    keras.utils.set_random_seed(0)
    spec = InputSpec.for_training(files, Preprocess(image_size=(8, 8)), order="global")
    layers = [keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(12)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    train = load(spec, TfDataOptions(), batch_size=4)
    train.fit(model, epochs=3, resume=Resume(folder, save_every=1), verbose=0)
    return [value.tobytes().hex() for value in model.get_weights()]
"""


@contextlib.contextmanager
def runs_of(program):
    """Gives a function that runs a program, and kills it before change `kill_at` if that is not -1.

    The function returns the program's result and its changes; None if it was killed.
    """
    command = [sys.executable, "-c", f"{KILL}\n{program}\n{FORK}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def run(*arguments, kill_at=-1):
            print(json.dumps([kill_at, *map(str, arguments)]), file=process.stdin, flush=True)
            end = json.loads(process.stdout.readline())
            if end == -signal.SIGKILL:
                return None
            assert isinstance(end, list), end
            if program is not COPY:  # whose threads may make one folder less
                assert kill_at < 0, f"no change {kill_at}"
            return end

        yield run
        process.stdin.close()
    assert process.returncode == 0


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
    with runs_of(INDEX) as index:
        _, num_changes = index(files)
        new = indexes()
        assert new != old
        for point in points(num_changes):
            (tmp_path / "index_manifest.json").unlink(missing_ok=True)  # or they stay as deep
            build_index(files)
            index(files, kill_at=point)
            assert all(text in (old[name], new[name]) for name, text in indexes().items())
            json.loads((tmp_path / "index_manifest.json").read_text())
            index(files)
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

    with runs_of(CONVERT) as convert:
        convert(*command, tmp_path / "old", out)
        old = read_set(out)
        shutil.copytree(out, tmp_path / "before")
        command += [tmp_path / "new", out]
        _, num_changes = convert(*command)
        new = read_set(out)
        assert new != old
        for point in points(num_changes):
            shutil.rmtree(out)
            shutil.copytree(tmp_path / "before", out)
            convert(*command, kill_at=point)
            sets = [path for path in out.parent.iterdir() if path.name.startswith("photos")]
            held = [*map(read_set, sets)]
            assert old in held or new in held  # also if it was renamed aside
            convert(*command)
            assert read_set(out) == new
            assert os.listdir(out.parent) == ["photos"]


@pytest.mark.slow
def test_copy(tmp_path):
    pytest.importorskip("obstore")
    (tmp_path / "dali_tf_input").mkdir()
    for mine in ("mine", "dali_tf_input/mine"):
        (tmp_path / mine).write_text("mine")
    folder = tmp_path / "dali_tf_input"
    with runs_of(COPY) as copy:
        _, num_changes = copy(tmp_path)
        for point in points(num_changes):
            for one in folder.glob("?" * 20):
                shutil.rmtree(one)
            copy(tmp_path, kill_at=point)
            copy(tmp_path)
            copies = sorted(folder.glob("*/*"), key=lambda path: path.name[-1])
            found = [path.read_bytes() for path in copies]
            assert found == [bytes([n]) * 100_000 for n in range(4)]
            assert (tmp_path / "mine").exists()
            assert (folder / "mine").exists()


@pytest.mark.nightly
def test_resume(tmp_path):
    """Killed, and continued: the weights of the training that was not."""
    write_dataset(tmp_path / "set", [12])
    files, killed = f"{tmp_path}/set/train-*-of-?????", tmp_path / "killed"
    with runs_of(RESUME) as fit:
        weights, num_changes = fit(files, tmp_path / "whole")
        for point in points(num_changes)[1:]:  # before the first change it has not begun
            assert fit(files, killed, kill_at=point) is None
            assert fit(files, killed)[0] == weights
            shutil.rmtree(killed)
