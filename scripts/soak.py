"""Shows that the input does not grow: memory, threads and file descriptors over long runs.

Each part runs in a process of its own, for each backend: a stream of small images; a model that is
evaluated again and again; datasets that are made, iterated once and dropped. Memory is the resident
memory of the process after `malloc_trim`, with one arena of glibc's (MALLOC_ARENA_MAX=1), which
returns what is free. Without --files it makes small images itself. The exit code is 1 if something
grows by more than its bound.

example: python scripts/soak.py --images=100000 --backends=tf_data --json=soak.json
"""

import ctypes
import gc
import glob
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil

from dali_tf_input import DatasetSpec, InputError, InputSpec, Preprocess, build_index
from dali_tf_input.index.example import encode_example
from dali_tf_input.index.tfrecord import frame_record
from support import cli, plots, processes
from support.flags import BACKENDS, FileFlags, backends_flag, begin

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_IMAGES = FLAGS.integer("images", 1_000_000, "Images streamed through each backend.", 1000)
_EVALUATIONS = FLAGS.integer("evaluations", 50, "Evaluations in one process.", 10)
_DATASETS = FLAGS.integer("datasets", 200, "Datasets made and dropped in one process.", 20)
_BACKENDS = backends_flag(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_JSON = FLAGS.string("json", None, "File for the results.")
_PLOT = FLAGS.string("plot", None, "File for the plot, a .png.")
_PART = FLAGS.string("part", None, "For the processes that this one starts: PART,BACKEND.")

_RECORDS, _SIZE, _BATCH_SIZE = 8192, 32, 256  # small images: growth does not depend on their size
_SAMPLES = 200  # of a stream
_WARM = 0.2  # of each part is not judged: caches and allocators fill
# Largest growth after that: of a stream, a part of its memory; else bytes per evaluation or
# dataset.
_BOUNDS = {"stream": 0.02, "evaluations": 50_000, "datasets": 50_000}
PARTS = {"stream": "images", "evaluations": "evaluations", "datasets": "datasets"}
_COLUMNS = (
    "part",
    "backend",
    "how many",
    "MB when warm",
    "MB at the end",
    "change",
    "bound",
    "threads",
    "descriptors",
    "verdict",
)


class Sample(NamedTuple):
    """The state of a process after `done` of its work."""

    done: int
    memory: int
    threads: int
    descriptors: int

    @classmethod
    def take(cls, done: int) -> "Sample":
        """Samples this process after returning free memory to the system, which is not growth."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        return cls(done, process.memory_info().rss, process.num_threads(), process.num_fds())


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    if _PART.value:
        processes.die_with_parent()
        for sample in run_part(*_PART.value.split(",")):
            print(json.dumps(sample), flush=True)
        return 0
    cli.check_writable(_JSON.value, flag="json")
    cli.check_writable(_PLOT.value, flag="plot", suffix=".png")
    about, backends = begin(_BACKENDS.value)
    samples: dict[str, dict[str, list[Sample]]] = {part: {} for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"--files={make_files(folder)}"]
        if _FILES.files.value:
            _FILES.dataset()  # raises before anything runs
            files = _FILES.as_arguments()
        for part in PARTS:
            for backend in backends:
                samples[part][backend] = collect(part, backend, files)
    verdicts = {
        part: {name: judge(part, one) for name, one in rows.items()}
        for part, rows in samples.items()
    }
    print()
    cli.print_table(
        _COLUMNS,
        [format_row(part, name, row) for part in PARTS for name, row in verdicts[part].items()],
    )
    report = {**about, "order": _ORDER.value, "verdicts": verdicts}
    report["samples"] = samples
    if _JSON.value:
        cli.write_json(_JSON.value, report)
    if _PLOT.value:
        plots.plot_soak(report, PARTS, path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    grown = [
        f"{name}, {PARTS[part]}"
        for part, rows in verdicts.items()
        for name, verdict in rows.items()
        if not verdict["passed"]
    ]
    if grown:
        print(f"error: grows beyond its bound: {'; '.join(grown)}.", file=sys.stderr)
    return 1 if grown else 0


def make_files(folder: str) -> str:
    """Writes and indexes small images; returns their pattern."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    images = []
    for _ in range(64):
        stream = io.BytesIO()
        pixels = random.integers(0, 256, (_SIZE, _SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "JPEG")
        images.append(stream.getvalue())
    for part in range(4):
        with open(os.path.join(folder, f"train-{part:05d}-of-00004"), "wb") as stream:
            for number in range(part, _RECORDS, 4):
                image = images[number % len(images)]
                example = {"image/encoded": image, "image/class/label": number % 10}
                stream.write(frame_record(encode_example(example)))
    pattern = os.path.join(glob.escape(folder), "train-*")
    build_index(pattern)
    return pattern


def collect(part: str, backend: str, files: list[str]) -> list[Sample]:
    """Runs a part in a process of its own; returns its samples."""
    numbers = [f"--{one.name}={one.value}" for one in (_IMAGES, _EVALUATIONS, _DATASETS, _ORDER)]
    words = [
        sys.executable,
        os.path.abspath(__file__),
        f"--part={part},{backend}",
        *numbers,
        *files,
    ]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        process = processes.start(words, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            # DALI prints to stdout too.
            lines = (json.loads(line) for line in process.stdout if line.startswith("["))
            total = how_many(part)[1]
            shown = cli.progress(lines, what=f"{backend}, {PARTS[part]}", total=total)
            samples = [Sample(*values) for values in shown]
            process.wait()
        finally:
            processes.kill(process)
        if process.returncode:
            log.seek(0)
            words = log.read().strip()[-2000:]
            code = process.returncode
            raise InputError(f"{backend}, {PARTS[part]}: ended with exit code {code}. {words}")
    return samples


def how_many(part: str) -> tuple[int, int]:
    """Returns how much work a part is, and how many samples are taken of it."""
    if part == "stream":
        return _IMAGES.value, min(_IMAGES.value // _BATCH_SIZE, _SAMPLES)
    work = {"evaluations": _EVALUATIONS.value, "datasets": _DATASETS.value}[part]
    return work, work


def run_part(part: str, backend: str) -> Iterator[Sample]:
    """Does the work of a part in this process; yields samples."""
    cli.import_tensorflow()
    from dali_tf_input import distribute, enable_memory_growth

    enable_memory_growth()
    dataset = _FILES.dataset()
    work, num_samples = how_many(part)
    batch_size = min(_BATCH_SIZE, dataset.num_records)
    if part == "evaluations":
        yield from evaluate(work, dataset, backend, batch_size)
        return
    preprocess = Preprocess.for_training(24)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order=_ORDER.value)

    def make() -> Any:
        return iter(distribute(spec, BACKENDS[backend], global_batch_size=batch_size).dataset)

    if part == "datasets":
        for number in range(work):
            next(make())
            yield Sample.take(number + 1)
        return
    batches, done = make(), 0
    for number in range(num_samples):
        while done < (number + 1) * work / num_samples:
            next(batches)
            done += batch_size
        yield Sample.take(done)


def evaluate(times: int, dataset: DatasetSpec, backend: str, batch_size: int) -> Iterator[Sample]:
    """Evaluates a small model again and again."""
    import keras

    from dali_tf_input import distribute

    preprocess = Preprocess.for_evaluation(24)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order="sequential", repeat=False)
    validation = distribute(spec, BACKENDS[backend], global_batch_size=batch_size).dataset
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((24, 24, 3)), *layers])
    model.compile("sgd", "mse", weighted_metrics=["mae"])  # for labels of any number
    for number in range(times):
        model.evaluate(validation, verbose=0)
        yield Sample.take(number + 1)


def judge(part: str, samples: list[Sample]) -> dict[str, Any]:
    """Compares the samples after the warm-up with the bound of a part."""
    warm = samples[int(_WARM * len(samples)) :]
    tenth = max(1, len(warm) // 10)
    first, last = (
        statistics.median(sample.memory for sample in some)
        for some in (warm[:tenth], warm[-tenth:])
    )
    # Threads and descriptors come and go: growth is what every later state exceeds.
    early = max(1, len(warm) // 2)
    counts = {
        name: (
            max(getattr(one, name) for one in warm[:early]),
            min(getattr(one, name) for one in warm[-tenth:]),
        )
        for name in ("threads", "descriptors")
    }
    if part == "stream":
        change = (last - first) / first
    else:
        begin, end = (
            statistics.median(sample.done for sample in some)
            for some in (warm[:tenth], warm[-tenth:])
        )
        change = (last - first) / (end - begin)
    grew = [name for name, (before, after) in counts.items() if after > before]
    return {
        "done": samples[-1].done,
        "warm_bytes": first,
        "last_bytes": last,
        "change": change,
        "bound": _BOUNDS[part],
        **counts,
        "passed": change <= _BOUNDS[part] and not grew,
    }


def format_row(part: str, name: str, verdict: dict[str, Any]) -> tuple[str, ...]:
    """Returns a line of the table."""
    if part == "stream":
        change, bound = f"{verdict['change']:+.1%}", f"{verdict['bound']:.0%}"
    else:
        change = f"{verdict['change'] / 1e3:+.0f} kB each"
        bound = f"{verdict['bound'] / 1e3:.0f} kB each"
    counts = []
    for before, after in (verdict["threads"], verdict["descriptors"]):
        counts.append(f"{before} to {after}" if after > before else "no more")
    memory = (f"{verdict[which] / 1e6:,.0f}" for which in ("warm_bytes", "last_bytes"))
    verdict_text = "flat" if verdict["passed"] else "GROWS"
    return (
        PARTS[part],
        name,
        f"{verdict['done']:,}",
        *memory,
        change,
        bound,
        *counts,
        verdict_text,
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
