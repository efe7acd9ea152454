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
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions
from support import cli, first_batches, machine, processes
from support.flags import FileFlags, WorkFlags
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
_SCRIPTS = os.path.dirname(os.path.abspath(__file__))


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    dataset = _FILES.dataset()
    if _PART.value:
        processes.die_with_parent()
        print(json.dumps(run_part(_PART.value, dataset)), flush=True)
        return 0
    unknown = [part for part in _PARTS.value or () if part not in PARTS]
    if unknown or _PARTS.value == []:
        got = ", ".join(unknown) or "none"
        raise InputError(f"`parts` must be of {', '.join(PARTS)}, got {got}.")
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
    cli.check_writable(_OUT.value, flag="out", suffix=".json")
    machine.print_lines(about)
    parts = _PARTS.value or list(PARTS)
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
        if not found["passed"]:
            failed.append(part)
    if _REHEARSE.value:
        print("This was a rehearsal on the CPU: it says nothing about a GPU.")
    print(f"results in {_OUT.value}")
    if failed:
        text = f"failed, or not measured: {', '.join(failed)}; see {_OUT.value}."
        print(f"error: {text}", file=sys.stderr)
    return 1 if failed else 0


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
        raise InputError(
            f"{_OUT.value} is not a result to add to: {error}. Name another --out."
        ) from error


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
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return {"passed": False, "text": f"DIED: {how}: {last}", "stderr": errors[-2000:]}


def device() -> str:
    """Returns what stands for the GPU."""
    return "cpu" if _REHEARSE.value else "gpu"


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
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "GPU_TESTS_ON": device()}
    code, output, errors = processes.call(
        [*words, os.path.join(os.path.dirname(_SCRIPTS), "tests", "backends", "test_gpu.py")],
        environment=environment,
    )
    lines = output.splitlines() or errors.splitlines() or ["no answer"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "passed": code == 0,
        "text": "\n  ".join([lines[-1], *failed]),
        "output": output[-20000:],
    }


def check_pixels(dataset: DatasetSpec) -> dict[str, Any]:
    """Compares training images and labels with tf.data's."""
    spec, options = make_spec(dataset, order="global"), DaliOptions(device=device())
    difference, labels = first_batches.compare(spec, options, TfDataOptions())
    mean, worst = float(difference.mean()), float(difference.mean(axis=(1, 2, 3)).max())
    text = f"differ from tf.data's by {mean:.2f} of 255 on average, one image by {worst:.2f}"
    passed = bool(labels and mean < _LARGEST_MEAN)
    return {"passed": passed, "text": text, "labels_equal": labels}


def check_throughput(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures the rows that are compared, on the photos as they are and at 1080p."""
    names = ["tf_data_serial", "tf_data", f"dali_{device()}_bare", f"dali_{device()}"]
    script = os.path.join(_SCRIPTS, "compare_throughput.py")
    texts, details = [], {}
    with tempfile.TemporaryDirectory() as folder:
        batch_size = min(8 if _REHEARSE.value else 256, dataset.num_records)
        full_hd = sweep.write_resized(dataset, (1080, 1920), folder, at_least=2 * batch_size)
        for name, files in {"photos": None, "1080p": [full_hd]}.items():
            path = os.path.join(folder, "rows.json")
            words = [sys.executable, script, f"--backends={','.join(names)}", f"--json={path}"]
            words += [f"--seconds={_SECONDS.value}", f"--repeats={_REPEATS.value}"]
            words += [f"--batch_size={batch_size}"]
            words += _FILES.as_arguments() if files is None else [f"--files={full_hd}"]
            code, _, errors = processes.call(words, seconds=_LIMIT)
            if code:
                raise InputError(errors.strip() or f"exit code {code}")
            with open(path, encoding="utf-8") as stream:
                details[name] = report = json.load(stream)
            rows = report["rows"].items()
            rates = (f"{row} {one['images_per_second']['median']:,.0f}" for row, one in rows)
            texts.append(
                "\n  ".join([f"{name}: {', '.join(rates)}", *conclusions(report["windows"])])
            )
    return {"passed": True, "text": "\n  ".join(texts), "details": details}


def check_hw_decoder_load(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures the dataset over the hardware decoder's share and the batch."""
    loads = (None,) if _REHEARSE.value else _LOADS
    batches = {min(size, dataset.num_records) for size in ((8,) if _REHEARSE.value else _BATCHES)}
    rows, best = [], (0.0, "nothing")
    for batch_size in sorted(batches):
        with Measurer(_FILES, _WORK, f"--batch_size={batch_size}") as measurer:
            for load in loads:
                options = DaliOptions(device=device(), hw_decoder_load=load)
                row: dict[str, Any] = {"batch_size": batch_size, "hw_decoder_load": load}
                try:
                    answer = measurer.measure(Candidate(options, "buffer"), seconds=_SECONDS.value)
                    row["images_per_second"] = rate = images_per_second(answer)
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
    for name, options in (("tf_data", TfDataOptions()), ("dali", DaliOptions(device=device()))):
        keras.utils.clear_session()
        keras.mixed_precision.set_global_policy("float32" if small else "mixed_float16")
        classes = (dataset.label_range[1] if dataset.label_range else 1000) + 1
        layers = [keras.layers.Input((size, size, 3)), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(classes, "softmax")])
        if not small:
            model = keras.applications.ResNet50(weights=None, classes=classes)
        model.compile("sgd", "sparse_categorical_crossentropy")
        spec = make_spec(dataset, size)
        train = distribute(spec, options, global_batch_size=batch_size)
        profile = InputProfile(train, cached_steps=4 if small else 20)
        arguments = {"steps_per_epoch": steps, "shuffle": False, "verbose": 0}
        model.fit(train.dataset, epochs=2, callbacks=[profile], **arguments)
        last = profile.epochs[-1]
        details[name] = last._asdict()
        texts.append(
            f"{name}: {batch_size / last.step_seconds:,.0f} images/s, waits {last.wait:.0%}"
        )
    return {"passed": True, "text": "; ".join(texts), "details": details}


def check_alone(dataset: DatasetSpec) -> dict[str, Any]:
    """Measures DALI's pipeline without TensorFlow, which sees no GPU."""
    from dali_tf_input import Shard, measure
    from dali_tf_input.dataset import import_dali

    batch_size = min(256, dataset.num_records)
    pipeline = import_dali().build_pipeline(
        make_spec(dataset),
        DaliOptions(device=device()),
        batch_size=batch_size,
        shard=Shard(0, 1),
        device_id=None if _REHEARSE.value else 0,
    )
    pipeline.build()
    batches = iter(pipeline.run, None)
    window = measure(batches, batch_size=batch_size, seconds=_SECONDS.value, warmup_batches=8)
    return {"passed": True, "text": f"bare pipe.run(): {window.images_per_second:,.0f} images/s"}


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
