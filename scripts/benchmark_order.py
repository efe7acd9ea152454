"""Measures what order "global" costs to start, and shows how well it mixes, compared with a buffer.

It writes TFRecords of one tiny JPEG to a temporary folder, starts a pipeline for one shard of each
number of shards in a process of its own, and takes the first batch. The plot shows when records
that are stored class by class are served.

example: python scripts/benchmark_order.py --plot=order.png
"""

import io
import resource
import sys
import tempfile
import time

import numpy as np
import psutil
from PIL import Image

from dali_tf_input import InputError
from dali_tf_input.order import shuffle
from support import cli, plots, processes
from support.convert.writer import write_images

FLAGS = cli.Flags()
_NUM_RECORDS = FLAGS.integer("num_records", 1_280_000, "Records in all files together.", 1)
_NUM_FILES = FLAGS.integer("num_files", 1024, "Files.", 1)
_SHARDS = FLAGS.list("shards", ["1", "2", "8"], "Numbers of shards to try.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")
_MEASURE = FLAGS.string("measure", None, "For the processes that this one starts: a pattern.")

_BATCH_SIZE = 64
_BUFFER_SIZE = 1024
_COLUMNS = ("order", "shards", "made s", "first batch s", "memory MB", "peak MB")


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    try:
        shards = [int(number) for number in _SHARDS.value]
    except ValueError as error:
        got = ",".join(_SHARDS.value)
        raise InputError(f"`shards` must be whole numbers, got {got}.") from error
    if _MEASURE.value:
        return measure(_MEASURE.value, shards[0])
    if _NUM_FILES.value > _NUM_RECORDS.value or not shards or min(shards) < 1:
        raise InputError("`shards` must be at least 1, and `num_records` at least `num_files`.")
    cli.check_writable(_PLOT, suffix=".png")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        encoded = io.BytesIO()
        Image.new("RGB", (8, 8), (90, 120, 150)).save(encoded, "JPEG")
        counts = {flag.name: flag.value for flag in (_NUM_RECORDS, _NUM_FILES)}
        pattern = write_images(folder, [encoded.getvalue()], **counts)
        for number in cli.progress(shards, what="starting", total=len(shards)):
            flags = [f"--measure={pattern}", f"--shards={number}"]
            output = processes.call_script("benchmark_order.py", *flags)
            lines += [line.split("\t") for line in output.splitlines()]
    print(
        f"{_NUM_RECORDS.value:,} records in {_NUM_FILES.value:,} files; one shard of so many;"
        f" batches of {_BATCH_SIZE}"
    )
    cli.print_table(_COLUMNS, lines)
    orders = orders_of_a_sorted_set()
    print_mixing(orders)
    if _PLOT.value:
        plots.plot_orders(orders, path=_PLOT.value)
    return 0


def measure(pattern: str, num_shards: int) -> int:
    """Starts one shard of each order and prints what that took, as tab-separated lines."""
    cli.import_tensorflow()
    from dali_tf_input import DatasetSpec, InputSpec, Preprocess, Shard, TfDataOptions, make_dataset

    shared = {"batch_size": _BATCH_SIZE, "shard": Shard(0, num_shards)}
    for order in ("sequential", "global"):  # the first pays for what TensorFlow sets up once
        start, before = time.perf_counter(), psutil.Process().memory_info().rss
        dataset = DatasetSpec.from_files(pattern)
        spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_training(8), order=order)
        made = make_dataset(spec, TfDataOptions(), **shared)
        seconds = time.perf_counter() - start
        next(iter(made))
        first = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        held = [used - before for used in (psutil.Process().memory_info().rss, peak)]
        memory = [f"{used / 1e6:,.0f}" for used in held]
        print("\t".join([order, str(num_shards), f"{seconds:.2f}", f"{first:.2f}", *memory]))
    return 0


def orders_of_a_sorted_set() -> dict[str, np.ndarray]:
    """Returns, for each order, which of 20,000 records (20 classes of 1,000) is served when."""
    count = 20_000
    blocks = {"shuffle_block_size": 64, "first_of_files": np.arange(0, count, 1000)}
    return {
        "sequential": np.arange(count),
        f"buffer of {_BUFFER_SIZE:,}": through_a_buffer(count),
        "global, blocks of 64": shuffle(count, seed=0, epoch=0, **blocks),
        "global": shuffle(count, seed=0, epoch=0),
    }


def through_a_buffer(count: int) -> np.ndarray:
    """Returns the order in which a shuffle buffer serves `count` records."""
    random = np.random.default_rng(0)
    buffer, served = list(range(_BUFFER_SIZE)), []
    for record in range(_BUFFER_SIZE, count):
        slot = random.integers(_BUFFER_SIZE)
        served.append(buffer[slot])
        buffer[slot] = record
    return np.array(served + list(random.permutation(buffer)))


def print_mixing(orders: dict[str, np.ndarray]) -> None:
    """Prints how many classes batches hold, and how far apart stored neighbors are served."""
    rows = []
    for name, order in orders.items():
        batches = np.split(order[: len(order) // 256 * 256] // 1000, len(order) // 256)
        classes = [len(np.unique(batch)) for batch in batches]
        apart = np.median(np.abs(np.diff(np.argsort(order))))
        numbers = (str(classes[0]), str(min(classes)), f"{np.mean(classes):.1f}", f"{apart:,.0f}")
        rows.append((name, *numbers))
    print("\n20 classes of 1,000 records, stored class by class; classes in batches of 256")
    cli.print_table(("order", "first batch", "least", "mean", "neighbors apart (median)"), rows)


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
