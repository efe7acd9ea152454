"""Two workers on this machine, a process each: they train as one process with two replicas does,
and end together.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import h5py
import numpy as np
import pytest
import tensorflow as tf
from commands import load as load_command
from commands import wait_until
from conftest import SCRIPTS, at_night, refused

import train_multi_worker
from dali_tf_input.cli import command

IMPORTS = "WARNING: All log messages before", "I0000 "  # TensorFlow says as it is imported
FILES = ["--files=data/sample/train-*", "--image_size=32"]


@pytest.fixture
def workers(sample_folder, tmp_path):
    """Starts workers, each of which writes to two files of its number; returns them and addresses.

    At the end none of them is left.
    """
    programs = []

    def start(*arguments, which=(0, 1)):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            addresses = [one.getsockname() for one in sockets]
        cluster = {"worker": [f"{host}:{port}" for host, port in addresses]}
        for index in which:
            words = [str(part).format(index) for part in [*FILES, *arguments]]
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            how = {"cwd": sample_folder, "env": {**os.environ, "TF_CONFIG": json.dumps(config)}}
            files = (tmp_path / f"{index}.{name}" for name in ("out", "err"))
            with next(files).open("w") as out, next(files).open("w") as err:
                words = [sys.executable, SCRIPTS / "train_multi_worker.py", *words]
                programs.append(subprocess.Popen(words, stdout=out, stderr=err, **how))
        return programs[-len(which) :], addresses

    yield start
    for program in programs:
        program.kill()
        program.wait()


def step_of(folder):
    try:
        return json.loads((folder / "state.json").read_text())["step"]
    except OSError:
        return 0


def weights_of(folder):
    """Returns the weights of a state by their names in the file."""
    state = json.loads((folder / "state.json").read_text())
    items = {}
    (weights,) = (name for name in state["files"] if name.endswith(".h5"))
    with h5py.File(folder / weights) as stream:
        stream.visititems(items.__setitem__)
        return {
            name: item[()]
            for name, item in items.items()
            if isinstance(item, h5py.Dataset) and item.ndim
        }


def losses_of(output):
    """Returns the columns that the epochs showed, by their names."""
    columns = {}
    for name, value in re.findall(r"(\w*(?:loss|accuracy)): ([\d.]+)", output):
        columns.setdefault(name, []).append(float(value))
    return columns


@pytest.mark.slow
@pytest.mark.parametrize("backend", at_night(["dali_cpu"], ["dali_cpu", "tf_data"]))
def test_two_workers_are_two_replicas(
    sample_folder, tmp_path, workers, monkeypatch, capsys, backend
):
    """The same losses, line by line, and the same weights, also if a worker dies in between.

    The other one ends, and says what to do. Started again they go on; by day one process does.
    """
    arguments = [f"--backend={backend}"]
    run = tmp_path / "run"
    saves = [f"--resume={run}", "--save_every=1"]
    programs, _ = workers(*arguments, *saves, "--epochs=2000")
    wait_until(lambda: step_of(run) >= 4 or programs[0].poll() is not None)
    programs[1].kill()
    programs[0].wait(timeout=90)  # with a hang the test fails here
    assert programs[0].returncode not in (0, -signal.SIGKILL)
    errors = (tmp_path / "0.err").read_text()
    assert "error: Another worker ended, or cannot be reached: " in errors
    assert f"To go on, start all workers again, with --resume={run}." in errors
    output = (tmp_path / "0.out").read_text()
    assert re.search(r"^workers +2: ", output, re.MULTILINE)
    before, step = losses_of(output), step_of(run)
    epochs = step // 3 + 2
    arguments += ["--validation_files=data/sample/validation-*", f"--epochs={epochs}"]

    monkeypatch.chdir(sample_folder)
    alone = load_command("train.py")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    alone.make_strategy = lambda *_: strategy

    def train_alone(folder):
        words = [*FILES, *arguments, f"--resume={folder}"]
        assert command.run(alone.main, alone.FLAGS, words) == 0
        return capsys.readouterr().out

    if at_night(True, False):
        outputs = [train_alone(run)]
    else:
        programs, _ = workers(*arguments, *saves)
        for index, program in enumerate(programs):
            assert program.wait(timeout=300) == 0, (tmp_path / f"{index}.err").read_text()
        outputs = [(tmp_path / f"{index}.out").read_text() for index in range(2)]
        for output in outputs:
            assert f"resume      after step {step:,} of {3 * epochs:,}" in output
    for output in outputs:
        assert f"Epoch 1/{epochs}" not in output
    after, expected = [*map(losses_of, outputs)], losses_of(train_alone(tmp_path / "whole"))
    assert sorted(before) == ["accuracy", "loss"]
    assert sorted(expected) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    for name, values in expected.items():
        assert len(values) == epochs
        for one in after:  # its first epoch may be the rest of one
            assert one.keys() == expected.keys()
            np.testing.assert_allclose(one[name][-1], values[-1], atol=0.0021)
    for name, values in before.items():
        np.testing.assert_allclose(values, expected[name][: len(values)], atol=0.0021)
    arrays, others = weights_of(run), weights_of(tmp_path / "whole")
    assert (step_of(run), arrays.keys()) == (step_of(tmp_path / "whole"), others.keys())
    for name, array in arrays.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-5, err_msg=name)


def listens(address):
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


@pytest.mark.nightly
def test_ctrl_c_while_another_worker_is_waited_for(workers, tmp_path):
    """One of two is started: it says what it waits for, and can be ended."""
    (program,), addresses = workers("--epochs=1", which=[1])
    wait_until(lambda: listens(addresses[1]))
    assert "waiting for all" in (tmp_path / "1.out").read_text()
    program.send_signal(signal.SIGINT)
    assert program.wait(timeout=300) == -signal.SIGINT
    lines = (tmp_path / "1.err").read_text().splitlines()
    assert not [line for line in lines if not line.startswith(IMPORTS)]  # no traceback


@pytest.mark.nightly
def test_workers_that_do_not_share_the_folder(workers, tmp_path):
    """One has a state, the other has none: both say so, and nobody trains on."""
    for index, step in enumerate((3, 0)):
        (tmp_path / f"run{index}").mkdir()
        if step:
            (tmp_path / f"run{index}/state.json").write_text(json.dumps({"step": step}))
    programs, _ = workers("--epochs=2", f"--resume={tmp_path}/run{{}}")
    for index, program in enumerate(programs):
        assert program.wait(timeout=300) == 1
        errors = (tmp_path / f"{index}.err").read_text()
        assert "others are not (" in errors
        assert "--resume must name a folder that all workers share" in errors


ALONE = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'
CHIEF = '{"cluster": {"chief": ["a:1"], "worker": ["a:2"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize("config", ["", "{}", "[1]", ALONE, CHIEF])
def test_a_wrong_config_is_refused(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", config)
    with refused("Each worker needs the environment variable TF_CONFIG"):
        train_multi_worker.make_strategy()


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Stands for the real one, which waits for other processes."""

    num_replicas_in_sync = 4

    def __init__(self):
        pass


def test_a_worker_has_one_replica(monkeypatch):
    """The loop gives a worker one shard, and all of its replicas would train on the same batch."""
    cluster = {"worker": ["a:1", "b:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    name = "MultiWorkerMirroredStrategy"
    monkeypatch.setattr(tf.distribute, name, MultiWorkerMirroredStrategy)
    with refused("2 workers have 4: start one process per GPU"):
        train_multi_worker.make_strategy()
