"""Runs commands for tests: in this process, or by their command line."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from conftest import ROOT, SCRIPTS

from dali_tf_input.cli import command

_numbers = itertools.count()
CLI = ROOT / "dali_tf_input/cli"
# The others are scripts.
PACKAGE = {"index", "convert", "preview", "explore", "card", "predict", "doctor", "service"}


def load(script):
    """Imports a command as a new module, with flags of its own."""
    path = SCRIPTS / script
    if script in PACKAGE:
        is_folder = (CLI / script).is_dir()
        path = CLI / script / f"{script}.py" if is_folder else CLI / f"{script}.py"
    spec = importlib.util.spec_from_file_location(f"command_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(script, *arguments, cwd=None):
    """Runs a command in this process; returns what looks like a finished process.

    Without the progress that an index run shows every ten seconds, on a machine that is busy.
    """
    arguments = list(map(str, arguments))
    output, errors, before = io.StringIO(), io.StringIO(), os.getcwd()
    argv = sys.argv
    try:
        os.chdir(cwd or before)
        module = load(script)
        sys.argv = [str(SCRIPTS / script), *arguments]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = command.run(module.main, module.FLAGS, arguments)
    finally:
        os.chdir(before)
        sys.argv = argv
    lines = errors.getvalue().splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith("indexing: "))
    return subprocess.CompletedProcess([script], code, output.getvalue(), said)


def python(*arguments, timeout=300, **options):
    """Runs Python; returns the finished process."""
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def run_cold(script, *arguments, cwd=None, **environment):
    """Runs a command by its command line; returns the finished process."""
    words = ["-m", "dali_tf_input", script] if script in PACKAGE else [SCRIPTS / script]
    return python(*words, *arguments, cwd=cwd, env={**os.environ, **environment})


def fails(process, *parts, bad_records=False):
    """Checks that a command failed with lines on stderr that hold `parts`, and no traceback."""
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert bad_records or process.stderr.startswith("error: "), process.stderr
    for part in parts:
        assert part in process.stderr


def children_of(pid):
    """Returns the processes that all threads of a process have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += task.read_text().split()
    return found


def wait_until(is_true, what="it did not come", seconds=240):
    """Waits for what another process does."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def succeeds(process, *, quiet=True):
    """Checks that a program ended well, if `quiet` without a word on stderr; returns the process.

    Those that import TensorFlow themselves are not quiet.
    """
    assert process.returncode == 0, process.stderr
    assert not (quiet and process.stderr), process.stderr
    return process


def rows(output):
    """Returns the (name, value) rows that a command prints."""
    return dict(
        re.split(r"(?<=:) |  +", line, maxsplit=1)
        for line in output.splitlines()
        if re.search(r"(?<=:) |  +", line)
    )
