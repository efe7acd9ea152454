"""Says what each stage of the input costs, and which setting would help most.

The real pipeline is cut after each stage, and the cuts are measured in turn, round by round. A
stage costs what its cut takes more than the one before it. Then settings that might help are
measured against the default, in rounds too; one is recommended only if it is faster beyond noise.

example: python scripts/profile_stages.py --files='path/train-*' --backends=tf_data
"""

import dataclasses
import os
import sys
from typing import Any

from dali_tf_input import InputError, InputSpec, Stats, TfDataOptions, Window
from support import cli, plots
from support.flags import FileFlags, WorkFlags, backends_flag, begin
from support.throughput import candidates
from support.throughput.candidates import (
    Candidate,
    CandidateError,
    Measurer,
    images_per_second,
    is_faster,
)
from support.throughput.stages import STAGES

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_BACKENDS = backends_flag(FLAGS)
_SECONDS = FLAGS.number("seconds", 1.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 3, "Measured windows of each cut and setting.", 1)
_SETTINGS = FLAGS.boolean("settings", True, "Whether to measure settings that might help, too.")
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_COLUMNS = ("backend", "stage", "images/s so far", "s / 1000", "min", "max", "share")
_COLUMNS += ("CPU s / 1000",)
_SETTING_COLUMNS = ("backend", "setting", "x default", "min", "max", "changes")
_AGAIN = 8  # rounds in which the best setting is measured against the default once more

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
    cli.check_no_arguments(arguments)
    cli.check_writable(_JSON.value, flag="json")
    cli.check_writable(_PLOT.value, flag="plot", suffix=".png")
    spec = _WORK.spec(_FILES.dataset(), _ORDER.value)
    about, backends = begin(_BACKENDS.value)
    files = cli.format_count(len(spec.dataset.files), "file")
    print(f"records   {spec.dataset.num_records:,} in {files}, order {spec.order}")
    settings = {}
    with Measurer(_FILES, _WORK) as measurer:
        stages = measure_stages(measurer, backends, has_gpu=about["tensorflow_gpus"] > 0)
        print()
        lines = (line for name, rows in stages.items() for line in format_stages(name, rows))
        cli.print_table(_COLUMNS, lines)
        if _SETTINGS.value:
            for name in backends:
                settings[name] = try_settings(measurer, name, spec, backends)
            print()
            lines = (
                line for name, rows in settings.items() for line in format_settings(name, rows)
            )
            cli.print_table(_SETTING_COLUMNS, lines)
    print()
    for name, rows in stages.items():
        print(conclude(name, rows, settings.get(name)))
    flags = (_WORK.batch_size, _ORDER, _SECONDS, _REPEATS)
    report = {**about, **{flag.name: flag.value for flag in flags}}
    report |= {"work": spec.preprocess.describe(), "num_records": spec.dataset.num_records}
    report |= {"stages": stages, "settings": settings}
    if _JSON.value:
        cli.write_json(_JSON.value, report)
    if _PLOT.value:
        plots.plot_stages(report, names=NAMES, path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    return 0


def measure_stages(
    measurer: Measurer, backends: list[str], *, has_gpu: bool
) -> dict[str, dict[str, dict]]:
    """Measures all cuts round by round; returns what each stage of each backend costs."""
    windows: dict[str, dict[str, list[dict]]] = {}
    for name in backends:
        # DALI's own reader reads and parses in one step.
        stages = STAGES[1:] if name != "tf_data" and _ORDER.value == "buffer" else STAGES
        stages = (*stages, "dataset", *(["device"] if has_gpu and name != "dali_gpu" else []))
        windows[name] = {stage: [] for stage in stages}
    turns = [(name, stage) for name, cuts in windows.items() for stage in cuts] * _REPEATS.value
    for name, stage in cli.progress(turns, what="cutting", total=len(turns)):
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
    repeats = len(next(iter(windows.values())))
    before = [0.0] * repeats
    for stage, measured in windows.items():
        seconds = [1000 / images_per_second(one) for one in measured]
        cpu = [Window(**one["window"]).cpu_seconds_per_1000_images for one in measured]
        differences = [now - then for now, then in zip(seconds, before, strict=True)]
        row: dict[str, Any] = {
            "images_per_second": 1000 / Stats.of(seconds).median,
            "differences": vars(Stats.of(differences)),
        }
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


def format_stages(name: str, rows: dict[str, dict]) -> list[tuple[str, ...]]:
    """Returns the lines of a backend in the table."""
    return [
        (
            name,
            title(stage, rows),
            f"{row['images_per_second']:,.0f}",
            f"{row['seconds']:.3f}",
            *(f"{max(0.0, row['differences'][which]):.3f}" for which in ("minimum", "maximum")),
            f"{row['share']:.0%}",
            f"{row['cpu']:.3f}",
        )
        for stage, row in rows.items()
    ]


def list_settings(name: str, spec: InputSpec, backends: list[str]) -> dict[str, Candidate]:
    """Returns the settings of a backend that might help, by how they differ from the default."""
    base = Candidate(_WORK.options(name), spec.order)
    cores, plainly = len(os.sched_getaffinity(0)), spec.preprocess.resizes_plainly
    space = candidates.changes(base.options, spec.order, cores, plainly=plainly)
    if isinstance(base.options, TfDataOptions):
        space["decode"].append("scaled")
    tried = [
        Candidate(dataclasses.replace(base.options, **{field: value}), spec.order)
        for field, values in space.items()
        for value in values
    ]
    tried.append(Candidate(base.options, "buffer" if spec.order == "global" else "global"))
    if spec.preprocess.dtype != "uint8":
        tried.append(Candidate(base.options, spec.order, {"dtype": "uint8"}))
    if spec.preprocess.antialias:
        tried.append(Candidate(base.options, spec.order, {"antialias": False}))
    tried += [Candidate(_WORK.options(other), spec.order) for other in backends if other != name]
    return {one.describe(base): one for one in tried if one != base}


def try_settings(
    measurer: Measurer, name: str, spec: InputSpec, backends: list[str]
) -> list[dict[str, Any]]:
    """Measures settings against the default, round by round; returns them, the fastest first."""
    base = Candidate(_WORK.options(name), spec.order)
    settings = list_settings(name, spec, backends)
    refused: dict[str, str] = {}

    def measure(candidate: Candidate) -> float:
        if candidate.key in refused:
            return 0.0
        bar.show(candidate.describe(base))
        try:
            return images_per_second(measurer.measure(candidate, seconds=_SECONDS.value))
        except CandidateError as error:
            if candidate == base:
                raise InputError(f"The default of {name} could not be measured: {error}") from error
            refused[candidate.key] = str(error)
            return 0.0

    with cli.Elapsed(f"trying settings of {name}", seconds=None) as bar:
        ratios = candidates.compare(settings, base, measure, rounds=_REPEATS.value)
        rows: list[dict[str, Any]] = []
        for text, one in settings.items():
            row = {"setting": text, "changes": what_changes(one, base)}
            row |= {"ratio": vars(Stats.of(ratios[text]))} if ratios[text] else {}
            row |= {"refused": refused[one.key]} if one.key in refused else {}
            rows.append(row)
        rows.sort(key=lambda row: -row["ratio"]["median"] if "ratio" in row else 0.0)
        best = rows[0]
        if "ratio" in best and best["ratio"]["median"] > 1:
            # The best of many is partly luck: what is said of it is measured once more.
            again = {"": settings[best["setting"]]}
            best["again"] = candidates.compare(again, base, measure, rounds=_AGAIN)[""]
    return rows


def what_changes(candidate: Candidate, base: Candidate) -> str:
    """Says what a setting changes besides speed; nothing for most."""
    if candidate.order != base.order:
        return "how records are mixed"
    if candidate.preprocess:
        return "what the model gets"
    decodes = [one.options.decode for one in (candidate, base)]
    return "the pixels" if decodes[0] != decodes[1] and "scaled" in decodes else ""


def format_settings(name: str, rows: list[dict]) -> list[tuple[str, ...]]:
    """Returns the lines of a backend in the table of settings."""
    lines = []
    for row in rows:
        ratio = row.get("ratio")
        found = (
            [f"{ratio[one]:.2f}" for one in ("median", "minimum", "maximum")] if ratio else "---"
        )
        lines.append((name, row["setting"], *found, row.get("refused", row["changes"])))
    return lines


def conclude(name: str, rows: dict[str, dict], settings: list[dict] | None) -> str:
    """Returns the sentence on a backend: its costliest stage, and a setting that surely helps."""
    costliest = max(rows, key=lambda stage: rows[stage]["share"])
    share = f"{rows[costliest]['share']:.0%}"
    text = f"{name}: {title(costliest, rows)} costs most, {share} of the time."
    if settings is None:
        return text
    again = next((row for row in settings if row.get("again")), None)
    if again is None:
        return f"{text} No setting that was tried is faster than the default."
    ratio, rounds = Stats.of(again["again"]), len(again["again"])
    spread = f"{ratio.minimum:.2f} to {ratio.maximum:.2f} in {rounds} rounds"
    if ratio.minimum <= 1 or not is_faster(again["again"]):
        return f"{text} No setting that was tried is faster than the default beyond noise."
    remark = f"; it changes {again['changes']}" if again["changes"] else ""
    gain = f"{ratio.median:.2f} times the images/s ({spread}){remark}"
    return f"{text} {again['setting']} would help most: {gain}."


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
