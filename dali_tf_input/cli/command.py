"""What commands share: flags, help, errors and exit codes; tables, progress, files to write."""

import contextlib
import gc
import io
import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import flags
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from dali_tf_input.errors import InputError
from dali_tf_input.storage.objects import is_url

_WIDTH, _INDENT = 98, 28


class Flags(flags.FlagValues):  # type: ignore[misc]
    """The flags of one command, so that several commands can run in one process."""

    def string(self, name: str, default: str | None, text: str) -> Any:
        """Defines a string flag; `text` is its help. Returns a holder with its `value`."""
        return flags.DEFINE_string(name, default, text, flag_values=self)

    def strings(self, name: str, text: str) -> Any:
        """Defines a flag that may be given several times."""
        return flags.DEFINE_multi_string(name, [], text, flag_values=self)

    def list(self, name: str, default: Any, text: str) -> Any:
        """Defines a flag of several values, separated by commas."""
        return flags.DEFINE_list(name, default, text, flag_values=self)

    def integer(self, name: str, default: int | None, text: str, least: int | None = None) -> Any:
        """Defines an integer flag; values below `least` are refused."""
        return self._bounded(flags.DEFINE_integer(name, default, text, flag_values=self), least)

    def number(
        self, name: str, default: float | None, text: str, least: float | None = None
    ) -> Any:
        """Defines a float flag; values below `least` are refused."""
        return self._bounded(flags.DEFINE_float(name, default, text, flag_values=self), least)

    def boolean(self, name: str, default: bool, text: str) -> Any:
        """Defines a flag that is given as --name or --noname."""
        return flags.DEFINE_boolean(name, default, text, flag_values=self)

    def choice(self, name: str, default: str | None, choices: Sequence[str], text: str) -> Any:
        """Defines a flag with one of a few values."""
        return flags.DEFINE_enum(name, default, choices, text, flag_values=self)

    def check_bounds(self) -> None:
        """Raises InputError for the first number that is too small."""
        for name, least in self.__dict__.get("_least", {}).items():
            value = self[name].value
            if value is not None and not math.isfinite(value):
                raise InputError(f"`{name}` must be a finite number, got {value}.")
            if value is not None and value < least:
                raise InputError(f"`{name}` must be at least {least:,}, got {value:,}.")

    def _bounded(self, holder: Any, least: float | None) -> Any:
        if least is not None:
            self.__dict__.setdefault("_least", {})[holder.name] = least
        return holder


def run(
    main: Callable[[list[str]], int | None],
    flag_values: Flags,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parses flags and calls `main` with the other arguments; None takes those of this process.

    The help is the docstring of its module; the part after "example:" is shown last.

    Returns:
      The exit code: what `main` returns (None is 0), 1 after an error in the input; 130 after
      Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, which end a command in the same way.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if problem := _prepare_output():
        print(f"error: {problem}", file=sys.stderr)
        return 1
    try:
        with _stopped_by_signals():
            return _run(main, flag_values, arguments)
    except KeyboardInterrupt as stop:
        return tell_stop(stop)


def tell_stop(stop: KeyboardInterrupt) -> int:
    """Says what stopped a command; returns its exit code."""
    number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
    words = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    print(words, file=sys.stderr, flush=True)
    return 128 + number


class Stopped(KeyboardInterrupt):
    """A signal that asks a process to end: what it started and has not finished is removed."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raises `Stopped` in the body for SIGTERM and SIGHUP, unless they are ignored, as by nohup."""

    def stop(number: int, _: Any) -> None:
        raise Stopped(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare_output() -> str | None:
    """Lets output in any encoding show all characters; says what is wrong with the output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return None if sys.stdout else "The standard output is closed: > /dev/null discards it."


def _run(
    main: Callable[[list[str]], int | None], flag_values: Flags, arguments: Sequence[str]
) -> int:
    """Does what `run` says, but for signals."""
    try:
        if {"--help", "-h", "--helpfull", "--helpshort"} & set(arguments):
            print(format_help(sys.modules[main.__module__].__doc__ or "", flag_values), flush=True)
            return 0
        for name in flag_values:
            flag_values[name].unparse()  # a second run in one process starts from the defaults
        positional = flag_values(["command", *arguments])[1:]
        flag_values.check_bounds()
        return main(positional) or 0
    except BrokenPipeError:  # what reads the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, OSError, flags.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        tf = sys.modules.get("tensorflow")
        if tf is None or not isinstance(error, tf.errors.OpError):
            raise
        print(f"error: TensorFlow stopped: {error.message}", file=sys.stderr)
        return 1


def format_help(text: str, flag_values: Flags) -> str:
    """Returns a command's help: what it does, its flags, an example."""
    text, _, example = text.strip().partition("\nexample:")
    lines = [text.strip(), "", "flags:"]
    for name in sorted(flag_values):
        flag = flag_values[name]
        default = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
        shown = f"  --[no]{name}" if flag.boolean else f"  --{name}"
        if default not in (None, "") and not flag.boolean:
            shown += f"={default}"
        words = f"{flag.help} (on by default)" if flag.boolean and default else flag.help
        # What absl adds: the choices, without spaces, and how to repeat a flag.
        words = re.sub(r"^<([^>]*)>: (.*)$", lambda one: _list_choices(*one.groups()), words)
        words = words.partition(";\n")[0]
        indent = " " * _INDENT
        wrapped = textwrap.wrap(
            words,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(shown) < _INDENT - 1:
            wrapped[0] = shown.ljust(_INDENT) + wrapped[0][_INDENT:]
            shown = ""
        lines += [*([shown] if shown else []), *wrapped]
    return "\n".join([*lines, *(["", f"example: {example.strip()}"] if example else [])])


def _list_choices(choices: str, words: str) -> str:
    return f"{words} One of {choices.replace('|', ', ')}."


def refuse_useless(rows: Iterable[tuple[bool, Sequence[Any], str]]) -> None:
    """Raises InputError for a flag that was given and does nothing.

    Args:
      rows: whether this is so, the flags that then do nothing, and why, as in "with --records".
    """
    for is_so, useless, why in rows:
        for flag in useless if is_so else ():
            if flag.present:
                raise InputError(f"--{flag.name} does nothing {why}: leave it out.")


def check_no_arguments(arguments: Sequence[str]) -> None:
    """Raises InputError if a command that takes only flags got other arguments."""
    if arguments:
        raise InputError(
            f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'."
        )


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Prints (name, value) rows with aligned values."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def format_count(number: int, what: str) -> str:
    """Returns "1 file", "2 files"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Returns a duration as text: "45 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def import_tensorflow() -> Any:
    """Imports TensorFlow without its start-up messages, unless the import fails.

    The import makes many objects, which all stay. So no garbage is collected meanwhile, and later
    collections, also the one at exit, skip these objects.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    gc.disable()
    try:
        with quiet_stderr():
            import tensorflow as tf
    finally:
        gc.enable()
        gc.freeze()
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
    """Prints a table with right-aligned numbers. Cells are folded, never cut.

    On a terminal too narrow for the longest words, each column comes by itself, beside the first.
    """
    rows = list(rows)
    cells = list(zip(columns, *rows, strict=True))
    console = Console(highlight=False, markup=False, emoji=False)
    full = sum(max(map(cell_len, column)) + 2 for column in cells)
    if not console.is_terminal:  # as wide as it needs to be
        console.width = full
    words = [{word for cell in column for word in cell.split()} for column in cells]
    least = sum(max(map(cell_len, own), default=0) + 2 for own in words) - 2
    if least > console.width and len(columns) > 2:
        for number in range(1, len(columns)):
            print_table((columns[0], columns[number]), [(row[0], row[number]) for row in rows])
            console.print()
        return
    console.width = max(console.width, least)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, *below in cells:
        numeric = all(cell[:1].isdigit() or cell == "-" for cell in below)
        longest = max(cell_len(word) for cell in (header, *below) for word in cell.split() or [""])
        # Only columns of text give way on a narrow terminal.
        width = longest if numeric and full > console.width else None
        side: JustifyMethod = "right" if numeric else "left"
        table.add_column(header, justify=side, overflow="fold", min_width=longest, width=width)
    for row in zip(*(below for _, *below in cells), strict=True):
        table.add_row(*row)
    console.print(table)


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
    if is_url(path):
        raise InputError(f"{name} is written to a local path, got {path}.")
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
