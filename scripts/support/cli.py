"""How commands start, and what they print: errors, tables, progress."""

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dali_tf_input import InputError, command
from dali_tf_input.command import Flags, check_no_arguments, format_count, format_seconds

__all__ = ["Flags", "check_no_arguments", "format_count", "format_seconds"]


def run(main: Callable[[list[str]], int | None], flag_values: Flags, arguments: Any = None) -> int:
    """Runs a command (see `dali_tf_input.command.run`); TensorFlow's errors are one line too."""

    def checked(positional: list[str]) -> int | None:
        try:
            return main(positional)
        except Exception as error:
            tf = sys.modules.get("tensorflow")
            if tf is None or not isinstance(error, tf.errors.OpError):
                raise
            print(f"error: TensorFlow stopped: {error.message}", file=sys.stderr)
            return 1

    checked.__module__ = main.__module__
    return command.run(checked, flag_values, arguments)


def import_tensorflow() -> Any:
    """Imports TensorFlow without its start-up messages, unless the import fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_stderr():
        import tensorflow as tf
    tf.get_logger().setLevel("WARNING")
    return tf


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what is written to file descriptor 2, also by C++; shows it if the body raises."""
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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table with right-aligned numbers. Cells are folded, never cut."""
    rows = list(rows)
    console = Console(highlight=False, markup=False, emoji=False)
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    full = sum(widths) + 2 * len(widths)
    if not console.is_terminal:  # as wide as it needs to be
        console.width = full
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, *cells in zip(columns, *rows, strict=True):
        numeric = all(cell[:1].isdigit() or cell == "-" for cell in cells)
        longest = max(
            (cell_len(word) for cell in [header, *cells] for word in cell.split()), default=0
        )
        # Only columns of text give way on a narrow terminal.
        width = longest if numeric and full > console.width else None
        side = "right" if numeric else "left"
        table.add_column(header, justify=side, overflow="fold", min_width=longest, width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def progress(items: Iterable[Any], *, what: str, total: int) -> Iterator[Any]:
    """Yields `items` under a progress bar if stderr is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _make_bar(*columns) as bar:
        yield from bar.track(items, total=total)


class Elapsed:
    """Progress of work that is bounded by time: a bar if stderr is a terminal."""

    def __init__(self, what: str, *, seconds: float | None) -> None:
        self._seconds = seconds
        self._start = time.monotonic()
        columns = (TextColumn(what), BarColumn(bar_width=30), TextColumn("{task.fields[text]}"))
        self._bar = _make_bar(*columns)
        self._task = self._bar.add_task(what, total=seconds, text="")

    def __enter__(self) -> "Elapsed":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, text: str) -> None:
        """Shows what is being done."""
        done = time.monotonic() - self._start
        left = format_seconds(max(0.0, self._seconds - done)) if self._seconds is not None else ""
        self._bar.update(self._task, completed=done, text=f"{text}{left and f', {left} left'}")


def _make_bar(*columns: Any) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def check_writable(path: str | None, *, flag: str, suffix: str = "") -> None:
    """Raises InputError if the file of `flag` cannot be written."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if suffix and not path.endswith(suffix):
        raise InputError(f"`{flag}` must end in {suffix}, got {path}.")
    if os.path.isdir(path):
        raise InputError(f"`{flag}` {path} is a folder: name a file.")
    if not os.path.isdir(folder):
        raise InputError(
            f"`{flag}` {path}: there is no folder {folder}: mkdir -p {shlex.quote(folder)}"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        if os.path.exists(path):
            with open(path, "ab"):
                pass
    except OSError as error:
        raise InputError(f"`{flag}` {path} cannot be written: {error.strerror}.") from error


def write_json(path: str, report: Any) -> None:
    """Writes a report, and says where."""
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(report, stream, indent=2)
        stream.write("\n")
    print(f"results in {path}")
