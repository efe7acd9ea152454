"""Says what each stage of the input costs, and which setting would help most: by cutting the real pipeline after each stage.

usage: profile_stages.py --files=GLOB [--backends=tf_data,dali_cpu] [--order=global] [--batch_size=64] [--seconds=1]
                         [--repeats=3] [--crop=resize_random_crop] [--image_size=224] [--antialias] [--dtype=float32]
                         [--nosettings] [--json=PATH] [--plot=PATH]

Each cut is measured in turn, round by round, in a process that measures nothing else meanwhile; a stage costs what its cut takes
more than the one before it, in the same round. Then settings that might help are measured against the defaults, in rounds too.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from typing import Any

from absl import flags

import console
import machine
import settings
from dali_tf_input import AUTOTUNE, DaliOptions, InputError, Spread, TfDataOptions
from settings import Setting
from tuner import is_faster

_BACKENDS = flags.DEFINE_list("backends", None, "Of tf_data, dali_cpu and dali_gpu; by default all that this machine has.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Length of each measured window in seconds, above 0.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measured windows of each cut and setting, at least 1.")
_SETTINGS = flags.DEFINE_boolean("settings", True, "Whether to measure settings that might help, too.")
_JSON = flags.DEFINE_string("json", None, "File for the results.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, a PNG.")

_COLUMNS = ("backend", "stage", "images/s so far", "alone", "s / 1000", "min", "max", "share", "CPU s / 1000", "min", "max")
_SETTING_COLUMNS = ("backend", "setting", "images/s", "x default", "min", "max", "changes")
_SMALLEST_GAIN = 1.02  # a median below that is not told from none

_AGAIN = 6  # rounds in which the best setting is measured against the default once more
_NOISY = 1.15  # the shares of stages that add up to more are mostly noise

# What the stages are called where a backend does several in one operation.
NAMES = {
    "read": "read",
    "parse": "parse",
    "decode": "decode",
    "resize": "crop and resize",
    "finish": "mirror and normalise",
    "batch": "batch",
    "device": "to the device",
}


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    check_flags()
    spec = settings.training_spec()
    about = machine.describe()
    has_gpu = bool(about["gpus"]) and machine.tensorflow_sees_a_gpu()
    options = choose_backends(has_gpu)
    machine.print_lines(about)
    print(f"records   {spec.dataset.num_records:,} in {console.count(len(spec.dataset.files), 'file')}, order {spec.order}")
    with tempfile.TemporaryDirectory() as folder, settings.Worker(os.path.join(folder, "log")) as worker:
        cuts = {name: cuts_of(option, spec.order, has_gpu=has_gpu) for name, option in options.items()}
        windows = measure_cuts(worker, cuts)
        stages = {name: summarise(windows[name]) for name in cuts}
        print()
        console.print_table(_COLUMNS, [line for name, rows in stages.items() for line in format_stages(name, rows, spec.order)])
        helps: dict[str, list[dict]] = {}
        if _SETTINGS.value:
            helps = {name: try_settings(worker, name, option, spec, options) for name, option in options.items()}
            print()
            console.print_table(_SETTING_COLUMNS, [line for name, rows in helps.items() for line in format_settings(name, rows)])
    print()
    for name, rows in stages.items():
        print(conclude(name, rows, helps.get(name)))
    report = {
        "command": shlex.join(sys.argv),
        **about,
        "batch_size": settings.backends.BATCH_SIZE.value,
        "order": spec.order,
        "seconds": _SECONDS.value,
        "repeats": _REPEATS.value,
        "num_records": spec.dataset.num_records,
        "preprocess": repr(spec.preprocess),
        "stages": stages,
        "settings": helps,
    }
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as stream:
            json.dump(report, stream, indent=2)
            stream.write("\n")
        print(f"results in {_JSON.value}")
    if _PLOT.value:
        import plots

        plots.plot_stages(report, names=NAMES, path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    return 0


def check_flags() -> None:
    """Checks the numbers and the outputs before anything is started."""
    if _REPEATS.value < 1:
        raise InputError(f"`repeats` must be at least 1, got {_REPEATS.value}.")
    if _SECONDS.value <= 0:
        raise InputError(f"`seconds` must be above 0, got {_SECONDS.value}.")
    for flag, suffix in ((_JSON, ""), (_PLOT, ".png")):
        if flag.value:
            console.check_writable(flag.value, flag=flag.name, suffix=suffix)


def choose_backends(has_gpu: bool) -> dict[str, DaliOptions | TfDataOptions]:
    """Returns the default options of the backends to measure."""
    here = settings.default_options(has_gpu=has_gpu)
    if _BACKENDS.value is None:
        return here
    for name in _BACKENDS.value or [""]:
        if name not in here:
            raise InputError(f"`backends` must be of {', '.join(here)} on this machine, got {name or 'none'}.")
    return {name: here[name] for name in _BACKENDS.value}


def cuts_of(options: DaliOptions | TfDataOptions, order: str, *, has_gpu: bool) -> dict[str, Setting]:
    """Returns the cut pipelines of a backend by the last stage of each, in turn."""
    stages: list[str | None] = ["read", "parse", "decode", "resize", "finish", None]
    if isinstance(options, DaliOptions) and order == "buffer":
        stages.remove("read")  # its own reader parses too
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    if has_gpu and not on_gpu:
        stages.append("device")
    return {stage or "batch": Setting(options, order, until=stage) for stage in stages}


def measure_cuts(worker: settings.Worker, cuts: dict[str, dict[str, Setting]]) -> dict[str, dict[str, list[dict]]]:
    """Measures all cuts round by round; returns the windows of each."""
    windows: dict[str, dict[str, list[dict]]] = {name: {stage: [] for stage in stages} for name, stages in cuts.items()}
    turns = [(name, stage, cut) for name, stages in cuts.items() for stage, cut in stages.items()] * _REPEATS.value
    for name, stage, cut in console.progress(turns, what="cutting", total=len(turns)):
        try:
            windows[name][stage].append(worker.measure(cut, seconds=_SECONDS.value))
        except settings.SettingError as error:
            raise InputError(f"{name}, cut after '{NAMES[stage]}': {error}") from error
    return windows


def summarise(windows: dict[str, list[dict]]) -> dict[str, dict]:
    """Returns for each stage of a backend the rate of its cut, and what it costs more than the one before."""
    rows: dict[str, dict] = {}
    repeats = len(next(iter(windows.values())))
    before = {"seconds": [0.0] * repeats, "cpu": [0.0] * repeats}
    for stage, measured in windows.items():
        now = {
            "seconds": [1000 / settings.images_per_second(window) for window in measured],
            "cpu": [settings.cpu_seconds_per_1000_images(window) for window in measured],
        }
        rows[stage] = {"images_per_second": vars(Spread.of([1000 / seconds for seconds in now["seconds"]]))}
        for what, name in (("seconds", "seconds_per_1000_images"), ("cpu", "cpu_seconds_per_1000_images")):
            rows[stage][name] = vars(Spread.of([one - other for one, other in zip(now[what], before[what], strict=True)]))
        before = now
    whole = Spread.of(before["seconds"]).median
    for row in rows.values():
        row["share"] = max(0.0, row["seconds_per_1000_images"]["median"]) / whole  # of all shares noise makes a bit more or less
    return rows


def title(stage: str, rows: dict[str, dict]) -> str:
    """Returns what a stage of a backend is called; DALI's own reader reads and parses at once."""
    return "read and parse" if stage == "parse" and "read" not in rows else NAMES[stage]


def format_stages(name: str, rows: dict[str, dict], order: str) -> list[tuple[str, ...]]:
    """Returns the lines of a backend in the table."""
    lines = []
    for stage, row in rows.items():
        seconds, cpu = row["seconds_per_1000_images"], row["cpu_seconds_per_1000_images"]
        own = f"{1000 / seconds['median']:,.0f}" if seconds["minimum"] > 0 else "-"  # else it is not told from nothing
        lines.append(
            (
                name,
                title(stage, rows),
                f"{row['images_per_second']['median']:,.0f}",
                own,
                *(f"{max(0.0, seconds[which]):.3f}" for which in ("median", "minimum", "maximum")),
                f"{row['share']:.0%}",
                *(f"{max(0.0, cpu[which]):.3f}" for which in ("median", "minimum", "maximum")),
            )
        )
    return lines


def candidates(name: str, options: DaliOptions | TfDataOptions, spec: Any, others: dict[str, Any], cores: int) -> list[Setting]:
    """Returns the settings of a backend that might help."""
    found: list[dict[str, Any]]
    if isinstance(options, TfDataOptions):
        other_plan = "decode" if spec.preprocess.resizes_plainly else "off"
        found = [
            {"fuse": other_plan},
            {"fuse": "scaled"},
            {"num_parallel_calls": cores},
            {"num_parallel_calls": 2 * cores},
            {"num_parallel_reads": 16},
            {"prefetch_batches": AUTOTUNE},
            {"read_buffer_bytes": 1 << 18},
        ]
    else:
        found = [{"num_threads": 2 * cores}, {"prefetch_queue_depth": 4}]
        if options.device == "cpu":
            found.append({"fuse": "off"})
        else:
            found += [{"hw_decoder_load": load} for load in (0.0, 0.5, 0.75, 0.9)]
        if spec.order == "buffer":
            found.append({"read_mode": "plain"})
    tried = [Setting(dataclasses.replace(options, **changes), spec.order) for changes in found]
    tried.append(Setting(options, "buffer" if spec.order == "global" else "global"))
    if spec.preprocess.dtype != "uint8":
        tried.append(Setting(options, spec.order, {"dtype": "uint8"}))
    if spec.preprocess.antialias:
        tried.append(Setting(options, spec.order, {"antialias": False}))
    return tried + [Setting(other, spec.order) for other_name, other in others.items() if other_name != name]


def try_settings(worker: settings.Worker, name: str, options: Any, spec: Any, others: dict[str, Any]) -> list[dict]:
    """Measures settings against the default, round by round; returns them, the most helpful first."""
    base = Setting(options, spec.order)
    tried = {
        settings.describe_difference(setting, base): setting
        for setting in candidates(name, options, spec, others, len(os.sched_getaffinity(0)))
    }
    tried.pop("default", None)  # one that the user's flags are already
    rates: dict[str, list[float]] = {text: [] for text in ("default", *tried)}
    refused: dict[str, str] = {}
    turns = [("default", base), *tried.items()] * _REPEATS.value
    for text, setting in console.progress(turns, what=f"trying settings of {name}", total=len(turns)):
        if text in refused:
            continue
        try:
            rates[text].append(settings.images_per_second(worker.measure(setting, seconds=_SECONDS.value)))
        except settings.SettingError as error:
            refused[text] = str(error)
    rows = []
    if "default" in refused:
        raise InputError(f"The default settings of {name} could not be measured again: {refused['default']}")
    for text, measured in rates.items():
        if text in refused:
            rows.append({"setting": text, "refused": refused[text]})
            continue
        ratio = Spread.of([rate / default for rate, default in zip(measured, rates["default"], strict=True)])
        changes = what_changes(tried.get(text, base), base)
        rows.append({"setting": text, "images_per_second": vars(Spread.of(measured)), "ratio": vars(ratio), "changes": changes})
    rows.sort(key=lambda row: -row["ratio"]["median"] if "ratio" in row else 0.0)
    best = next((row for row in rows if "ratio" in row and row["setting"] != "default"), None)
    if best and best["ratio"]["median"] >= _SMALLEST_GAIN:  # the best of many is partly luck: what is said of it is measured anew
        best["again"] = measure_again(worker, base, tried[best["setting"]])
    return rows


def measure_again(worker: settings.Worker, base: Setting, setting: Setting) -> list[float]:
    """Returns the ratios of a setting to the default in rounds of their own; fewer where it is refused."""
    ratios: list[float] = []
    with contextlib.suppress(settings.SettingError):
        for _ in console.progress(range(_AGAIN), what="measuring the best again", total=_AGAIN):
            default, rate = (settings.images_per_second(worker.measure(each, seconds=_SECONDS.value)) for each in (base, setting))
            ratios.append(rate / default)
    return ratios


def what_changes(setting: Setting, base: Setting) -> str:
    """Says what else than the speed a setting changes; nothing for most."""
    if setting.order != base.order:
        return "how records are mixed"
    if setting.preprocess:
        return "what the model gets"
    fuse, base_fuse = (getattr(options, "fuse", "") for options in (setting.options, base.options))
    return "the pixels" if fuse != base_fuse and "scaled" in (fuse, base_fuse) else ""


def format_settings(name: str, rows: list[dict]) -> list[tuple[str, ...]]:
    """Returns the lines of a backend in the table of settings."""
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append((name, row["setting"], "-", "-", "-", "-", row["refused"]))
            continue
        ratio = row["ratio"]
        ratios = (
            ("-",) * 3 if row["setting"] == "default" else tuple(f"{ratio[key]:.2f}" for key in ("median", "minimum", "maximum"))
        )
        lines.append((name, row["setting"], f"{row['images_per_second']['median']:,.0f}", *ratios, row["changes"]))
    return lines


def conclude(name: str, rows: dict[str, dict], helps: list[dict] | None) -> str:
    """Returns the sentence on a backend: its costliest stage, and the setting that helps most."""
    costliest = max(rows, key=lambda stage: rows[stage]["share"])
    text = f"{name}: {title(costliest, rows)} costs most, {rows[costliest]['share']:.0%} of the time."
    if sum(row["share"] for row in rows.values()) > _NOISY:
        text += " The cuts differ by less than the noise of this machine: take longer windows (--seconds=5)."
    if helps is None:
        return text
    measured = [row for row in helps if "ratio" in row and row["setting"] != "default"]
    if not measured:
        return text
    best = measured[0]
    if "again" not in best:
        return f"{text} None of {len(measured)} settings that were tried is faster than the default by more than 2%."
    if not best["again"]:
        return f"{text} Of {len(measured)} settings {best['setting']} seemed to help most, and then could not be measured again."
    ratio, rounds = Spread.of(best["again"]), len(best["again"])
    spread = f"{ratio.median:.2f} times the images/s ({ratio.minimum:.2f} to {ratio.maximum:.2f} in {rounds} rounds of its own)"
    if not is_faster(best["again"]):
        return f"{text} Of {len(measured)} settings the best, {best['setting']}, does not help beyond noise: {spread}."
    remark = f"; it changes {best['changes']}" if best["changes"] else ""
    return f"{text} Of {len(measured)} settings that were tried {best['setting']} helps most: {spread}{remark}."


if __name__ == "__main__":
    console.run(main)
