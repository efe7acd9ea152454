"""Compares the ways of feeding TensorFlow from TFRecords of JPEGs: images per second, CPU time, first batch, memory.

usage: compare_throughput.py --files=GLOB [--backends=NAME,...] [--batch_size=64] [--seconds=4] [--repeats=5]
                             [--warmup_batches=16] [--crop=resize_random_crop] [--image_size=224] [--antialias] [--fuse=auto]
                             [--dtype=float32] [--json=PATH] [--plot=PATH]
       compare_throughput.py --files=GLOB --sweep [--seconds=4] [--repeats=5] [--json=PATH]

Each row is a process of its own; the processes are measured in turn, round by round, so that what else the machine does meets
all of them alike. First it is shown that both backends make the same images. --sweep does that for six kinds of work, on the
images as they are and resized, and compares each backend of the package with the same work written by hand.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys

from absl import flags

import console
import input_flags
import machine
import sweep
from backends import BATCH_SIZE, ROWS, WORK_FLAGS, options_of, rates, ratios, training_spec
from dali_tf_input import CenterCrop, DatasetSpec, InputError, InputSpec, RandomResizedCrop, ResizeRandomCrop, Spread

_BACKENDS = flags.DEFINE_list("backends", None, f"Rows to measure, of {', '.join(ROWS)}; by default all that this machine has.")
_SECONDS = flags.DEFINE_float("seconds", 4.0, "Length of each measured window in seconds, above 0.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measured windows of each row, at least 1.")
_WARMUP_BATCHES = flags.DEFINE_integer("warmup_batches", 16, "Batches taken before each window: more than the queues hold.")
_SWEEP = flags.DEFINE_boolean("sweep", False, "Measure six kinds of work, against the same by hand.")
_JSON = flags.DEFINE_string("json", None, "File for the results, versions, machine, spec and options.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, a PNG.")

_REFERENCE = "tf_data"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LIMIT = 600  # seconds beyond a window after which a process counts as hung: its start, reading ahead, a busy machine
_COLUMNS = ("backend", "images/s", "min", "max", f"x {_REFERENCE}", "CPU s / 1000", "first batch s", "peak MB", "what")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    check_flags()
    spec = training_spec()
    about = machine.describe()
    backends = choose_backends(about["gpus"])
    if _SWEEP.value:
        return run_sweep(spec.dataset, about)
    batch_size = BATCH_SIZE.value
    if batch_size > spec.dataset.num_records:
        raise InputError(f"`batch_size` must be at most the {spec.dataset.num_records} records, got {batch_size}.")
    machine.print_lines(about)
    print(f"records   {spec.dataset.num_records:,} in {len(spec.dataset.files):,} files, {describe_bytes(spec.dataset)}")
    print(f"work      {describe_work(spec)}, batch {batch_size}")
    images = compare_images()
    print(
        f"images    DALI and tf.data agree: mean absolute difference {images['mean_absolute_difference']:.6f} of 255 over "
        f"{images['images']} evaluation images (largest {images['largest_difference']:.4f})"
    )
    results = measure_all(backends)
    rows = {backend: summarise(result, results.get(_REFERENCE), what=ROWS[backend].what) for backend, result in results.items()}
    print()
    console.print_table(_COLUMNS, [format_row(backend, row) for backend, row in rows.items()])
    for sentence in conclusions(results):
        print(sentence)
    report = {
        "command": shlex.join(sys.argv),
        **about,
        "dataset": {
            "files": list(input_flags.FILES.value),
            "num_files": len(spec.dataset.files),
            "num_records": spec.dataset.num_records,
            "bytes": sum(map(os.path.getsize, spec.dataset.files)),
        },
        "spec": {"preprocess": repr(spec.preprocess), "order": spec.order, "buffer_size": spec.buffer_size, "seed": spec.seed},
        "options": {backend: repr(options_of(backend)) for backend in backends},
        "batch_size": batch_size,
        "seconds": _SECONDS.value,
        "repeats": _REPEATS.value,
        "warmup_batches": _WARMUP_BATCHES.value,
        "evaluation_images": images,
        "rows": rows,
        "windows": results,
    }
    write_report(report, spec)
    return 0


def run_sweep(dataset: DatasetSpec, about: dict) -> int:
    """Measures the kinds of work in `sweep.WORKS`."""
    given = [flag.name for flag in (*WORK_FLAGS[1:], _BACKENDS, _PLOT) if flag.present]
    if given:
        raise InputError(f"--sweep chooses --{given[0]} itself.")
    arguments = [f"--{flag.name}={flag.value}" for flag in (BATCH_SIZE, _SECONDS, _REPEATS, _WARMUP_BATCHES)]
    machine.print_lines(about)
    reports = sweep.run(dataset, input_flags.as_arguments(input_flags.FILES.value), arguments)
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as stream:
            json.dump(reports, stream, indent=2)
            stream.write("\n")
        print(f"results in {_JSON.value}")
    return 0


def check_flags() -> None:
    """Checks the numbers before anything is started."""
    for name, least in (("batch_size", 1), ("repeats", 1), ("warmup_batches", 0)):
        if flags.FLAGS[name].value < least:
            raise InputError(f"`{name}` must be at least {least}, got {flags.FLAGS[name].value}.")
    if _SECONDS.value <= 0:
        raise InputError(f"`seconds` must be above 0, got {_SECONDS.value}.")
    for flag, suffix in ((_JSON, ""), (_PLOT, ".png")):
        if flag.value:
            console.check_writable(flag.value, flag=flag.name, suffix=suffix)


def choose_backends(gpus: list[str]) -> list[str]:
    """Returns the rows to measure; those that need a GPU only where TensorFlow sees one."""
    usable = bool(gpus) and machine.tensorflow_sees_a_gpu()
    if _BACKENDS.value is None:
        if gpus and not usable:
            print("The GPU rows are left out: TensorFlow sees no GPU. For them: make install GPU=1")
        measured = [backend for backend, row in ROWS.items() if row.order == "buffer"]
        return [backend for backend in measured if usable or not backend.startswith("dali_gpu")]
    unknown = [backend for backend in _BACKENDS.value if backend not in ROWS]
    if unknown or not _BACKENDS.value:
        raise InputError(f"`backends` must be of {', '.join(ROWS)}, got {', '.join(unknown) or 'none'}.")
    if not usable and any(backend.startswith("dali_gpu") for backend in _BACKENDS.value):
        raise InputError(
            f"dali_gpu and dali_gpu_bare need an NVIDIA GPU: nvidia-smi shows {len(gpus)}, TensorFlow sees none. "
            "Where there is one: make install GPU=1"
        )
    return list(dict.fromkeys(_BACKENDS.value))


def compare_images() -> dict[str, float]:
    """Compares the backends' evaluation images in a process of its own; an error if they differ."""
    command = [sys.executable, os.path.join(_FOLDER, "compare_images.py"), "--json"]
    command += input_flags.as_arguments(input_flags.FILES.value)
    try:
        code, output, _ = console.call(command, seconds=_LIMIT, stderr=None)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"The backends' images are not compared within {_LIMIT} s. What works here? make doctor") from error
    if code:
        raise InputError(f"The backends' images were not shown to be the same, so their speeds say nothing. {output}")
    return json.loads(output)


class Measurer:
    """A process that measures one row when told to; between its turns it is stopped (SIGSTOP).

    Without that it would go on filling its queues while another row is measured, and find them full on its own turn.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        command = [sys.executable, os.path.join(_FOLDER, "measure_throughput.py"), f"--backend={backend}"]
        command += [f"--{flag.name}={str(flag.value).lower()}" for flag in WORK_FLAGS]
        command += input_flags.as_arguments(input_flags.FILES.value)
        self._process = console.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.first_batch_seconds = self._read(_LIMIT)["first_batch_seconds"]
        except BaseException:
            self.stop()
            raise
        self._process.send_signal(signal.SIGSTOP)

    def measure(self, seconds: float, warmup_batches: int) -> dict[str, float]:
        """Measures one window."""
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{seconds} {warmup_batches}\n")
        self._process.stdin.flush()
        answer = self._read(_LIMIT + 10 * seconds)
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        """Ends the process; it has nothing to save."""
        console.kill(self._process)

    def _read(self, seconds: float) -> dict[str, float]:
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise InputError(f"{self.backend} does not answer within {seconds:.0f} s. What works here? make doctor")
        line = self._process.stdout.readline()
        if not line:
            raise InputError(f"{self.backend} ended with exit code {self._process.wait()} before it was measured (see above).")
        return json.loads(line)


def measure_all(backends: list[str]) -> dict[str, dict]:
    """Starts a process for each row, one after the other, then measures them round by round; returns all windows."""
    measurers: list[Measurer] = []
    try:
        for backend in console.progress(backends, what="starting", total=len(backends)):
            measurers.append(Measurer(backend))
            measurers[-1].measure(_SECONDS.value / 2, 0)  # not counted: caches fill, tf.data's tuning settles
        windows: dict[str, list[dict]] = {backend: [] for backend in backends}
        turns = [measurer for number in range(_REPEATS.value) for measurer in (measurers if number % 2 else measurers[::-1])]
        for measurer in console.progress(turns, what="measuring", total=len(turns)):
            windows[measurer.backend].append(measurer.measure(_SECONDS.value, _WARMUP_BATCHES.value))
        return {
            measurer.backend: {"first_batch_seconds": measurer.first_batch_seconds, "windows": windows[measurer.backend]}
            for measurer in measurers
        }
    finally:
        for measurer in measurers:
            measurer.stop()


def summarise(result: dict, reference: dict | None, *, what: str) -> dict:
    """Returns what the table shows of one row."""
    cpu = [1000 * window["cpu_seconds"] / (window["measured_batches"] * window["batch_size"]) for window in result["windows"]]
    return {
        "images_per_second": vars(Spread.of(rates(result))),
        "ratio_to_tf_data": vars(Spread.of(ratios(result, reference))) if reference else None,
        "cpu_seconds_per_1000_images": Spread.of(cpu).median,
        "first_batch_seconds": result["first_batch_seconds"],
        "what": what,
        "peak_memory_bytes": max(window["peak_memory_bytes"] for window in result["windows"]),
    }


def format_row(backend: str, row: dict) -> tuple[str, ...]:
    """Returns one line of the table."""
    speed, ratio = row["images_per_second"], row["ratio_to_tf_data"]
    return (
        backend,
        f"{speed['median']:,.0f}",
        f"{speed['minimum']:,.0f}",
        f"{speed['maximum']:,.0f}",
        f"{ratio['median']:.2f}" if ratio else "-",
        f"{row['cpu_seconds_per_1000_images']:.2f}",
        f"{row['first_batch_seconds']:.2f}",
        f"{row['peak_memory_bytes'] / 1e6:,.0f}",
        ROWS[backend].what,
    )


def conclusions(results: dict[str, dict]) -> list[str]:
    """Returns a sentence for each pair of rows that answers a question, with the ratio round by round."""
    pairs = (
        ("tf_data", "tf_data_by_hand", "tf.data through the package, against the same written by hand"),
        ("dali_cpu_bare", "dali_cpu_by_hand", "the package's DALI pipeline, against one written by hand (whole images)"),
        ("dali_cpu", "dali_cpu_bare", "DALI on CPU as a dataset, against its bare pipe.run()"),
        ("dali_gpu", "dali_gpu_bare", "DALI on GPU as a dataset, against its bare pipe.run()"),
        ("tf_data_global", "tf_data", "tf.data in global order, against a buffer"),
        ("dali_cpu_global", "dali_cpu", "DALI on CPU in global order, against a buffer"),
        ("tf_data", "tf_data_serial", "tf.data in parallel, against serial"),
        ("dali_gpu", "tf_data_serial", "DALI on GPU, against serial tf.data (6.13 in the 2018 example)"),
    )
    sentences = []
    for backend, reference, question in pairs:
        if backend in results and reference in results:
            spread = Spread.of(ratios(results[backend], results[reference]))
            sentences.append(f"{question}: {spread.median:.2f} ({spread.minimum:.2f} to {spread.maximum:.2f})")
    return sentences


def describe_bytes(dataset: DatasetSpec) -> str:
    """Returns how large the records are."""
    size = sum(map(os.path.getsize, dataset.files))
    return f"{size / 1e6:,.1f} MB, {size / dataset.num_records / 1e3:,.0f} KB a record"


def describe_work(spec: InputSpec) -> str:
    """Returns what is done to each image."""
    preprocess = spec.preprocess
    size = "x".join(map(str, preprocess.image_size))
    match preprocess.crop:
        case ResizeRandomCrop(resize=(height, width)):
            region = f"resize to {height}x{width}, random {size} crop"
        case RandomResizedCrop(area_range=(low, high)):
            region = f"random region of {low:.0%} to {high:.0%} of the area resized to {size}"
        case CenterCrop(resize_shorter=resize_shorter):
            region = f"resize the shorter side to {resize_shorter}, centre {size} crop"
        case _:
            region = f"random {size} crop"
    antialias = ", antialias" if preprocess.antialias else ""
    return f"decode, {region}{antialias}, mirror, normalise, {preprocess.dtype} {preprocess.layout}"


def write_report(report: dict, spec: InputSpec) -> None:
    """Writes the JSON and the plot that were asked for."""
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as stream:
            json.dump(report, stream, indent=2)
            stream.write("\n")
        print(f"results in {_JSON.value}")
    if _PLOT.value:
        import plots

        plots.plot_throughput(report, work=describe_work(spec), path=_PLOT.value)
        print(f"plot in {_PLOT.value}")


if __name__ == "__main__":
    console.run(main)
