"""Shows that the input does not grow: memory, threads and file descriptors over a long run, evaluations, and datasets dropped.

usage: soak.py [--images=1000000] [--evaluations=50] [--datasets=200] [--backends=tf_data,dali_cpu] [--order=global]
               [--files=GLOB] [--json=PATH] [--plot=PATH]

Each part runs in a process of its own, for each backend: a stream of small images of which memory is sampled; a model that is
evaluated again and again; datasets that are made, iterated once and dropped. Memory is the host's, of the whole process. Of the
stream it is the largest since the last sample. Of evaluations and datasets it is what they hold, finely: they run with one arena
of glibc's, which gives back what is free. "Resident" is eight times as many evaluations, of a few batches each, with the
allocator as it is in training, coarsely. Without --files it makes small images itself. Exit code 1 if one grows by more than its
bound.
"""

import ctypes
import gc
import glob
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from absl import flags

import console
import input_flags
import machine
from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions, build_index
from dali_tf_input.example import encode_example
from dali_tf_input.tfrecord import frame_record

_IMAGES = flags.DEFINE_integer("images", 1_000_000, "Images streamed through each backend, at least 1000.")
_EVALUATIONS = flags.DEFINE_integer("evaluations", 50, "Evaluations in one process, at least 10.")
_DATASETS = flags.DEFINE_integer("datasets", 200, "Datasets made and dropped in one process, at least 20.")
_BACKENDS = flags.DEFINE_list("backends", None, "Of tf_data, dali_cpu and dali_gpu; by default all that this machine has.")
_ORDER = flags.DEFINE_enum("order", "global", ["global", "buffer"], "How the streamed records are mixed.")
_JSON = flags.DEFINE_string("json", None, "File for the results.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, a PNG.")
_PART = flags.DEFINE_string("part", None, "Which part this process is to run; for soak.py itself.")

_RECORDS, _SIZE, _BATCH_SIZE = 8192, 32, 256  # small images: what is looked for does not depend on their size
_SAMPLES = 200  # of a stream
_LIMIT = 600  # seconds without a sample, after which a process counts as hung
_WARM = 0.2  # of each part is not judged: caches and allocators fill
# Largest growth after that: of memory a part of it, per evaluation or dataset bytes; of threads and descriptors none.
_STREAM_SPREAD = 0.02
_BYTES_EACH = {"evaluations": 50_000, "resident": 500_000, "datasets": 50_000}  # TensorFlow keeps a little of what it traced
_RESIDENT_TIMES, _RESIDENT_BATCHES = 8, 8  # more and shorter evaluations: resident memory goes up and down by tens of MB

# Threads get arenas of glibc's, up to 8 for each core, and malloc_trim() leaves what is free at the top of all but the first
# (malloc.c, mtrim). A pipeline starts threads anew: tens of MB that are free stay resident, more or less of them each time, in
# which a leak is not seen. With one arena, trimmed, what is resident is held.
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
_HELD = ("evaluations", "datasets")

OPTIONS = {"tf_data": TfDataOptions(), "dali_cpu": DaliOptions(device="cpu"), "dali_gpu": DaliOptions(device="gpu")}
PARTS = {
    "stream": "images",
    "evaluations": "evaluations",
    "resident": "evaluations, resident",
    "datasets": "datasets made and dropped",
}
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
    def take(cls, done: int, *, trim: bool = False) -> "Sample":
        """Looks at this process; with `trim` after the allocator gave back what nobody holds, which is no growth."""
        if trim:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        return cls(done, resident_bytes(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    for flag, least in ((_IMAGES, 1000), (_EVALUATIONS, 10), (_DATASETS, 20)):
        if flag.value < least:
            raise InputError(f"`{flag.name}` must be at least {least:,}, got {flag.value:,}.")
    if _PART.value:
        console.die_with_parent()
        part, backend = _PART.value.split(",")
        for sample in run_part(part, backend):
            print(json.dumps(sample), flush=True)
        return 0
    for flag, suffix in ((_JSON, ""), (_PLOT, ".png")):
        if flag.value:
            console.check_writable(flag.value, flag=flag.name, suffix=suffix)
    about = machine.describe()
    here = [name for name in OPTIONS if name != "dali_gpu" or (about["gpus"] and machine.tensorflow_sees_a_gpu())]
    unknown = [name for name in _BACKENDS.value or [] if name not in here]
    if unknown or _BACKENDS.value == []:
        raise InputError(f"`backends` must be of {', '.join(here)} on this machine, got {', '.join(unknown) or 'none'}.")
    machine.print_lines(about)
    with tempfile.TemporaryDirectory() as folder:
        files = input_flags.as_arguments(input_flags.FILES.value) if input_flags.FILES.value else [make_files(folder)]
        if input_flags.FILES.value:
            input_flags.dataset_spec(input_flags.FILES.value)  # what is wrong with them is said before anything runs
        results: dict[str, dict[str, list[Sample]]] = {part: {} for part in PARTS}
        for part in PARTS:
            for backend in _BACKENDS.value or here:
                results[part][backend] = collect(part, backend, files)
                if _JSON.value:  # what is known is kept, whatever comes
                    write({"command": shlex.join(sys.argv), **about, "samples": results})
    verdicts = {part: {name: judge(part, samples) for name, samples in rows.items()} for part, rows in results.items()}
    print()
    console.print_table(_COLUMNS, [line(part, name, verdicts[part][name]) for part in PARTS for name in verdicts[part]])
    report = {
        "command": shlex.join(sys.argv),
        **about,
        "order": _ORDER.value,
        "verdicts": verdicts,
        "samples": {part: {name: list(map(list, samples)) for name, samples in rows.items()} for part, rows in results.items()},
    }
    if _JSON.value:
        write(report)
        print(f"results in {_JSON.value}")
    if _PLOT.value:
        import plots

        plots.plot_soak(report, PARTS, path=_PLOT.value)
        print(f"plot in {_PLOT.value}")
    grown = [f"{name}, {part}" for part, rows in verdicts.items() for name, verdict in rows.items() if not verdict["passed"]]
    if grown:
        print(f"error: grows beyond its bound: {'; '.join(grown)}.", file=sys.stderr)
    return 1 if grown else 0


def write(report: dict[str, Any]) -> None:
    """Writes the results."""
    with open(_JSON.value, "w", encoding="utf-8") as stream:
        json.dump(report, stream)
        stream.write("\n")


def make_files(folder: str) -> str:
    """Writes and indexes small images; returns the flag that names them."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    images = []
    for _ in range(64):
        stream = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (_SIZE, _SIZE, 3), dtype=np.uint8)).save(stream, "JPEG")
        images.append(stream.getvalue())
    for part in range(4):
        with open(os.path.join(folder, f"train-{part:05d}-of-00004"), "wb") as stream:
            for number in range(part, _RECORDS, 4):
                example = {"image/encoded": images[number % len(images)], "image/class/label": number % 10}
                stream.write(frame_record(encode_example(example)))
    pattern = os.path.join(glob.escape(folder), "train-*")
    build_index(pattern)
    return f"--files={pattern}"


def collect(part: str, backend: str, files: list[str]) -> list[Sample]:
    """Runs a part in a process of its own; returns its samples."""
    numbers = [f"--{flag.name}={flag.value}" for flag in (_IMAGES, _EVALUATIONS, _DATASETS, _ORDER)]
    command = [sys.executable, os.path.abspath(__file__), f"--part={part},{backend}", *numbers, *files]
    environment = {**os.environ, **(_ONE_ARENA if part in _HELD else {})}
    samples = []
    hung = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        process = console.start(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdout is not None

        def give_up() -> None:
            hung.set()
            process.kill()

        watch = threading.Timer(_LIMIT, give_up)
        watch.daemon = True
        watch.start()
        try:
            lines = (Sample(*json.loads(line)) for line in process.stdout if line.startswith("["))  # DALI prints there too
            for sample in console.progress(lines, what=f"{backend}, {PARTS[part]}", total=how_many(part)[1]):
                samples.append(sample)
                watch.cancel()
                watch = threading.Timer(_LIMIT, give_up)
                watch.start()
            process.wait()
        finally:
            watch.cancel()
            console.kill(process)
        if hung.is_set():
            raise InputError(f"{backend}, {PARTS[part]}: nothing happened for {_LIMIT} s after {len(samples)} samples.")
        if process.returncode:
            log.seek(0)
            raise InputError(f"{backend}, {PARTS[part]}: ended with exit code {process.returncode}. {log.read().strip()[-2000:]}")
    return samples


def how_many(part: str) -> tuple[int, int]:
    """Returns how much work a part is, and how many samples are taken of it."""
    work = {
        "stream": _IMAGES.value,
        "evaluations": _EVALUATIONS.value,
        "resident": _RESIDENT_TIMES * _EVALUATIONS.value,
        "datasets": _DATASETS.value,
    }[part]
    return work, min(work // _BATCH_SIZE, _SAMPLES) if part == "stream" else work


def run_part(part: str, backend: str) -> Iterator[Sample]:
    """Does the work of a part in this process; yields samples."""
    console.import_tensorflow()
    from dali_tf_input.distribute import distribute, enable_memory_growth

    enable_memory_growth()
    dataset = input_flags.dataset_spec(input_flags.FILES.value)
    preprocess = Preprocess.for_training(24)
    work, num_samples = how_many(part)
    batch_size = min(_BATCH_SIZE, dataset.num_records)
    if part == "stream":
        spec = InputSpec(dataset=dataset, preprocess=preprocess, order=_ORDER.value)
        batches = iter(distribute(spec, OPTIONS[backend], global_batch_size=batch_size).dataset)
        done = 0
        for number in range(num_samples):
            peak = 0  # of all batches since the last sample: how many are in flight changes from one to the next
            while done < (number + 1) * work / num_samples:
                next(batches)
                done += batch_size
                peak = max(peak, resident_bytes())
            yield Sample.take(done)._replace(memory=peak)
    elif part == "evaluations":
        yield from evaluate(work, None, distribute, dataset, OPTIONS[backend], batch_size, trim=True)
    elif part == "resident":
        yield from evaluate(work, _RESIDENT_BATCHES, distribute, dataset, OPTIONS[backend], batch_size, trim=False)
    else:
        spec = InputSpec(dataset=dataset, preprocess=preprocess, order=_ORDER.value)
        for number in range(work):
            next(iter(distribute(spec, OPTIONS[backend], global_batch_size=batch_size).dataset))
            yield Sample.take(number + 1, trim=True)


def evaluate(
    times: int, steps: int | None, distribute: Any, dataset: DatasetSpec, options: Any, batch_size: int, *, trim: bool
) -> Iterator[Sample]:
    """Evaluates a small model again and again, on all batches or the first `steps` of them."""
    import keras

    spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_evaluation(24), order="sequential", repeat=False)
    validation = distribute(spec, options, global_batch_size=batch_size).dataset
    model = keras.Sequential([keras.layers.Input((24, 24, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", weighted_metrics=["mae"])  # for labels of any number
    steps = steps and min(steps, -(-dataset.num_records // batch_size))
    for number in range(times):
        model.evaluate(validation, verbose=0, steps=steps)
        yield Sample.take(number + 1, trim=trim)


def judge(part: str, samples: list[Sample]) -> dict[str, Any]:
    """Compares the samples after the warm-up with the bounds of a part."""
    warm = samples[int(_WARM * len(samples)) :]
    tenth = max(1, len(warm) // 10)
    first, last = (statistics.median(sample.memory for sample in some) for some in (warm[:tenth], warm[-tenth:]))
    # A running pipeline opens and closes files and threads: growth of a stream is what its every later state is above.
    early = max(1, len(warm) // 2) if part == "stream" else tenth
    threads, descriptors = (
        (max(values[:early]), min(values[-tenth:]))
        for values in ([sample.threads for sample in warm], [sample.descriptors for sample in warm])
    )
    if part == "stream":
        change = (max(sample.memory for sample in warm) - min(sample.memory for sample in warm)) / first
        bound = _STREAM_SPREAD
    else:
        begin, end = (statistics.median(sample.done for sample in some) for some in (warm[:tenth], warm[-tenth:]))
        change, bound = (last - first) / (end - begin), _BYTES_EACH[part]
    return {
        "done": samples[-1].done,
        "warm_bytes": first,
        "last_bytes": last,
        "change": change,
        "bound": bound,
        "threads": threads,
        "descriptors": descriptors,
        "passed": change <= bound and threads[1] <= threads[0] and descriptors[1] <= descriptors[0],
    }


def line(part: str, name: str, verdict: dict[str, Any]) -> tuple[str, ...]:
    """Returns a line of the table."""
    if part == "stream":
        change, bound = f"spread {verdict['change']:.1%}", f"{verdict['bound']:.0%}"
    else:
        change, bound = f"{verdict['change'] / 1e3:+.0f} kB each", f"{verdict['bound'] / 1e3:.0f} kB each"
    return (
        PARTS[part],
        name,
        f"{verdict['done']:,}",
        f"{verdict['warm_bytes'] / 1e6:,.0f}",
        f"{verdict['last_bytes'] / 1e6:,.0f}",
        change,
        bound,
        "no more" if verdict["threads"][1] <= verdict["threads"][0] else " to ".join(map(str, verdict["threads"])),
        "no more" if verdict["descriptors"][1] <= verdict["descriptors"][0] else " to ".join(map(str, verdict["descriptors"])),
        "flat" if verdict["passed"] else "GROWS",
    )


if __name__ == "__main__":
    console.run(main)
