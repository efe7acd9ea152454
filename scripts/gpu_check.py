"""Checks and measures everything that is claimed about GPUs, on a machine that has one.

Each part runs in a process of its own, takes at most eight minutes and leaves its results at once:
what may crash (probe), pixels against tf.data's, devices and strategies, images/s by batch and
image size (throughput), other ways of feeding (experiments), a ResNet-50 step with and without
input (training), memory. Where TensorFlow sees no GPU, DALI is measured alone. --rehearse runs all
of it briefly on the CPU.

example: python scripts/gpu_check.py --files='path/train-*' --parts=probe,pixels
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
try:
    sys.path.append(_ROOT)  # the package may not be installed
    import numpy as np

    import dali_tf_input as dti
    from dali_tf_input.cli import command, machine, pictures, processes
    from dali_tf_input.cli.convert.writer import write_images
    from dali_tf_input.cli.flags import FileFlags, WorkFlags, check_list
    from support.benchmark import Stats
    from support.throughput import experiments, rows
    from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second
except ModuleNotFoundError as error:
    sys.exit(f"error: {sys.executable} lacks {error.name}: install it, or see docs/install.md.")

PARTS = ("probe", "pixels", "devices", "throughput", "experiments", "training", "memory")
FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_PARTS = FLAGS.list("parts", None, f"Of {', '.join(PARTS)}; by default all.")
_OUT = FLAGS.string("out", "docs/results/gpu", "Folder for the results, PART.json.")
_REHEARSE = FLAGS.boolean("rehearse", False, "Run everything on the CPU, briefly.")
_PART = FLAGS.string("part", None, "For the processes that this one starts: what to do.")

_LIMIT = 480  # seconds that a part may take
_WINDOWS, _BRIEFLY = (2.0, 3), (0.1, 1)  # seconds of a measured window, and how many
_RESIZED = 256  # images of each size, at most
_LARGEST_MEAN = 3.0  # of 255: nvJPEG's inverse DCT and upsampling differ from libjpeg-turbo's


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    dataset = _FILES.dataset()
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), _ROOT])
    if _PART.value:
        processes.die_with_parent()
        command.import_tensorflow()
        check = globals().get(f"check_{_PART.value}", lambda _: run_tests(_PART.value))
        print(json.dumps(check(dataset)), flush=True)
        return 0
    parts = check_list("parts", _PARTS.value, list(PARTS))
    if _REHEARSE.value and not _OUT.present:
        raise dti.InputError("A rehearsal is not a result: name another folder with --out.")
    about = machine.describe()
    if not about["gpus"] and not _REHEARSE.value:
        raise dti.InputError(
            "There is no NVIDIA GPU here (no nvidia-smi, or it shows none). To try this on the CPU:"
            " scripts/gpu_check.py --rehearse --out=rehearsal --files=GLOB"
        )
    os.makedirs(_OUT.value, exist_ok=True)
    machine.print_lines(about)
    if not _REHEARSE.value and not machine.count_gpus_of_tensorflow():
        print("TensorFlow sees no GPU (docs/install.md): DALI is measured alone.")
        parts = ["alone"]
    failed = []
    for part in parts:
        start = time.monotonic()
        result = start_part(part)
        with open(os.path.join(_OUT.value, f"{part}.json"), "w", encoding="utf-8") as stream:
            json.dump({**about, "rehearsal": _REHEARSE.value, **result}, stream, indent=2)
        took = command.format_seconds(time.monotonic() - start)
        print(f"{part:<12} {result['text']}  ({took})", flush=True)
        failed += [] if result["passed"] else [part]
    if _REHEARSE.value:
        print("This was a rehearsal on the CPU: it says nothing about a GPU.")
    print(f"results in {_OUT.value}")
    if failed:
        raise dti.InputError(f"failed, or not measured: {', '.join(failed)}; see {_OUT.value}.")
    return 0


def start_part(part: str, **environment: str) -> dict[str, Any]:
    """Runs a part in a process; how it died is a result too."""
    words = [sys.executable, os.path.abspath(__file__), f"--part={part}", *_FILES.as_arguments()]
    words += ["--rehearse"] if _REHEARSE.value else []
    try:
        shared = {"seconds": _LIMIT, "environment": {**os.environ, **environment}}
        code, output, errors = processes.call(words, **shared)
    except subprocess.TimeoutExpired:
        return {"passed": False, "text": f"DIED: no answer within {_LIMIT} s"}
    if code == 0:
        return {**json.loads(output.splitlines()[-1]), "stderr": errors[-20000:]}
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    text = f"DIED: {processes.how_it_ended(code)}: {last}"
    return {"passed": False, "text": text, "stderr": errors[-20000:]}


def make_options(**changes: Any) -> dti.DaliOptions:
    """Returns options for the GPU, or what stands for it."""
    return dti.DaliOptions(device="cpu" if _REHEARSE.value else "gpu", **changes)


def make_candidate(order: str = "buffer", variant: str = "dataset", **changes: Any) -> Candidate:
    """Returns a way of feeding a GPU; `changes` are of its options."""
    return Candidate(make_options(**changes), order, variant)


def choose_batch_size(dataset: dti.Records) -> int:
    """Returns 256, or what a rehearsal or the records allow."""
    return min(8 if _REHEARSE.value else 256, dataset.num_records)


def compare(dataset: dti.Records, ways: dict[str, Candidate]) -> dict[str, Any]:
    """Measures candidates in turn, in one process; one that dies does not end it."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    texts: dict[str, str] = {}
    seconds, repeats = _BRIEFLY if _REHEARSE.value else _WINDOWS
    flags = (*_FILES.as_arguments(), *_WORK.as_arguments())
    with Measurer(*flags, f"--batch_size={choose_batch_size(dataset)}") as measurer:
        for _ in range(repeats):
            for name in [name for name in ways if "FAILED" not in texts.get(name, "")]:
                try:
                    answers[name].append(measurer.measure(ways[name], seconds=seconds))
                except CandidateError as error:
                    texts[name] = f"{name}: FAILED: {str(error).splitlines()[0]}"
                    continue
                rate = Stats.of(list(map(images_per_second, answers[name]))).median
                memory = answers[name][-1]["gpu_memory_bytes"]
                usage = f", {memory / 1e6:,.0f} MB of the GPU in use" if memory else ""
                texts[name] = f"{name}: {rate:,.0f} images/s{usage}"
    passed = all("FAILED" not in text for text in texts.values())
    return {"passed": passed, "text": "\n  ".join(texts.values()), "details": answers}


def run_tests(part: str) -> dict[str, Any]:
    """Runs the tests of a part, those that need a GPU and have it in their name."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", f"test_{part}"]
    words += ["-p", "no:cacheprovider", os.path.join(_ROOT, "tests", "backends", "test_gpu.py")]
    environment = {**os.environ, "GPU_TESTS_ON": make_options().device}
    code, output, errors = processes.call(words, environment=environment)
    lines = output.splitlines() or errors.splitlines() or ["no answer"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    text = "\n  ".join([lines[-1], *(line.partition(" - ")[0] for line in failed)])
    return {"passed": code == 0, "text": text, "output": output[-20000:]}


def check_probe(_: dti.Records) -> dict[str, Any]:
    """Tries what may crash; keeps what the decoder says of its hardware."""
    tests, bare = run_tests("probe"), start_part("alone", DALI_NVIMGCODEC_LOG_LEVEL="3")
    messages = re.findall(r".*(?:HW|hardware).*decoder.*", bare.get("stderr", ""), re.IGNORECASE)
    passed, text = tests["passed"] and bare["passed"], [tests["text"], bare["text"]]
    return {
        "passed": passed,
        "text": "\n  ".join([*text, *dict.fromkeys(messages)]),
        "tests": tests,
    }


def check_alone(dataset: dti.Records) -> dict[str, Any]:
    """Measures what needs no GPU of TensorFlow's: the bare pipeline, and a dataset on the CPU."""
    ways = {"bare pipe.run()": "bare", "dataset on the CPU": "on_cpu"}
    return compare(dataset, {name: make_candidate(variant=way) for name, way in ways.items()})


def check_pixels(dataset: dti.Records) -> dict[str, Any]:
    """Runs the tests; compares real training images with tf.data's, by both ways of upsampling."""
    import tensorflow as tf

    from dali_tf_input.serving import denormalize

    result, preprocess = run_tests("pixels"), dti.Preprocess.for_training(224)
    spec = dti.InputSpec(records=dataset, preprocess=preprocess, order="global")
    options, batch_size = make_options(), min(64, dataset.num_records)
    batch, other = (
        next(pictures.make_batches(spec, backend_options, batch_size))
        for backend_options in (options, dti.TfDataOptions())
    )
    with tf.device(f"{options.device}:0"):
        shared = {"spec": spec, "options": options, "batch_size": batch_size}
        plain = next(iter(experiments.make_dataset("plain_upsampling", **shared)))[0]
    plain = denormalize(plain.numpy(), preprocess)
    mean, plain_mean = (
        float(np.abs(images - other["image"]).mean()) for images in (batch["image"], plain)
    )
    equal = bool((batch["label"] == other["label"]).all())
    text = f"{mean:.2f} of 255 from tf.data's; {plain_mean:.2f} with plain chroma upsampling"
    passed = result["passed"] and equal and mean < _LARGEST_MEAN
    result |= {"labels_equal": equal, "mean": mean, "plain_mean": plain_mean}
    return {**result, "passed": passed, "text": f"{result['text']}\n  {text}"}


def write_resized(
    dataset: dti.Records, size: tuple[int, int], folder: str, num_records: int
) -> str:
    """Writes images of `dataset`, resized to (height, width), as TFRecords; returns a pattern."""
    images = []
    for record in range(0, dataset.num_records, -(-dataset.num_records // _RESIZED)):
        stream = io.BytesIO()
        pictures.read_image(dataset, record).resize(size[::-1]).save(stream, "JPEG", quality=90)
        images.append(stream.getvalue())
    out = os.path.join(folder, str(size[0]))
    return write_images(out, images, num_records=num_records, num_files=1)


def check_throughput(dataset: dti.Records) -> dict[str, Any]:
    """Measures rows in turn, by the size of batches and of images."""
    dali, usual = f"dali_{make_options().device}", choose_batch_size(dataset)
    names = ["tf_data_serial", "tf_data", f"{dali}_bare", dali, f"{dali}_global"]
    batches = () if _REHEARSE.value else (64, 256, 1024)
    texts, details = [], {}
    seconds, repeats = _BRIEFLY if _REHEARSE.value else _WINDOWS
    window: dict[str, Any] = {"seconds": seconds, "warmup_batches": 4, "repeats": repeats}
    with tempfile.TemporaryDirectory() as folder:
        for size, batch in (*(((256, 341), batch) for batch in batches), ((1080, 1920), usual)):
            flags, at_least = command.Flags(), 16 if _REHEARSE.value else 2048
            files = FileFlags(flags)
            flags(["", f"--files={write_resized(dataset, size, folder, at_least)}"])
            windows = rows.measure_rows(names, files, _WORK, f"--batch_size={batch}", **window)
            rates = {name: Stats.of(rows.rates(measured)) for name, measured in windows.items()}
            shown = ", ".join(f"{name} {stats.median:,.0f}" for name, stats in rates.items())
            texts += [f"{size}, batch {batch}: {shown}", *rows.conclusions(windows)]
            details[f"{size}, {batch}"] = windows
    return {"passed": True, "text": "\n  ".join(texts), "details": details}


def check_experiments(dataset: dti.Records) -> dict[str, Any]:
    """Measures other ways of feeding, and shares of the hardware decoder, beside the default."""
    ways = {}
    for order, names in (("buffer", experiments.ANY_ORDER), ("global", experiments.EXPERIMENTS)):
        for name in ("dataset", *names):
            ways[f"{order}, {name}"] = make_candidate(order, name)
    for load in () if _REHEARSE.value else (0.0, 0.25, 0.5, 0.75, 1.0):
        ways[f"hw_decoder_load={load}"] = make_candidate(hw_decoder_load=load)
    return compare(dataset, ways)


def check_training(dataset: dti.Records) -> dict[str, Any]:
    """Trains a ResNet-50 (rehearsed: a MobileNet): which part of the step it waits for input."""
    import keras
    import tensorflow as tf

    from dali_tf_input.backends.build import enable_memory_growth

    enable_memory_growth()
    small, options = _REHEARSE.value, make_options()
    gpus = [device.name for device in tf.config.list_logical_devices(options.device.upper())]
    cases: list[tuple[str, Any, list[str]]] = [("tf_data", dti.TfDataOptions(), [])]
    cases += [("dali", options, []), ("dali, mirrored", options, gpus[:1])]
    cases += [(f"dali, {len(gpus)} GPUs", options, gpus)] if len(gpus) > 1 else []
    size, steps = (32, 20) if small else (224, 40)
    details, texts = {}, []
    keras.mixed_precision.set_global_policy("float32" if small else "mixed_float16")
    preprocess = dti.Preprocess.for_training(size)
    spec = dti.InputSpec(records=dataset, preprocess=preprocess, order="buffer")
    for name, backend_options, devices in cases:
        keras.utils.clear_session()
        strategy = tf.distribute.MirroredStrategy(devices) if devices else None
        batch_size = max(1, len(devices)) * (4 if small else choose_batch_size(dataset))
        with (strategy or tf.distribute.get_strategy()).scope():
            make = keras.applications.MobileNet if small else keras.applications.ResNet50
            model = make(input_shape=(size, size, 3), weights=None, classes=1001)
            model.compile("sgd", "sparse_categorical_crossentropy")
        train = dti.load(spec, backend_options, strategy=strategy, batch_size=batch_size)
        train.fit(model, steps_per_epoch=2, verbose=0)
        profile = train.profile(model, steps=steps)
        details[name] = profile._asdict()
        rate = profile.images_per_second
        texts.append(f"{name}: {rate:,.0f} images/s, waits {profile.wait:.0%}")
    return {"passed": True, "text": "\n  ".join(texts), "details": details}


def check_memory(dataset: dti.Records) -> dict[str, Any]:
    """Runs the tests; measures what the decoder's memory hints take of the GPU."""
    result, texts = run_tests("memory"), []
    for hints in (True, False):  # each in a process of its own
        name = f"memory_hints={hints}"
        result[name] = compare(dataset, {name: make_candidate(memory_hints=hints)})
        texts.append(result[name]["text"])
    return {**result, "text": "\n  ".join([result["text"], *texts])}


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
