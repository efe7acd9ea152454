"""The rows of the throughput comparison: what each is, and how they are measured in turn."""

import contextlib
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dali_tf_input import DaliOptions, InputError, TfDataOptions
from dali_tf_input.cli import command
from support.benchmark import Stats, format_stats
from support.flags import FileFlags, WorkFlags
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second
from support.throughput.peers import PEERS

# The 2018 example's baseline: one image after another, nothing made ahead.
_SERIAL = TfDataOptions(
    num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False
)
_PLAIN = TfDataOptions(kernel="tensorflow")
_TF, _CPU, _GPU = TfDataOptions(), DaliOptions(device="cpu"), DaliOptions(device="gpu")


class Row(NamedTuple):
    """One row. Those of order "global" and of other packages are measured only on request."""

    candidate: Candidate
    what: str


_TABLE: tuple[tuple[str, DaliOptions | TfDataOptions, str, str, str], ...] = (
    ("tf_data_serial", _SERIAL, "buffer", "dataset", "tf.data, one image after another"),
    ("tf_data_by_hand", _TF, "buffer", "by_hand", "tf.data in parallel, written by hand"),
    ("tf_data", _TF, "buffer", "dataset", "this package on tf.data"),
    ("tf_data_plain", _PLAIN, "buffer", "dataset", "the same by TensorFlow's operations"),
    ("dali_cpu_by_hand", _CPU, "buffer", "by_hand", "DALI on CPU, written by hand, bare"),
    ("dali_cpu_bare", _CPU, "buffer", "bare", "DALI on CPU, without TensorFlow"),
    ("dali_cpu", _CPU, "buffer", "dataset", "this package on DALI, CPU"),
    ("tf_data_global", _TF, "global", "dataset", "tf.data, order global"),
    ("dali_cpu_global", _CPU, "global", "dataset", "DALI on CPU, order global"),
    ("dali_gpu_bare", _GPU, "buffer", "bare", "DALI on GPU, without TensorFlow"),
    ("dali_gpu", _GPU, "buffer", "dataset", "this package on DALI, GPU"),
    ("dali_gpu_global", _GPU, "global", "dataset", "DALI on GPU, order global"),
    *((name, _TF, "buffer", name, what) for name, what in PEERS.items()),
)
ROWS = {
    name: Row(Candidate(options, order, variant), what)
    for name, options, order, variant, what in _TABLE
}

# Pairs of rows that answer a question, and the ratio that is aimed at.
_QUESTIONS: tuple[tuple[str, str, str, float | None], ...] = (
    ("tf_data", "tf_data_by_hand", "the package on tf.data, to the same written by hand", None),
    ("dali_cpu_bare", "dali_cpu_by_hand", "the package's DALI pipeline, to one by hand", None),
    ("dali_cpu", "dali_cpu_bare", "DALI on CPU as a dataset, to its bare pipe.run()", None),
    ("dali_gpu", "dali_gpu_bare", "DALI on GPU as a dataset, to its bare pipe.run()", 0.95),
    ("tf_data", "tf_data_plain", "the compiled operation, to TensorFlow's operations", None),
    ("tf_data_global", "tf_data", "tf.data in global order, to a buffer", None),
    ("dali_cpu_global", "dali_cpu", "DALI on CPU in global order, to a buffer", None),
    ("dali_gpu_global", "dali_gpu", "DALI on GPU in global order, to a buffer", 0.9),
    ("tf_data", "tf_data_serial", "tf.data in parallel, to serial", None),
    ("tf_data", "decode_only", "the package on tf.data, to decoding alone", None),
    ("tf_data", "decode_simplejpeg", "the package on tf.data, to decoding by simplejpeg", None),
    ("tf_data", "grain", "the package on tf.data, to Grain and OpenCV", None),
    ("tf_data", "torch", "the package on tf.data, to PyTorch and OpenCV", None),
    ("dali_gpu", "tf_data", "DALI on GPU, to tf.data", 3),
    ("dali_gpu", "tf_data_serial", "DALI on GPU, to serial tf.data (as the 2018 example)", 6.13),
)


def measure_rows(
    names: list[str], files: FileFlags, work: WorkFlags, **window: Any
) -> dict[str, list[dict[str, Any]]]:
    """Measures some of `ROWS`, see `measure_in_turn`."""
    candidates = {}
    for name in names:
        options = work.with_decode(ROWS[name].candidate.options)
        candidates[name] = dataclasses.replace(ROWS[name].candidate, options=options)
    flags = [*files.as_arguments(), *work.as_arguments()]
    rows = {name: (candidate, flags) for name, candidate in candidates.items()}
    return measure_in_turn(rows, **window)


def measure_in_turn(
    rows: dict[str, tuple[Candidate, list[str]]],
    *,
    repeats: int,
    environments: Mapping[str, dict[str, str]] = MappingProxyType({}),
    **window: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Measures rows in turn, round by round, each in a process that is paused between its turns.

    Returns:
      The windows of each row, as `Measurer.measure` returns them, which takes `window`. A row is a
      candidate and the flags of its `Measurer`; `environments` has variables for the processes of
      some rows.

    Raises:
      InputError: a row cannot be measured.
    """
    with contextlib.ExitStack() as stack:
        measurers = {
            name: stack.enter_context(Measurer(*flags, **environments.get(name, {})))
            for name, (_, flags) in rows.items()
        }
        names = list(rows)
        windows: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}

        def measure(name: str) -> dict[str, Any]:
            try:
                return measurers[name].measure(rows[name][0], fresh=False, **window)
            except CandidateError as error:
                raise InputError(f"{name} cannot be measured: {error}") from error
            finally:
                measurers[name].pause()

        for name in command.progress(names, what="starting", total=len(names)):
            measure(name)  # not counted: caches fill, tf.data's tuning settles
        turns = [name for number in range(repeats) for name in names[:: 1 if number % 2 else -1]]
        for name in command.progress(turns, what="measuring", total=len(turns)):
            windows[name].append(measure(name))
    return windows


def rates(windows: list[dict[str, Any]]) -> list[float]:
    """Returns images/s of each window."""
    return [images_per_second(window) for window in windows]


def ratios(windows: list[dict[str, Any]], others: list[dict[str, Any]]) -> Stats:
    """Returns the ratios of images/s to those of another row, round by round."""
    pairs = zip(rates(windows), rates(others), strict=True)
    return Stats.of([rate / other for rate, other in pairs])


def conclusions(windows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns a sentence for each pair of rows that answers a question."""
    sentences = []
    for name, other, question, target in _QUESTIONS:
        if name in windows and other in windows:
            stats = ratios(windows[name], windows[other])
            verdict = "met" if stats.median >= (target or 0) else "missed"
            aim = f"; target {target}: {verdict}" if target else ""
            sentences.append(f"{question}: {format_stats(stats)}{aim}")
    return sentences
