"""Flags that the scripts share, beyond those of the package's commands."""

import dataclasses
import sys
from typing import Any

import dali_tf_input as dti
from dali_tf_input.cli import flags
from dali_tf_input.cli.command import Flags
from dali_tf_input.cli.flags import check_list
from dali_tf_input.processes import describe_end, run_command
from support import machine

# What users call the backends on the command line.
BACKENDS: dict[str, dti.DaliOptions | dti.TfDataOptions] = {
    "tf_data": dti.TfDataOptions(),
    "dali_cpu": dti.DaliOptions(device="cpu"),
    "dali_gpu": dti.DaliOptions(device="gpu"),
}


def backends_flag(flags: Flags) -> Any:
    """Defines the flag whose value `begin` takes."""
    names = ", ".join(BACKENDS)
    return flags.list("backends", None, f"Of {names}; else all that work here.")


def begin(backends: list[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Prints a description of this machine; returns it, and the backends: those given, or all.

    Raises:
      InputError: a given backend does not work on this machine.
    """
    about = machine.describe()
    about["tensorflow_gpus"] = machine.count_gpus_of_tensorflow() if about["gpus"] else 0
    here = [name for name in BACKENDS if about["tensorflow_gpus"] or name != "dali_gpu"]
    names = check_list("backends", backends, here, " on this machine")
    machine.print_lines(about)
    return about, names


_TRY_DALI = """if True:
    import sys
    from dali_tf_input import InputError
    from dali_tf_input.backends.build import import_dali
    try:
        import_dali().load_operator()
    except InputError as error:
        sys.exit(str(error))
"""


def find_problem_of_dali() -> str | None:
    """Returns why DALI, its plugin or our operator does not work here, tried apart, else None."""
    end, _, errors = run_command([sys.executable, "-c", _TRY_DALI])
    return (errors.strip().splitlines() or [describe_end(end)])[-1] if end else None


class FileFlags(flags.FileFlags):
    """The flags that say which records are read, which a script can pass on."""

    def as_arguments(self) -> list[str]:
        """Returns these flags as arguments for a command that has them too."""
        arguments = [f"--{flag.name}={flag.value}" for flag in self.all if flag.value]
        return [*(f"--files={pattern}" for pattern in self.files.value), *arguments]


class WorkFlags(flags.WorkFlags):
    """The flags that say what is done to each image, which a script can pass on."""

    def as_arguments(self) -> list[str]:
        """Returns these flags as arguments for a command that has them too."""
        values = {flag.name: flag.value for flag in self.all}
        values["augment"] = ",".join(values["augment"])
        return [f"--{name}={str(value).lower()}" for name, value in values.items()]

    def spec(self, files: FileFlags, order: str) -> dti.InputSpec:
        """Returns what is measured.

        Raises:
          InputError: the records do not fill a batch.
        """
        records = files.dataset()
        if self.batch_size.value > records.num_records:
            raise dti.InputError(
                f"`batch_size` must be at most the {records.num_records} records, got "
                f"{self.batch_size.value}: name more files, or --batch_size={records.num_records}."
            )
        fields = {"order": order, "label": files.label()}
        return dti.InputSpec.for_training(records, self.preprocess(), **fields)

    def options(self, name: str) -> dti.DaliOptions | dti.TfDataOptions:
        """Returns the default options of a backend, with --decode."""
        return self.with_decode(BACKENDS[name])

    def with_decode(
        self, options: dti.DaliOptions | dti.TfDataOptions
    ) -> dti.DaliOptions | dti.TfDataOptions:
        """Returns options with --decode, as far as the backend knows it."""
        if isinstance(options, dti.DaliOptions) and self.decode.value == "scaled":
            return options
        return dataclasses.replace(options, decode=self.decode.value)
