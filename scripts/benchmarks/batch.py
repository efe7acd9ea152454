"""Measures what a batch costs, with and without TensorFlow's own pool of memory.

TensorFlow pools memory only where its oneDNN kernels are on (TF_ENABLE_ONEDNN_OPTS) and the
processor has AVX512_VNNI. Elsewhere each batch that TensorFlow allocates is fresh memory, whose
pages the system has to find one by one: page faults. Rows: decoding alone, by simplejpeg if that is
installed; this package on tf.data and DALI, in order "global", and DALI's bare pipeline; each of
the three with TensorFlow's pool and without.

example: python scripts/benchmarks/batch.py --files='path/train-*' --batch_size=256
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support import machine
from support.benchmark import Stats, Window, format_stats
from support.flags import FileFlags, WorkFlags
from support.throughput.rows import ROWS, measure_in_turn, rates, ratios

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ROWS = FLAGS.list("rows", ["tf_data"], "Rows of compare_throughput.py to measure.")
_SECONDS = FLAGS.number("seconds", 2.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 7, "Measured windows of each row.", 1)
_JSON = FLAGS.string("json", None, "File for the results.")

_POOLS = {"with TensorFlow's pool": "1", "without": "0"}
_COLUMNS = ("row", "memory", "images/s", "x decoding", "CPU ms", "faults", "peak MB")


def main(arguments: list[str]) -> None:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    alone = "decode_simplejpeg" if importlib.util.find_spec("simplejpeg") else "decode_only"
    names = check_list("rows", _ROWS.value, list(ROWS))
    keys = [(alone, ""), *((name, pool) for name in names for pool in _POOLS)]
    flags = [*_FILES.as_arguments(), *_WORK.as_arguments()]
    rows, environments = {}, {}
    for name, pool in keys:
        candidate = ROWS[name].candidate
        options = _WORK.with_decode(candidate.options)
        rows[f"{name} {pool}"] = (dataclasses.replace(candidate, options=options), flags)
        if pool:
            environments[f"{name} {pool}"] = {"TF_ENABLE_ONEDNN_OPTS": _POOLS[pool]}
    window = {"seconds": _SECONDS.value, "warmup_batches": 8}
    windows = measure_in_turn(rows, repeats=_REPEATS.value, environments=environments, **window)
    results = [summarize(name, pool, windows, f"{alone} ") for name, pool in keys]
    command.print_table(_COLUMNS, [format_row(result) for result in results])
    print("Median (minimum to maximum) of the rounds; the others of an image, median.")
    if _JSON.value:
        report = {"machine": machine.describe(), "rows": results}
        Path(_JSON.value).write_text(json.dumps(report, indent=1))


def summarize(
    name: str, pool: str, windows: dict[str, list[dict[str, Any]]], alone: str
) -> dict[str, Any]:
    """Returns what the table shows of one row."""
    measured = windows[f"{name} {pool}"]
    made = [Window(**measurement["window"]) for measurement in measured]
    return {
        "row": name,
        "memory": pool,
        "images_per_second": vars(Stats.of(rates(measured))),
        "ratio_to_decoding": vars(ratios(measured, windows[alone])),
        "cpu_ms": Stats.of([one.cpu_seconds_per_1000_images for one in made]).median,
        "page_faults": Stats.of([one.page_faults_per_image for one in made]).median,
        "peak_memory_bytes": max(measurement["peak_memory_bytes"] for measurement in measured),
    }


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns one line of the table."""
    speed = row["images_per_second"]
    return (
        row["row"],
        row["memory"],
        f"{speed['median']:,.0f} ({speed['minimum']:,.0f} to {speed['maximum']:,.0f})",
        format_stats(Stats(**row["ratio_to_decoding"])),
        f"{row['cpu_ms']:.2f}",
        f"{row['page_faults']:.1f}",
        f"{row['peak_memory_bytes'] / 1e6:,.0f}",
    )


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
