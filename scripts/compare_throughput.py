"""Compares ways of feeding TensorFlow from TFRecords: images/s, CPU time, first batch, memory.

Each row runs in a process of its own. The processes are measured in turn, round by round, and
paused between their turns, so that whatever else the machine does affects all of them alike. First
both backends are shown to make the same images. --sweep measures six kinds of work against the same
work written by hand.

example: python scripts/compare_throughput.py --files='path/train-*' --seconds=2
"""

import os
import subprocess
import sys

from dali_tf_input import InputError, InputSpec, Stats, Window
from support import cli, machine, plots, processes
from support.flags import FileFlags, WorkFlags
from support.throughput import sweep
from support.throughput.rows import ROWS, conclusions, measure_rows, rates, ratios

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_BACKENDS = FLAGS.list("backends", None, f"Rows to measure, of {', '.join(ROWS)}; else the usual.")
_SECONDS = FLAGS.number("seconds", 4.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 5, "Measured windows of each row.", 1)
_WARMUP_BATCHES = FLAGS.integer(
    "warmup_batches", 16, "Batches before each window, beyond queues.", 0
)
_SWEEP = FLAGS.boolean("sweep", False, "Measure six kinds of work, against the same by hand.")
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")

_REFERENCE = "tf_data"
_LIMIT = 600  # seconds for the comparison of images
_COLUMNS = (
    "backend",
    "images/s",
    "min",
    "max",
    f"x {_REFERENCE}",
    "CPU s / 1000",
    "first batch s",
    "peak MB",
    "what",
)


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    cli.check_writable(_JSON.value, flag="json")
    cli.check_writable(_PLOT.value, flag="plot", suffix=".png")
    spec = _WORK.spec(_FILES.dataset(), "buffer")
    about = machine.describe()
    names = choose_rows(about["gpus"])
    machine.print_lines(about)
    if _SWEEP.value:
        given = [flag.name for flag in (*_WORK.all[1:], _BACKENDS, _PLOT) if flag.present]
        if given:
            raise InputError(f"--sweep chooses --{given[0]} itself.")
        measured = [
            f"--{flag.name}={flag.value}" for flag in (_SECONDS, _REPEATS, _WORK.batch_size)
        ]
        reports = sweep.run(spec.dataset, _FILES, measured)
        if _JSON.value:
            cli.write_json(_JSON.value, reports)
        return 0
    size = sum(map(os.path.getsize, spec.dataset.files))
    records = spec.dataset.num_records
    files = cli.format_count(len(spec.dataset.files), "file")
    print(f"records   {records:,} in {files}, {size / records / 1e3:,.0f} KB each")
    print(f"work      {spec.preprocess.describe()}, batch {_WORK.batch_size.value}")
    print(f"images    {compare_images()}")
    windows = measure_rows(
        names,
        _FILES,
        _WORK,
        seconds=_SECONDS.value,
        repeats=_REPEATS.value,
        warmup_batches=_WARMUP_BATCHES.value,
    )
    rows = {name: summarize(name, windows) for name in names}
    print()
    cli.print_table(_COLUMNS, [format_row(name, row) for name, row in rows.items()])
    print()
    for sentence in conclusions(windows):
        print(sentence)
    report = make_report(about, spec, rows, windows)
    if _JSON.value:
        cli.write_json(_JSON.value, report)
    if _PLOT.value:
        plots.plot_throughput(report, path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    return 0


def choose_rows(gpus: list[str]) -> list[str]:
    """Returns the rows to measure; those that need a GPU only if TensorFlow sees one."""
    usable = bool(gpus) and machine.count_gpus_of_tensorflow() > 0
    if _BACKENDS.value is None:
        if gpus and not usable:
            print("The GPU rows are left out: TensorFlow sees no GPU. See docs/install.md.")
        usual = [name for name, row in ROWS.items() if row.candidate.order == "buffer"]
        return [name for name in usual if usable or not name.startswith("dali_gpu")]
    unknown = [name for name in _BACKENDS.value if name not in ROWS]
    if unknown or not _BACKENDS.value:
        names = ", ".join(unknown) or "none"
        raise InputError(f"`backends` must be of {', '.join(ROWS)}, got {names}.")
    if not usable and any(name.startswith("dali_gpu") for name in _BACKENDS.value):
        raise InputError(
            f"The dali_gpu rows need an NVIDIA GPU: nvidia-smi shows {len(gpus)}, TensorFlow sees"
            " none. If there is one, see docs/install.md."
        )
    return list(dict.fromkeys(_BACKENDS.value))


def compare_images() -> str:
    """Compares the backends' evaluation images in another process; an error if they differ."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_images.py")
    try:
        words = [sys.executable, script, *_FILES.as_arguments()]
        code, output, errors = processes.call(words, seconds=_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"The images are not compared within {_LIMIT} s.") from error
    if code:
        raise InputError(
            "The backends' images were not shown to be the same, so their speeds mean nothing. "
            f"{errors.strip() or output.strip()}"
        )
    return output.strip()


def summarize(name: str, windows: dict[str, list[dict]]) -> dict:
    """Returns what the table shows of one row."""
    measured, reference = windows[name], windows.get(_REFERENCE)
    cpu = [Window(**one["window"]).cpu_seconds_per_1000_images for one in measured]
    return {
        "what": ROWS[name].what,
        "images_per_second": vars(Stats.of(rates(measured))),
        "ratio_to_tf_data": vars(Stats.of(ratios(measured, reference))) if reference else None,
        "cpu_seconds_per_1000_images": Stats.of(cpu).median,
        "first_batch_seconds": measured[0]["first_batch_seconds"],
        "peak_memory_bytes": max(one["peak_memory_bytes"] for one in measured),
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


def make_report(about: dict, spec: InputSpec, rows: dict, windows: dict) -> dict:
    """Returns all that was measured, and of what."""
    return {
        **about,
        "files": list(_FILES.files.value),
        "num_records": spec.dataset.num_records,
        "bytes": sum(map(os.path.getsize, spec.dataset.files)),
        "work": spec.preprocess.describe(),
        "options": {name: repr(ROWS[name].candidate.options) for name in rows},
        "decode": _WORK.decode.value,
        "batch_size": _WORK.batch_size.value,
        "seconds": _SECONDS.value,
        "repeats": _REPEATS.value,
        "warmup_batches": _WARMUP_BATCHES.value,
        "rows": rows,
        "windows": windows,
    }


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
