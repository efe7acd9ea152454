"""Has an executor check files for `build_index`, perhaps on other machines."""

import contextlib
import dataclasses
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from typing import Any

from dali_tf_input import __version__
from dali_tf_input.errors import InputError
from dali_tf_input.index.workers import KEPT_SECONDS, Job, Seat
from dali_tf_input.records.paths import absolute

_SECONDS_TO_CONNECT = 10

_logger = logging.getLogger("dali_tf_input")
_KEPT = Seat()  # of a process that an executor runs


def run_elsewhere(
    jobs: Sequence[Job], executor: Executor, on_progress: Callable[[int, int], None]
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Runs `jobs` by an executor, perhaps on other machines; yields as `run_jobs` does.

    Files must be objects of a store, or on a file system that all machines share.

    Raises:
      InputError: the executor fails, or another version of this package is installed there.
    """
    jobs = [dataclasses.replace(job, file=absolute(job.file)) for job in jobs]
    futures = {executor.submit(_check_here, job, __version__): n for n, job in enumerate(jobs)}
    try:
        for future in as_completed(futures):
            job = jobs[futures[future]]
            try:
                answer, index, bad_records = future.result()
            except InputError:
                raise
            except Exception as error:  # of the executor's own kinds
                raise explain_executor(error, job.file) from error
            for path, data in ((job.index, index), (job.bad_records, bad_records)):
                with open(path, "wb") as stream:
                    stream.write(data)
            if "error" in answer:
                raise InputError(f"{job.file}: its worker cannot write: {answer['error'][1]}")
            entry = answer.get("entry", {"records": 0, "size": 0})
            on_progress(entry["records"], entry["size"])
            yield futures[future], answer
    finally:
        for future in futures:
            future.cancel()


def explain_executor(error: Exception, where: str, needs: str = "") -> InputError:
    """Returns what to raise for an error of an executor's own; `needs`: what else it must have."""
    words = repr(error)
    if "Cancelled" in type(error).__name__ or type(error).__name__ == "CommClosedError":
        words = "its scheduler is gone"
    elif isinstance(error, ImportError) or "deserialization of the task graph" in words:
        words = f"its scheduler and workers must have dali_tf_input {__version__}{needs}"
    return InputError(f"The executor failed at {where}: {words}.")


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
        text = f"--dask needs Dask: {error}. Install it: pip install distributed"
        raise InputError(text) from error
    try:
        client: Any = Client(address, timeout=_SECONDS_TO_CONNECT)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(f"No Dask scheduler answers at {address}: {error}") from error
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # tracebacks
    if not client.scheduler_info()["workers"]:
        _logger.warning("%s has no workers: waiting for one", address)
    with client:
        yield _DaskExecutor(client)


class _DaskExecutor(Executor):
    """A Dask client as an executor. Its own never answers where the scheduler dies."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:  # type: ignore[override]
        """Hands work to the cluster."""
        future = Future[Any]()

        def finish(done: Any) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(done.result())
            except BaseException as error:
                future.set_exception(error)

        self._client.submit(work, *arguments, pure=False).add_done_callback(finish)
        return future


def _check_here(job: Job, version: str) -> tuple[dict[str, Any], bytes, bytes]:
    """Returns the answer to a job, its index and its bad records."""
    if version != __version__:
        text = f"A worker has dali_tf_input {__version__}, this program {version}"
        raise InputError(f"{text}: install the same version everywhere.")
    with tempfile.TemporaryDirectory(prefix="dali_tf_input-") as folder:
        index, bad_records, mark = (os.path.join(folder, name) for name in ("idx", "bad", "mark"))
        here = dataclasses.replace(job, index=index, bad_records=bad_records, mark=mark)
        with _KEPT.lock:
            answer = _KEPT.run(here, lambda *_: None, threading.Event())
        timer = threading.Timer(KEPT_SECONDS, _KEPT.close_if_idle)
        timer.daemon = True
        timer.start()
        return answer, _read_if_there(index), _read_if_there(bad_records)


def _read_if_there(path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        return stream.read()
    return b""
