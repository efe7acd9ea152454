"""Measures which part of a training step waits for input: a ResNet-50, fed by each backend.

On GPUs in mixed precision; DALI also under a MirroredStrategy of one GPU and of all of them.

example: python scripts/benchmarks/training.py --files='path/train-*' --batch_size=256
"""

import sys
from pathlib import Path
from typing import Any

import dali_tf_input as dti
from dali_tf_input.cli import command

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support.flags import BACKENDS, FileFlags, backends_flag, begin

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_BACKENDS = backends_flag(FLAGS)
_NETWORK = FLAGS.choice("network", "ResNet50", ["ResNet50", "MobileNet"], "What is trained.")
_BATCH_SIZE = FLAGS.integer("batch_size", 256, "Images in a step, of each replica.", 1)
_IMAGE_SIZE = FLAGS.integer("image_size", 224, "Height and width of the images.", 32)
_STEPS = FLAGS.integer("steps", 40, "Measured steps.", 1)
_JSON = FLAGS.string("json", None, "File for the results.")

_COLUMNS = ("backend", "replicas", "images/s", "ms a step", "ms on a cached batch", "waits")


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    spec = dti.InputSpec.for_training(_FILES.dataset(), _IMAGE_SIZE.value, order="buffer")
    about, backends = begin(_BACKENDS.value)
    tf = command.import_tensorflow()
    import keras

    from dali_tf_input.backends.build import enable_memory_growth

    enable_memory_growth()
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    keras.mixed_precision.set_global_policy("mixed_float16" if gpus else "float32")
    cases = [(name, gpus[:count]) for name in backends for count in list_counts(name, gpus)]
    rows = [{"backend": name, **measure(spec, name, devices)} for name, devices in cases]
    print()
    command.print_table(_COLUMNS, map(format_row, rows))
    shared = {flag.name: flag.value for flag in (_NETWORK, _BATCH_SIZE, _IMAGE_SIZE, _STEPS)}
    command.write_json(_JSON, {**about, **shared, "rows": rows})
    return 0


def list_counts(backend: str, gpus: list[str]) -> list[int]:
    """Returns how many replicas a backend feeds, case by case; 0 is without a strategy."""
    return sorted({0, 1, len(gpus)}) if gpus and backend == "dali_gpu" else [0]


def measure(spec: dti.InputSpec, backend: str, devices: list[str]) -> dict[str, Any]:
    """Trains a new network, under a MirroredStrategy of `devices` if there are some."""
    import keras
    import tensorflow as tf

    keras.utils.clear_session()
    strategy = tf.distribute.MirroredStrategy(devices) if devices else None
    height, width = spec.preprocess.image_size
    with (strategy or tf.distribute.get_strategy()).scope():
        make = getattr(keras.applications, _NETWORK.value)
        model = make(input_shape=(height, width, 3), weights=None, classes=1001)
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
