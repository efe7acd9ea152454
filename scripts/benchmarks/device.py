"""Tries a DALI pipeline on a GPU: what it serves, its memory, and two of them at once.

--trial=resident: the batches of the default order lie on the GPU; records, crops and pixels are
compared with tf.data's; the process ends while the pipeline works ahead. --trial=memory: the memory
of the GPU over steps of training, beside what TensorFlow takes of it. --trial=pair: images/s and
memory of one pipeline and of two in turn, as of training and validation.

example: python scripts/benchmarks/device.py --files='path/train-*' --trial=memory --steps=500
"""

import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import dali_tf_input as dti
from dali_tf_input.cli import command

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support import machine
from support.flags import FileFlags

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_TRIAL = FLAGS.choice("trial", "resident", ["resident", "memory", "pair"], "What is tried.")
_DEVICE = FLAGS.choice("device", "gpu", ["cpu", "gpu"], "Where DALI's images are made.")
_BATCH_SIZE = FLAGS.integer("batch_size", 64, "Images per batch.", 1)
_IMAGE_SIZE = FLAGS.integer("image_size", 224, "Height and width of the images.", 32)
_STEPS = FLAGS.integer("steps", 500, "Steps of --trial=memory.", 10)
_JSON = FLAGS.string("json", None, "File for the results.")

_COMPARED_BATCHES = 4
_SECONDS = 3.0  # of each window of --trial=pair
_MOST_MEAN = 3.0  # of 255, as tests/backends/test_gpu.py has it
_MOST_GROWTH = 0.02  # of the memory, between a fifth of the steps and the last


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    dataset = _FILES.dataset()
    command.import_tensorflow()
    from dali_tf_input.backends.build import enable_memory_growth

    enable_memory_growth()
    spec = dti.InputSpec.for_training(dataset, _IMAGE_SIZE.value)
    trials = {"resident": try_resident, "memory": try_memory, "pair": try_pair}
    found = trials[_TRIAL.value](spec)
    for line in found["conclusions"]:
        print(line)
    command.write_json(_JSON, {**machine.describe(), "trial": _TRIAL.value, **found})
    return int(not found["passed"])


def serve(spec: dti.InputSpec, options: Any) -> Iterator[Any]:
    """Returns an endless iterator over batches that lie on the device."""
    import tensorflow as tf

    on_gpu = isinstance(options, dti.DaliOptions) and options.device == "gpu"
    with tf.device("GPU:0" if on_gpu else "CPU:0"):
        return iter(dti.make_dataset(spec, options, batch_size=_BATCH_SIZE.value, endless=True))


def try_resident(spec: dti.InputSpec) -> dict[str, Any]:
    """Compares batches with tf.data's, from 0 to 255; leaves the pipeline working."""
    ours = serve(spec, dti.DaliOptions(device=_DEVICE.value))
    theirs = serve(spec, dti.TfDataOptions())
    scale = np.array(spec.preprocess.std)
    means, devices, same = [], set(), True
    for (images, labels), (others, other_labels) in itertools.islice(
        zip(ours, theirs, strict=False), _COMPARED_BATCHES
    ):
        devices |= {value.device.rpartition("device:")[2] for value in (images, labels)}
        same = same and labels.numpy().tolist() == other_labels.numpy().tolist()
        means += np.abs((images.numpy() - others.numpy()) * scale).mean(axis=(1, 2, 3)).tolist()
    mean, most = float(np.mean(means)), float(np.max(means))
    text = f"{len(means)} images on {', '.join(sorted(devices))}: labels"
    text += f" {'as tf.data has them' if same else 'DIFFER from those of tf.data'}, pixels differ"
    text += f" by {mean:.2f} of 255 on average, by {most:.2f} in the worst image"
    passed = same and mean < _MOST_MEAN and all(_DEVICE.value.upper() in one for one in devices)
    found = {"mean_difference": mean, "largest_of_an_image": most, "devices": sorted(devices)}
    return {"passed": passed, "conclusions": [text], "same_labels": same, **found}


def try_memory(spec: dti.InputSpec) -> dict[str, Any]:
    """Trains, and looks at the memory 20 times."""
    import keras

    steps, every = _STEPS.value, max(1, _STEPS.value // 20)
    samples: list[dict[str, Any]] = []

    counter = itertools.count(1)

    def look(batch: int, logs: Any = None) -> None:
        step = next(counter)  # over all epochs
        if step % every == 0:
            samples.append({"step": step, **look_at_memory()})

    size, classes = _IMAGE_SIZE.value, len(spec.records.class_names or ()) or 1001
    model = keras.applications.MobileNet(input_shape=(size, size, 3), weights=None, classes=classes)
    model.compile("sgd", "sparse_categorical_crossentropy")
    options = dti.DaliOptions(device=_DEVICE.value)
    train = dti.load(spec, options, batch_size=_BATCH_SIZE.value)
    epochs = math.ceil(steps / len(train))
    looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    train.fit(model, epochs=epochs, callbacks=[looking], verbose=0)
    early = samples[len(samples) // 5]
    growth = samples[-1]["used"] / early["used"] - 1
    passed = growth <= _MOST_GROWTH or _DEVICE.value == "cpu"  # a host frees when it likes to
    last = samples[-1]
    text = f"{last['used'] / 1e6:,.0f} MB after {last['step']} steps, of which TensorFlow has"
    text += f" {last['tensorflow'] / 1e6:,.0f}; {growth:+.1%} since step {early['step']}"
    verdict = "it does not grow" if growth <= _MOST_GROWTH else "it grows"
    conclusions = [f"{verdict}: {text}"]
    return {"passed": passed, "conclusions": conclusions, "growth": growth, "samples": samples}


def look_at_memory() -> dict[str, int]:
    """Returns the bytes used of the device, and those that TensorFlow holds."""
    import psutil
    import tensorflow as tf

    if _DEVICE.value == "cpu":
        return {"used": psutil.Process().memory_info().rss, "tensorflow": 0}
    held = tf.config.experimental.get_memory_info("GPU:0")
    return {"used": machine.gpu_memory(), "tensorflow": held["current"]}


def try_pair(spec: dti.InputSpec) -> dict[str, Any]:
    """Measures one pipeline, then two in turn."""
    options = dti.DaliOptions(device=_DEVICE.value)
    rows = []
    running: list[Iterator[Any]] = []
    for _ in range(2):
        running.append(serve(spec, options))
        batches = itertools.chain.from_iterable(zip(*running, strict=True))
        for _ in range(8):
            next(batches)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _SECONDS:
            next(batches)
            count += 1
        rate = count * _BATCH_SIZE.value / (time.perf_counter() - start)
        rows.append({"pipelines": len(running), "images_per_second": rate, **look_at_memory()})
    one, two = rows
    ratio = two["images_per_second"] / one["images_per_second"]
    text = f"one pipeline {one['images_per_second']:,.0f} images/s, two together {ratio:.2f} times"
    text += f" that; the second one takes {(two['used'] - one['used']) / 1e6:,.0f} MB"
    return {"passed": True, "conclusions": [text], "rows": rows}


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
