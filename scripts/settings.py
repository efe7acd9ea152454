"""Settings of the input, and a process that measures them one after the other: what profile_stages.py and tune.py share."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from absl import flags

import backends
import console
import input_flags
from dali_tf_input import AUTOTUNE, DaliOptions, InputError, InputSpec, TfDataOptions

ORDER = flags.DEFINE_enum("order", "global", ["global", "buffer"], "How the records are mixed, as in training.")

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_KINDS = {"dali": DaliOptions, "tf_data": TfDataOptions}
_LIMIT = 120  # seconds beyond the window after which the process counts as hung: TensorFlow's start, a search for a bad record
_TRIES = 2  # a process that died once, of whatever, says nothing of a setting
_CRASHES = 3 * _TRIES  # of the measuring process, in a row, after which something other than a setting is wrong


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured: options, and what else differs from the flags.

    Attributes:
      options: of either backend.
      order: how the records are mixed.
      preprocess: fields of `Preprocess` that differ.
      until: None for the whole pipeline, a stage to cut it after, or "device" for whole batches on the GPU.
    """

    options: DaliOptions | TfDataOptions
    order: str = "global"
    preprocess: dict[str, Any] = dataclasses.field(default_factory=dict)
    until: str | None = None

    @property
    def backend(self) -> str:
        """The name of the backend, as in the other scripts."""
        return f"dali_{self.options.device}" if isinstance(self.options, DaliOptions) else "tf_data"

    @property
    def key(self) -> str:
        """A text that is the same for equal settings only."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {
            "backend": "dali" if isinstance(self.options, DaliOptions) else "tf_data",
            "options": dataclasses.asdict(self.options),
            "order": self.order,
            "preprocess": self.preprocess,
            "until": self.until,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Setting":
        """Makes a setting of what `to_json` returned."""
        options = _KINDS[values["backend"]](**values["options"])
        return cls(options, values["order"], values["preprocess"], values["until"])


def training_spec() -> InputSpec:
    """Returns what is measured, by the flags of compare_throughput.py and --order.

    Raises:
      InputError: a flag is out of its range, or the records do not fill a batch.
    """
    spec = dataclasses.replace(backends.training_spec(), order=ORDER.value)
    batch_size, num_records = backends.BATCH_SIZE.value, spec.dataset.num_records
    if not 1 <= batch_size <= num_records:
        raise InputError(
            f"`batch_size` must be from 1 to the {console.count(num_records, 'record')} of these files, got {batch_size}: "
            f"name more files, or --batch_size={num_records}."
        )
    return spec


def default_options(*, has_gpu: bool) -> dict[str, DaliOptions | TfDataOptions]:
    """Returns the default options of each backend that works here, with the plan of --fuse, the package's own choice first."""
    fuse = backends.FUSE.value
    of_dali = "auto" if fuse == "scaled" else fuse  # which DALI does not have
    found: dict[str, DaliOptions | TfDataOptions] = {
        "tf_data": TfDataOptions(fuse=fuse),
        "dali_cpu": DaliOptions(device="cpu", fuse=of_dali),
    }
    return {"dali_gpu": DaliOptions(device="gpu", fuse=of_dali), **found} if has_gpu else found


class SettingError(Exception):
    """A setting cannot be measured: refused, or the process died over it."""


class Worker:
    """A process that measures settings; a new one is started where it died (a context manager)."""

    def __init__(
        self, log: str, *, files: list[str] | None = None, batch_size: int | None = None, cores: int | None = None
    ) -> None:
        """Makes a worker, not started yet.

        Args:
          log: the file that takes what the process writes to stderr.
          files: the arguments that name the files; None are those of this process.
          batch_size: images in a batch; None is the flag's.
          cores: how many the process may use; None are all.
        """
        self._log = log
        self._cores = cores
        self._hung = False
        self._files = files or input_flags.as_arguments(input_flags.FILES.value)
        self._batch_size = batch_size or backends.BATCH_SIZE.value
        self._process: subprocess.Popen | None = None
        self._crashes = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            console.kill(self._process)

    def start(self) -> None:
        """Starts the process, if there is none.

        Raises:
          InputError: it does not start.
        """
        if self._process is not None:
            return
        arguments = [f"--{flag.name}={str(flag.value).lower()}" for flag in (*backends.WORK_FLAGS, ORDER)]
        arguments.append(f"--batch_size={self._batch_size}")  # of two the last counts
        arguments += [f"--cores={self._cores}"] if self._cores else []
        command = [sys.executable, os.path.join(_FOLDER, "measure_settings.py"), *arguments, *self._files]
        with open(self._log, "w", encoding="utf-8") as log:
            self._process = console.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        if self._read(_LIMIT) is None:
            raise InputError(f"The measuring process ends at its start. {self._last_words()}")

    def measure(self, setting: Setting, *, seconds: float) -> dict[str, Any]:
        """Measures a window of `seconds`; see `measure_settings.measure_setting`.

        Raises:
          SettingError: the setting is refused, or the process died over it, twice, or hung.
          InputError: the process died over one setting after the other.
        """
        for _ in range(_TRIES):
            answer, code = self._ask(setting, seconds)
            if answer is not None:
                self._crashes = 0
                if "error" in answer:
                    raise SettingError(answer["error"])
                return answer
            self._crashes += 1
            if self._crashes >= _CRASHES:
                raise InputError(f"The measuring process died {_CRASHES} times in a row. {self._last_words()}")
            if self._hung:
                self._hung = False
                raise SettingError(f"no answer within {_LIMIT + 10 * seconds:.0f} s")
        raise SettingError(f"the process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")

    def _ask(self, setting: Setting, seconds: float) -> tuple[dict[str, Any] | None, int]:
        """Returns the answer on a setting, None where the process ended or was killed over it; and its exit code."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        answer = None
        with contextlib.suppress(BrokenPipeError):  # it died since it last answered
            self._process.stdin.write(json.dumps({"setting": setting.to_json(), "seconds": seconds}) + "\n")
            self._process.stdin.flush()
            answer = self._read(_LIMIT + 10 * seconds)
        if answer is not None:
            return answer, 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        console.kill(self._process)
        code = self._process.returncode or 0
        self._process = None
        return None, code

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next answer; None where the process ended, or had to be killed as it gave none."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._hung = True
            self._process.kill()
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as stream:
            return "".join(stream.readlines()[-5:]).strip()


def images_per_second(window: dict[str, Any]) -> float:
    """Returns the rate of a window."""
    return window["measured_batches"] * window["batch_size"] / window["seconds"]


def cpu_seconds_per_1000_images(window: dict[str, Any]) -> float:
    """Returns the CPU time of a window, all threads of the process."""
    return 1000 * window["cpu_seconds"] / (window["measured_batches"] * window["batch_size"])


def as_python(value: Any) -> str:
    """Returns the value of an option as Python writes it."""
    return "AUTOTUNE" if type(value) is int and value == AUTOTUNE else repr(value)


def describe_difference(setting: Setting, base: Setting) -> str:
    """Says in what a setting differs from another one, as Python writes it: "num_threads=4, order='buffer'"."""
    parts = []
    if setting.backend != base.backend:
        default = DaliOptions(device=setting.options.device) if isinstance(setting.options, DaliOptions) else TfDataOptions()
        base_options = default
        parts.append(setting.backend)
    else:
        base_options = base.options
    parts += [
        f"{field.name}={as_python(getattr(setting.options, field.name))}"
        for field in dataclasses.fields(setting.options)
        if getattr(setting.options, field.name) != getattr(base_options, field.name)
    ]
    if setting.order != base.order:
        parts.append(f"order={setting.order!r}")
    parts += [f"{name}={value!r}" for name, value in setting.preprocess.items() if base.preprocess.get(name) != value]
    return ", ".join(parts) or "default"
