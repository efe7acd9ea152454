"""Measures which part of a training step waits for input: a ResNet-50, fed by each backend.

On GPUs in mixed precision. --mirrored trains under a MirroredStrategy, of one GPU and of all.

example: python scripts/benchmarks/training.py --files='path/train-*' --batch_size=256
"""

import sys
from pathlib import Path
from typing import Any

import dali_tf_input as dti
from dali_tf_input.cli import command

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support.benchmark import save_json
from support.flags import BACKENDS, FileFlags, backends_flag, begin

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_BACKENDS = backends_flag(FLAGS)
_NETWORK = FLAGS.choice("network", "ResNet50", ["ResNet50", "MobileNet"], "What is trained.")
_BATCH_SIZE = FLAGS.integer("batch_size", 256, "Images in a step, of each replica.", 1)
_IMAGE_SIZE = FLAGS.integer("image_size", 224, "Height and width of the images.", 32)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How records are mixed.")
_STEPS = FLAGS.integer("steps", 40, "Measured steps.", 1)
_MIRRORED = FLAGS.boolean("mirrored", False, "Train under a MirroredStrategy.")
_JSON = FLAGS.string("json", None, "File for the results.")

_COLUMNS = ("backend", "replicas", "images/s", "ms a step", "ms on a cached batch", "waits")


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    spec = dti.InputSpec.for_training(_FILES.dataset(), _IMAGE_SIZE.value, order=_ORDER.value)
    about, backends = begin(_BACKENDS.value)
    tf = command.import_tensorflow()
    import keras

    from dali_tf_input.backends.build import enable_memory_growth

    enable_memory_growth()
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    keras.mixed_precision.set_global_policy("mixed_float16" if gpus else "float32")
    devices = gpus or ["CPU:0"]
    cases = [(name, devices[:count]) for name in backends for count in list_counts(devices)]
    shared = {
        flag.name: flag.value for flag in (_NETWORK, _BATCH_SIZE, _IMAGE_SIZE, _ORDER, _STEPS)
    }
    report: dict[str, Any] = {**about, **shared, "rows": [], "conclusions": []}
    for name, some in cases:
        row = {"backend": name, **measure(spec, name, some)}
        report["rows"].append(row)
        report["conclusions"].append(conclude(row))
        print(report["conclusions"][-1], flush=True)
        if _JSON.value:  # row by row: the next one may run out of time
            save_json(report, _JSON.value)
    print()
    command.print_table(_COLUMNS, map(format_row, report["rows"]))
    command.write_json(_JSON, report)
    return 0


def list_counts(devices: list[str]) -> list[int]:
    """Returns how many replicas are fed, case by case; 0 is without a strategy."""
    return sorted({1, len(devices)}) if _MIRRORED.value else [0]


def conclude(row: dict[str, Any]) -> str:
    """Returns the sentence on a row: what a step takes, to one on a batch that is there."""
    share = row["cached_step_seconds"] / row["step_seconds"]
    where = f", {row['replicas']} replicas" if row["replicas"] else ""
    return (
        f"{row['backend']}{where}: {row['images_per_second']:,.0f} images/s, {share:.2f} of the"
        f" speed with one repeated batch"
    )


def measure(spec: dti.InputSpec, backend: str, devices: list[str]) -> dict[str, Any]:
    """Trains a new network, under a MirroredStrategy of `devices` if there are some."""
    import keras
    import tensorflow as tf

    keras.utils.clear_session()
    strategy = tf.distribute.MirroredStrategy(devices) if devices else None
    height, width = spec.preprocess.image_size
    classes = len(spec.records.class_names or ()) or 1001
    with (strategy or tf.distribute.get_strategy()).scope():
        make = getattr(keras.applications, _NETWORK.value)
        model = make(input_shape=(height, width, 3), weights=None, classes=classes)
        model.compile("sgd", "sparse_categorical_crossentropy")
    batch_size = max(1, len(devices)) * _BATCH_SIZE.value
    train = dti.load(spec, BACKENDS[backend], strategy=strategy, batch_size=batch_size)
    train.fit(model, steps_per_epoch=2, verbose=0)
    profile = train.profile(model, steps=_STEPS.value)
    return {"replicas": len(devices), **profile._asdict(), "wait": profile.wait}


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns one line of the table."""
    times = (f"{1000 * row[name]:.1f}" for name in ("step_seconds", "cached_step_seconds"))
    replicas = str(row["replicas"] or "-")
    return (
        row["backend"],
        replicas,
        f"{row['images_per_second']:,.0f}",
        *times,
        f"{row['wait']:.0%}",
    )


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
