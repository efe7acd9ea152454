"""Trains a small network with Keras, fed by either backend, on one or several replicas.

The number of classes comes from --num_classes, from labels.txt beside the first file (one name per
line), or from the highest label that the index step saw (--verify=schema). With --resume, an
interrupted run continues from the state in that folder. Programs to copy from are in
docs/training.md.

example: python scripts/train.py --files='path/train-*' --validation_files='path/validation-*'
  --epochs=3
"""

import contextlib
import shlex
import sys
from typing import Any

import dali_tf_input as dti
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import augment_flag, find_augmentations
from support.flags import BACKENDS, FileFlags

FLAGS = command.Flags()
_RECORDS = FileFlags(FLAGS)
_VALIDATION_FILES = FLAGS.strings("validation_files", "TFRecords of the validation split.")
_BACKEND = FLAGS.choice("backend", "auto", ["auto", *BACKENDS], "What feeds the network.")
_REPLICAS = FLAGS.integer("replicas", 1, "Copies of the network: GPUs, else CPU devices.", 1)
_BATCH_SIZE = FLAGS.integer("batch_size", 32, "Images in a step.", 1)
_EPOCHS = FLAGS.integer("epochs", 12, "Passes over the training records.", 1)
_IMAGE_SIZE = FLAGS.integer("image_size", 96, "Height and width of the images.", 1)
_LEARNING_RATE = FLAGS.number("learning_rate", 2e-3, "Learning rate of Adam.")
_NUM_CLASSES = FLAGS.integer("num_classes", None, "Number of classes; else found.", 1)
_AUGMENT = augment_flag(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How records are mixed.")
_SERVICE = FLAGS.string("service", None, "tf.data service, grpc://host:port.")
_RESUME = FLAGS.string("resume", None, "Folder that keeps the state of training.")
_SAVE_EVERY = FLAGS.integer("save_every", None, "Steps between saves; else an epoch.", 1)
_SAVE = FLAGS.string("save", None, "File for the trained model, a .keras.")
_PROFILE_INPUT = FLAGS.boolean("profile_input", False, "Measure the wait for input.")
_SEED = FLAGS.integer("seed", 0, "Seed of weights, order, crops and mirrors.", 0)

_LITTLE = 0.05  # of a step: less waiting than that is not told from noise


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    command.check_writable(_SAVE, suffix=".keras")
    if _RESUME.value and _ORDER.value != "global":
        raise dti.InputError(f"--resume needs --order=global, got {_ORDER.value}.")
    if _SAVE_EVERY.value is not None and not _RESUME.value:
        raise dti.InputError("--save_every is for --resume=FOLDER, which is not given.")
    spec = dti.InputSpec.for_training(
        _RECORDS.dataset(),
        _IMAGE_SIZE.value,
        augment=find_augmentations(_AUGMENT.value),
        order=_ORDER.value,
        seed=_SEED.value,
        label=_RECORDS.label(),
    )
    num_classes = count_classes(spec)
    options = choose_options()
    held_out = None
    if _VALIDATION_FILES.value:
        records = _RECORDS.dataset(_VALIDATION_FILES.value)
        label = _RECORDS.label()
        held_out = dti.InputSpec.for_evaluation(records, _IMAGE_SIZE.value, label=label)

    tf = command.import_tensorflow()  # only now: it takes seconds
    import keras

    if options is None:  # as `load` would choose
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        options = dti.DaliOptions(device="gpu") if has_gpu else dti.TfDataOptions()
    strategy = make_strategy(tf, _REPLICAS.value)
    keras.utils.set_random_seed(_SEED.value)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_network(keras, _IMAGE_SIZE.value, num_classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(_LEARNING_RATE.value), loss, metrics=["accuracy"])
    print(f"training    {spec.records.num_records:,} records, {num_classes} classes")
    shared = {"strategy": strategy, "batch_size": _BATCH_SIZE.value}
    train, valid = dti.load(spec, options, **shared), None
    print(f"input       {train!r}")
    if held_out:
        print(f"validation  {held_out.records.num_records:,} records")
        # A service cannot serve a fixed order.
        own = dti.TfDataOptions() if _SERVICE.value else train.options
        valid = dti.load(held_out, own, **shared)
    history = train.fit(
        model,
        epochs=_EPOCHS.value,
        validation=valid,
        resume=dti.Resume(_RESUME.value, save_every=_SAVE_EVERY.value) if _RESUME.value else None,
        profile=_PROFILE_INPUT.value,
        verbose=2,
    ).history
    losses = history["loss"]
    epochs = command.format_count(len(losses), "epoch")
    print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {epochs}")
    if held_out:
        chance = f"guessing would give about {1 / num_classes:.1%}"
        print(f"validation accuracy {history['val_accuracy'][-1]:.1%}; {chance}")
    if _PROFILE_INPUT.value:
        print(advise(train.profile(model)))
    if _SAVE.value:
        model.save(_SAVE.value)
        print(f"model in {_SAVE.value}")
    return 0


def count_classes(spec: dti.InputSpec) -> int:
    """Returns --num_classes, the number of lines in labels.txt, or the highest label plus 1."""
    file = spec.records.paths[0]
    num_classes, source = _NUM_CLASSES.value, "--num_classes"
    if num_classes is None:
        num_classes, source = len(spec.records.class_names or ()), "labels.txt"
    if not num_classes and spec.label_range and spec.class_counts:  # not of a sample
        return spec.label_range[1] + 1
    if not num_classes:
        raise dti.InputError(
            f"The number of classes is unknown: there is no labels.txt beside {file}."
            " Pass --num_classes=N, or index with --verify=schema."
        )
    if spec.label_range and spec.label_range[1] >= num_classes:
        raise dti.InputError(
            f"There are {num_classes:,} classes by {source}, and labels go up to"
            f" {spec.label_range[1]:,}: --num_classes must be above it."
        )
    return num_classes


def choose_options() -> dti.DaliOptions | dti.TfDataOptions | None:
    """Returns the options of --backend and --service; None if they are to be found."""
    options = BACKENDS.get(_BACKEND.value)
    if not _SERVICE.value:
        return options
    if isinstance(options, dti.DaliOptions):
        raise dti.InputError(f"--service is for the tf.data backend, got {options!r}.")
    return dti.TfDataOptions(service=_SERVICE.value)


def make_strategy(tf: Any, num_replicas: int) -> Any:
    """Returns a MirroredStrategy over GPUs, or over logical CPU devices; None for one replica."""
    if num_replicas == 1:
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and num_replicas > len(gpus):
        text = f"at most the {len(gpus)} GPUs, got {num_replicas}"
        raise dti.InputError(f"`replicas` must be {text}.")
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * num_replicas
        tf.config.set_logical_device_configuration(cpu, logical)
    kind = "GPU" if gpus else "CPU"
    return tf.distribute.MirroredStrategy([f"{kind}:{number}" for number in range(num_replicas)])


def make_network(keras: Any, image_size: int, num_classes: int) -> Any:
    """Returns a small convolutional network from normalized images to `num_classes` logits."""
    layers = [keras.layers.Input((image_size, image_size, 3))]
    for filters in (16, 32, 64, 96):
        layers += [
            keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False),
            # Training is short: the statistics must follow quickly.
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)]
    return keras.Sequential(layers)


def advise(profile: Any) -> str:
    """Says whether a faster input would help."""
    step, cached = 1000 * profile.step_seconds, 1000 * profile.cached_step_seconds
    took = f"{step:.1f} ms ({cached:.1f} ms on a cached batch)"
    text = f"input: the network waits for it {profile.wait:.0%} of a step of {took}."
    if profile.wait < _LITTLE:
        return f"{text} A faster input would gain at most that."
    words = [*_RECORDS.as_arguments(), f"--image_size={_IMAGE_SIZE.value}"]
    words += [f"--batch_size={_BATCH_SIZE.value // _REPLICAS.value}", f"--order={_ORDER.value}"]
    command_line = f"scripts/compare_throughput.py {shlex.join(words)}"
    return (
        f"{text}\n  what costs:      {command_line} --stages"
        f"\n  faster options:  {command_line} --tune --replicas={_REPLICAS.value}"
    )


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
