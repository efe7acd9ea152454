"""Says what each stage of the input costs, and which setting would help most.

The real pipeline is cut after each stage, and the cuts are measured in turn, round by round. A
stage costs what its cut takes more than the one before it. Then settings that might help are
measured against the default, in rounds too; one is recommended only if it is faster beyond noise.

example: python scripts/profile_stages.py --files='path/train-*' --backends=tf_data
"""

import dataclasses
import os
import shlex
import sys
from typing import Any

from dali_tf_input import AUTOTUNE, InputError, InputSpec, Stats, TfDataOptions, Window
from support import cli, machine, plots
from support.flags import FileFlags, WorkFlags, choose_backends
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
_BACKENDS = FLAGS.list("backends", None, "Of tf_data, dali_cpu, dali_gpu; else all that work here.")
_SECONDS = FLAGS.number("seconds", 1.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 3, "Measured windows of each cut and setting.", 1)
_SETTINGS = FLAGS.boolean("settings", True, "Whether to measure settings that might help, too.")
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_COLUMNS = (
    "backend",
    "stage",
    "images/s so far",
    "s / 1000",
    "min",
    "max",
    "share",
    "CPU s / 1000",
)
_SETTING_COLUMNS = ("backend", "setting", "images/s", "x default", "min", "max", "changes")
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
    about = machine.describe()
    has_gpu = bool(about["gpus"]) and machine.count_gpus_of_tensorflow() > 0
    backends = choose_backends(_BACKENDS.value, has_gpu=has_gpu)
    machine.print_lines(about)
    files = cli.format_count(len(spec.dataset.files), "file")
    print(f"records   {spec.dataset.num_records:,} in {files}, order {spec.order}")
    with Measurer(_FILES, _WORK) as measurer:
        stages = measure_stages(measurer, backends, has_gpu=has_gpu)
        print()
        cli.print_table(
            _COLUMNS, [line for name, rows in stages.items() for line in format_stages(name, rows)]
        )
        settings = {}
        if _SETTINGS.value:
            for name in backends:
                settings[name] = try_settings(measurer, name, spec, backends)
            print()
            cli.print_table(
                _SETTING_COLUMNS,
                [line for name, rows in settings.items() for line in format_settings(name, rows)],
            )
    print()
    for name, rows in stages.items():
        print(conclude(name, rows, settings.get(name)))
    report = {
        "command": shlex.join(sys.argv),
        **about,
        "work": spec.preprocess.describe(),
        "batch_size": _WORK.batch_size.value,
        "order": spec.order,
        "seconds": _SECONDS.value,
        "repeats": _REPEATS.value,
        "num_records": spec.dataset.num_records,
        "stages": stages,
        "settings": settings,
    }
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
    cuts: dict[tuple[str, str], Candidate] = {}
    for name in backends:
        stages = [*STAGES, "dataset"]
        if name != "tf_data" and _ORDER.value == "buffer":
            stages.remove("read")  # DALI's own reader reads and parses in one step
        if has_gpu and name != "dali_gpu":
            stages.append("device")
        for stage in stages:
            cuts[name, stage] = Candidate(_WORK.options(name), _ORDER.value, variant=stage)
    windows: dict[tuple[str, str], list[dict]] = {cut: [] for cut in cuts}
    turns = list(cuts) * _REPEATS.value
    for cut in cli.progress(turns, what="cutting", total=len(turns)):
        try:
            windows[cut].append(measurer.measure(cuts[cut], seconds=_SECONDS.value))
        except CandidateError as error:
            raise InputError(f"{cut[0]}, cut after '{NAMES[cut[1]]}': {error}") from error
    return {
        name: summarize({stage: windows[name, stage] for one, stage in cuts if one == name})
        for name in backends
    }


def summarize(windows: dict[str, list[dict]]) -> dict[str, dict]:
    """Returns for each stage of a backend what it costs more than the one before.

    A later cut may come out faster by chance. Costs are therefore increases of the largest median
    so
    far: they are never negative, and their shares sum to 100%.
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


def list_candidates(name: str, spec: InputSpec, backends: list[str]) -> list[Candidate]:
    """Returns the settings of a backend that might help."""
    options, cores = _WORK.options(name), len(os.sched_getaffinity(0))
    changes: list[dict[str, Any]]
    if isinstance(options, TfDataOptions):
        other = "region" if spec.preprocess.resizes_plainly else "full"
        changes = [{"decode": other}, {"decode": "scaled"}]
        changes += [{"num_parallel_calls": cores}, {"num_parallel_calls": 2 * cores}]
        changes += [{"num_parallel_reads": 16}, {"prefetch_batches": AUTOTUNE}]
        changes += [{"read_buffer_bytes": 1 << 18}]
    else:
        changes = [{"num_threads": 2 * cores}, {"prefetch_queue_depth": 4}]
        if options.device == "cpu":
            changes.append({"decode": "full"})
        else:
            changes += [{"hw_decoder_load": load} for load in (0.0, 0.5, 0.75, 0.9)]
        if spec.order == "buffer":
            changes.append({"read_mode": "plain"})
    tried = [Candidate(dataclasses.replace(options, **change), spec.order) for change in changes]
    tried.append(Candidate(options, "buffer" if spec.order == "global" else "global"))
    if spec.preprocess.dtype != "uint8":
        tried.append(Candidate(options, spec.order, {"dtype": "uint8"}))
    if spec.preprocess.antialias:
        tried.append(Candidate(options, spec.order, {"antialias": False}))
    return tried + [
        Candidate(_WORK.options(other), spec.order) for other in backends if other != name
    ]


def try_settings(
    measurer: Measurer, name: str, spec: InputSpec, backends: list[str]
) -> list[dict[str, Any]]:
    """Measures settings against the default, round by round; returns them, the fastest first."""
    base = Candidate(_WORK.options(name), spec.order)
    tried = {one.describe(base): one for one in list_candidates(name, spec, backends)}
    tried = {"default": base, **{text: one for text, one in tried.items() if text != "default"}}
    rates: dict[str, list[float]] = {text: [] for text in tried}
    refused: dict[str, str] = {}
    turns = list(tried) * _REPEATS.value
    for text in cli.progress(turns, what=f"trying settings of {name}", total=len(turns)):
        if text in refused:
            continue
        try:
            answer = measurer.measure(tried[text], seconds=_SECONDS.value)
            rates[text].append(images_per_second(answer))
        except CandidateError as error:
            refused[text] = str(error)
    if "default" in refused:
        raise InputError(f"The default of {name} could not be measured: {refused['default']}")
    rows: list[dict[str, Any]] = [
        {"setting": text, "refused": reason} for text, reason in refused.items()
    ]
    for text in tried.keys() - refused.keys():
        ratios = [one / other for one, other in zip(rates[text], rates["default"], strict=True)]
        row = {"setting": text, "images_per_second": Stats.of(rates[text]).median}
        row |= {"ratio": vars(Stats.of(ratios)), "changes": what_changes(tried[text], base)}
        rows.append(row)
    rows.sort(key=lambda row: -row["ratio"]["median"] if "ratio" in row else 0.0)
    best = next((row for row in rows if "ratio" in row and row["setting"] != "default"), None)
    if best and best["ratio"]["median"] > 1:
        # The best of many is partly luck: what is said of it is measured once more.
        best["again"] = measure_again(measurer, tried[best["setting"]], base)
    return rows


def measure_again(measurer: Measurer, candidate: Candidate, base: Candidate) -> list[float]:
    """Returns the ratios of a setting to the default in rounds of their own; none if it fails."""
    ratios = []
    for _ in cli.progress(range(_AGAIN), what="measuring the best again", total=_AGAIN):
        try:
            default, rate = (
                images_per_second(measurer.measure(one, seconds=_SECONDS.value))
                for one in (base, candidate)
            )
        except CandidateError:
            return []
        ratios.append(rate / default)
    return ratios


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
        if "refused" in row:
            lines.append((name, row["setting"], "-", "-", "-", "-", row["refused"]))
            continue
        ratios = [f"{row['ratio'][which]:.2f}" for which in ("median", "minimum", "maximum")]
        ratios = ["-"] * 3 if row["setting"] == "default" else ratios
        rate = f"{row['images_per_second']:,.0f}"
        lines.append((name, row["setting"], rate, *ratios, row["changes"]))
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
