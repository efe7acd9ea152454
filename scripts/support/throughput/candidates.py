"""What can be measured: ways of feeding TensorFlow, and the process that measures them."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any

from dali_tf_input import DaliOptions, TfDataOptions
from dali_tf_input.spec.options import AUTOTUNE
from support import processes
from support.benchmark import Window
from support.flags import BACKENDS

SCRIPTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_LIMIT = 120  # seconds beyond a window after which a process counts as hung


@dataclass(frozen=True)
class Candidate:
    """One way of feeding TensorFlow.

    Attributes:
      options: of either backend.
      order: how the records are mixed.
      variant: "dataset" or "whole", what the package makes; "bare", its DALI pipeline without
        TensorFlow; "by_hand", the same work written by hand; "device", whole batches copied to the
        GPU; or a stage after which the pipeline is cut, see `stages`.
    """

    options: DaliOptions | TfDataOptions
    order: Any = "global"
    variant: str = "dataset"

    @property
    def backend(self) -> str:
        """The name of the backend on the command line."""
        return f"dali_{self.options.device}" if isinstance(self.options, DaliOptions) else "tf_data"

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {**dataclasses.asdict(self), "backend": self.backend}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Candidate":
        """Makes a candidate of what `to_json` returned."""
        kind = type(BACKENDS[values["backend"]])
        return cls(kind(**values["options"]), values["order"], values["variant"])

    def describe(self, base: DaliOptions | TfDataOptions) -> str:
        """Says how the options differ from others of their backend: "num_threads=4"."""
        parts = []
        for name, value in vars(self.options).items():
            if value != getattr(base, name):
                parts.append(f"{name}={'AUTOTUNE' if value == AUTOTUNE else repr(value)}")
        return ", ".join(parts) or "default"


class CandidateError(Exception):
    """A candidate cannot be measured: it is refused, or the process died over it."""


class Measurer(processes.JsonWorker):
    """A process that measures candidates (a context manager), restarted if it dies."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        """Makes a measurer, not started yet; `arguments` are the flags of worker.py."""
        words = [sys.executable, _WORKER, *arguments]
        path = os.pathsep.join([SCRIPTS, os.environ.get("PYTHONPATH", "")])
        environment |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
        super().__init__(words, environment=environment)

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
          window (the fields of `Window`), first_batch_seconds, peak_memory_bytes,
          gpu_memory_bytes, which is 0 unless DALI works on a GPU, images_taken, also before the
          window, and disk_bytes, those read from a disk meanwhile; None if not known.

        Raises:
          CandidateError: the candidate is refused, or the process died over it twice, or hung.
        """
        task = {"candidate": candidate.to_json(), "seconds": seconds}
        task |= {"warmup_batches": warmup_batches, "fresh": fresh}
        try:
            try:
                answer = self.ask(task, seconds=_LIMIT + 10 * seconds)
            except processes.WorkerDied as error:
                if "no answer" in str(error):
                    raise
                answer = self.ask(task, seconds=_LIMIT + 10 * seconds)  # once says nothing
        except processes.WorkerDied as error:
            raise CandidateError(str(error)) from error
        if "error" in answer:
            raise CandidateError(answer["error"])
        return answer


def images_per_second(answer: dict[str, Any]) -> float:
    """Returns the rate of a window that `Measurer.measure` returned."""
    return Window(**answer["window"]).images_per_second
