"""Measures the index step: against DALI's tfrecord2idx, by number of files, and level by level.

The first table is of files made for it (1250 records each, of random sizes), in a warm page cache:
the whole command including its start, and the memory of all its processes. The second, with
--files, checks real images at each level. The rows take turns, so that a slow moment of the machine
affects them all.

example: python scripts/benchmarks/index.py --num_files=128,1024 --files='path/train-*'
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.records.paths import find_files
from dali_tf_input.records.tfrecord import frame_record

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support import machine, processes
from support.benchmark import Stats, format_stats

FLAGS = command.Flags()
_NUM_FILES = FLAGS.list("num_files", ["128", "1024", "8192"], "Files of each row of table 1.")
_RECORDS = FLAGS.integer("records_per_file", 1250, "Records in each of them.", 1)
_FILES = FLAGS.strings("files", "TFRecords of images for the second table.")
_REPEATS = FLAGS.integer("repeats", 5, "How often each row is measured.", 1)
_JSON = FLAGS.string("json", None, "File for the results.")

_RECORD_BYTES = 2000
_TFRECORD2IDX_FILES = 3
_MOST_BYTES = 3_000_000_000  # larger sets get smaller records
_LEVELS = {
    "framing": ["--verify=framing"],
    "crc": ["--verify=crc"],
    "schema": ["--verify=schema"],
    "decode, DALI's decoder": ["--verify=decode", "--decoder=dali"],
    "decode, tf.data's": ["--verify=decode", "--decoder=tf_data"],
    "decode, both": ["--verify=decode"],
}
_COLUMNS: tuple[str, ...] = (
    "files",
    "records",
    "bytes each",
    "seconds",
    "M records/s",
    "MB memory",
)
_COLUMNS += ("unchanged, s", "x tfrecord2idx")


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    numbers = [int(number) if number.isdecimal() else 0 for number in _NUM_FILES.value]
    if not numbers or min(numbers) < 1:
        got = ",".join(_NUM_FILES.value) or "none"
        raise InputError(f"`num_files` must be whole numbers of at least 1, got {got}.")
    command.check_writable(_JSON)
    report = {**machine.describe(), "repeats": _REPEATS.value}
    with tempfile.TemporaryDirectory() as folder:
        report["sets"] = measure_sets(folder, numbers)
    if _FILES.value:
        report["levels"] = measure_levels(find_files(_FILES.value))
    command.write_json(_JSON, report)
    return 0


def measure_sets(folder: str, numbers: list[int]) -> dict[str, Any]:
    """Measures sets of `numbers` files; prints the first table."""
    sizes = {n: min(_RECORD_BYTES, _MOST_BYTES // (n * _RECORDS.value)) for n in numbers}
    for number, size in sizes.items():
        make_set(os.path.join(folder, str(number)), number, size)
    runs: dict[int, list[Any]] = {number: [] for number in sizes}
    for _ in range(_REPEATS.value):
        for number, measured in runs.items():
            pattern = os.path.join(folder, str(number), "*-of-*")
            measured.append((*time_index(pattern, "--force"), time_index(pattern)[0]))
    theirs = time_tfrecord2idx(os.path.join(folder, str(numbers[0])))
    lines, rows = [], {}
    for number, size in sizes.items():
        took, peaks, again = map(list, zip(*runs[number], strict=True))
        seconds, unchanged, records = Stats.of(took), Stats.of(again), number * _RECORDS.value
        ratio = theirs * number / seconds.median
        line = [f"{number:,}", f"{records:,}", f"{size:,}", format_stats(seconds)]
        line += [f"{records / seconds.median / 1e6:.2f}", f"{max(peaks) / 1e6:.0f}"]
        line += [format_stats(unchanged), f"{ratio:,.0f}"]
        lines.append(line)
        row = rows[number] = {"records": records, "record_bytes": size, "memory_bytes": max(peaks)}
        row |= {"seconds": vars(seconds), "unchanged": vars(unchanged), "times_tfrecord2idx": ratio}
    command.print_table(_COLUMNS, lines)
    print(f"tfrecord2idx: {theirs:.2f} s a file; its column is that, times the files")
    return {"rows": rows, "tfrecord2idx_seconds_per_file": theirs}


def measure_levels(files: Sequence[str]) -> dict[str, Any]:
    """Measures each level over real images; prints the second table."""
    size = sum(map(os.path.getsize, files))
    seconds: dict[str, list[float]] = {name: [] for name in _LEVELS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_REPEATS.value):
            for name, arguments in _LEVELS.items():
                words = [*files, "--force", f"--index_dir={folder}", *arguments]
                seconds[name].append(time_index(*words)[0])
        records = sum(len(path.read_text().splitlines()) for path in Path(folder).glob("*.idx"))
    lines, results = [], {}
    for name, values in seconds.items():
        stats = Stats.of(values)
        results[name] = {**vars(stats), "records": records, "bytes": size}
        rates = (f"{size / stats.median / 1e6:,.0f}", f"{records / stats.median:,.0f}")
        lines.append((name, format_stats(stats), *rates))
    what = f"level, over {records:,} images, {size / 1e6:,.0f} MB"
    print()
    command.print_table((what, "seconds", "MB/s", "images/s"), lines)
    return results


def make_set(folder: str, num_files: int, record_bytes: int) -> None:
    """Writes files of records whose sizes vary by half around `record_bytes`."""
    generator = random.Random(num_files)
    data = generator.randbytes(2 * record_bytes)
    os.mkdir(folder)
    what = f"making {num_files:,} files"
    for number in command.progress(range(num_files), what=what, total=num_files):
        bounds = (record_bytes // 2, record_bytes * 3 // 2)
        sizes = (generator.randint(*bounds) for _ in range(_RECORDS.value))
        with open(os.path.join(folder, f"train-{number:05d}-of-{num_files:05d}"), "wb") as stream:
            stream.write(b"".join(frame_record(data[:size]) for size in sizes))


def time_index(*arguments: str) -> tuple[float, int]:
    """Runs the index command; returns its seconds and the peak memory of its processes."""
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.05):
            peak = max(peak, memory_of_children())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return processes.run_index(*arguments), peak
    finally:
        finished.set()
        watcher.join()


def memory_of_children() -> int:
    """Returns the memory of this process's children in bytes; what they share counts once."""
    try:
        children = psutil.Process().children(recursive=True)
        return sum(process.memory_full_info().pss for process in children)
    except psutil.Error:
        return 0  # one of them has just ended


def time_tfrecord2idx(folder: str) -> float:
    """Returns the seconds that DALI's own tool takes for a file."""
    tool = Path(sys.executable).parent / "tfrecord2idx"
    files = sorted(path for path in Path(folder).glob("*-of-*") if path.suffix != ".idx")
    files = files[:_TFRECORD2IDX_FILES]
    start = time.perf_counter()
    for file in files:
        words = [sys.executable, str(tool), str(file), f"{file}.theirs"]
        subprocess.run(words, check=True, capture_output=True)
    return (time.perf_counter() - start) / len(files)


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
