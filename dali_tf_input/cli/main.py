"""``dali-tf-input``, which starts the command that its first argument names."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from dali_tf_input.cli import command
from dali_tf_input.records.paths import program

# What each does. A command is a module of this package with `FLAGS` and `main`, imported alone.
_COMMANDS = {
    "index": "where each record is, and whether it is sound: the first step",
    "convert": "TFRecords from images, tables, or other TFRecords",
    "preview": "a picture of what the model sees",
    "explore": "what records hold, and what of it would hurt training",
    "card": "what a set holds and means, in files that tfds reads",
    "predict": "the classes of images, by an exported model",
    "doctor": "what works in this installation, and how to fix the rest",
    "service": "a part of a tf.data service, on another machine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` are by default those of this process. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, *others = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        print(f"usage: {program()} COMMAND [flags] ...\n")
        command.print_rows((f"  {name}", what) for name, what in _COMMANDS.items())
        print(f"\nexample: {program()} index --help")
        return 0
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        known = ", ".join(_COMMANDS)
        print(f"error: there is no command '{name}', only {known}.{hint}", file=sys.stderr)
        return 1
    package = f"{name}.{name}" if name in ("convert", "explore") else name
    module = importlib.import_module(f"dali_tf_input.cli.{package}")
    return command.run(module.main, module.FLAGS, others)
