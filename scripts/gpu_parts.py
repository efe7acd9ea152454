"""The parts of gpu_check.py that run in processes of their own; each prints its findings as a line of JSON.

usage: gpu_parts.py --part=NAME --files=GLOB [--device=gpu] [--seconds=2]
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from absl import flags

import console
import input_flags
from dali_tf_input import (
    CenterCrop,
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    NoCrop,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    Shard,
    TfDataOptions,
    measure,
)
from dali_tf_input.order import Position

tf = console.import_tensorflow()
import keras  # noqa: E402  (after TensorFlow, whose chatter is held back)
import numpy as np  # noqa: E402

from dali_tf_input.distribute import distribute, enable_memory_growth  # noqa: E402
from dali_tf_input.input_profile import InputProfile  # noqa: E402

_DEVICE = flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "cpu rehearses every part with the CPU in the GPU's place.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Length of a measured window.")
_EVALUATIONS = {"gpu": 20, "cpu": 10}
# nvJPEG's inverse DCT and its way of enlarging colours are others than libjpeg-turbo's: mean difference in 0..255 units.
_LARGEST_MEAN = 3.0
_LARGEST_OF_ONE = 8.0  # of the worst image; another image altogether differs by 60


def _options(**changes: Any) -> DaliOptions:
    return DaliOptions(device=_DEVICE.value, **changes)


def _spec(dataset: DatasetSpec, preprocess: Preprocess | None = None, **changes: Any) -> InputSpec:
    return InputSpec(dataset=dataset, preprocess=preprocess or Preprocess.for_training(224), **{"order": "buffer", **changes})


def probe(dataset: DatasetSpec) -> dict[str, Any]:
    """Decodes only regions, which was reported to crash on some GPUs."""
    made = {}
    for fuse in ("off", "decode"):
        fed = distribute(
            _spec(dataset, Preprocess.for_evaluation(224), order="sequential"),
            _options(fuse=fuse),
            global_batch_size=min(32, dataset.num_records),
        )
        made[fuse] = next(iter(fed.dataset))[0].numpy()
    difference = float(np.abs(made["off"] - made["decode"]).mean()) * 57  # of 255
    return {"mean_difference_to_whole": difference, "passed": difference < _LARGEST_MEAN}


def pixels_reader(dataset: DatasetSpec) -> dict[str, Any]:
    """Compares images and labels with tf.data's where DALI reads: what is not random of them."""
    return compare_pixels(dataset, "sequential", [CenterCrop(resize_shorter=256), NoCrop()], mirror_probability=0.0)


def pixels_planned(dataset: DatasetSpec) -> dict[str, Any]:
    """Compares images and labels with tf.data's where tf.data reads for DALI: every crop, the same at random."""
    crops = [ResizeRandomCrop(resize=(256, 256)), RandomResizedCrop(), RandomCrop(), CenterCrop(resize_shorter=256), NoCrop()]
    return compare_pixels(dataset, "global", crops, mirror_probability=0.5)


def compare_pixels(dataset: DatasetSpec, order: str, crops: list[Any], *, mirror_probability: float) -> dict[str, Any]:
    """Compares the first batch of both backends for each crop, with and without antialias."""
    found = {}
    batch_size = min(64, dataset.num_records)
    for crop in crops:
        for antialias in (False, True) if _DEVICE.value == "gpu" else (False,):
            preprocess = Preprocess(image_size=(224, 224), crop=crop, mirror_probability=mirror_probability, antialias=antialias)
            spec = _spec(dataset, preprocess, order=order)
            made = []
            for options in (_options(), TfDataOptions()):
                images, labels = next(iter(distribute(spec, options, global_batch_size=batch_size).dataset))
                made.append((images.numpy() * np.float32(preprocess.std), labels.numpy()))
            difference = np.abs(made[0][0] - made[1][0])
            found[f"{type(crop).__name__}{', antialias' if antialias else ''}"] = {
                "mean": float(difference.mean()),
                "mean_of_the_worst_image": float(difference.mean(axis=(1, 2, 3)).max()),
                "percentile_99": float(np.percentile(difference, 99)),
                "largest": float(difference.max()),
                "labels_equal": bool((made[0][1] == made[1][1]).all()),
            }
    passed = all(
        one["mean"] <= _LARGEST_MEAN and one["mean_of_the_worst_image"] <= _LARGEST_OF_ONE and one["labels_equal"]
        for one in found.values()
    )
    return {"bound_of_mean": _LARGEST_MEAN, "bound_of_one_image": _LARGEST_OF_ONE, "of_255": found, "passed": passed}


def devices_reader(dataset: DatasetSpec) -> dict[str, Any]:
    """Says on which device the tensors are where DALI reads."""
    return find_devices(dataset, "buffer")


def devices_planned(dataset: DatasetSpec) -> dict[str, Any]:
    """Says on which device the tensors are where tf.data reads for DALI."""
    return find_devices(dataset, "global")


def find_devices(dataset: DatasetSpec, order: str) -> dict[str, Any]:
    """Returns the devices of the first batch under each strategy."""
    kind = _DEVICE.value.upper()
    strategies: dict[str, Callable[[], tf.distribute.Strategy | None]] = {
        "no strategy": lambda: None,
        "OneDevice": lambda: tf.distribute.OneDeviceStrategy(f"{kind}:0"),
        "Mirrored": lambda: tf.distribute.MirroredStrategy([device.name for device in tf.config.list_logical_devices(kind)]),
    }
    found = {}
    for name, make in strategies.items():
        strategy = make()
        num_replicas = strategy.num_replicas_in_sync if strategy else 1
        batch_size = max(1, min(8, dataset.num_records // num_replicas))
        fed = distribute(_spec(dataset, order=order), _options(), strategy=strategy, global_batch_size=batch_size * num_replicas)
        found[name] = list(fed.devices)
    expected = {name: [f"{kind}:{number}" for number in range(len(where))] for name, where in found.items()}
    return {"devices": found, "passed": found == expected}


def memory(dataset: DatasetSpec) -> dict[str, Any]:
    """Trains and evaluates again and again with TensorFlow and DALI on one device; returns its memory after each."""
    batch_size = min(32, dataset.num_records)
    train = distribute(_spec(dataset), _options(), global_batch_size=batch_size)
    evaluation = _spec(dataset, Preprocess.for_evaluation(224), order="sequential")
    validation = distribute(evaluation, _options(), global_batch_size=batch_size)
    layers = [keras.layers.Conv2D(8, 7, 4), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((224, 224, 3)), *layers])
    model.compile("sgd", "mse")  # for labels of any number
    used = []
    for _ in range(_EVALUATIONS[_DEVICE.value]):
        model.fit(train.dataset, steps_per_epoch=2, shuffle=False, verbose=0)
        model.evaluate(validation.dataset, steps=4, verbose=0)
        used.append(memory_used())
    first, last = (statistics.median(some) for some in (used[len(used) // 4 : len(used) // 2], used[-5:]))
    growth = max(0.0, (last - first) / first)
    bound = 0.05 if _DEVICE.value == "gpu" else 0.15  # the host's allocator gives back when it likes to
    return {"evaluations": len(used), "bytes": used, "growth_after_warm_up": growth, "bound": bound, "passed": growth <= bound}


def memory_used() -> int:
    """Returns the bytes used of the first GPU, by all; of this process, in a rehearsal."""
    if _DEVICE.value == "cpu":
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"  # a number or a UUID, as nvidia-smi takes too
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not text.isdigit() or text == "0":
        raise InputError(f"nvidia-smi does not say how much memory GPU {first} uses: {text or 'no word'}.")
    return int(text) << 20


def training(dataset: DatasetSpec) -> dict[str, Any]:
    """Trains a ResNet-50 (in a rehearsal a single layer) with and without input: which part of the step it waits."""
    small = _DEVICE.value == "cpu"
    batch_size, size, steps = (4, 32, 6) if small else (256, 224, 40)
    batch_size = min(batch_size, dataset.num_records)
    found = {}
    for name, options in (("tf_data", TfDataOptions()), (f"dali_{_DEVICE.value}", _options())):
        keras.utils.clear_session()
        keras.mixed_precision.set_global_policy("float32" if small else "mixed_float16")
        classes = (dataset.label_range[1] if dataset.label_range else 1000) + 1
        shape = (size, size, 3)
        if small:
            model = keras.Sequential([keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(classes, "softmax")])
        else:
            model = keras.applications.ResNet50(weights=None, classes=classes, input_shape=shape)
        model.compile("sgd", "sparse_categorical_crossentropy")
        train = distribute(_spec(dataset, Preprocess.for_training(size)), options, global_batch_size=batch_size)
        profile = InputProfile(train.dataset, cached_steps=4 if small else 20)
        model.fit(train.dataset, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0, callbacks=[profile])
        last = profile.epochs[-1]
        found[name] = {
            "images_per_second": batch_size / last.step_seconds,
            "images_per_second_cached": batch_size / last.cached_step_seconds,
            "wait": last.wait,
        }
    model_name = "a single layer" if small else "ResNet-50, mixed precision"
    return {"model": f"{model_name}, {size}x{size}, batch {batch_size}", "rows": found, "passed": True}


def dali_alone(dataset: DatasetSpec) -> dict[str, Any]:
    """Where TensorFlow does not see the GPU: DALI's pipeline by itself, and its dataset placed on the CPU, which copies."""
    from dali_tf_input import dali_backend

    found = {}
    batch_size = min(256, dataset.num_records)
    device_id = 0 if _DEVICE.value == "gpu" else None
    shared = {"batch_size": batch_size, "shard": Shard(0, 1), "device_id": device_id}
    pipeline = dali_backend.build_pipeline(_spec(dataset), _options(), **shared)
    pipeline.build()

    def run() -> Any:
        while True:
            yield pipeline.run()

    with tf.device("CPU:0"):
        placed = dali_backend.build(_spec(dataset), _options(), position=Position(), **shared)
    for name, batches in (("bare", run()), ("dataset on the CPU", iter(placed))):
        window = measure(batches, batch_size=batch_size, seconds=_SECONDS.value, warmup_batches=8)
        found[name] = window.images_per_second
    return {"images_per_second": found, "batch_size": batch_size, "passed": True}


PARTS = {
    part.__name__: part
    for part in (probe, pixels_reader, pixels_planned, devices_reader, devices_planned, memory, training, dali_alone)
}
_PART = flags.DEFINE_enum("part", None, list(PARTS), "What to do.", required=True)


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    console.die_with_parent()
    enable_memory_growth()
    dataset = input_flags.dataset_spec(input_flags.FILES.value)
    start = time.monotonic()
    found = PARTS[_PART.value](dataset)
    print(json.dumps({**found, "seconds": time.monotonic() - start}), flush=True)
    return 0


if __name__ == "__main__":
    console.run(main)
