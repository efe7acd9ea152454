"""What can be measured: ways of feeding TensorFlow, and the process that measures them."""

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dali_tf_input import AUTOTUNE, DaliOptions, InputError, TfDataOptions, Window
from support import processes
from support.flags import FileFlags, WorkFlags

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_SCRIPTS = os.path.dirname(os.path.dirname(os.path.dirname(_WORKER)))
_LIMIT = 120  # seconds beyond a window after which a process counts as hung
_TRIES = 2  # a process that died once says nothing about the candidate
_CRASHES = 3 * _TRIES  # in a row, after which something other than a candidate is wrong


@dataclass(frozen=True)
class Candidate:
    """One way of feeding TensorFlow.

    Attributes:
      options: of either backend.
      order: how the records are mixed.
      cores: how many cores the input may use.
      preprocess: fields of `Preprocess` that differ from the flags.
      variant: "dataset", what the package makes; "bare", its DALI pipeline without TensorFlow;
        "by_hand", the same work written by hand; "device", whole batches copied to the GPU; or a
        stage after which the pipeline is cut, see `stages`.
    """

    options: DaliOptions | TfDataOptions
    order: str = "global"
    preprocess: dict[str, Any] = field(default_factory=dict)
    variant: str = "dataset"

    @property
    def backend(self) -> str:
        """The name of the backend on the command line."""
        return f"dali_{self.options.device}" if isinstance(self.options, DaliOptions) else "tf_data"

    @property
    def key(self) -> str:
        """A text that is the same for equal candidates only."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {**dataclasses.asdict(self), "backend": self.backend}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Candidate":
        """Makes a candidate of what `to_json` returned."""
        kind = TfDataOptions if values["backend"] == "tf_data" else DaliOptions
        options = kind(**values["options"])
        return cls(options, values["order"], values["preprocess"], values["variant"])

    def describe(self, base: "Candidate") -> str:
        """Says how it differs from `base`, as Python writes it: "num_threads=4, order='buffer'"."""
        base_options, parts = base.options, []
        if self.backend != base.backend:
            parts.append(self.backend)
            device = getattr(self.options, "device", None)
            base_options = DaliOptions(device=device) if device else TfDataOptions()
        for one in dataclasses.fields(self.options):
            value = getattr(self.options, one.name)
            if value != getattr(base_options, one.name):
                is_autotune = type(value) is int and value == AUTOTUNE
                parts.append(f"{one.name}={'AUTOTUNE' if is_autotune else repr(value)}")
        parts += [f"order={self.order!r}"] if self.order != base.order else []
        parts += [f"{name}={value!r}" for name, value in self.preprocess.items()]
        return ", ".join(parts) or "default"


class CandidateError(Exception):
    """A candidate cannot be measured: it is refused, or the process died over it."""


class Measurer:
    """Measures candidates in another process (a context manager), restarted if it dies."""

    def __init__(self, files: FileFlags, work: WorkFlags, *arguments: str) -> None:
        """Makes a measurer, not started yet; `arguments` of worker.py override the flags."""
        flags = [*files.as_arguments(), *work.as_arguments()]
        self._words = [sys.executable, _WORKER, *flags, *arguments]
        self._worker: processes.JsonWorker | None = None
        self._crashes = 0

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.__exit__()
        self._worker = None

    def start(self) -> processes.JsonWorker:
        """Starts the process, if there is none."""
        if self._worker is None:
            path = os.pathsep.join([_SCRIPTS, os.environ.get("PYTHONPATH", "")])
            environment = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
            self._worker = processes.JsonWorker(self._words, environment=environment)
        return self._worker

    def measure(
        self, candidate: Candidate, *, seconds: float, warmup_batches: int = 0, fresh: bool = True
    ) -> dict[str, Any]:
        """Measures a window.

        Args:
          candidate: what to measure.
          seconds: the length of the window.
          warmup_batches: batches taken before it.
          fresh: whether to make the pipeline again if it is the one that was measured last.

        Returns:
          window (the fields of `Window`), first_batch_seconds, peak_memory_bytes.

        Raises:
          CandidateError: the candidate is refused, or the process died over it twice, or hung.
          InputError: the process died over one candidate after the other.
        """
        task = {"candidate": candidate.to_json(), "seconds": seconds}
        task |= {"warmup_batches": warmup_batches, "fresh": fresh}
        for attempt in range(_TRIES):
            try:
                answer = self.start().ask(task, seconds=_LIMIT + 10 * seconds)
            except processes.WorkerDied as error:
                self.__exit__()
                self._crashes += 1
                if self._crashes >= _CRASHES:
                    raise InputError(f"The measuring process died repeatedly: {error}") from error
                if attempt == _TRIES - 1 or "no answer" in str(error):
                    raise CandidateError(str(error)) from error
                continue
            self._crashes = 0
            if "error" in answer:
                raise CandidateError(answer["error"])
            return answer
        raise AssertionError("unreachable")

    def pause(self) -> None:
        """Stops the process until it measures again: it would go on filling its queues."""
        if self._worker is not None:
            self._worker.pause()


def images_per_second(answer: dict[str, Any]) -> float:
    """Returns the rate of a window that `Measurer.measure` returned."""
    return Window(**answer["window"]).images_per_second


def changes(
    options: DaliOptions | TfDataOptions, order: str, cores: int, *, plainly: bool
) -> dict[str, list]:
    """Returns the fields of a backend's options that change its speed, and values worth trying.

    Args:
      options: the backend's default; every value but `decode` "scaled" keeps its pixels.
      order: how the records are mixed.
      cores: how many cores the input may use.
      plainly: whether the preprocessing resizes plainly (`Preprocess.resizes_plainly`).
    """
    threads = sorted({max(1, cores // 2), cores, 2 * cores})
    if isinstance(options, TfDataOptions):
        return {
            "decode": ["region" if plainly else "full"],
            "num_parallel_calls": threads,
            "num_parallel_reads": [1, 16],
            "read_buffer_bytes": [1 << 18],
            "prefetch_batches": [4, AUTOTUNE],
        }
    found: dict[str, list] = {"num_threads": threads, "prefetch_queue_depth": [1, 4]}
    # Decoding regions was reported to crash on some GPUs.
    on_gpu = options.device == "gpu"
    found |= {"hw_decoder_load": [0.0, 0.5, 0.75, 0.9]} if on_gpu else {"decode": ["full"]}
    return found | ({"read_mode": ["plain"]} if order == "buffer" else {})


def compare(
    rivals: Mapping[str, Candidate],
    default: Candidate,
    measure: Callable[[Candidate], float],
    *,
    rounds: int,
    is_over: Callable[[int], bool] = lambda _: False,
) -> dict[str, list[float]]:
    """Measures rivals against the default, round by round.

    Args:
      rivals: what is measured.
      default: what it is compared with.
      measure: returns images/s of a candidate, 0 if it cannot be measured.
      rounds: how many.
      is_over: says, of a round's number, whether the time is up.

    Returns:
      The ratios of each rival's images/s to the default's.
    """
    turn = {"": default, **rivals}
    ratios: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds if rivals else 0):
        if is_over(number):
            break
        rates = {name: measure(turn[name]) for name in list(turn)[:: 1 if number % 2 else -1]}
        for name in rivals:
            if rates[name] and rates[""]:
                ratios[name].append(rates[name] / rates[""])
    return ratios


def is_faster(ratios: list[float]) -> bool:
    """Whether ratios to the default, round by round, show a gain beyond noise.

    Wilcoxon's signed-rank test, one-sided, at 5%, and a median above 1. It takes at least five
    rounds.
    """
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 5 or not any(logs) or statistics.median(ratios) <= 1:
        return False
    return stats.wilcoxon(logs, alternative="greater").pvalue <= 0.05
