"""tf.data service: a dispatcher and its workers on this machine do the preprocessing."""

import contextlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from commands import fails, run
from conftest import at_night, refused, spec_of
from stores import free_port

from dali_tf_input import Preprocess, TfDataOptions
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.training.load import load

SMALL = Preprocess.for_training(8)


def start(*arguments):
    """Starts a server; returns the process and the line that says it is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dali_tf_input", "service", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline()


@pytest.fixture(scope="module")
def service():
    """Yields the address of a dispatcher, the processes of its workers, and their ports.

    By day it has one worker, at night two, among which the records are divided.
    """
    with contextlib.ExitStack() as stack:
        dispatcher, line = start("--role=dispatcher", "--port=0")
        stack.callback(dispatcher.kill)
        address = line.split()[-1]
        workers, ports = [], []
        for _ in range(at_night(1, 2)):
            ports.append(free_port())
            arguments = [f"--dispatcher={address}", "--address=127.0.0.1", f"--port={ports[-1]}"]
            worker, line = start("--role=worker", *arguments)
            stack.callback(worker.kill)
            assert line.startswith("worker of")
            workers.append(worker)
        yield address, workers, ports


def make(dataset, address, order="buffer"):
    spec = spec_of(dataset, order, SMALL)
    return make_dataset(spec, TfDataOptions(service=address), batch_size=4, endless=True)


@pytest.mark.slow
def test_each_record_once_a_pass(dataset, service):
    address, *_ = service
    tf.random.set_seed(1)  # must not make all passes alike
    iterator = iter(make(dataset, address))
    batches = [[next(iterator) for _ in range(6)] for _ in range(4)]
    passes = [np.concatenate([labels for _, labels in batch]).tolist() for batch in batches]
    assert all(sorted(labels) == list(range(24)) for labels in passes)
    assert len({tuple(labels) for labels in passes}) > 1  # no two alike, but for bad luck with all
    record = [
        np.concatenate([images for images, _ in batch])[labels.index(3)]
        for batch, labels in zip(batches, passes, strict=True)
    ]
    assert any((image != record[0]).any() for image in record[1:])  # other crops of the same record
    spec, options = spec_of(dataset, "buffer", SMALL), TfDataOptions(service=address)
    train = load(spec, options, batch_size=8)
    assert train.steps_per_epoch == 3


@pytest.mark.nightly
def test_a_worker_that_dies_and_is_started_again(dataset, service):
    """Training waits for it, and then goes on; soon each pass is whole again."""
    address, workers, ports = service
    iterator = iter(make(dataset, address))
    for _ in range(8):
        next(iterator)
    workers[1].kill()
    workers[1].wait()
    arguments = [f"--dispatcher={address}", "--address=127.0.0.1", f"--port={ports[1]}"]
    again, line = start("--role=worker", *arguments)
    try:
        assert line.startswith("worker of")
        seen: list[int] = []
        deadline = time.monotonic() + 120
        while not any(sorted(seen[n : n + 24]) == list(range(24)) for n in range(len(seen) - 23)):
            # What was lost may move the bounds of passes within batches.
            seen += next(iterator)[1].numpy().tolist()
            assert time.monotonic() < deadline
        assert len(seen) < 240
    finally:
        again.kill()


@pytest.mark.nightly
def test_a_service_of_tensorflows_own(dataset):
    """It needs nothing of this package: TensorFlow's operations are used."""
    program = """if True:
        import tensorflow as tf
        service = tf.data.experimental.service
        dispatcher = service.DispatchServer()
        address = dispatcher.target.split("://")[1]
        worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
        print(dispatcher.target, flush=True)
        worker.join()
    """
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        batches = iter(make(dataset, address))
        labels = np.concatenate([next(batches)[1] for _ in range(6)])
        del batches  # before the dispatcher: TensorFlow's prefetching would wait for it forever
        assert sorted(labels.tolist()) == list(range(24))
        options = TfDataOptions(service=address, kernel="native")
        with refused("works with TensorFlow's operations: use kernel='auto', got 'native'"):
            make_dataset(spec_of(dataset, "buffer", SMALL), options, batch_size=4)
    finally:
        process.kill()


def test_no_worker(dataset, monkeypatch):
    monkeypatch.setattr("dali_tf_input.backends.tf_data._SERVICE_SECONDS", 2)
    dispatcher = tf.data.experimental.service.DispatchServer()
    at = dispatcher.target
    with refused(f"No worker of the tf.data service at {at} answers within 2 s. Start "):
        make(dataset, dispatcher.target)


def test_refuses(dataset):
    with refused(r"There is no tf.data service at grpc://127.0.0.1:9: .*--role=dispatcher"):
        make(dataset, "grpc://127.0.0.1:9")
    with refused(r"There is no tf.data service at grpc://here: "):
        make(dataset, "grpc://here")
    with refused("`service` must be an address like 'grpc://host:5050', got 'host:5050'"):
        TfDataOptions(service="host:5050")
    with refused("`service` is for order 'buffer', got 'global'"):
        make(dataset, "grpc://127.0.0.1:9", order="global")
    for arguments, message in (
        (["--role=worker"], "error: A worker needs --dispatcher=HOST:PORT"),
        (["--role=worker", "--dispatcher=here"], "`dispatcher` must be HOST:PORT"),
        (["--role=dispatcher", "--port=70000"], "error: `port` must be in [0, 65536), got 70000"),
    ):
        fails(run("service", *arguments), message)
