"""Compares ways of feeding TensorFlow from TFRecords: images/s, and CPU time per image.

Each row runs in its own process. The processes take turns, round by round, and pause in between, so
that other load on the machine affects all of them alike. Before that, the images of both backends
are compared. Ctrl-C ends it; the rounds until then are shown and kept. --stages measures the cost
of each stage of a backend instead; --tune finds faster options for this machine and these files.

example: python scripts/compare_throughput.py --files='path/train-*' --seconds=2
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import dali_tf_input as dti
from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list, describe_work
from dali_tf_input.index.decoders import read_header
from dali_tf_input.processes import describe_end, run_command
from dali_tf_input.records.checks import InvalidRecord
from dali_tf_input.records.installing import pip_install
from support import machine, plots
from support.benchmark import keep_earlier, save_json
from support.flags import BACKENDS, FileFlags, WorkFlags, find_problem_of_dali
from support.throughput import comparison, costs, tuning
from support.throughput.peers import check_installed, find_missing
from support.throughput.rows import GROUPS, ROWS, Windows, measure_rows

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_STAGES = FLAGS.boolean("stages", False, "Say what each stage of a backend costs instead.")
_TUNE = FLAGS.boolean("tune", False, "Find faster options of the fastest backend instead.")
_BACKENDS = FLAGS.list(
    "backends",
    None,
    f"Rows to measure, from {', '.join(ROWS)}; by default the usual ones. With --stages or --tune,"
    f" backends from {', '.join(BACKENDS)}; by default all that work here.",
)
_ORDER = FLAGS.choice(
    "order", "global", ["global", "buffer"], "With --stages or --tune: how records are mixed."
)
_REPLICAS = FLAGS.integer("replicas", None, "With --tune: how many share the cores; else GPUs.", 1)
_ONLY = FLAGS.list("only", None, "With --tune: the options to try; by default all.")
_SECONDS = FLAGS.number("seconds", 2.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 6, "Measured windows of each row, stage or setting.", 1)
_WARMUP_BATCHES = FLAGS.integer("warmup_batches", 16, "Batches before each window.", 0)
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_MOST_DIFFERENCE = 0.01  # of 255, on average
_MOST_SIZES = 256  # images whose size in pixels is read
# For the time that it will take, on 2 cores: the start of a process and its first batches, and
# the batches before a window.
_START_SECONDS, _WARMUP_SECONDS = 9, 1


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    command.check_writable(_PLOT, suffix=".png")
    if _PLOT.value and importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"--plot needs matplotlib: {pip_install('matplotlib')}")
    check_flags()
    window: dict[str, Any] = {flag.name: flag.value for flag in (_SECONDS, _REPEATS)}
    if _STAGES.value or _TUNE.value:
        given = (_FILES, _WORK, _ORDER.value, _BACKENDS.value)
        if _STAGES.value:
            report = costs.report_costs(*given, **window)
        else:
            report = tuning.tune(*given, replicas=_REPLICAS.value, only=_ONLY.value, **window)
        report |= {**window, "work": describe_work(_WORK.preprocess())}
        report |= {"batch_size": _WORK.batch_size.value, "files": list(_FILES.files.value)}
        keep_other_results(report, ("files", "num_records", "order", "work", "batch_size"))
        command.write_json(_JSON, report)
        if _PLOT.value:
            plots.plot_stages(report, names=costs.NAMES, path=_PLOT.value)
        return 0
    compare(window | {_WARMUP_BATCHES.name: _WARMUP_BATCHES.value})
    return 0


def compare(window: dict[str, Any]) -> None:
    """Measures the rows, and shows what was found, also of rounds before an interruption."""
    spec = _WORK.spec(_FILES, "buffer")
    report = {"schema": comparison.SCHEMA, **machine.describe(), **window}
    report |= {"data": look_at_data(spec.records), "work": describe_work(spec.preprocess)}
    report |= {"batch_size": _WORK.batch_size.value, "decode": _WORK.decode.value}
    machine.print_lines(report)
    print(f"records   {comparison.describe_data(report['data'])}")
    print(f"work      {report['work']}, batch {report['batch_size']}")
    names, left_out = choose_rows(report["gpus"], is_remote=spec.records.is_remote)
    for text in left_out:
        print(f"left out  {text}")
    minutes = math.ceil(estimate_seconds(len(names)) / 60)
    print(
        f"plan      {command.format_count(len(names), 'row')} in turn,"
        f" {command.format_count(_REPEATS.value, 'round')} of {_SECONDS.value:g} s each:"
        f" about {minutes} min",
        flush=True,
    )
    compares = any(name.startswith("dali") for name in names)
    report["images"] = (
        compare_images() if compares else "not compared: DALI makes none of these rows"
    )
    print(f"images    {report['images']}", flush=True)
    report |= {"left_out": left_out, "rounds": 0}
    options = {name: _WORK.with_decode(ROWS[name].candidate.options) for name in names}
    report["options"] = {name: repr(one) for name, one in options.items()}
    start = time.monotonic()

    def keep(windows: Windows) -> None:
        if not report["rounds"]:  # only now is there something to write
            keep_other_results(report, ("data", "work", "batch_size", "decode"))
        report.update(comparison.summarize(windows, report["data"]["num_records"]))
        report.update(windows=windows, load_after=os.getloadavg()[0])
        report.update(seconds_taken=time.monotonic() - start)
        report["conclusion"] = comparison.conclude(report)
        if _JSON.value:
            save_json(report, _JSON.value)

    try:
        measure_rows(names, _FILES, _WORK, after_round=keep, **window)
    finally:
        if report["rounds"]:
            show(report)


def show(report: dict[str, Any]) -> None:
    """Prints the sentence, the table and what limits them; plots; says where the files are."""
    rounds, reference = report["rounds"], report["reference"]
    print(f"\n{report['conclusion']}")
    if rounds < report["repeats"]:
        print(f"warning: it ended early, after {rounds} of {report['repeats']} rounds.")
    if warning := comparison.warn_if_busy(report):
        print(f"warning: {warning}")
    print()
    columns = ("", "row", "images/s", f"{reference} over it", "CPU ms an image", "what")
    rows = report["rows"]
    firsts = {next((n for n, row in rows.items() if row["group"] == group), "") for group in GROUPS}
    command.print_table(
        columns,
        [
            (
                row["group"] if name in firsts else "",
                name,
                f"{row['images_per_second']:,.0f}",
                "-" if name == reference else comparison.format_ratio(row["ratio"], rounds),
                f"{row['cpu_ms_per_image']:.2f}",
                row["what"],
            )
            for name, row in rows.items()
        ],
    )
    print()
    for line in comparison.answer_questions(report):
        print(line)
    print(
        f"images/s: of {reference} the median of {command.format_count(rounds, 'window')}; of the"
        " others, that divided by the ratio: the median (smallest to largest) of the rounds."
    )
    print(comparison.describe_reads(report))
    if _JSON.value:
        print(f"results in {_JSON.value}")
    if _PLOT.value:
        plots.plot_throughput(report, path=_PLOT.value)
    print("make profile says where the time goes; make tune looks for faster options.")


def estimate_seconds(rows: int) -> float:
    """Returns about how long it takes on 2 cores."""
    turn = _SECONDS.value + _WARMUP_SECONDS
    return rows * (_START_SECONDS + 1.25 * _SECONDS.value + _REPEATS.value * turn)


def look_at_data(records: dti.Records) -> dict[str, Any]:
    """Returns which records are read, how many and how large; the images' sizes are of some."""
    from support.samples import CLASS_NAMES

    sizes = [] if records.is_remote else read_sizes(records)
    return {
        "files": list(_FILES.files.value),
        "num_files": len(records.files),
        "is_sample": list(records.class_names or ()) == CLASS_NAMES,
        "is_remote": records.is_remote,
        "num_records": records.num_records,
        "bytes": sum(file.size for file in records.files),
        "mean_size": [sum(one) / len(sizes) for one in zip(*sizes, strict=True)] if sizes else None,
        "sizes_read": len(sizes),
    }


def read_sizes(records: dti.Records) -> list[tuple[int, int]]:
    """Reads height and width of some images in pixels, as they are stored."""
    if records.stores_pixels:
        return []
    sizes = []
    for record in records.sample(min(_MOST_SIZES, records.num_records)).ids.tolist():
        with contextlib.suppress(InvalidRecord):  # measuring will name it
            sizes.append(read_header(records.read(record)[records.image_key][0])[1:])
    return sizes


def check_flags() -> None:
    """Raises InputError for flags that do not go together."""
    if _STAGES.value and _TUNE.value:
        raise InputError("--stages and --tune are two runs: give one of them.")
    if _TUNE.value and _PLOT.value:
        raise InputError("--tune has no plot: leave out --plot, or call make tune.")
    if _JSON.value and _JSON.value == _PLOT.value:
        raise InputError(f"--json and --plot name one file, {_JSON.value}: name two.")
    if _ORDER.present and not (_STAGES.value or _TUNE.value):
        raise InputError("--order is of --stages and --tune: the rows name their order.")
    for flag in (_REPLICAS, _ONLY):
        if flag.present and not _TUNE.value:
            raise InputError(f"--{flag.name} is of --tune: leave it out.")


def choose_rows(gpus: list[str], *, is_remote: bool) -> tuple[list[str], list[str]]:
    """Returns the rows to measure, and what is left out of the usual ones, and why.

    Those of --backends, or the usual ones: without DALI's where it does not work, and where
    TensorFlow sees no GPU without those that need one.

    Raises:
      InputError: a row of --backends cannot be measured here.
    """
    on_gpu = [name for name in ROWS if name.startswith("dali_gpu")]
    dali = [name for name in ROWS if name.startswith("dali")]
    usable = bool(gpus) and machine.count_gpus_of_tensorflow() > 0
    if _BACKENDS.value is None:
        names = [name for name, row in ROWS.items() if row.is_usual]
        names = [name for name in names if usable or name not in on_gpu]
        left_out = []
        if gpus and not usable:
            left_out.append("DALI's rows on the GPU: TensorFlow sees none, see docs/install.md")
        if is_remote:
            names = [name for name in names if ROWS[name].group == "this package"]
            left_out.append("what is written by hand, and parts: they read local files")
        if problem := find_problem_of_dali():
            names = [name for name in names if name not in dali]
            left_out.append(f"DALI's rows: {problem}")
        augments = bool(_WORK.preprocess().augment)
        missing = {name: find_missing(name, augments=augments) for name in names}
        left_out += [f"{name}: {text}" for name, text in missing.items() if text]
        return [name for name in names if not missing[name]], left_out
    names = check_list("backends", _BACKENDS.value, list(ROWS))
    if set(names) & set(dali) and (problem := find_problem_of_dali()):
        raise InputError(problem)
    for name in names:
        check_installed(name, augments=bool(_WORK.preprocess().augment))
    needed = {name for name in names if name in on_gpu}
    if gpus:
        needed.discard("dali_gpu_bare")  # needs no GPU of TensorFlow's
    if needed and not usable:
        raise InputError(
            f"The dali_gpu rows need an NVIDIA GPU: nvidia-smi shows {len(gpus)}, TensorFlow sees"
            " none. If there is one, see docs/install.md."
        )
    return names, []


def compare_images() -> str:
    """Compares the backends' evaluation images in another process; an error if they differ."""
    script = Path(__file__).with_name("compare_images.py")
    words = [sys.executable, str(script), *_FILES.as_arguments()]
    words += ["--evaluation", f"--most={_MOST_DIFFERENCE}"]
    code, output, errors = run_command(words)
    if code:
        raise InputError(
            "The backends' images were not shown to be the same, so their speeds mean nothing. "
            f"{errors.strip() or describe_end(code)}"
        )
    return f"DALI's to tf.data's: {output.rpartition('difference')[2].strip()}"


def keep_other_results(report: dict[str, Any], names: tuple[str, ...]) -> None:
    """Renames results which would be overwritten, if they differ in what `names` say."""
    try:
        before = json.loads(Path(_JSON.value or "").read_text("utf-8"))
        if all(before[name] == report[name] for name in names):
            return
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or it is something else
        pass
    for path in keep_earlier(_JSON.value, _PLOT.value):
        print(f"kept: results of other records or work: {path}")


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
