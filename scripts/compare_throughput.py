"""Compares ways of feeding TensorFlow from TFRecords: images/s, CPU time, first batch, memory.

Each row runs in its own process. The processes take turns, round by round, and pause in between, so
that other load on the machine affects all of them alike. Before that, the images of both backends
are compared. --stages measures the cost of each stage of a backend instead, and --tune finds faster
options for this machine and these files.

example: python scripts/compare_throughput.py --files='path/train-*' --seconds=2
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list, describe_work
from dali_tf_input.processes import describe_end, run_command
from dali_tf_input.records.installing import pip_install
from support import machine, plots
from support.benchmark import Stats, Window
from support.flags import BACKENDS, FileFlags, WorkFlags
from support.throughput import costs, tuning
from support.throughput.peers import PEERS, check_installed
from support.throughput.rows import ROWS, conclusions, measure_rows, rates, ratios

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
_SECONDS = FLAGS.number("seconds", 4.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 5, "Measured windows of each row, stage or setting.", 1)
_WARMUP_BATCHES = FLAGS.integer("warmup_batches", 16, "Batches before each window.", 0)
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_REFERENCE = "tf_data"
_MOST_DIFFERENCE = 0.01  # of 255, on average
_COLUMNS: tuple[str, ...] = ("backend", "images/s", "min", "max", f"x {_REFERENCE}", "CPU s / 1000")
_COLUMNS += ("first batch s", "peak MB", "what")


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
            report = tuning.tune(*given, replicas=_REPLICAS.value, **window)
        report |= {**window, "work": describe_work(_WORK.preprocess())}
        report |= {"batch_size": _WORK.batch_size.value}
        command.write_json(_JSON, report)
        if _PLOT.value:
            plots.plot_stages(report, names=costs.NAMES, path=_PLOT.value)
        return 0
    spec = _WORK.spec(_FILES, "buffer")
    dataset = spec.records
    about = machine.describe()
    names = choose_rows(about["gpus"], order="global" if dataset.is_remote else "buffer")
    machine.print_lines(about)
    size = sum(file.size for file in dataset.files)
    files = command.format_count(len(dataset.files), "file")
    kilobytes = f"{size / dataset.num_records / 1e3:,.0f} KB each"
    print(f"records   {dataset.num_records:,} in {files}, {kilobytes}")
    print(f"work      {describe_work(spec.preprocess)}, batch {_WORK.batch_size.value}")
    print(f"images    {compare_images()}")
    shared = {**window, _WARMUP_BATCHES.name: _WARMUP_BATCHES.value}
    windows = measure_rows(names, _FILES, _WORK, **shared)
    rows = {name: summarize(name, windows) for name in names}
    print()
    command.print_table(_COLUMNS, [format_row(name, row) for name, row in rows.items()])
    print()
    print("\n".join(conclusions(windows)))
    report = {**about, **shared, "files": list(_FILES.files.value), "bytes": size}
    report |= {"num_records": dataset.num_records, "work": describe_work(spec.preprocess)}
    report |= {"options": {name: repr(ROWS[name].candidate.options) for name in rows}}
    report |= {"decode": _WORK.decode.value, "batch_size": _WORK.batch_size.value}
    report |= {"rows": rows, "windows": windows}
    command.write_json(_JSON, report)
    if _PLOT.value:
        plots.plot_throughput(report, path=_PLOT.value)
    return 0


def check_flags() -> None:
    """Raises InputError for flags that do not go together."""
    if _STAGES.value and _TUNE.value:
        raise InputError("--stages and --tune are two runs: give one of them.")
    if _TUNE.value and _PLOT.value:
        raise InputError("--tune has no plot: leave out --plot.")
    if _ORDER.present and not (_STAGES.value or _TUNE.value):
        raise InputError("--order is of --stages and --tune: the rows name their order.")
    if _REPLICAS.present and not _TUNE.value:
        raise InputError("--replicas is of --tune: leave it out.")


def choose_rows(gpus: list[str], order: str) -> list[str]:
    """Returns the rows to measure: those of --backends, or the usual ones of `order`.

    The usual ones include rows that need a GPU only if TensorFlow sees one.
    """
    usable = bool(gpus) and machine.count_gpus_of_tensorflow() > 0
    if _BACKENDS.value is None:
        if gpus and not usable:
            print("The GPU rows are left out: TensorFlow sees no GPU. See docs/install.md.")
        usual = [name for name, row in ROWS.items() if row.candidate.order == order]
        left_out = ("" if usable else "dali_gpu", *PEERS)
        return [name for name in usual if not name.startswith(tuple(filter(None, left_out)))]
    names = check_list("backends", _BACKENDS.value, list(ROWS))
    for name in names:
        check_installed(name, augments=bool(_WORK.preprocess().augment))
    on_gpu = {name for name in names if name.startswith("dali_gpu")}
    if gpus:
        on_gpu.discard("dali_gpu_bare")  # needs no GPU of TensorFlow's
    if on_gpu and not usable:
        raise InputError(
            f"The dali_gpu rows need an NVIDIA GPU: nvidia-smi shows {len(gpus)}, TensorFlow sees"
            " none. If there is one, see docs/install.md."
        )
    return names


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


def summarize(name: str, windows: dict[str, list[dict]]) -> dict:
    """Returns what the table shows of one row."""
    measured, reference = windows[name], windows.get(_REFERENCE)
    cpu = [Window(**measurement["window"]).cpu_seconds_per_1000_images for measurement in measured]
    return {
        "what": ROWS[name].what,
        "images_per_second": vars(Stats.of(rates(measured))),
        "ratio_to_tf_data": vars(ratios(measured, reference)) if reference else None,
        "cpu_seconds_per_1000_images": Stats.of(cpu).median,
        "first_batch_seconds": measured[0]["first_batch_seconds"],
        "peak_memory_bytes": max(measurement["peak_memory_bytes"] for measurement in measured),
    }


def format_row(name: str, row: dict) -> tuple[str, ...]:
    """Returns one line of the table."""
    speed, ratio = row["images_per_second"], row["ratio_to_tf_data"]
    return (
        name,
        *(f"{speed[which]:,.0f}" for which in ("median", "minimum", "maximum")),
        f"{ratio['median']:.2f}" if ratio else "-",
        f"{row['cpu_seconds_per_1000_images']:.2f}",
        f"{row['first_batch_seconds']:.2f}",
        f"{row['peak_memory_bytes'] / 1e6:,.0f}",
        row["what"],
    )


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
