"""Two workers on this machine, a process each: they train as one process with two replicas does,
and end together.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import time

import h5py
import numpy as np
import pytest
import tensorflow as tf
import warm
from commands import fails, run
from conftest import SCRIPTS, nightly

from dali_tf_input import InputError, InputSpec, TfDataOptions, load


def start(folder, *arguments, workers=2, which=None):
    """Starts the training script, once for each worker, or some of them; without workers once, on
    two replicas.
    """
    command = ["--files=data/sample/train-*", "--image_size=32", *arguments]
    if not workers:
        return [warm.Program([SCRIPTS / "train.py", *command, "--replicas=2"], cwd=folder)]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        cluster = {"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]}
    programs = []
    for index in which or range(workers):
        words = [SCRIPTS / "train_multi_worker.py", *(str(part).format(index) for part in command)]
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        programs.append(warm.Program(words, cwd=folder, env=environment))
    return programs


def finish(processes):
    """Waits for all; returns what they printed."""
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


def weights_of(folder):
    """Returns the step of a state, and its weights by their names in the file."""
    state = json.loads((folder / "state.json").read_text())
    items = {}
    (weights,) = (name for name in state["files"] if name.endswith(".h5"))
    with h5py.File(folder / weights) as stream:
        stream.visititems(items.__setitem__)
        arrays = {
            name: item[()]
            for name, item in items.items()
            if isinstance(item, h5py.Dataset) and item.ndim
        }
    return state["step"], arrays


def assert_same_weights(folder, other):
    (step, arrays), (other_step, others) = weights_of(folder), weights_of(other)
    assert (step, arrays.keys()) == (other_step, others.keys())
    for name, array in arrays.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dali_cpu", nightly("tf_data")])
def test_two_workers_are_two_replicas(sample_folder, tmp_path, backend):
    """The same losses, line by line, and the same weights."""
    validation = "--validation_files=data/sample/validation-*"
    arguments = ["--epochs=2", f"--backend={backend}", validation]
    runs = [start(sample_folder, *arguments, f"--resume={tmp_path}/{n}", workers=n) for n in (2, 0)]
    first, second = finish(runs[0])
    (whole,) = finish(runs[1])
    tables = [
        re.findall(r"(\w*(?:loss|accuracy)): ([\d.]+)", one) for one in (first, second, whole)
    ]
    assert len(tables[0]) == 2 * 4
    names = [[name for name, _ in table] for table in tables]
    assert names[0] == names[1] == names[2]
    values = np.array([[float(value) for _, value in table] for table in tables])
    np.testing.assert_allclose(values[:2], values[[2, 2]], atol=0.0021)
    assert re.search(r"^workers +2: ", second)
    assert_same_weights(tmp_path / "2", tmp_path / "0")


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_others_and_restart_resumes(sample_folder, tmp_path):
    arguments = [f"--resume={tmp_path}/run", "--save_every=1"]
    processes = start(sample_folder, *arguments, "--epochs=2000")
    state = tmp_path / "run" / "state.json"
    deadline = time.monotonic() + 120
    while not state.exists() or json.loads(state.read_text())["step"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    processes[1].kill()
    killed = time.monotonic()
    _, errors = processes[0].communicate(timeout=300)  # with a hang the test fails here
    assert processes[1].wait() == -signal.SIGKILL
    assert processes[0].returncode not in (0, -signal.SIGKILL)
    assert time.monotonic() - killed < 90
    assert "error: Another worker ended, or cannot be reached: " in errors
    assert f"To go on, start all workers again, with --resume={tmp_path}/run." in errors
    step = json.loads(state.read_text())["step"]
    epochs = step // 3 + 2
    outputs = finish(start(sample_folder, *arguments, f"--epochs={epochs}"))
    assert all(f"resume      after step {step:,} of {3 * epochs:,}" in output for output in outputs)
    arguments = [f"--resume={tmp_path}/whole", f"--epochs={epochs}"]
    uninterrupted = start(sample_folder, *arguments, workers=0)
    finish(uninterrupted)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_while_another_worker_is_waited_for(sample_folder):
    """One of two is started: it says what it waits for, and can be ended."""
    (process,) = start(sample_folder, "--epochs=1", which=[1])
    deadline = time.monotonic() + 120
    while "waiting for all" not in process.output:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == -signal.SIGINT


@pytest.mark.slow
def test_workers_that_do_not_share_the_folder(sample_folder, tmp_path):
    """One has a state, the other has none: both say so, and nobody trains on."""
    finish(start(sample_folder, "--epochs=1", f"--resume={tmp_path}/0", workers=0))
    (tmp_path / "1").mkdir()
    processes = start(sample_folder, "--epochs=2", f"--resume={tmp_path}/{{}}")
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "others are not (" in errors
        assert "--resume must name a folder that all workers share" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        "",
        "{}",
        '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 1}}',
        "[1]",
        '{"cluster": {"chief": ["a:1"], "worker": ["a:2"]}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_a_wrong_config_is_refused(sample_folder, config):
    arguments = ["--files=data/sample/train-*"]
    process = run("train_multi_worker.py", *arguments, cwd=sample_folder, TF_CONFIG=config)
    fails(process, "error: Each worker needs the environment variable TF_CONFIG")


class TPUStrategy(tf.distribute.Strategy):
    """Stands for the real one, which needs a TPU."""

    num_replicas_in_sync = 1

    def __init__(self):
        pass


class ParameterServerStrategyV2(TPUStrategy):
    """Stands for the real one, which needs a cluster."""


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Stands for the real one, which waits for other processes."""

    num_replicas_in_sync = 4

    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (TPUStrategy(), r"got a TPUStrategy\. Feed others with make_dataset"),
        (ParameterServerStrategyV2(), r"got a ParameterServerStrategyV2\. Feed others with make_"),
        (MultiWorkerMirroredStrategy(), "Feed a custom loop on each host with make_dataset"),
    ],
)
def test_strategies_that_are_not_served(dataset, strategy, said):
    spec = InputSpec.for_training(dataset, 16)
    with pytest.raises(InputError, match=said):
        load(spec, TfDataOptions(), strategy=strategy, batch_size=4)


def test_a_worker_has_one_replica(monkeypatch):
    """The loop gives a worker one shard, and all of its replicas would train on the same batch."""
    cluster = {"worker": ["a:1", "b:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    name = "MultiWorkerMirroredStrategy"
    monkeypatch.setattr(tf.distribute, name, MultiWorkerMirroredStrategy)
    worker_loop = importlib.import_module("train_multi_worker")
    with pytest.raises(InputError, match="2 workers have 4: start one process per GPU"):
        worker_loop.make_strategy()
