"""What each stage of the input costs, for `compare_throughput.py --stages`.

The real pipeline is cut after each stage, and the cuts are measured in turn, round by round. A
stage's cost is its cut's time minus the previous cut's.
"""

import sys
from collections.abc import Iterator
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from support.benchmark import Stats, Window
from support.flags import FileFlags, WorkFlags, begin
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second
from support.throughput.stages import STAGES, TF_DATA_STAGES

_COLUMNS: tuple[str, ...] = (
    "backend",
    "stage",
    "images/s so far",
    "s / 1000",
    "min",
    "max",
    "share",
)
_COLUMNS += ("CPU s / 1000",)

# What the stages are called.
NAMES = {
    "read": "read",
    "parse": "parse",
    "decode": "decode",
    "resize": "crop and resize",
    "normalize": "mirror and normalize",
    "dataset": "batch",
    "whole": "decode to batch",
    "device": "to the device",
}


def report_costs(
    files: FileFlags, work: WorkFlags, order: str, backends: list[str] | None, **window: Any
) -> dict[str, Any]:
    """Measures what each stage costs, prints it, and returns it; `window`: seconds, repeats."""
    spec = work.spec(files, order)
    about, names = begin(backends)
    count = command.format_count(len(spec.records.files), "file")
    print(f"records   {spec.records.num_records:,} in {count}, order {order}")
    stages = measure_stages(files, work, order, names, about["tensorflow_gpus"] > 0, **window)
    print()
    lines = (line for name, rows in stages.items() for line in format_stages(name, rows))
    command.print_table(_COLUMNS, lines)
    print()
    for name, rows in stages.items():
        print(conclude(name, rows))
    return {**about, "num_records": spec.records.num_records, "order": order, "stages": stages}


def measure_stages(
    files: FileFlags,
    work: WorkFlags,
    order: str,
    backends: list[str],
    has_gpu: bool,
    *,
    seconds: float,
    repeats: int,
) -> dict[str, dict[str, dict]]:
    """Measures all cuts round by round; returns what each stage of each backend costs."""
    windows: dict[str, dict[str, list[dict]]] = {}
    for name in backends:
        if name == "tf_data":  # one operation decodes and does all that follows
            stages: tuple[str, ...] = (*TF_DATA_STAGES, "whole")
        else:  # DALI's own reader reads and parses in one step
            is_one = name == "dali_gpu" and order == "buffer"
            stages = (*(STAGES[1:] if is_one else STAGES), "dataset")
        stages = (*stages, *(["device"] if has_gpu and name != "dali_gpu" else []))
        windows[name] = {stage: [] for stage in stages}
    turns = [(name, stage) for name, cuts in windows.items() for stage in cuts] * repeats
    with Measurer(*files.as_arguments(), *work.as_arguments()) as measurer:
        for name, stage in command.progress(turns, what="cutting", total=len(turns)):
            cut = Candidate(work.options(name), order, variant=stage)
            try:
                windows[name][stage].append(measurer.measure(cut, seconds=seconds))
                if not sys.stderr.isatty():  # else a bar is shown; kept if this is stopped
                    rate = images_per_second(windows[name][stage][-1])
                    print(f"{name}, until {NAMES[stage]}: {rate:,.0f} images/s", flush=True)
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
