"""Runs a part of tf.data service, which preprocesses images on other machines for TfDataOptions(service=...).

usage: data_service.py --role=dispatcher [--port=5050]
       data_service.py --role=worker --dispatcher=HOST:5050 [--address=HOST] [--port=5051]

One dispatcher, and as many workers as there are machines to help; each worker sees the TFRecords under the same paths as training
does. Then: train.py --service=grpc://HOST:5050. Runs until it is stopped (Ctrl-C, SIGTERM). A worker
that died must be started again with the same address and port: training waits for it.
"""

import socket

from absl import flags

import console
from dali_tf_input import InputError

_ROLE = flags.DEFINE_enum("role", None, ["dispatcher", "worker"], "What this process is.", required=True)
_PORT = flags.DEFINE_integer("port", None, "Port to serve at; 5050 for the dispatcher, 5051 for a worker, 0 chooses one.")
_DISPATCHER = flags.DEFINE_string("dispatcher", None, "Where the dispatcher is, HOST:PORT; for a worker.")
_ADDRESS = flags.DEFINE_string("address", None, "Name by which others reach this worker's machine; by default its host name.")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    if (_ROLE.value == "worker") != bool(_DISPATCHER.value):
        raise InputError("A worker needs --dispatcher=HOST:PORT, a dispatcher does not.")
    port = _PORT.value if _PORT.value is not None else {"dispatcher": 5050, "worker": 5051}[_ROLE.value]
    if not 0 <= port < 65536:
        raise InputError(f"`port` must be in [0, 65536), got {port}.")
    check_free(port)
    tf = console.import_tensorflow()
    service = tf.data.experimental.service
    if _ROLE.value == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=port))
        print(f"dispatcher at {server.target}", flush=True)
    else:
        address = _ADDRESS.value or socket.gethostname()
        config = service.WorkerConfig(
            dispatcher_address=_DISPATCHER.value.removeprefix("grpc://"),
            worker_address=f"{address}:%port%",  # TensorFlow fills in the port
            port=port,
            dispatcher_timeout_ms=60_000,
        )
        server = service.WorkerServer(config)
        print(f"worker of {_DISPATCHER.value}", flush=True)
    server.join()
    return 0


def check_free(port: int) -> None:
    """Checks that nothing serves at a port of this machine yet; TensorFlow would end the process."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InputError(f"Port {port} cannot be used: {error}. Name another with --port.") from error


if __name__ == "__main__":
    console.run(main)
