"""What the scripts share: how they start, fail, and print."""

import contextlib
import ctypes
import multiprocessing
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import app, logging
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dali_tf_input import Fault, InputError
from dali_tf_input.index import Progress as IndexState

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE = 5  # seconds after a Ctrl-C
_SECONDS_BETWEEN_LINES = 10  # of progress where there is no terminal


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs `main` with the arguments that are no flags; a mistake in the input is one line on stderr and exit code 1."""

    def checked(arguments: list[str]) -> int | None:
        try:
            return main(arguments[1:])
        except (InputError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except Exception as error:
            tf = sys.modules.get("tensorflow")
            if tf is None or not isinstance(error, tf.errors.OpError):
                raise  # a mistake of ours: show where
            print(f"error: TensorFlow stopped: {error.message}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    logging.set_verbosity(logging.WARNING)
    if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        die_with_parent()  # see `without_interrupts`
    threading.Thread(target=_heed_interrupts, args=(_interrupts(),), daemon=True).start()
    app.run(checked)


def _interrupts() -> int:
    """Returns a descriptor on which each signal of this process can be read, whatever the main thread does."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _heed_interrupts(signals: int) -> None:
    """Has a later Ctrl-C end this process where the main thread did not notice the first, as it waits inside C++ code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which the main thread is to get
    while signal.SIGINT not in os.read(signals, 1):
        pass
    time.sleep(_PATIENCE)
    while select.select([signals], [], [], 0)[0]:  # what came meanwhile was for Python
        os.read(signals, 64)
    with contextlib.suppress(OSError):  # whoever reads it may be gone
        os.write(2, b"waiting for what runs to end; Ctrl-C again does not wait\n")
    while signal.SIGINT not in os.read(signals, 1):
        pass
    with contextlib.suppress(OSError):
        os.write(2, b"\x1b[?25h" * os.isatty(2) + b"interrupted\n")  # and the cursor that a progress bar hides
    os._exit(130)


def import_tensorflow() -> Any:
    """Imports TensorFlow without its start-up chatter; what it printed is shown if the import fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_stderr():
        import tensorflow as tf
    tf.get_logger().setLevel("WARNING")
    return tf


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what is written to file descriptor 2, by C++ code too; shows it if the body raises."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            os.write(kept, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that the body starts never get a Ctrl-C, which a terminal sends to all: this one gets it, and ends them.

    Else they would print where they were, and one that ends in the middle of an answer leaves its reader waiting.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which is inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it went before the kernel was told


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process; one that hangs in a driver takes no signal, and is left."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # for one whose pipes another one holds


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process that never sees Ctrl-C; `options` as of `subprocess.Popen`. Whoever starts it is to end it."""
    process = None
    try:
        with without_interrupts():
            process = subprocess.Popen(command, text=True, errors="replace", **options)
    except BaseException:
        if process is not None:  # an interrupt came at the end of the body
            kill(process)
        raise
    return process


def call(command: Sequence[str], *, seconds: float | None = None, stderr: int | None = subprocess.PIPE) -> tuple[int, str, str]:
    """Runs a command to its end, and never longer than it may; returns its exit code and what it wrote to stdout and stderr.

    Args:
      command: its words.
      seconds: how long it may run; None is without limit.
      stderr: as of `subprocess.Popen`.

    Raises:
      subprocess.TimeoutExpired: it ran longer.
    """
    process = start(command, stdout=subprocess.PIPE, stderr=stderr)
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException:
        kill(process)
        raise
    return process.returncode, output, errors or ""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; columns whose every cell starts with a digit or is "-" are aligned to the right.

    Nothing is ever cut: where a terminal is too narrow, headers and texts are folded; where it still is, lines wrap.
    """
    rows = list(rows)
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # what is in a cell is shown as it is
    console = Console(**plain)
    cells = [[row[position] for row in rows] for position in range(len(columns))]
    numeric = [all(cell[:1].isdigit() or cell == "-" for cell in column) for column in cells]
    full = [max(map(cell_len, [header, *column])) for header, column in zip(columns, cells, strict=True)]
    widths, between = list(full), 2 * (len(columns) - 1)
    if console.is_terminal and sum(full) + between > console.width:
        for position, (header, column) in enumerate(zip(columns, cells, strict=True)):
            texts = column if numeric[position] else " ".join(column).split()
            widths[position] = max(map(cell_len, [*header.split(), *texts]), default=0)
        for position in range(len(columns)):  # what is left goes to the first that can use it
            if not numeric[position]:
                widths[position] += max(0, min(full[position] - widths[position], console.width - sum(widths) - between))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, is_numeric, width in zip(columns, numeric, widths, strict=True):
        table.add_column(header, justify="right" if is_numeric else "left", width=width)
    for row in rows:
        table.add_row(*row)
    Console(**plain, width=sum(widths) + between, height=console.height).print(table)


def check_writable(path: str, *, flag: str, suffix: str = "") -> None:
    """Raises InputError where the file that `flag` names cannot be written: before an hour of measuring, not after it."""
    folder = os.path.dirname(path) or "."
    if suffix and not path.endswith(suffix):
        raise InputError(f"`{flag}` must end in {suffix}, got {path}.")
    if os.path.isdir(path):
        raise InputError(f"`{flag}` {path} is a folder: name a file.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(f"`{flag}` {path}: {folder} is no folder. Name a file in one.")
    if not os.path.isdir(folder):
        raise InputError(f"`{flag}` {path}: there is no folder {folder}. Make it: mkdir -p {shlex.quote(folder)}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        if os.path.exists(path):
            with open(path, "ab"):
                pass
    except OSError as error:
        raise InputError(f"`{flag}` {path} cannot be written: {error.strerror}. Name a file where you may write.") from error


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Prints (name, value) rows, the values below one another."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def count(number: int, what: str) -> str:
    """Returns "1 file", "2 files"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class IndexProgress:
    """Progress of an index run on stderr: a bar on a terminal, elsewhere a line every ten seconds (a context manager)."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS_BETWEEN_LINES
        self._bar = Progress(
            TextColumn("indexing"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("indexing", total=None, text="")

    def __enter__(self) -> "IndexProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, state: IndexState) -> None:
        """Shows how far a run is."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        left = seconds * (state.num_bytes - state.bytes) / max(state.bytes, 1)
        text = (
            f"{state.files:,} of {state.num_files:,} files, {state.records:,} records, "
            f"{state.bytes / seconds / 1e6:,.0f} MB/s, {format_seconds(left)} left"
        )
        self._bar.update(self._task, total=state.num_bytes, completed=state.bytes, text=text)
        if not self._console.is_terminal and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(f"indexing: {text}", file=sys.stderr, flush=True)

    def print_fault(self, file: str, fault: Fault) -> None:
        """Prints one fault as one line."""
        place = "" if fault.record is None else f"record {fault.record:,}, byte {fault.offset:,}: "
        self._console.print(f"{file}: {place}{fault.reason}: {fault.detail}", highlight=False, markup=False, soft_wrap=True)

    def print_unreadable(self, file: str, fault: Fault) -> None:
        """Prints a fault that no index can leave out."""
        if fault.reason == "unreadable":
            self.print_fault(file, fault)


class Elapsed:
    """Progress of work that is bounded by time, on stderr: a bar on a terminal, nothing elsewhere (a context manager)."""

    def __init__(self, what: str, *, seconds: float | None) -> None:
        console = Console(stderr=True)
        self._seconds = seconds
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn(what),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=seconds, text="")

    def __enter__(self) -> "Elapsed":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, text: str) -> None:
        """Shows what is being done."""
        done = time.monotonic() - self._start
        left = f", {format_seconds(max(0.0, self._seconds - done))} left" if self._seconds is not None else ""
        self._bar.update(self._task, completed=done, text=f"{text}{left}")


def format_seconds(seconds: float) -> str:
    """Returns a span of time as text: "45 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def progress(items: Iterable[Any], *, what: str, total: int) -> Iterator[Any]:
    """Yields `items` under a progress bar where stderr is a terminal; silently where it is not."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield from bar.track(items, total=total)
