"""Says what each stage of the input costs.

The real pipeline is cut after each stage, and the cuts are measured in turn, round by round. A
stage's cost is its cut's time minus the previous cut's. scripts/tune.py finds faster options.

example: python scripts/profile_stages.py --files='path/train-*' --backends=tf_data
"""

import shlex
import sys
from collections.abc import Iterator
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import FileFlags, WorkFlags, backends_flag, begin, describe_work
from support import plots
from support.benchmark import Stats, Window
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second
from support.throughput.stages import STAGES

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_BACKENDS = backends_flag(FLAGS)
_SECONDS = FLAGS.number("seconds", 1.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 3, "Measured windows of each cut.", 1)
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_COLUMNS = ("backend", "stage", "images/s so far", "s / 1000", "min", "max", "share")
_COLUMNS += ("CPU s / 1000",)

# What the stages are called.
NAMES = {
    "read": "read",
    "parse": "parse",
    "decode": "decode",
    "resize": "crop and resize",
    "normalize": "mirror and normalize",
    "dataset": "batch",
    "device": "to the device",
}


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    command.check_writable(_PLOT, suffix=".png")
    spec = _WORK.spec(_FILES, _ORDER.value)
    about, backends = begin(_BACKENDS.value)
    files = command.format_count(len(spec.records.files), "file")
    print(f"records   {spec.records.num_records:,} in {files}, order {spec.order}")
    stages = measure_stages(backends, has_gpu=about["tensorflow_gpus"] > 0)
    print()
    lines = (line for name, rows in stages.items() for line in format_stages(name, rows))
    command.print_table(_COLUMNS, lines)
    print()
    for name, rows in stages.items():
        print(conclude(name, rows))
    flags = (_WORK.batch_size, _WORK.crop, _WORK.image_size, _WORK.antialias, _WORK.dtype, _ORDER)
    tune_flags = [f"--{flag.name}={str(flag.value).lower()}" for flag in flags if flag.present]
    print(f"faster options: scripts/tune.py {shlex.join([*_FILES.as_arguments(), *tune_flags])}")
    report = {**about, "num_records": spec.records.num_records}
    report |= {"work": describe_work(spec.preprocess)}
    report |= {flag.name: flag.value for flag in (_WORK.batch_size, _ORDER, _SECONDS, _REPEATS)}
    report |= {"stages": stages}
    command.write_json(_JSON, report)
    if _PLOT.value:
        plots.plot_stages(report, names=NAMES, path=_PLOT.value)
    return 0


def measure_stages(backends: list[str], *, has_gpu: bool) -> dict[str, dict[str, dict]]:
    """Measures all cuts round by round; returns what each stage of each backend costs."""
    windows: dict[str, dict[str, list[dict]]] = {}
    for name in backends:
        # DALI's own reader reads and parses in one step.
        stages = STAGES[1:] if name != "tf_data" and _ORDER.value == "buffer" else STAGES
        stages = (*stages, "dataset", *(["device"] if has_gpu and name != "dali_gpu" else []))
        windows[name] = {stage: [] for stage in stages}
    turns = [(name, stage) for name, cuts in windows.items() for stage in cuts] * _REPEATS.value
    with Measurer(*_FILES.as_arguments(), *_WORK.as_arguments()) as measurer:
        for name, stage in command.progress(turns, what="cutting", total=len(turns)):
            cut = Candidate(_WORK.options(name), _ORDER.value, variant=stage)
            try:
                windows[name][stage].append(measurer.measure(cut, seconds=_SECONDS.value))
            except CandidateError as error:
                raise InputError(f"{name}, cut after '{NAMES[stage]}': {error}") from error
    return {name: summarize(cuts) for name, cuts in windows.items()}


def summarize(windows: dict[str, list[dict]]) -> dict[str, dict]:
    """Returns for each stage of a backend what it costs more than the one before.

    A later cut may come out faster by chance. Costs are therefore increases of the largest median
    so far: they are never negative, and their shares sum to 100%.
    """
    rows: dict[str, dict] = {}
    reached = {"seconds": 0.0, "cpu": 0.0}
    before = [0.0] * len(next(iter(windows.values())))
    for stage, measured in windows.items():
        seconds = [1000 / images_per_second(measurement) for measurement in measured]
        cpu = [
            Window(**measurement["window"]).cpu_seconds_per_1000_images for measurement in measured
        ]
        differences = [now - then for now, then in zip(seconds, before, strict=True)]
        row: dict[str, Any] = {"images_per_second": 1000 / Stats.of(seconds).median}
        row["differences"] = vars(Stats.of(differences))
        for what, values in (("seconds", seconds), ("cpu", cpu)):
            total = max(reached[what], Stats.of(values).median)
            row[what], reached[what] = total - reached[what], total
        rows[stage], before = row, seconds
    for row in rows.values():
        row["share"] = row["seconds"] / reached["seconds"]
    return rows


def title(stage: str, rows: dict[str, dict]) -> str:
    """Returns what a stage is called; DALI's own reader reads and parses at once."""
    return "read and parse" if stage == "parse" and "read" not in rows else NAMES[stage]


def format_stages(name: str, rows: dict[str, dict]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of a backend in the table."""
    for stage, row in rows.items():
        spread = (max(0.0, row["differences"][which]) for which in ("minimum", "maximum"))
        seconds = (f"{value:.3f}" for value in (row["seconds"], *spread))
        so_far, share = f"{row['images_per_second']:,.0f}", f"{row['share']:.0%}"
        yield (name, title(stage, rows), so_far, *seconds, share, f"{row['cpu']:.3f}")


def conclude(name: str, rows: dict[str, dict]) -> str:
    """Returns the sentence on a backend: its costliest stage."""
    costliest = max(rows, key=lambda stage: rows[stage]["share"])
    share = f"{rows[costliest]['share']:.0%}"
    return f"{name}: {title(costliest, rows)} costs most, {share} of the time."


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
