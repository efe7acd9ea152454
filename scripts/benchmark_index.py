"""Measures the index step: against DALI's tfrecord2idx, by number of files, and level by level.

The first table is of files made for it (1250 records each, of random sizes), in a warm page cache:
the whole command including its start, and the memory of all its processes. The second, with
--files, checks real images at each level. The rows take turns, so that a slow moment of the machine
affects them all.

example: python scripts/benchmark_index.py --num_files=128,1024 --files='path/train-*'
"""

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from dali_tf_input import InputError, Stats, find_files
from dali_tf_input.index.tfrecord import frame_record
from support import cli, machine, processes

FLAGS = cli.Flags()
_NUM_FILES = FLAGS.list(
    "num_files", ["128", "1024", "8192"], "Files of each row of the first table."
)
_RECORDS = FLAGS.integer("records_per_file", 1250, "Records in each of them.", 1)
_MOST_BYTES = FLAGS.integer("most_bytes", 3_000_000_000, "Larger sets get smaller records.", 1)
_FILES = FLAGS.strings("files", "TFRecords of images for the second table.")
_REPEATS = FLAGS.integer("repeats", 5, "How often each row is measured.", 1)
_TFRECORD2IDX_FILES = FLAGS.integer("tfrecord2idx_files", 3, "Files for tfrecord2idx; 0: none.", 0)
_FOLDER = FLAGS.string("folder", None, "Where the files are made; else a temporary folder.")
_JSON = FLAGS.string("json", None, "File for the results.")

_RECORD_BYTES = 2000
_LEVELS = {
    "framing": ["--verify=framing"],
    "crc": ["--verify=crc"],
    "schema": ["--verify=schema"],
    "decode, DALI's decoder": ["--verify=decode", "--decoder=dali"],
    "decode, tf.data's": ["--verify=decode", "--decoder=tf_data"],
    "decode, both": ["--verify=decode"],
}


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    numbers = [int(number) if number.isdecimal() else 0 for number in _NUM_FILES.value]
    if not numbers or min(numbers) < 1:
        raise InputError(
            "`num_files` must be whole numbers of at least 1, got"
            f" {','.join(_NUM_FILES.value) or 'none'}."
        )
    cli.check_writable(_JSON.value, flag="json")
    report = {**machine.describe(), "repeats": _REPEATS.value}
    folder = tempfile.mkdtemp(dir=_FOLDER.value)
    try:
        report["sets"] = measure_sets(folder, numbers)
    finally:
        shutil.rmtree(folder)
    if _FILES.value:
        report["levels"] = measure_levels(find_files(_FILES.value))
    if _JSON.value:
        cli.write_json(_JSON.value, report)
    return 0


def measure_sets(folder: str, numbers: list[int]) -> dict:
    """Measures sets of `numbers` files; prints the first table."""
    sets = {}
    for number in numbers:
        record_bytes = min(_RECORD_BYTES, _MOST_BYTES.value // (number * _RECORDS.value))
        made = os.path.join(folder, str(number))
        make_set(made, number, record_bytes)
        sets[number] = {
            "record_bytes": record_bytes,
            "seconds": [],
            "unchanged": [],
            "memory_bytes": 0,
            "folder": made,
        }
    for _ in range(_REPEATS.value):
        for row in sets.values():
            seconds, memory = time_index(f"{row['folder']}/*-of-*", "--force")
            row["seconds"].append(seconds)
            row["memory_bytes"] = max(row["memory_bytes"], memory)
            row["unchanged"].append(time_index(f"{row['folder']}/*-of-*")[0])
    theirs = (
        time_tfrecord2idx(next(iter(sets.values()))["folder"])
        if _TFRECORD2IDX_FILES.value
        else None
    )
    rows = []
    for number, row in sets.items():
        seconds = row["seconds"] = dataclasses.asdict(Stats.of(row["seconds"]))
        unchanged = row["unchanged"] = dataclasses.asdict(Stats.of(row["unchanged"]))
        records = row["records"] = number * _RECORDS.value
        row["times_tfrecord2idx"] = theirs * number / seconds["median"] if theirs else None
        del row["folder"]
        rows.append(
            (
                f"{number:,}",
                f"{records:,}",
                f"{row['record_bytes']:,}",
                f"{seconds['median']:.2f} ({seconds['minimum']:.2f} to {seconds['maximum']:.2f})",
                f"{records / seconds['median'] / 1e6:.2f}",
                f"{row['memory_bytes'] / 1e6:.0f}",
                (
                    f"{unchanged['median']:.2f} ({unchanged['minimum']:.2f} to"
                    f" {unchanged['maximum']:.2f})"
                ),
                f"{row['times_tfrecord2idx']:,.0f}" if theirs else "-",
            )
        )
    columns = (
        "files",
        "records",
        "bytes each",
        "seconds",
        "M records/s",
        "MB memory",
        "unchanged, s",
        "x tfrecord2idx",
    )
    cli.print_table(columns, rows)
    if theirs:
        print(
            f"tfrecord2idx: {theirs:.2f} s a file, over {_TFRECORD2IDX_FILES.value} files; its"
            " column is that, times the files"
        )
    return {"rows": sets, "tfrecord2idx_seconds_per_file": theirs}


def measure_levels(files: tuple[str, ...]) -> dict:
    """Measures each level over real images; prints the second table."""
    size = sum(map(os.path.getsize, files))
    seconds: dict[str, list[float]] = {name: [] for name in _LEVELS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_REPEATS.value):
            for name, arguments in _LEVELS.items():
                seconds[name].append(
                    time_index(*files, "--force", f"--index_dir={folder}", *arguments)[0]
                )
        records = sum(len(path.read_text().splitlines()) for path in Path(folder).glob("*.idx"))
    rows, results = [], {}
    for name, values in seconds.items():
        spread = Stats.of(values)
        results[name] = {**dataclasses.asdict(spread), "records": records, "bytes": size}
        times = f"{spread.median:.2f} ({spread.minimum:.2f} to {spread.maximum:.2f})"
        rows.append(
            (name, times, f"{size / spread.median / 1e6:,.0f}", f"{records / spread.median:,.0f}")
        )
    print()
    cli.print_table(
        (f"level, over {records:,} images, {size / 1e6:,.0f} MB", "seconds", "MB/s", "images/s"),
        rows,
    )
    return results


def make_set(folder: str, num_files: int, record_bytes: int) -> None:
    """Writes files of records whose sizes vary by half around `record_bytes`."""
    generator = random.Random(num_files)
    data = generator.randbytes(2 * record_bytes)
    os.mkdir(folder)
    for number in cli.progress(
        range(num_files), what=f"making {num_files:,} files", total=num_files
    ):
        sizes = (
            generator.randint(record_bytes // 2, record_bytes * 3 // 2)
            for _ in range(_RECORDS.value)
        )
        with open(os.path.join(folder, f"train-{number:05d}-of-{num_files:05d}"), "wb") as stream:
            stream.write(b"".join(frame_record(data[:size]) for size in sizes))


def time_index(*arguments: str) -> tuple[float, int]:
    """Runs the index command; returns its seconds and the peak memory of its processes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "dali_tf_input.index", *arguments]
    process = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    most, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not finished.wait(0.05):
            most = max(most, memory_of_tree(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output = process.communicate()[0]
        seconds = time.perf_counter() - start
    finally:
        processes.kill(process)
        finished.set()
        watcher.join()
    if process.returncode:
        raise InputError(f"The index command failed: {output}")
    return seconds, most


def memory_of_tree(root: int) -> int:
    """Returns the memory of a process and its children in bytes; what they share counts once."""
    try:
        parent = psutil.Process(root)
        tree = [parent, *parent.children(recursive=True)]
        return sum(process.memory_full_info().pss for process in tree)
    except psutil.Error:
        return 0  # one of them has just ended


def time_tfrecord2idx(folder: str) -> float:
    """Returns the seconds that DALI's own tool takes for a file."""
    tool = Path(sys.executable).parent / "tfrecord2idx"
    files = sorted(
        path for path in Path(folder).iterdir() if "-of-" in path.name and path.suffix != ".idx"
    )
    files = files[: _TFRECORD2IDX_FILES.value]
    start = time.perf_counter()
    for file in files:
        subprocess.run(
            [sys.executable, tool, file, f"{file}.theirs"], check=True, capture_output=True
        )
    return (time.perf_counter() - start) / len(files)


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
