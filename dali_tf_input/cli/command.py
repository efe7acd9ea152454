"""Runs a command: parses its flags, prints its help and one-line errors, returns the exit code."""

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from dali_tf_input.errors import InputError

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

    def number(self, name: str, default: float, text: str, least: float | None = None) -> Any:
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
    """Calls `main` with the arguments that are not flags; None takes those of this process.

    The docstring of its module is the help, and what follows "example:" ends it.

    Returns:
      The exit code: what `main` returns (None is 0), 1 after an error in the input, 130 after
      Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"--help", "-h", "--helpfull", "--helpshort"} & set(arguments):
        print(format_help(sys.modules[main.__module__].__doc__ or "", flag_values))
        return 0
    try:
        for name in flag_values:
            flag_values[name].unparse()  # a second run in one process starts from the defaults
        positional = flag_values(["command", *arguments])[1:]
        flag_values.check_bounds()
        return main(positional) or 0
    except (InputError, OSError, flags.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


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
        indent = " " * _INDENT
        wrapped = textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=indent)
        if len(shown) < _INDENT - 1:
            wrapped[0] = shown.ljust(_INDENT) + wrapped[0][_INDENT:]
            shown = ""
        lines += [*([shown] if shown else []), *wrapped]
    return "\n".join([*lines, *(["", f"example: {example.strip()}"] if example else [])])


def check_no_arguments(arguments: Sequence[str]) -> None:
    """Raises InputError if a command that takes flags only got arguments."""
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
