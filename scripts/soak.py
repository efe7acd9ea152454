"""Shows that memory, threads and file descriptors do not grow over long runs.

Each part runs in a process of its own, for each backend: a stream of small images; a model that is
evaluated again and again; datasets that are made, iterated once and dropped. Memory is the resident
memory of the process after `malloc_trim`, with one arena of glibc's (MALLOC_ARENA_MAX=1), which
returns what is free. Without --files it makes small images itself. The exit code is 1 if something
grows by more than its bound.

example: python scripts/soak.py --images=100000 --backends=tf_data --json=soak.json
"""

import ctypes
import gc
import io
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from dali_tf_input import InputError, InputSpec
from dali_tf_input.cli import command, processes
from dali_tf_input.cli.convert.writer import write_images
from dali_tf_input.cli.flags import BACKENDS, FileFlags, backends_flag, begin
from support import plots

FLAGS = command.Flags()
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
_LIMIT = 3600  # seconds for each
_WARM = 0.2  # of each part is not judged: caches and allocators fill
# Largest growth after that: of a stream, a part of its memory; else bytes of each.
_BOUNDS = {"stream": 0.02, "evaluations": 50_000, "datasets": 50_000}
PARTS = {"stream": "images", "evaluations": "evaluations", "datasets": "datasets"}
_COLUMNS = ("part", "backend", "how many", "MB when warm", "MB at the end", "change", "bound")
_COLUMNS += ("threads", "descriptors", "verdict")


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
    command.check_no_arguments(arguments)
    if _PART.value:
        samples_of_part = run_part(*_PART.value.split(","))
        processes.serve(lambda _: next(samples_of_part))
        return 0
    command.check_writable(_JSON)
    command.check_writable(_PLOT, suffix=".png")
    about, backends = begin(_BACKENDS.value)
    runs = [(part, backend) for part in PARTS for backend in backends]
    samples: dict[str, dict[str, list[Sample]]] = {part: {} for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        if _FILES.files.value:
            _FILES.dataset()  # raises before anything runs
        files = _FILES.as_arguments() or [f"--files={make_files(folder)}"]
        for part, backend in runs:
            samples[part][backend] = collect(part, backend, files)
    verdicts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for part, backend in runs:
        verdicts[part][backend] = judge(part, samples[part][backend])
    print()
    command.print_table(
        _COLUMNS, [format_row(part, name, verdicts[part][name]) for part, name in runs]
    )
    report = {**about, "order": _ORDER.value, "verdicts": verdicts, "samples": samples}
    command.write_json(_JSON, report)
    if _PLOT.value:
        plots.plot_soak(report, PARTS, path=_PLOT.value)
    grown = [f"{name}, {PARTS[part]}" for part, name in runs if not verdicts[part][name]["passed"]]
    if grown:
        raise InputError(f"grows beyond its bound: {'; '.join(grown)}.")
    return 0


def make_files(folder: str) -> str:
    """Writes and indexes small images; returns their pattern."""
    random, images = np.random.default_rng(0), []
    for pixels in random.integers(0, 256, (64, _SIZE, _SIZE, 3), dtype=np.uint8):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        images.append(stream.getvalue())
    return write_images(folder, images, num_records=_RECORDS, num_files=4)


def how_many(part: str) -> tuple[int, int]:
    """Returns how much work a part is, and how many samples are taken of it."""
    if part == "stream":
        return _IMAGES.value, min(_IMAGES.value // _BATCH_SIZE, _SAMPLES)
    work = {"evaluations": _EVALUATIONS.value, "datasets": _DATASETS.value}[part]
    return work, work


def collect(part: str, backend: str, files: list[str]) -> list[Sample]:
    """Runs a part in a process of its own; returns its samples."""
    numbers = [f"--{flag.name}={flag.value}" for flag in (_IMAGES, _EVALUATIONS, _DATASETS, _ORDER)]
    words = [sys.executable, os.path.abspath(__file__), f"--part={part},{backend}"]
    what, total = f"{backend}, {PARTS[part]}", how_many(part)[1]
    one_arena = {"environment": {"MALLOC_ARENA_MAX": "1"}}
    with processes.JsonWorker([*words, *numbers, *files], **one_arena) as worker:
        turns = command.progress(range(total), what=what, total=total)
        try:
            return [Sample(*worker.ask("next", seconds=_LIMIT)) for _ in turns]
        except processes.WorkerDied as error:
            raise InputError(f"{what}: {error}") from error


def run_part(part: str, backend: str) -> Iterator[Sample]:
    """Does the work of a part in this process; yields samples."""
    command.import_tensorflow()
    import keras

    from dali_tf_input import load, make_dataset
    from dali_tf_input.backends.build import enable_memory_growth

    gc.freeze()  # samples collect garbage: not again and again among what was imported
    enable_memory_growth()
    records = _FILES.dataset()
    batch_size = min(_BATCH_SIZE, records.num_records)
    work, num_samples = how_many(part)
    fields = {"label": _FILES.label()}
    spec = InputSpec.for_training(records, 24, order=_ORDER.value, **fields)
    if part == "evaluations":
        spec = InputSpec.for_evaluation(records, 24, **fields)

    def make() -> Any:
        return load(spec, BACKENDS[backend], batch_size=batch_size).dataset

    if part == "stream":
        dataset = make_dataset(spec, BACKENDS[backend], batch_size=batch_size, endless=True)
        batches, done = iter(dataset), 0
        for number in range(num_samples):
            while done < (number + 1) * work / num_samples:
                next(batches)
                done += batch_size
            yield Sample.take(done)
    elif part == "datasets":
        for number in range(work):
            next(iter(make()))
            yield Sample.take(number + 1)
    else:
        layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((24, 24, 3)), *layers])
        model.compile("sgd", "mse", weighted_metrics=["mae"])  # for labels of any number
        validation = make()
        for number in range(work):
            model.evaluate(validation, verbose=0)
            yield Sample.take(number + 1)


def judge(part: str, samples: list[Sample]) -> dict[str, Any]:
    """Compares the samples after the warm-up with the bound of a part."""
    warm = samples[int(_WARM * len(samples)) :]
    tenth = max(1, len(warm) // 10)
    (start, first), (end, last) = (
        [statistics.median(sample[field] for sample in span) for field in (0, 1)]
        for span in (warm[:tenth], warm[-tenth:])
    )
    # Threads and descriptors come and go: growth is what every later state exceeds.
    early, late = warm[: max(1, len(warm) // 2)], warm[-tenth:]
    counts = {
        name: (
            max(getattr(sample, name) for sample in early),
            min(getattr(sample, name) for sample in late),
        )
        for name in ("threads", "descriptors")
    }
    change = (last - first) / (first if part == "stream" else end - start)
    grew = any(after > before for before, after in counts.values())
    growth = {"done": samples[-1].done, "warm_bytes": first, "last_bytes": last, "change": change}
    passed = change <= _BOUNDS[part] and not grew
    return {**growth, "bound": _BOUNDS[part], **counts, "passed": passed}


def format_row(part: str, name: str, verdict: dict[str, Any]) -> tuple[str, ...]:
    """Returns a line of the table."""
    change, bound = verdict["change"], verdict["bound"]
    changes = (f"{change / 1e3:+.0f} kB each", f"{bound / 1e3:.0f} kB each")
    if part == "stream":
        changes = (f"{change:+.1%}", f"{bound:.0%}")
    counts = (
        f"{before} to {after}" if after > before else "no more"
        for before, after in (verdict["threads"], verdict["descriptors"])
    )
    memory = (f"{verdict[which] / 1e6:,.0f}" for which in ("warm_bytes", "last_bytes"))
    text = "flat" if verdict["passed"] else "GROWS"
    return (PARTS[part], name, f"{verdict['done']:,}", *memory, *changes, *counts, text)


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
