"""The rows of the throughput comparison: what each is, and how they are measured in turn."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

from dali_tf_input import DaliOptions, InputError, Stats, TfDataOptions
from support import cli
from support.flags import FileFlags, WorkFlags
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second

# The 2018 example's baseline: one image after another, nothing made ahead.
_SERIAL = TfDataOptions(
    num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False
)
_CPU, _GPU = DaliOptions(device="cpu"), DaliOptions(device="gpu")


class Row(NamedTuple):
    """One row. Those of order "global" are measured only on request."""

    candidate: Candidate
    what: str


def _row(options: Any, what: str, variant: str = "dataset", order: str = "buffer") -> Row:
    return Row(Candidate(options, order, variant=variant), what)


ROWS = {
    "tf_data_serial": _row(_SERIAL, "tf.data, one image after another"),
    "tf_data_by_hand": _row(TfDataOptions(), "tf.data in parallel, written by hand", "by_hand"),
    "tf_data": _row(TfDataOptions(), "this package on tf.data"),
    "dali_cpu_by_hand": _row(_CPU, "DALI on CPU, written by hand, bare", "by_hand"),
    "dali_cpu_bare": _row(_CPU, "DALI on CPU, without TensorFlow", "bare"),
    "dali_cpu": _row(_CPU, "this package on DALI, CPU"),
    "tf_data_global": _row(TfDataOptions(), "tf.data, order global", order="global"),
    "dali_cpu_global": _row(_CPU, "DALI on CPU, order global", order="global"),
    "dali_gpu_bare": _row(_GPU, "DALI on GPU, without TensorFlow", "bare"),
    "dali_gpu": _row(_GPU, "this package on DALI, GPU"),
    "dali_gpu_global": _row(_GPU, "DALI on GPU, order global", order="global"),
}

# Pairs of rows that answer a question.
_QUESTIONS = (
    ("tf_data", "tf_data_by_hand", "the package on tf.data, to the same written by hand"),
    ("dali_cpu_bare", "dali_cpu_by_hand", "the package's DALI pipeline, to one written by hand"),
    ("dali_cpu", "dali_cpu_bare", "DALI on CPU as a dataset, to its bare pipe.run()"),
    ("dali_gpu", "dali_gpu_bare", "DALI on GPU as a dataset, to its bare pipe.run()"),
    ("tf_data_global", "tf_data", "tf.data in global order, to a buffer"),
    ("dali_cpu_global", "dali_cpu", "DALI on CPU in global order, to a buffer"),
    ("dali_gpu_global", "dali_gpu", "DALI on GPU in global order, to a buffer"),
    ("tf_data", "tf_data_serial", "tf.data in parallel, to serial"),
    ("dali_gpu", "tf_data", "DALI on GPU, to tf.data"),
    ("dali_gpu", "tf_data_serial", "DALI on GPU, to serial tf.data (6.13 in the 2018 example)"),
)


def measure_rows(
    names: list[str],
    files: FileFlags,
    work: WorkFlags,
    *arguments: str,
    seconds: float,
    repeats: int,
    warmup_batches: int,
) -> dict[str, list[dict[str, Any]]]:
    """Measures rows in turn, round by round, each in a process that is paused between its turns.

    Returns:
      The windows of each row, as `Measurer.measure` returns them.

    Raises:
      InputError: a row cannot be measured.
    """
    with contextlib.ExitStack() as stack:
        measurers = {}
        windows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

        def measure(name: str) -> dict[str, Any]:
            try:
                candidate = ROWS[name].candidate
                options = work.with_decode(candidate.options)
                candidate = dataclasses.replace(candidate, options=options)
                return measurers[name].measure(
                    candidate, seconds=seconds, warmup_batches=warmup_batches, fresh=False
                )
            except CandidateError as error:
                raise InputError(f"{name} cannot be measured: {error}") from error
            finally:
                measurers[name].pause()

        for name in cli.progress(names, what="starting", total=len(names)):
            measurers[name] = stack.enter_context(Measurer(files, work, *arguments))
            measure(name)  # not counted: caches fill, tf.data's tuning settles
        turns = [
            name for number in range(repeats) for name in (names if number % 2 else names[::-1])
        ]
        for name in cli.progress(turns, what="measuring", total=len(turns)):
            windows[name].append(measure(name))
    return windows


def rates(windows: list[dict[str, Any]]) -> list[float]:
    """Returns images/s of each window."""
    return [images_per_second(window) for window in windows]


def ratios(windows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Returns, round by round, the ratio of images/s to those of another row."""
    return [rate / other for rate, other in zip(rates(windows), rates(others), strict=True)]


def conclusions(windows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns a sentence for each pair of rows that answers a question."""
    sentences = []
    for name, other, question in _QUESTIONS:
        if name in windows and other in windows:
            stats = Stats.of(ratios(windows[name], windows[other]))
            spread = f"{stats.minimum:.2f} to {stats.maximum:.2f}"
            sentences.append(f"{question}: {stats.median:.2f} ({spread})")
    return sentences
