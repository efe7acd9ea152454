"""The rows of the throughput comparison: what each is, and how they are measured in turn."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dali_tf_input import DaliOptions, InputError, TfDataOptions
from dali_tf_input.cli import command
from support.benchmark import Stats
from support.flags import FileFlags, WorkFlags
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second

GROUPS = OURS, BY_HAND, PARTS = "this package", "written by hand", "parts"
# The 2018 example's baseline: one image after another, nothing made ahead.
_SERIAL = TfDataOptions(
    num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False
)
_PLAIN = TfDataOptions(kernel="tensorflow")
_TF, _CPU, _GPU = TfDataOptions(), DaliOptions(device="cpu"), DaliOptions(device="gpu")


class Row(NamedTuple):
    """One row.

    Attributes:
      group: one of `GROUPS`.
      candidate: what is measured.
      what: what it is, in words that a sentence can use.
      is_usual: whether it is measured without being asked for.
    """

    group: str
    candidate: Candidate
    what: str
    is_usual: bool = True


def _row(group: str, options: Any, variant: str, what: str, order: str = "global") -> Row:
    return Row(group, Candidate(options, order, variant), what)


def _extra(*arguments: Any) -> Row:
    return _row(*arguments)._replace(is_usual=False)


_DALI = "this package's DALI pipeline"
# DALI's own reader and what is written by hand mix records by a buffer; `load` by a global order.
ROWS = {
    "tf_data": _row(OURS, _TF, "dataset", "this package on tf.data"),
    "dali_gpu": _row(OURS, _GPU, "dataset", "this package on DALI, GPU"),
    "dali_cpu": _row(OURS, _CPU, "dataset", "this package on DALI, CPU"),
    "tf_data_by_hand": _row(BY_HAND, _TF, "by_hand", "tf.data written by hand", "buffer"),
    "dali_cpu_by_hand": _row(
        BY_HAND, _CPU, "by_hand", "DALI on the CPU written by hand, without TensorFlow", "buffer"
    ),
    "grain": _extra(BY_HAND, _TF, "grain", "Grain and OpenCV, in threads", "buffer"),
    "torch": _extra(BY_HAND, _TF, "torch", "PyTorch's DataLoader and OpenCV", "buffer"),
    "decode_simplejpeg": _row(
        PARTS, _TF, "decode_simplejpeg", "libjpeg-turbo decoding whole images alone", "buffer"
    ),
    "decode_only": _row(
        PARTS, _TF, "decode_only", "TensorFlow decoding whole images alone", "buffer"
    ),
    "tf_data_plain": _row(PARTS, _PLAIN, "dataset", "this package, kernel='tensorflow'"),
    "tf_data_serial": _extra(
        PARTS, _SERIAL, "dataset", "this package, one image after another", "buffer"
    ),
    "tf_data_buffer": _extra(
        PARTS, _TF, "dataset", "this package on tf.data, order 'buffer'", "buffer"
    ),
    "dali_cpu_bare": _row(PARTS, _CPU, "bare", f"{_DALI}, CPU, without TensorFlow", "buffer"),
    "dali_cpu_buffer": _extra(
        PARTS, _CPU, "dataset", "this package on DALI, CPU, order 'buffer'", "buffer"
    ),
    "dali_gpu_bare": _row(PARTS, _GPU, "bare", f"{_DALI}, GPU, without TensorFlow", "buffer"),
    "dali_gpu_buffer": _row(
        PARTS, _GPU, "dataset", "this package on DALI, GPU, order 'buffer'", "buffer"
    ),
}

Windows = dict[str, list[dict[str, Any]]]  # those of each row, as `Measurer.measure` returns them


def measure_rows(names: list[str], files: FileFlags, work: WorkFlags, **how: Any) -> Windows:
    """Measures some of `ROWS`, see `measure_in_turn`."""
    candidates = {}
    for name in names:
        options = work.with_decode(ROWS[name].candidate.options)
        candidates[name] = dataclasses.replace(ROWS[name].candidate, options=options)
    flags = [*files.as_arguments(), *work.as_arguments()]
    return measure_in_turn({name: (one, flags) for name, one in candidates.items()}, **how)


def measure_in_turn(
    rows: dict[str, tuple[Candidate, list[str]]],
    *,
    repeats: int,
    environments: Mapping[str, dict[str, str]] = MappingProxyType({}),
    after_round: Callable[[Windows], None] = lambda _: None,
    **window: Any,
) -> Windows:
    """Measures rows in turn, round by round, each in a process that is paused between its turns.

    A bar shows how far it is; where no terminal is, each round prints a line.

    Args:
      rows: candidates, and the flags of their `Measurer`.
      repeats: rounds that are counted.
      environments: variables for the processes of some rows.
      after_round: called after each round with the windows of all rounds so far.
      **window: what `Measurer.measure` takes.

    Returns:
      The windows of each row.

    Raises:
      InputError: a row cannot be measured.
    """
    with contextlib.ExitStack() as stack:
        measurers = {
            name: stack.enter_context(Measurer(*flags, **environments.get(name, {})))
            for name, (_, flags) in rows.items()
        }
        names = list(rows)
        windows: Windows = {name: [] for name in rows}

        def measure(name: str) -> dict[str, Any]:
            try:
                return measurers[name].measure(rows[name][0], fresh=False, **window)
            except CandidateError as error:
                raise InputError(f"{name} cannot be measured: {error}") from error
            finally:
                measurers[name].pause()

        for name in command.progress(names, what="starting", total=len(names)):
            measure(name)  # not counted: caches fill, tf.data's tuning settles
        turns = [
            (number, name)
            for number in range(repeats)
            for name in names[:: 1 if number % 2 else -1]
        ]
        latest: dict[str, dict[str, Any]] = {}
        for number, name in command.progress(turns, what="measuring", total=len(turns)):
            latest[name] = measure(name)
            if len(latest) == len(names):
                for measured, answer in latest.items():
                    windows[measured].append(answer)
                after_round(windows)
                _print_round(number + 1, repeats, {name: latest[name] for name in names})
                latest = {}
    return windows


def _print_round(number: int, repeats: int, answers: dict[str, dict[str, Any]]) -> None:
    """Prints a round's images/s, unless a terminal shows a bar, and all that is printed."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        speeds = (f"{name} {images_per_second(answer):,.0f}" for name, answer in answers.items())
        print(f"round {number} of {repeats}, images/s: {', '.join(speeds)}", flush=True)


def rates(windows: list[dict[str, Any]]) -> list[float]:
    """Returns images/s of each window."""
    return [images_per_second(window) for window in windows]


def ratios(windows: list[dict[str, Any]], others: list[dict[str, Any]]) -> Stats:
    """Returns the ratios of images/s to those of another row, round by round."""
    pairs = zip(rates(windows), rates(others), strict=True)
    return Stats.of([rate / other for rate, other in pairs])
