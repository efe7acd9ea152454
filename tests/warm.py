"""Starts programs as a command line would, but in processes forked from one that has imported TensorFlow already.

To import TensorFlow, Keras and DALI's plugin takes four seconds of CPU; where dozens of tests each
start a program, that is a fifth of all their time. A program that starts here meets what it would:
its arguments, folder, environment and module path, its own stdout and stderr; exit code or signal
are its own. Three things are otherwise: import errors and the imports' chatter are those of the
first start, the hash seed is shared, and at its end the interpreter is not taken down. So what a
test says of those, and a training on each backend, starts by the command line (`run_cold` in
test_scripts.py), as what has no TensorFlow does.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from multiprocessing import forkserver, process
from pathlib import Path

from dali_tf_input.cli.command import quiet_stderr
from support.processes import die_with_parent

TESTS = Path(__file__).resolve().parent
NOT_OF_A_PROGRAM = {str(TESTS), str(TESTS.parent / "scripts")}  # what pytest puts on the path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["warm_imports"])  # found by PYTHONPATH
_running = set()


@atexit.register
def _end_all() -> None:
    """Leaves no program running where a test failed: `multiprocessing` would wait for it."""
    for program in _running:
        program.kill()


class Program:
    """A program that runs; what `subprocess.Popen` offers of it."""

    def __init__(
        self, arguments: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        """Starts a program.

        Args:
          arguments: a script and its arguments, or "-c", code and its arguments.
          cwd: its folder; this process's by default.
          env: all of its environment variables; this process's by default.
        """
        self.args = list(map(str, arguments))
        with quiet_stderr():
            forkserver.ensure_running()
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        paths = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in self._streams]
        environment = dict(os.environ if env is None else env)
        arguments = (self.args, str(cwd or os.getcwd()), environment, paths)
        self._process = _context.Process(target=_become, args=arguments)
        self._process.start()
        _running.add(self)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns the exit code. TimeoutExpired after `timeout` seconds: it runs
        on.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        _running.discard(self)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; returns what it wrote to stdout and stderr."""
        self.wait(timeout)
        return self._read(0), self._read(1)

    @property
    def output(self) -> str:
        """What it wrote to stdout so far."""
        return self._read(0)

    def _read(self, number: int) -> str:
        self._streams[number].seek(0)
        return self._streams[number].read().decode()


def run(arguments, *, cwd=None, env=None, timeout=300) -> subprocess.CompletedProcess:
    """Runs a program to its end, killed after `timeout` seconds."""
    program = Program(arguments, cwd=cwd, env=env)
    try:
        output, errors = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
        raise
    return subprocess.CompletedProcess(program.args, program.returncode, output, errors)


def _become(arguments: list[str], cwd: str, env: dict[str, str], streams: list[str]) -> None:
    """Makes of the process that was forked the program; never returns."""
    for number, path in enumerate(streams, start=1):
        stream = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(stream, number)
        os.close(stream)
    code = 1
    try:
        assert "tensorflow" in sys.modules, (
            "warm.py: this process was to be forked from one that has imported TensorFlow"
        )
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        process._parent_process = None  # it is no worker of a pool; pools of its own start
        die_with_parent()  # which ends when the tests do
        # What runs the tests may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.set_start_method(None, force=True)
        is_code = arguments[0] == "-c"
        folder = "" if is_code else os.path.dirname(arguments[0])
        sys.path[:] = [folder, *(path for path in sys.path if path not in NOT_OF_A_PROGRAM)]
        if is_code:
            sys.argv = ["-c", *arguments[2:]]
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
