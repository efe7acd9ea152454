"""Checks and measures everything that is claimed about GPUs, on a machine that has one.

Each part runs in a process of its own, as it may crash, and adds to the results at once. tests:
those with the marker `gpu`; pixels: real images against tf.data's; throughput: images/s of photos
and 1080p; hw_decoder_load: the hardware decoder's share swept; training: a ResNet-50 step with and
without input; alone: DALI where TensorFlow sees no GPU. --rehearse runs all of it briefly on the
CPU.

example: python scripts/gpu_check.py --files='path/train-*' --parts=tests,pixels
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions
from support import cli, first_batches, machine, processes
from support.flags import FileFlags, WorkFlags, check_list
from support.throughput import sweep
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second
from support.throughput.rows import conclusions

PARTS = ("tests", "pixels", "throughput", "hw_decoder_load", "training")
FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_PARTS = FLAGS.list("parts", None, f"Of {', '.join(PARTS)}; by default all.")
_OUT = FLAGS.string("out", "docs/results/gpu.json", "File for the results.")
_SECONDS = FLAGS.number("seconds", 2.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 3, "Measured windows of each row.", 1)
_REHEARSE = FLAGS.boolean("rehearse", False, "Run everything on the CPU, briefly.")
_PART = FLAGS.string("part", None, "For the processes that this one starts: what to do.")

_LIMIT = 480  # seconds that a part may take
_LOADS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)
_BATCHES = (64, 256, 512)
_LARGEST_MEAN = 3.0  # of 255: nvJPEG's inverse DCT and upsampling differ from libjpeg-turbo's


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    dataset = _FILES.dataset()
    if _PART.value:
        processes.die_with_parent()
        print(json.dumps(run_part(_PART.value, dataset)), flush=True)
        return 0
    parts = check_list("parts", _PARTS.value, list(PARTS))
    if _REHEARSE.value and not _OUT.present:
        raise InputError("A rehearsal is not a result: name another file with --out.")
    about = machine.describe()
    if not about["gpus"] and not _REHEARSE.value:
        raise InputError(
            "There is no NVIDIA GPU here (no nvidia-smi, or it shows none). To try this on the CPU:"
            " scripts/gpu_check.py --rehearse --out=rehearsal.json --files=GLOB"
        )
    if not _OUT.present:
        os.makedirs(os.path.dirname(_OUT.value), exist_ok=True)
    cli.check_writable(_OUT, suffix=".json")
    machine.print_lines(about)
    if not _REHEARSE.value and not machine.count_gpus_of_tensorflow():
        print("TensorFlow sees no GPU (docs/install.md): DALI is measured alone.")
        parts = ["alone"]
    report = {**about, "rehearsal": _REHEARSE.value, "parts": {}}
    if _PARTS.value and os.path.exists(_OUT.value):
        report["parts"] = read_parts(report)
    failed = []
    for part in parts:
        start = time.monotonic()
        report["parts"][part] = found = start_part(part)
        with open(_OUT.value, "w", encoding="utf-8") as stream:  # what was found is kept
            json.dump(report, stream, indent=2)
        took = cli.format_seconds(time.monotonic() - start)
        print(f"{part:<16} {found['text']}  ({took})", flush=True)
        failed += [] if found["passed"] else [part]
    if _REHEARSE.value:
        print("This was a rehearsal on the CPU: it says nothing about a GPU.")
    print(f"results in {_OUT.value}")
    if failed:
        raise InputError(f"failed, or not measured: {', '.join(failed)}; see {_OUT.value}.")
    return 0


def read_parts(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run on this machine found."""
    try:
        with open(_OUT.value, encoding="utf-8") as stream:
            earlier = json.load(stream)
        same = ("gpus", "cpu", "cores", "versions", "rehearsal")
        if any(earlier[what] != report[what] for what in same):
            raise ValueError("it is of another machine or version, or a rehearsal")
        return dict(earlier["parts"])
    except (ValueError, KeyError, TypeError) as error:
        text = f"{_OUT.value} is not a result to add to: {error}. Name another --out."
        raise InputError(text) from error


def start_part(part: str) -> dict[str, Any]:
    """Runs a part in a process; how it died is a result too."""
    words = [sys.executable, os.path.abspath(__file__), f"--part={part}", *_FILES.as_arguments()]
    words += [f"--seconds={_SECONDS.value}", f"--repeats={_REPEATS.value}"]
    words += ["--rehearse"] if _REHEARSE.value else []
    try:
        code, output, errors = processes.call(words, seconds=_LIMIT)
    except subprocess.TimeoutExpired:
        return {"passed": False, "text": f"DIED: no answer within {_LIMIT} s"}
    if code == 0:
        return json.loads(output.splitlines()[-1])
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    text = f"DIED: {processes.how_it_ended(code)}: {last}"
    return {"passed": False, "text": text, "stderr": errors[-2000:]}


def make_options(**changes: Any) -> DaliOptions:
    """Returns options for the GPU, or what stands for it."""
    return DaliOptions(device="cpu" if _REHEARSE.value else "gpu", **changes)


def make_spec(dataset: DatasetSpec, image_size: int = 224, order: str = "buffer") -> InputSpec:
    """Returns a training input."""
    preprocess = Preprocess.for_training(image_size)
    return InputSpec(dataset=dataset, preprocess=preprocess, order=order)


def run_part(part: str, dataset: DatasetSpec) -> dict[str, Any]:
    """Does a part in this process; returns passed, text and details."""
    cli.import_tensorflow()
    from dali_tf_input import enable_memory_growth

    if part in ("pixels", "training"):  # others start processes of their own
        enable_memory_growth()
    return globals()[f"check_{part}"](dataset)


def check_tests(_: DatasetSpec) -> dict[str, Any]:
    """Runs the tests that need a GPU, in the folder of this repository."""
    file = os.path.join(os.path.dirname(processes.SCRIPTS), "tests", "backends", "test_gpu.py")
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "GPU_TESTS_ON": make_options().device}
    code, output, errors = processes.call(words, environment=environment)
    lines = output.splitlines() or errors.splitlines() or ["no answer"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    text = "\n  ".join([lines[-1], *failed])
    return {"passed": code == 0, "text": text, "output": output[-20000:]}


def check_pixels(dataset: DatasetSpec) -> dict[str, Any]:
    """Compares training images and labels with tf.data's."""
    spec, batch_size = make_spec(dataset, order="global"), min(64, dataset.num_records)
    (images, labels), (other_images, other_labels) = (
        next(first_batches.make_batches(spec, options, batch_size))
        for options in (make_options(), TfDataOptions())
    )
    means = np.abs(images - other_images).mean(axis=(1, 2, 3))
    mean, equal = float(means.mean()), bool((labels == other_labels).all())
    text = f"differ from tf.data's by {mean:.2f} of 255 on average, one image by {means.max():.2f}"
    return {"passed": equal and mean < _LARGEST_MEAN, "text": text, "labels_equal": equal}


def check_throughput(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures the rows that are compared, on the photos as they are and at 1080p."""
    dali = f"dali_{make_options().device}"
    names = ["tf_data_serial", "tf_data", f"{dali}_bare", dali]
    batch_size = min(8 if _REHEARSE.value else 256, dataset.num_records)
    flags = [f"--{one.name}={one.value}" for one in (_SECONDS, _REPEATS)]
    flags += [f"--batch_size={batch_size}"]
    texts, details = [], {}
    with tempfile.TemporaryDirectory() as folder:
        full_hd = sweep.write_resized(dataset, (1080, 1920), folder, at_least=2 * batch_size)
        sets = {"photos": _FILES.as_arguments(), "1080p": [f"--files={full_hd}"]}
        for name, files in sets.items():
            report = details[name] = sweep.compare_rows(names, [*files, *flags], seconds=_LIMIT)
            rows = report["rows"].items()
            rates = (f"{row} {one['images_per_second']['median']:,.0f}" for row, one in rows)
            texts += [f"{name}: {', '.join(rates)}", *conclusions(report["windows"])]
    return {"passed": True, "text": "\n  ".join(texts), "details": details}


def check_hw_decoder_load(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures the dataset over the hardware decoder's share and the batch."""
    loads = (None,) if _REHEARSE.value else _LOADS
    batches = {min(size, dataset.num_records) for size in ((8,) if _REHEARSE.value else _BATCHES)}
    rows, best = [], (0.0, "nothing")
    for batch_size in sorted(batches):
        with Measurer(_FILES, _WORK, f"--batch_size={batch_size}") as measurer:
            for load in loads:
                row: dict[str, Any] = {"batch_size": batch_size, "hw_decoder_load": load}
                candidate = Candidate(make_options(hw_decoder_load=load), "buffer")
                try:
                    rate = images_per_second(measurer.measure(candidate, seconds=_SECONDS.value))
                    row["images_per_second"] = rate
                    share = "DALI's own share" if load is None else f"a share of {load}"
                    best = max(best, (rate, f"batch {batch_size}, {share}"))
                except CandidateError as error:
                    row["failed"] = str(error)
                rows.append(row)
    text = f"fastest: {best[0]:,.0f} images/s, {best[1]}"
    return {"passed": all("failed" not in row for row in rows), "text": text, "details": rows}


def check_training(dataset: DatasetSpec) -> dict[str, Any]:
    """Trains a ResNet-50 (in a rehearsal one layer): which part of the step it waits for input."""
    import keras

    from dali_tf_input import InputProfile, distribute

    small = _REHEARSE.value
    batch_size, size, steps = (4, 32, 20) if small else (min(256, dataset.num_records), 224, 40)
    details, texts = {}, []
    for name, options in (("tf_data", TfDataOptions()), ("dali", make_options())):
        keras.utils.clear_session()
        keras.mixed_precision.set_global_policy("float32" if small else "mixed_float16")
        classes = max(1000, dataset.label_range[1] if dataset.label_range else 0) + 1
        layers = [keras.layers.Input((size, size, 3)), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(classes, "softmax")])
        if not small:
            model = keras.applications.ResNet50(weights=None, classes=classes)
        model.compile("sgd", "sparse_categorical_crossentropy")
        train = distribute(make_spec(dataset, size), options, global_batch_size=batch_size)
        profile = InputProfile(train, cached_steps=4 if small else 20)
        arguments = {"steps_per_epoch": steps, "shuffle": False, "verbose": 0}
        model.fit(train.dataset.repeat(), epochs=2, callbacks=[profile], **arguments)
        last = profile.epochs[-1]
        details[name], rate = last._asdict(), batch_size / last.step_seconds
        texts.append(f"{name}: {rate:,.0f} images/s, waits {last.wait:.0%}")
    return {"passed": True, "text": "; ".join(texts), "details": details}


def check_alone(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures DALI's pipeline without TensorFlow, which sees no GPU."""
    from dali_tf_input import measure
    from dali_tf_input.backends.reading import Stream
    from dali_tf_input.dataset import import_dali

    batch_size = min(256, dataset.num_records)
    stream = Stream(spec=make_spec(dataset), batch_size=batch_size)
    pipeline = import_dali().build_pipeline(stream, make_options(), 0)
    pipeline.build()
    batches = iter(pipeline.run, None)
    window = measure(batches, batch_size=batch_size, seconds=_SECONDS.value, warmup_batches=8)
    return {"passed": True, "text": f"bare pipe.run(): {window.images_per_second:,.0f} images/s"}


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
