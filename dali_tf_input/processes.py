"""A child process that calls functions, and is replaced when it dies.

Decoders are C code: a damaged image may crash them, or keep them busy for ever. What runs in a
child costs one call then, and not the program. The child is started by a plain command, so it works
whatever the program is and has imported, and it ends with the program: its connection closes.
"""

import contextlib
import fcntl
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Literal

from dali_tf_input import __version__
from dali_tf_input.errors import InputError

# The import path as it is now, made absolute, as the program may change its folder.
_PATH = [os.path.abspath(entry) for entry in sys.path]
_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; from dali_tf_input.processes import serve;"
    " serve(*eval(sys.argv[1]))"
)
# Images are decoded on the CPU: GPUs and their memory are left to training.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


class ChildDiedError(Exception):
    """The child did not answer; the text says why.

    Attributes:
      cause: "crash": a signal that code sends to its own process ended it. "timeout": it was killed
        after the time limit. "end": it ended in another way; something else may have killed it.
    """

    def __init__(self, text: str, cause: Literal["crash", "timeout", "end"]) -> None:
        super().__init__(text, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class Child:
    """A process that calls functions, one at a time (a context manager).

    It starts with the first call, and again with the first call after it died. With `idle_seconds`
    it may be kept for a long time: it ends when it had no call for so long.

    Attributes:
      started_with: the program's environment variables when it started; none if it is not running.
    """

    def __init__(
        self, *, idle_seconds: float | None = None, environment: Mapping[str, str] = _WITHOUT_GPUS
    ) -> None:
        self._idle_seconds, self._last_used = idle_seconds, 0.0
        self._environment = environment  # variables that it has besides those of the program
        self.started_with: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._stderr: IO[bytes] | None = None
        self._memory = -1  # a file in memory, which both processes have open
        self._is_stopped = False
        self._parent = 0  # the process that started it

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        data: Sequence[bytes] | None = None,
        seconds: float | None = None,
        on_progress: Callable[..., None] | None = None,
    ) -> Any:
        """Returns what a function of some module returns, or raises what it raises.

        Args:
          function: what to call; it and its arguments are pickled. Not of a program's own file,
            which cannot be imported.
          *arguments: its arguments.
          data: its last argument, such as a list of images, which is passed in shared memory:
            pickled, it would be copied several times more.
          seconds: how long to wait for an answer; None waits for ever.
          on_progress: called with what the function tells; it gets another argument, `tell`, a
            function for that.

        Raises:
          ChildDiedError: the process died, or did not answer in time and was killed.
        """
        if self._parent != os.getpid():  # a fork of the program needs one of its own
            self.close()
        if self._idle_seconds is not None and self._connection is not None:
            idle = time.monotonic() - self._last_used
            if idle > self._idle_seconds / 2:
                self.close()
        if self._connection is None:
            self._start()
        answer = None
        try:
            sizes = None if data is None else [*map(len, data)]
            if data and sizes and os.pwritev(self._memory, data, 0) < sum(sizes):
                raise InputError(f"{sum(sizes):,} bytes at once are too many for a process.")
            self._send((function, arguments, sizes, on_progress is not None))
            while answer is None:
                kind, value = self._receive(seconds)
                if kind == "progress" and on_progress:
                    on_progress(*value)
                else:
                    answer = kind, value
        finally:
            if answer is None:  # a later call must not get the answer to this one
                self.close()
        self._last_used = time.monotonic()
        if answer[0] == "error":
            raise answer[1]
        return answer[1]

    def _send(self, message: Any) -> None:
        assert self._connection
        try:
            self._connection.send(message)
        except ConnectionError as error:
            raise self._explain_end() from error

    def _receive(self, seconds: float | None) -> tuple[str, Any]:
        assert self._connection
        try:
            if _has_input(self._connection, seconds):
                message: tuple[str, Any] = self._connection.recv()
                return message
        except (EOFError, ConnectionError) as error:
            raise self._explain_end() from error
        raise ChildDiedError(f"there was no answer within {seconds:g} s", "timeout")

    def kill(self) -> None:
        """Ends the process, and the call that another thread waits for; no other one starts."""
        self._is_stopped = True
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """Ends the process, if there is one; a fork of the program only forgets it."""
        if self._process and self._parent == os.getpid():
            self._process.kill()
            self._process.wait()
        for stream in (self._connection, self._stderr):
            if stream:
                stream.close()
        if self._memory >= 0:
            os.close(self._memory)
        self._process = self._connection = self._stderr = None
        self._memory, self.started_with = -1, {}

    def _start(self) -> None:
        if self._is_stopped:
            raise ChildDiedError("it was stopped", "end")
        self.started_with, self._last_used = dict(os.environ), time.monotonic()
        self._parent = os.getpid()
        self._connection, theirs = Pipe()
        command = (sys.executable, "-c", _CODE)
        path = dict.fromkeys([*_PATH, *filter(os.path.isabs, sys.path)])
        self._memory = os.memfd_create("dali_tf_input")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        descriptors = (theirs.fileno(), self._memory)
        with theirs:
            self._process = subprocess.Popen(
                [*command, repr((*descriptors, self._idle_seconds)), *path],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,  # decoders print
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches the program alone, which ends this process
                env={**os.environ, **self._environment},
            )
        if self._is_stopped:  # meanwhile
            self._process.kill()

    def _explain_end(self) -> ChildDiedError:
        """Returns the error for a process that has ended, or is about to."""
        assert self._process
        assert self._stderr
        status = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        text = ": ".join([describe_end(status), *words])
        return ChildDiedError(text, "crash" if -status in _CRASHES else "end")


# The signals by which code ends its own process.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def describe_end(code: int) -> str:
    """Says what an exit code means: "SIGSEGV", "exit code 3"."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve(descriptor: int, memory: int, idle_seconds: float | None) -> None:
    """Calls what comes over a connection, until it is closed or idle: the other side of `Child`."""
    connection: Connection[Any, Any] = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # whoever asked is gone
        while _has_input(connection, idle_seconds):
            function, arguments, sizes, has_progress = connection.recv()
            if sizes is not None:
                ends = itertools.accumulate(sizes)
                data = [
                    os.pread(memory, size, end - size)
                    for size, end in zip(sizes, ends, strict=False)
                ]
                arguments = (*arguments, data)
            more: dict[str, Any] = {}
            if has_progress:
                more["tell"] = lambda *values: connection.send(("progress", values))
            try:
                # One that tells of its progress notices the end by that.
                with contextlib.nullcontext() if has_progress else _ending_with(connection):
                    answer = ("result", function(*arguments, **more))
            except ConnectionError:
                raise
            except Exception as error:
                answer = ("error", error)
            try:
                connection.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # it cannot be pickled
                connection.send(("error", InputError(f"{answer[1]!r}: {error}")))
    os._exit(0)  # at once: there is nothing to tidy up, and TensorFlow takes its time


@contextlib.contextmanager
def _ending_with(connection: "Connection[Any, Any]") -> Iterator[None]:
    """Has the kernel end this process, also in C code that hangs, if the other side closes.

    It sends SIGIO then, whose default action that is.
    """
    descriptor = connection.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if _has_input(connection, 0):  # closed before: nothing else comes during a call
            raise EOFError
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


_IDLE_SECONDS = 60.0


def _has_input(connection: "Connection[Any, Any]", seconds: float | None) -> bool:
    """Waits for a message, or the end; returns False after `seconds`. `poll` takes longer."""
    if seconds is None:
        return True
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


_idle: list[Child] = []  # of a process that an executor runs: one for each of its threads


def call_apart(version: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a child of an executor's process, perhaps on another machine.

    Raises:
      InputError: another version of this package is installed there.
      ChildDiedError: the process died.
    """
    if version != __version__:
        text = f"A worker has dali_tf_input {__version__}, this program {version}"
        raise InputError(f"{text}: install the same version everywhere.")
    child = _idle.pop() if _idle else Child(idle_seconds=_IDLE_SECONDS)
    if child.started_with != dict(os.environ):  # such as credentials
        child.close()
    try:
        return child.call(function, *arguments)
    finally:
        _idle.append(child)


def run_command(
    words: Sequence[str],
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Runs a command to its end; returns its exit code and what it wrote to stdout and stderr.

    It has a session of its own, which Ctrl-C does not reach: this process ends it.

    Raises:
      subprocess.TimeoutExpired: it ran longer than `seconds`.
    """
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is left
            process.communicate(timeout=5)
        raise
    return process.returncode, output, errors
