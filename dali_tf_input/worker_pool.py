"""Worker processes that go through files: started, told what to do, and buried when they die."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from dali_tf_input.tfrecord import InputError

# A plain command, so that it does not matter what the calling program is, has imported, or guards by __name__.
_PATH = [os.path.abspath(entry) for entry in sys.path]  # now: the caller may change its folder
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # a process's own doing
_LONGEST_DECODE = 900  # seconds over one image after which its decoder counts as hung
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from dali_tf_input.index_worker import serve; serve()"


_T = TypeVar("_T")
Crashing = dict[int, tuple[str, str]]  # records over which a process ended or hung: number in the file -> (reason, detail)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One file to go through: by which `checks.Checks` (its fields), and where to make its index and the list of its faults.

    The file `mark` is to hold the number of the record that was decoded last, in 8 bytes, and 1 in a ninth while it is.
    """

    file: str
    index: str
    faults: str
    mark: str
    checks: dict[str, Any]


def run_jobs(
    jobs: Sequence[Job], num_processes: int, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs `jobs` in up to `num_processes` processes.

    Args:
      jobs: what to do.
      num_processes: how many at most; no more are started than there are jobs.
      on_progress: called with records and bytes gone through since its last call, by any thread.

    Yields:
      (number of the job, answer of `index_worker`), in the order they are done. Where decoding a record crashes a process, or
      does not end, another one goes through the file without it. A process that is killed otherwise answers
      {"unreadable": ...}, and another one goes on.

    Raises:
      InputError: a process ended with an error: something is missing in this installation.
      OSError: what is made cannot be written.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        todo.put(number)
    done: queue.SimpleQueue[tuple[int, dict[str, Any]] | BaseException] = queue.SimpleQueue()
    workers: list[_Worker] = []
    stopped = threading.Event()
    looked = [time.monotonic()]

    def work() -> None:
        worker = None
        try:
            while not stopped.is_set():
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    break
                crashing: Crashing = {}
                answer = None
                while answer is None:
                    if worker is None or worker.is_dead:
                        if worker:
                            worker.close()
                        worker = _Worker()
                        workers.append(worker)
                        if stopped.is_set():
                            worker.kill()
                    answer = worker.run(jobs[number], crashing, on_progress)
                done.put((number, answer))
        except BaseException as error:
            done.put(error)
        finally:
            if worker:
                worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_processes, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        for _ in jobs:
            answer = _next(done, workers, looked)
            if isinstance(answer, BaseException):
                raise answer
            if "error" in answer[1]:
                raise OSError(*answer[1]["error"])
            yield answer
    finally:
        stopped.set()
        for worker in list(workers):
            worker.kill()
        for thread in threads:
            thread.join()


def _next(done: "queue.SimpleQueue[_T]", workers: Sequence["_Worker"], looked: list[float]) -> _T:
    """Returns what is done next; meanwhile ends workers that do not come back from a record. `looked` is when it last looked."""
    while True:
        try:
            return done.get(timeout=_LONGEST_DECODE / 100)
        except queue.Empty:
            now = time.monotonic()
            anew = now - looked[-1] > _LONGEST_DECODE / 10  # this process was stopped, and they perhaps with it
            looked[:] = [now]
            for worker in list(workers):
                worker.look(now, anew=anew)


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self.is_dead = False
        self._job: Job | None = None
        self._decoding: tuple[Job | None, int | None] | None = None
        self._since = 0.0
        self._hangs = False
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *_PATH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Images are decoded on the CPU; a GPU and its memory are left to who trains.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def run(self, job: Job, crashing: Crashing, on_progress: Callable[[int, int], None]) -> dict[str, Any] | None:
        """Returns the answer to a job; None if the process crashed or hung over a record, which is added to `crashing`."""
        self._job = job
        try:
            return self._run(job, crashing, on_progress)
        finally:
            self._job = None

    def _run(self, job: Job, crashing: Crashing, on_progress: Callable[[int, int], None]) -> dict[str, Any] | None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it died; how, its exit status says
            self._process.stdin.write(json.dumps({**dataclasses.asdict(job), "crashing": crashing}).encode() + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                self.kill()
                raise InputError(f"The indexing process answered {line[:80]!r}: is a module shadowed in {os.getcwd()}?") from None
            if "progress" not in answer:
                return answer
            on_progress(*answer["progress"])
        self.is_dead = True
        status = self._process.wait()
        if status >= 0:
            self._stderr.seek(0)
            last_words = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise InputError(f"The indexing process stopped at {job.file}: {' '.join(last_words) or f'exit status {status}'}")
        name = signal.Signals(-status).name
        if self._hangs or -status in _CRASHES:
            number, _ = _read_mark(job)
            if number is not None and number not in crashing:
                os.unlink(job.mark)
                hung = ("hangs the decoder", f"decoding it did not end within {_LONGEST_DECODE} s.")
                crashing[number] = hung if self._hangs else ("crashes the decoder", f"decoding it ended the process: {name}.")
                return None
        return {"unreadable": f"{job.file}: the process that went through it was ended by {name}."}

    def look(self, now: float, *, anew: bool) -> None:
        """Kills the process if it is over one image for too long; `anew` begins to count at `now`."""
        job = self._job
        number, is_decoding = _read_mark(job) if job else (None, False)
        decoding = (job, number) if is_decoding else None
        if decoding is None or decoding != self._decoding or anew:
            self._decoding, self._since = decoding, now
        elif now - self._since > _LONGEST_DECODE:
            self._hangs = True
            self.kill()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._stderr.close()

    def kill(self) -> None:
        self._process.kill()


def _read_mark(job: Job) -> tuple[int | None, bool]:
    """Returns the record that was decoded last, and whether it still is; None before the first."""
    try:
        with open(job.mark, "rb") as stream:
            mark = stream.read()
    except FileNotFoundError:
        return None, False
    return (int.from_bytes(mark[:8], "little"), mark[8:] == b"\1") if mark else (None, False)
