"""How commands start, and what they print: errors, tables, progress."""

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.command import Flags, check_no_arguments, format_count, format_seconds
from support.benchmark import Stats

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
    saved_stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            os.write(saved_stderr, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table with right-aligned numbers. Cells are folded, never cut."""
    cells = list(zip(columns, *rows, strict=True))
    console = Console(highlight=False, markup=False, emoji=False)
    full = sum(max(map(cell_len, column)) + 2 for column in cells)
    if not console.is_terminal:  # as wide as it needs to be
        console.width = full
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, *below in cells:
        numeric = all(cell[:1].isdigit() or cell == "-" for cell in below)
        longest = max(cell_len(word) for cell in (header, *below) for word in cell.split())
        # Only columns of text give way on a narrow terminal.
        width = longest if numeric and full > console.width else None
        side = "right" if numeric else "left"
        table.add_column(header, justify=side, overflow="fold", min_width=longest, width=width)
    for row in zip(*(below for _, *below in cells), strict=True):
        table.add_row(*row)
    console.print(table)


def format_stats(stats: Stats) -> str:
    """Returns "median (minimum to maximum)"."""
    return f"{stats.median:.2f} ({stats.minimum:.2f} to {stats.maximum:.2f})"


def progress(items: Iterable[Any], *, what: str, total: int) -> Iterator[Any]:
    """Yields `items` under a progress bar if stderr is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield from bar.track(items, total=total)


def status(what: str) -> Status:
    """Returns a line with a spinner, shown if stderr is a terminal; `update` changes its text."""
    return Console(stderr=True, highlight=False).status(what)


def check_writable(flag: Any, *, suffix: str = "") -> None:
    """Raises InputError if a flag names a file that cannot be written."""
    path, name = flag.value, f"`{flag.name}`"
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if suffix and not path.endswith(suffix):
        raise InputError(f"{name} must end in {suffix}, got {path}.")
    if os.path.isdir(path):
        raise InputError(f"{name} {path} is a folder: name a file.")
    if not os.path.isdir(folder):
        fix = f"mkdir -p {shlex.quote(folder)}"
        raise InputError(f"{name} {path}: there is no folder {folder}: {fix}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        if os.path.exists(path):
            with open(path, "ab"):
                pass
    except OSError as error:
        raise InputError(f"{name} {path} cannot be written: {error.strerror}.") from error


def write_json(flag: Any, report: Any) -> None:
    """Writes a report to the file that a flag names, if it does, and says where."""
    if flag.value:
        with open(flag.value, "w", encoding="utf-8") as stream:
            json.dump(report, stream, indent=2)
            stream.write("\n")
        print(f"results in {flag.value}")
