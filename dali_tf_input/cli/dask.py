"""The executor of a Dask cluster, for commands that take --dask."""

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from dali_tf_input.errors import InputError
from dali_tf_input.records.installing import pip_install

_SECONDS_TO_CONNECT = 10

_logger = logging.getLogger("dali_tf_input")


@contextlib.contextmanager
def connect_dask(address: str | None) -> Iterator[Executor | None]:
    """Gives the executor of a Dask cluster; None without an address.

    Raises:
      InputError: Dask is not installed, or no scheduler answers.
    """
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        text = f"--dask needs Dask: {error}. Install it: {pip_install('distributed')}"
        raise InputError(text) from error
    try:
        client: Any = Client(address, timeout=_SECONDS_TO_CONNECT)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(f"No Dask scheduler answers at {address}: {error}") from error
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # tracebacks
    if not client.scheduler_info()["workers"]:
        _logger.warning("%s has no workers: waiting for one", address)
    with client:
        yield client.get_executor(pure=False)
