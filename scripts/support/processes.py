"""Child processes of measurements, which can be paused: workers that answer JSON."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dali_tf_input import InputError
from dali_tf_input.processes import describe_end, run_command

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_SECONDS = 600  # for TensorFlow's start on a busy machine

_Worker = TypeVar("_Worker", bound="JsonWorker")


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process in a session of its own, which Ctrl-C does not reach."""
    return subprocess.Popen(words, text=True, errors="replace", start_new_session=True, **options)


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process. One that hangs in a driver takes no signal, and is left."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)


class End(NamedTuple):
    """How a command ended, and what it wrote until then.

    Attributes:
      code: its exit code; None if it hangs in a driver and could not be ended.
      output: what it wrote to stdout.
      errors: what it wrote to stderr.
      is_late: whether it was ended for its time.
      interrupt: what this process was interrupted by meanwhile, which the caller raises again.
    """

    code: int | None
    output: str
    errors: str
    is_late: bool
    interrupt: KeyboardInterrupt | None


def run_logged(
    words: Sequence[str], seconds: float, environment: dict[str, str], show: Callable[[str], None]
) -> End:
    """Runs a command to its end, and shows what it writes to stdout while it does.

    After `seconds`, or if this process is interrupted, it gets SIGTERM, so that it can save what it
    has, and ten seconds later SIGKILL. The kernel kills it if this process dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # this process has one thread
            )
        deadline, is_late, interrupt = time.monotonic() + seconds, False, None
        with paths[0].open(errors="replace") as output:
            try:
                while process.poll() is None and not is_late:
                    show(output.read())
                    time.sleep(0.1)
                    is_late = time.monotonic() > deadline
            except KeyboardInterrupt as stop:
                interrupt = stop
            finally:
                _end_session(process)
                show(output.read())
        written, errors = (path.read_text(errors="replace") for path in paths)
    return End(process.returncode, written, errors, is_late, interrupt)


def _end_session(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all of its session; one that hangs in a driver takes no signal."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)


def run_index(*arguments: str) -> float:
    """Runs the index command; returns its seconds.

    Raises:
      InputError: it failed.
    """
    start = time.perf_counter()
    words = [sys.executable, "-m", "dali_tf_input", "index", *arguments]
    code, output, errors = run_command(words)
    if code:
        raise InputError(f"The index command failed: {errors or output}")
    return time.perf_counter() - start


class WorkerDied(Exception):  # noqa: N818 (an outcome, not a mistake)
    """A worker gave no answer; the text says how it ended."""


class JsonWorker:
    """A process that answers each line of JSON with a line of JSON (a context manager).

    It is started by the first question, and if it died, again by the next one. When it is ready, it
    sends an empty answer first.
    """

    def __init__(self, words: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        self._words, self._environment = list(words), {**os.environ, **(environment or {})}
        self._process: Any = None

    def __enter__(self: _Worker) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the process, if there is none.

        Raises:
          InputError: it ended before it was ready.
        """
        if self._process is not None:
            return
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see `close`)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = start(self._words, env=self._environment, **pipes)
        try:
            self._read(_START_SECONDS)
        except WorkerDied as error:
            raise InputError(f"{self._words[1]} does not start: {error}") from error

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            kill(self._process)
            self._log.close()
        self._process = None

    def pause(self) -> None:
        """Stops the process until it is asked again, so that it takes no time from others."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def ask(self, question: Any, *, seconds: float) -> Any:
        """Returns the answer.

        Raises:
          WorkerDied: the process ended, or gave no answer within `seconds` and was killed.
        """
        self.start()
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it died; how is said below
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read(seconds)

    def _read(self, seconds: float) -> Any:
        stdout = self._process.stdout
        ready = select.select([stdout], [], [], seconds)[0]
        line = stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        text = f"no answer within {seconds:.0f} s"
        if ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._log.seek(0)
            words = "".join(self._log.readlines()[-5:]).strip()
            how = describe_end(self._process.returncode or 0)
            text = f"the process died ({how}){words and ': ' + words}"
        self.close()
        raise WorkerDied(text)


def serve(answer: Callable[[Any], Any]) -> None:
    """Answers each line of JSON on stdin with a line on stdout: the other side of `JsonWorker`.

    A first, empty answer says that it is ready.
    """
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what DALI prints is not an answer
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
