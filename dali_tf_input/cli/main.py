"""``dali-tf-input``, which starts the command that its first argument names."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from dali_tf_input import __version__

# What each does. A command is a module of this package with `FLAGS` and `main`, imported alone.
_COMMANDS = {
    "index": "index and validate TFRecords (run this first)",
    "convert": "make TFRecords from images, tables, or other TFRecords",
    "preview": "draw a sheet of images as the model sees them",
    "explore": "summarize a dataset and report likely problems",
    "card": "describe a dataset in the files that TensorFlow Datasets reads",
    "predict": "classify images with an exported model",
    "doctor": "check this installation, and say how to fix it",
    "service": "run the dispatcher or a worker of a tf.data service",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` are by default those of this process. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _start(*(arguments or ["--help"]))
    except KeyboardInterrupt:  # while a command is imported
        print("interrupted", file=sys.stderr)
        return 130


def _start(name: str, *others: str) -> int:
    # Imported here, because Ctrl-C may come meanwhile.
    from dali_tf_input.cli import command
    from dali_tf_input.records.paths import program

    if name in ("--version", "-V", "version"):
        print(f"dali-tf-input {__version__}")
        return 0
    if name == "help" and others:
        name, others = others[0], ("--help",)
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
