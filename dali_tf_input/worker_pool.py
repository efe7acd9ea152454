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
_SILENCE = 900  # seconds without a word after which a process counts as hung: it says how far it is a few times a second
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from dali_tf_input.index_worker import serve; serve()"


_T = TypeVar("_T")
Crashing = dict[int, tuple[str, str]]  # records over which a process ended or hung: number in the file -> (reason, detail)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One file to go through: by which `checks.Checks` (its fields), and where to make its index and the list of its faults.

    The file `mark` is to hold the number of the record that is being decoded.
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
            answer = _next(done, workers)
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


def _next(done: "queue.SimpleQueue[_T]", workers: Sequence["_Worker"]) -> _T:
    """Returns what is done next; kills workers from which nothing is heard any more."""
    looked = time.monotonic()
    while True:
        try:
            return done.get(timeout=_SILENCE / 100)
        except queue.Empty:
            now = time.monotonic()
            if now - looked > _SILENCE / 10:  # this process was stopped, and they with it
                for worker in list(workers):
                    worker.heard = now
            looked = now
            for worker in list(workers):
                if worker.is_busy and now - worker.heard > _SILENCE:
                    worker.hangs = True
                    worker.kill()


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self.is_dead = self.is_busy = self.hangs = False
        self.heard = time.monotonic()
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
        self.heard, self.is_busy = time.monotonic(), True
        try:
            return self._run(job, crashing, on_progress)
        finally:
            self.is_busy = False

    def _run(self, job: Job, crashing: Crashing, on_progress: Callable[[int, int], None]) -> dict[str, Any] | None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it died; how, its exit status says
            self._process.stdin.write(json.dumps({**dataclasses.asdict(job), "crashing": crashing}).encode() + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            self.heard = time.monotonic()
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
        if (self.hangs or -status in _CRASHES) and os.path.exists(job.mark) and os.path.getsize(job.mark) == 8:
            with open(job.mark, "rb") as stream:
                number = int.from_bytes(stream.read(), "little")
            os.unlink(job.mark)
            if number not in crashing:
                hung = ("hangs the decoder", f"decoding it did not end within {_SILENCE} s.")
                crashing[number] = hung if self.hangs else ("crashes the decoder", f"decoding it ended the process: {name}.")
                return None
        if self.hangs:
            return {"unreadable": f"{job.file}: the process that went through it said nothing for {_SILENCE} s."}
        return {"unreadable": f"{job.file}: the process that went through it was ended by {name}."}

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        self._stderr.close()

    def kill(self) -> None:
        self._process.kill()
