"""What the scripts share: how they start, fail, and print."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import app, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dali_tf_input import InputError


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
    app.run(checked)


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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; columns whose every cell starts with a digit or is "-" are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = list(rows)
    for position, column in enumerate(columns):
        numeric = all(row[position][:1].isdigit() or row[position] == "-" for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width: never cut a column
    console.print(table)


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
