"""Runs the dispatcher or a worker of a tf.data service, which preprocesses images remotely.

usage: dali-tf-input service [flags] --role=dispatcher|worker

Start one dispatcher, and a worker on each machine that helps. Every worker must find the TFRecords
under the same paths as training does. Then run train.py --order=buffer --service=grpc://HOST:5050.
It listens on all network interfaces without authentication: use it on a private network only. The
command runs until it is stopped (Ctrl-C, SIGTERM). If a worker dies, restart it with the same
address and port: training waits for it.

example: dali-tf-input service --role=worker --dispatcher=host0:5050
"""

import itertools
import os
import signal
import socket
import time

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.records.paths import program

FLAGS = command.Flags()
_ROLE = FLAGS.choice("role", None, ["dispatcher", "worker"], "Role of this process.")
_PORT = FLAGS.integer(
    "port", None, "Port to listen on (default: 5050, or 5051 for a worker; 0: any free one)."
)
_DISPATCHER = FLAGS.string(
    "dispatcher", None, "Address of the dispatcher, HOST:PORT, for a worker."
)
_ADDRESS = FLAGS.string(
    "address", None, "Address that others use to reach this machine (default: its host name)."
)


def main(arguments: list[str]) -> int:
    """Serves until it is stopped."""
    command.check_no_arguments(arguments)
    role, dispatcher = _ROLE.value, (_DISPATCHER.value or "").removeprefix("grpc://")
    if not role:
        raise InputError("Name the role: --role=dispatcher or --role=worker.")
    if (role == "worker") != bool(dispatcher):
        raise InputError("A worker needs --dispatcher=HOST:PORT, a dispatcher does not.")
    port = _PORT.value if _PORT.present else {"dispatcher": 5050, "worker": 5051}[role]
    if not 0 <= port < 65536:
        raise InputError(f"`port` must be in [0, 65536), got {port}.")
    check_free(port)
    if dispatcher:
        wait_for(dispatcher)
    tf = command.import_tensorflow()
    from dali_tf_input.backends.tf_native import uses_native

    uses_native("auto")  # what datasets hold must be known to both roles
    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=port))
        print(f"dispatcher at {server.target}", flush=True)
    else:
        config = service.WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=f"{_ADDRESS.value or socket.gethostname()}:%port%",  # TensorFlow's port
            port=port,
            dispatcher_timeout_ms=60_000,
        )
        server = service.WorkerServer(config)
        print(f"worker of {_DISPATCHER.value}", flush=True)
    try:
        while server:
            signal.pause()  # not `server.join()`, which ignores Ctrl-C
    except KeyboardInterrupt as stop:
        os._exit(command.tell_stop(stop))  # without the server's end, which waits for its clients
    return 0


def wait_for(dispatcher: str, *, seconds: float = 60) -> None:
    """Waits until something answers at HOST:PORT: TensorFlow would wait forever."""
    host, _, port = dispatcher.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"`dispatcher` must be HOST:PORT, got {dispatcher!r}.")
    deadline = time.monotonic() + seconds
    for attempt in itertools.count():
        try:
            with socket.create_connection((host, int(port)), timeout=10):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"No dispatcher answers at {dispatcher}: {error}. Start it: "
                raise InputError(f"{text}{program()} service --role=dispatcher") from error
            if not attempt:
                print(f"waiting for the dispatcher at {dispatcher}", flush=True)
            time.sleep(1)


def check_free(port: int) -> None:
    """Raises InputError if a port of this machine is in use; TensorFlow would abort."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            text = f"Port {port} cannot be used: {error}. Name another with --port."
            raise InputError(text) from error
