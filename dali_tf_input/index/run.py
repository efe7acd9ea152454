"""The processes, threads or executor that check files for `build_index`."""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TextIO

from dali_tf_input import __version__
from dali_tf_input.errors import InputError
from dali_tf_input.index.decode import DecodingChild
from dali_tf_input.index.scan import check_file
from dali_tf_input.processes import Child, ChildDiedError, call_apart
from dali_tf_input.records.checks import PIXELS_KEY, Checks
from dali_tf_input.records.contents import FileEntry, unpack_integers
from dali_tf_input.records.paths import absolute
from dali_tf_input.records.tfrecord import BadRecord
from dali_tf_input.storage.copies import local_copy
from dali_tf_input.storage.objects import ObjectVersion
from dali_tf_input.storage.staging import WRITE_ERRORS

_OBJECTS_AT_ONCE = 8  # stored objects that threads check concurrently
_FEW_BYTES = 1 << 24  # so few are checked faster than a process, or another one, starts

Tell = Callable[[int, int], None]  # gets the records and bytes since its last call


class Unreadable(str):
    """Why a file could not be checked."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A file to check, its checks, and the paths of the results.

    A stored object has a `version`, and perhaps a `cache_dir` for its copy. A local file that has
    the size of an earlier run but another time has the entry of that run, `before`.
    """

    file: str
    index: str
    bad_records: str
    checks: Checks
    version: ObjectVersion | None = None
    cache_dir: str | None = None
    before: FileEntry | None = None


@dataclass(frozen=True)
class Recognized:
    """A file that holds what it held before; its entry, which is as before but for the time."""

    entry: FileEntry


Answer = FileEntry | Unreadable | Recognized


def _recognize(job: Job, before: FileEntry) -> Recognized | None:
    """Returns the new entry of a file that was copied or touched; None if it holds other records.

    It reads the framing of the file, with the CRCs of the data, but not the data.
    """
    with open(os.devnull, "wb") as index:
        found = check_file(
            job.file,
            index,
            Checks(verify="framing"),
            decode=None,
            on_bad_record=lambda _: None,
            on_progress=lambda *_: None,
        )
    # A record whose header is damaged takes up as many bytes as before.
    bad, known = ({*unpack_integers(one.skipped_numbers or b"")} for one in (found, before))
    same = (found.framing_crc, found.content_crc) == (before.framing_crc, before.content_crc)
    if not same or not bad <= known:
        return None
    return Recognized(dataclasses.replace(before, mtime_ns=found.mtime_ns))


def check_job(job: Job, tell: Tell, **download: Any) -> Answer:
    """Checks a file and writes its index; `download`: further arguments of `local_copy`.

    Raises:
      InputError: a decoder is not installed.
      OSError: the results cannot be written.
    """
    try:
        if job.before and (recognized := _recognize(job, job.before)):
            return recognized
    except (InputError, OSError) as error:
        return Unreadable(f"{job.file} cannot be read: {getattr(error, 'strerror', error)}")
    checks = job.checks
    decodes = checks.image_key != PIXELS_KEY or checks.mask_key
    decode = _decoding_child(checks) if checks.verify == "decode" and decodes else None
    try:
        with contextlib.ExitStack() as stack:
            index = stack.enter_context(open(job.index, "wb"))
            bad_records: TextIO | None = None

            def on_bad_record(bad: BadRecord) -> None:
                nonlocal bad_records
                if bad_records is None:  # most files have none
                    bad_records = stack.enter_context(open(job.bad_records, "w", encoding="utf-8"))
                line = {"file": os.path.basename(job.file), **dataclasses.asdict(bad)}
                bad_records.write(json.dumps(line) + "\n")

            entry = check_file(
                stack.enter_context(local_copy(job.file, job.version, job.cache_dir, **download)),
                index,
                checks,
                name=job.file,
                decode=decode,
                on_bad_record=on_bad_record,
                on_progress=tell,
            )
    except InputError as error:
        return Unreadable(error)
    except OSError as error:
        if error.errno in WRITE_ERRORS:
            raise
        return Unreadable(f"{job.file} cannot be read: {error.strerror or error}")
    if job.version:
        entry = dataclasses.replace(entry, mtime_ns=0, etag=job.version.etag)
    return entry


@functools.lru_cache(1)  # of a process that checks files
def _decoding_child(checks: Checks) -> DecodingChild:
    return DecodingChild(checks)


def run_jobs(
    jobs: Sequence[Job], num_processes: int | None, on_progress: Tell, *, num_bytes: int
) -> Generator[tuple[int, Answer], None, None]:
    """Runs `jobs` in up to `num_processes` processes or threads; None means one per core.

    None also means at most one process per 16 MiB, as starting another would take longer. Threads
    of this process are used if the files have few `num_bytes` in total, below level "decode"; and
    for objects at level "framing", by default 8, because they mostly wait. At level "decode" each
    process has another one, which decodes. `on_progress` is called from any thread.

    Yields:
      (number of the job, answer), in the order of completion. If a process is killed, its file is
      `Unreadable`, and another one continues.

    Raises:
      InputError: a process ended with an error: something is missing in this installation.
      OSError: the results cannot be written.
    """
    if not jobs:
        return
    local, children, stopped = threading.local(), list[Child](), threading.Event()
    levels = {job.checks.verify for job in jobs}
    waits = levels == {"framing"} and all(job.version for job in jobs)
    in_threads = waits or ("decode" not in levels and num_bytes <= _FEW_BYTES)
    most = _OBJECTS_AT_ONCE if waits else len(os.sched_getaffinity(0))
    most = most if in_threads else min(most, 1 + num_bytes // _FEW_BYTES)
    at_once = min(num_processes or most, len(jobs))

    def check_here(job: Job) -> Answer:
        problems: list[Exception] = []  # of `on_progress`, which say nothing of the file

        def tell(records: int, size: int) -> None:
            try:
                if stopped.is_set():
                    raise InputError("The run ends.")
                on_progress(records, size)
            except Exception as error:
                problems.append(error)
                raise

        answer = check_job(job, tell, at_once=at_once, stopped=stopped)
        if problems:
            raise problems[0]
        return answer

    def work(job: Job) -> Answer:
        if in_threads:
            return check_here(job)
        if not hasattr(local, "child"):
            local.child = Child()
            children.append(local.child)
        return _call_child(local.child, job, on_progress)

    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        stopped.set()
        for child in list(children):
            child.kill()
        pool.shutdown(cancel_futures=True)
        for child in children:
            child.close()


def _call_child(child: Child, job: Job, on_progress: Tell) -> Answer:
    try:
        answer: Answer = child.call(check_job, job, on_progress=on_progress)
    except ChildDiedError as error:
        if str(error).startswith("exit code"):
            raise InputError(f"The indexing process stopped at {job.file}: {error}") from error
        return Unreadable(f"{job.file}: the process that checked it was ended by {error}.")
    return answer


def run_in_executor(
    jobs: Sequence[Job], executor: Executor, on_progress: Tell
) -> Generator[tuple[int, Answer], None, None]:
    """Runs `jobs` by an executor, perhaps on other machines; yields as `run_jobs` does.

    Files must be stored objects, or on a file system that all machines share.

    Raises:
      InputError: the executor fails, or another version of this package is installed there.
    """
    jobs = [dataclasses.replace(job, file=absolute(job.file)) for job in jobs]
    futures = {
        executor.submit(call_apart, __version__, _check_there, job): number
        for number, job in enumerate(jobs)
    }
    try:
        for future in as_completed(futures):
            job = jobs[futures[future]]
            index = bad_records = b""
            try:
                answer, index, bad_records = future.result()
            except InputError:
                raise
            except ChildDiedError as error:
                answer = Unreadable(f"{job.file}: the process that checked it ended: {error}.")
            except (Exception, CancelledError) as error:  # of the executor's own kinds
                raise explain_executor(error, job.file) from error
            for path, data in ((job.index, index), (job.bad_records, bad_records)):
                with open(path, "wb") as stream:
                    stream.write(data)
            if isinstance(answer, FileEntry):
                on_progress(answer.records, answer.size)
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
    elif isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        words = f"its worker cannot write: {error.strerror}"
    return InputError(f"The executor failed at {where}: {words}.")


def _check_there(job: Job) -> tuple[Answer, bytes, bytes]:
    """Returns the answer to a job, its index and its bad records."""
    with tempfile.TemporaryDirectory(prefix="dali_tf_input-") as folder:
        index, bad_records = (os.path.join(folder, name) for name in ("idx", "bad"))
        here = dataclasses.replace(job, index=index, bad_records=bad_records)
        answer = check_job(here, lambda *_: None)
        return answer, _read_if_there(index), _read_if_there(bad_records)


def _read_if_there(path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        return stream.read()
    return b""
