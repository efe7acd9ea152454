"""What order "global" costs to start, and how well it mixes, against a buffer.

usage: benchmark_order.py [--num_records=1280000] [--num_files=1024] [--shards=1,2,8] [--plot=PATH]

Makes TFRecords of one tiny JPEG, as many as are asked for, in a temporary folder; starts a pipeline for one shard of each number
of shards in a process of its own, and takes the first batch. The plot shows where records that are stored class by class are
served.
"""

import io
import os
import resource
import sys
import tempfile
import time

import numpy as np
from absl import flags

import console
from dali_tf_input import Checks, InputError, build_index
from dali_tf_input.example import encode_example
from dali_tf_input.tfrecord import frame_record

_NUM_RECORDS = flags.DEFINE_integer("num_records", 1_280_000, "Records in all files together, at least --num_files.")
_NUM_FILES = flags.DEFINE_integer("num_files", 1024, "Files, at least 1.")
_SHARDS = flags.DEFINE_list("shards", ["1", "2", "8"], "Numbers of shards to try.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, a PNG.")
_MEASURE = flags.DEFINE_string("measure", None, "For the processes that this one starts: a pattern of files.")

_BATCH_SIZE = 64
_BUFFER_SIZE = 1024
_COLUMNS = ("order", "shards", "made s", "first batch s", "memory MB", "peak MB")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    try:
        shards = [int(number) for number in _SHARDS.value]
    except ValueError as error:
        raise InputError(f"`shards` must be whole numbers, got {','.join(_SHARDS.value)}.") from error
    if _MEASURE.value:
        return measure(_MEASURE.value, shards[0])
    if not 1 <= _NUM_FILES.value <= _NUM_RECORDS.value or not shards or min(shards) < 1:
        raise InputError("`num_files` and `shards` must be at least 1, and `num_records` at least `num_files`.")
    if _PLOT.value and not os.access(os.path.dirname(_PLOT.value) or ".", os.W_OK):
        raise InputError(f"Cannot write {_PLOT.value}: its folder is missing or not writable.")
    if _PLOT.value and not _PLOT.value.endswith(".png"):
        raise InputError(f"`plot` must end in .png, got {_PLOT.value}.")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_records(folder)
        pattern = os.path.join(folder, "train-*")
        build_index(pattern, Checks())
        for number in console.progress(shards, what="starting", total=len(shards)):
            command = [sys.executable, os.path.abspath(__file__), f"--measure={pattern}", f"--shards={number}"]
            code, output, errors = console.call(command)
            if code:
                raise InputError(f"{number} shards could not be started. {errors.strip()}")
            lines += [tuple(line.split("\t")) for line in output.splitlines()]
    print(f"{_NUM_RECORDS.value:,} records in {_NUM_FILES.value:,} files; one shard of so many; batches of {_BATCH_SIZE}")
    console.print_table(_COLUMNS, lines)
    print_mixing()
    if _PLOT.value:
        import plots

        plots.plot_orders(orders_of_a_sorted_set(), path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    return 0


def write_records(folder: str) -> None:
    """Writes the files."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.new("RGB", (8, 8), (90, 120, 150)).save(encoded, "JPEG")
    record = frame_record(encode_example({"image": encoded.getvalue(), "label": 0}))
    for number in range(_NUM_FILES.value):
        count = _NUM_RECORDS.value * (number + 1) // _NUM_FILES.value - _NUM_RECORDS.value * number // _NUM_FILES.value
        with open(os.path.join(folder, f"train-{number:05d}-of-{_NUM_FILES.value:05d}"), "wb") as stream:
            stream.write(record * count)


def measure(pattern: str, num_shards: int) -> int:
    """Starts one shard of each order and prints what that took, as tab-separated lines."""
    console.import_tensorflow()
    from dali_tf_input import DatasetSpec, InputSpec, Preprocess, Shard, TfDataOptions
    from dali_tf_input.dataset import make_dataset

    for order in ("sequential", "global"):  # the first pays for what TensorFlow sets up once
        start, before = time.perf_counter(), resident_bytes()
        dataset = DatasetSpec.from_files(pattern)
        spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_training(8), order=order)
        made = make_dataset(spec, TfDataOptions(), batch_size=_BATCH_SIZE, shard=Shard(0, num_shards))
        seconds = time.perf_counter() - start
        next(iter(made))
        first = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = resident_bytes() - before
        print(f"{order}\t{num_shards}\t{seconds:.2f}\t{first:.2f}\t{memory / 1e6:,.0f}\t{(peak - before) / 1e6:,.0f}")
    return 0


def resident_bytes() -> int:
    """Returns how much memory this process holds."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def orders_of_a_sorted_set() -> dict[str, np.ndarray]:
    """Returns, for each order, which of 20,000 records (20 classes of 1,000, class by class) is served when."""
    from dali_tf_input.order import shuffle

    count = 20_000
    files = np.arange(0, count, 1000)
    return {
        "sequential": np.arange(count),
        f"buffer of {_BUFFER_SIZE:,}": through_a_buffer(count),
        "global, fragments of 64": shuffle(count, seed=0, epoch=0, fragment_size=64, first_of_files=files),
        "global": shuffle(count, seed=0, epoch=0),
    }


def through_a_buffer(count: int) -> np.ndarray:
    """Returns the order in which a shuffle buffer serves `count` records."""
    random = np.random.default_rng(0)
    buffer, served = list(range(_BUFFER_SIZE)), []
    for record in range(_BUFFER_SIZE, count):
        place = random.integers(_BUFFER_SIZE)
        served.append(buffer[place])
        buffer[place] = record
    return np.array(served + list(random.permutation(buffer)))


def print_mixing() -> None:
    """Prints how many of the 20 classes batches of 256 hold, and how far records that were neighbours are served apart."""
    rows = []
    for name, order in orders_of_a_sorted_set().items():
        classes = [len(np.unique(order[start : start + 256] // 1000)) for start in range(0, len(order) - 255, 256)]
        when = np.empty_like(order)
        when[order] = np.arange(len(order))
        apart = np.median(np.abs(np.diff(when)))
        rows.append((name, str(classes[0]), str(min(classes)), f"{np.mean(classes):.1f}", f"{apart:,.0f}"))
    print("\n20 classes of 1,000 records, stored class by class; classes in batches of 256")
    console.print_table(("order", "first batch", "least", "mean", "neighbours apart (median)"), rows)


if __name__ == "__main__":
    console.run(main)
