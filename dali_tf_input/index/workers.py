"""The processes, threads or executor that check files for `build_index`."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import IO, Any

from dali_tf_input import __version__
from dali_tf_input.errors import InputError
from dali_tf_input.index.worker import IDLE_STATUS, check_task
from dali_tf_input.records.paths import absolute
from dali_tf_input.records.schema import Checks
from dali_tf_input.storage.objects import Status

# A plain command, which works whatever the calling program is and has imported. Its import path is
# made absolute now, as the caller may change its folder.
_PATH = [os.path.abspath(entry) for entry in sys.path]
_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]; from dali_tf_input.index.worker import serve; serve()"
)

# The signals by which a process ends if an image crashes its decoder.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_OBJECTS_AT_ONCE = 8  # stored objects that threads check concurrently
_FEW_BYTES = 1 << 24  # so few are checked faster than a process, or another one, starts
_LONGEST_DECODE = 900  # seconds for one record, after which SIGALRM ends the worker

# Records that must not be decoded: number in the file -> (reason, detail).
Crashing = dict[int, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A file to check, its checks as `Checks.to_json` returns them, and the paths of the results.

    A stored object has a `status`, and perhaps a `cache_dir` for its copy.
    """

    file: str
    index: str
    bad_records: str
    mark: str  # the number of the record that the worker decodes, 8 bytes
    checks: dict[str, Any]
    status: Status | None = None
    cache_dir: str | None = None


def run_jobs(
    jobs: Sequence[Job],
    num_processes: int | None,
    on_progress: Callable[[int, int], None],
    *,
    num_bytes: int,
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Runs `jobs` in up to `num_processes` processes or threads; None means one per core.

    None also means at most one process per 16 MiB, as starting another would take longer. Threads
    of this process are used if the files have few `num_bytes` in total, below level "decode"; and
    for objects at level "framing", by default 8, because they mostly wait. `on_progress` is called
    from any thread, with the records and bytes since its last call.

    Yields:
      (number of the job, answer of `worker`), in the order of completion. If decoding a record
      crashes or hangs a process, another one checks the file without that record. If a process is
      killed in another way, its file's answer is {"unreadable": ...}, and another one continues.

    Raises:
      InputError: a process ended with an error: something is missing in this installation.
      OSError: the results cannot be written.
    """
    if not jobs:
        return
    local, seats, stopped = threading.local(), list[Seat](), threading.Event()
    levels = {job.checks["verify"] for job in jobs}
    waits = levels == {"framing"} and all(job.status for job in jobs)
    in_threads = waits or ("decode" not in levels and num_bytes <= _FEW_BYTES)
    most = _OBJECTS_AT_ONCE if waits else len(os.sched_getaffinity(0))
    most = most if in_threads else min(most, 1 + num_bytes // _FEW_BYTES)
    at_once = min(num_processes or most, len(jobs))

    def work(job: Job) -> dict[str, Any]:
        if in_threads:
            return _check_here(job, on_progress, at_once=at_once, stopped=stopped)
        if not hasattr(local, "seat"):
            local.seat = Seat()
            seats.append(local.seat)
        seat: Seat = local.seat
        return seat.run(job, on_progress, stopped)

    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            answer = future.result()
            if "error" in answer:
                raise OSError(*answer["error"])
            yield futures[future], answer
    finally:
        stopped.set()
        for seat in list(seats):
            seat.kill()
        pool.shutdown(cancel_futures=True)
        for seat in seats:
            seat.close()


def _check_here(
    job: Job, on_progress: Callable[[int, int], None], *, at_once: int, stopped: threading.Event
) -> dict[str, Any]:
    """Checks a file in this thread; returns the answer. Raises what `on_progress` raises."""
    problems: list[Exception] = []

    def tell(records: int, size: int) -> None:
        if stopped.is_set():
            raise InputError("The run ends.")
        try:
            on_progress(records, size)
        except Exception as error:
            problems.append(error)
            raise

    task = {**dataclasses.asdict(job), "crashing": {}}
    shared = {"at_once": at_once, "stopped": stopped}
    answer = check_task(task, Checks.from_json(job.checks), None, tell, **shared)
    if problems:
        raise problems[0]
    return answer


def run_in_executor(
    jobs: Sequence[Job], executor: Executor, on_progress: Callable[[int, int], None]
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Runs `jobs` by an executor, perhaps on other machines; yields as `run_jobs` does.

    Files must be stored objects, or on a file system that all machines share.

    Raises:
      InputError: the executor fails, or another version of this package is installed there.
    """
    jobs = [dataclasses.replace(job, file=absolute(job.file)) for job in jobs]
    futures = {executor.submit(_check_there, job, __version__): n for n, job in enumerate(jobs)}
    try:
        for future in as_completed(futures):
            job = jobs[futures[future]]
            try:
                answer, index, bad_records = future.result()
            except InputError:
                raise
            except (Exception, CancelledError) as error:  # of the executor's own kinds
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


def explain_executor(error: BaseException, where: str) -> InputError:
    """Returns what to raise for an error of an executor's own."""
    words = repr(error)
    if isinstance(error, CancelledError) or type(error).__name__ == "CommClosedError":
        words = "its scheduler is gone"
    elif isinstance(error, ImportError) or "deserialization of the task graph" in words:
        words = f"its scheduler and workers must have dali_tf_input {__version__}"
    return InputError(f"The executor failed at {where}: {words}.")


_idle_seats: list["Seat"] = []  # of a process that an executor runs: one for each of its threads


def _check_there(job: Job, version: str) -> tuple[dict[str, Any], bytes, bytes]:
    """Returns the answer to a job, its index and its bad records."""
    if version != __version__:
        text = f"A worker has dali_tf_input {__version__}, this program {version}"
        raise InputError(f"{text}: install the same version everywhere.")
    try:
        seat = _idle_seats.pop()
    except IndexError:
        seat = Seat()
    with tempfile.TemporaryDirectory(prefix="dali_tf_input-") as folder:
        index, bad_records, mark = (os.path.join(folder, name) for name in ("idx", "bad", "mark"))
        here = dataclasses.replace(job, index=index, bad_records=bad_records, mark=mark)
        answer = seat.run(here, lambda *_: None, threading.Event())
        _idle_seats.append(seat)
        return answer, _read_if_there(index), _read_if_there(bad_records)


def _read_if_there(path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        return stream.read()
    return b""


class Seat:
    """Runs one process at a time, and starts another if it ends."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self, job: Job, on_progress: Callable[[int, int], None], stopped: threading.Event
    ) -> dict[str, Any]:
        """Returns the answer to a job."""
        crashing: Crashing = {}
        while True:
            if not self._workers or self._workers[-1].is_outdated:
                self.close()
                self._workers.append(_Worker())
            if stopped.is_set():
                self.kill()
            answer = self._workers[-1].run(job, crashing, on_progress)
            if answer is not None:
                return answer

    def kill(self) -> None:
        """Kills the process."""
        for worker in self._workers[-1:]:
            worker.kill()

    def close(self) -> None:
        """Waits for the processes, which have ended or will."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self._is_dead = False
        self._environment = dict(os.environ)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *_PATH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches the caller alone, which ends this process
            # Images are decoded on the CPU: GPUs and their memory are left to training.
            env={**self._environment, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    @property
    def is_outdated(self) -> bool:
        """Whether the process has ended, or environment variables have changed since it started."""
        return self._is_dead or self._environment != dict(os.environ)

    def run(
        self, job: Job, crashing: Crashing, on_progress: Callable[[int, int], None]
    ) -> dict[str, Any] | None:
        """Returns the answer to a job; None if it is to be run again by another process."""
        assert self._process.stdin
        assert self._process.stdout
        task = {**dataclasses.asdict(job), "crashing": crashing, "longest_decode": _LONGEST_DECODE}
        with contextlib.suppress(BrokenPipeError):  # it died; its exit status says how
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                self.kill()
                raise InputError(
                    f"The indexing process answered {line[:80]!r}: is a module shadowed in "
                    f"{os.getcwd()}?"
                ) from None
            if "progress" not in answer:
                return answer
            on_progress(*answer["progress"])
        self._is_dead = True
        status = self._process.wait()
        if status == IDLE_STATUS:  # it had waited for this job for too long
            return None
        if status >= 0:
            self._stderr.seek(0)
            last_words = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            words = " ".join(last_words) or f"exit status {status}"
            raise InputError(f"The indexing process stopped at {job.file}: {words}")
        return self._judge(job, signal.Signals(-status), crashing)

    def _judge(
        self, job: Job, ended_by: signal.Signals, crashing: Crashing
    ) -> dict[str, Any] | None:
        """Blames the last decoded record if decoding it may have ended the process."""
        number = _read_mark(job)
        if number is not None and number not in crashing:
            if ended_by in _CRASHES:
                detail = f"decoding it ended the process: {ended_by.name}."
                crashing[number] = ("crashes the decoder", detail)
                return None
            if ended_by == signal.SIGALRM:
                detail = f"decoding it did not end within {_LONGEST_DECODE} s."
                crashing[number] = ("hangs the decoder", detail)
                return None
        text = f"{job.file}: the process that checked it was ended by {ended_by.name}."
        return {"unreadable": text}

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._stderr.close()

    def kill(self) -> None:
        self._process.kill()


def _read_mark(job: Job) -> int | None:
    """Returns the record that was decoded last; None before the first. Forgets it."""
    try:
        with open(job.mark, "rb") as stream:
            mark = stream.read()
        os.unlink(job.mark)
    except FileNotFoundError:
        return None
    return int.from_bytes(mark, "little") if mark else None
