"""Trains a small network with Keras `fit`, fed by either backend, on one replica or several; prints what it learned.

usage: train.py --files='path/train-*' --validation_files='path/validation-*' [--backend=auto] [--replicas=1]
                [--strategy=mirrored] [--order=global] [--resume=FOLDER [--save_every=N]]
                [--options=tuned.json] [--profile_input]
                [--auto_augment=rand] [--mixup=0.2] [--cutmix=1] [--label_smoothing=0.1] [...]

The number of classes comes from --num_classes, from labels.txt beside the first file (one name a line), or from the highest label
that the index step saw. With --resume a run that was stopped, by whatever, goes on where FOLDER says it was.
"""

import dataclasses
import os
import shlex
import time

import numpy as np
from absl import flags

import console
import input_flags
from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions, load_options

tf = console.import_tensorflow()
import keras  # noqa: E402  (after TensorFlow, whose chatter is held back)

import multi_worker  # noqa: E402
from dali_tf_input.distribute import Distributed, distribute, enable_memory_growth  # noqa: E402
from dali_tf_input.input_profile import InputProfile  # noqa: E402
from dali_tf_input.resume import Resume  # noqa: E402
from mixing import Mixing  # noqa: E402

_BACKENDS = {
    "auto": None,
    "dali_cpu": DaliOptions(device="cpu"),
    "dali_gpu": DaliOptions(device="gpu"),
    "tf_data": TfDataOptions(),
}

_VALIDATION_FILES = flags.DEFINE_multi_string("validation_files", [], "TFRecord files of the validation split.")
_BACKEND = flags.DEFINE_enum("backend", "auto", list(_BACKENDS), "What feeds the network; auto chooses for this machine.")
_OPTIONS = flags.DEFINE_string("options", None, "Options that scripts/tune.py found, a .json file, instead of --backend.")
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Copies of the network: GPUs, or logical CPU devices where there is no GPU.")
_STRATEGY = flags.DEFINE_enum(
    "strategy", "mirrored", ["mirrored", "multi_worker"], "multi_worker: this process is a worker, TF_CONFIG says which."
)
_GLOBAL_BATCH_SIZE = flags.DEFINE_integer("global_batch_size", 32, "Images in a step, over all replicas.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Passes over the training records.")
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 96, "Height and width of the images the network sees, in pixels.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Learning rate of Adam; with --resume that of the state.")
_NUM_CLASSES = flags.DEFINE_integer("num_classes", None, "Number of classes; by default that of labels.txt.")
_AUTO_AUGMENT = flags.DEFINE_enum("auto_augment", None, ["trivial", "rand"], "Augmentation of the training images.")
_MIXUP = flags.DEFINE_float("mixup", 0.0, "Alpha of Mixup, above 0; each pair of images is blended by Beta(alpha, alpha).")
_CUTMIX = flags.DEFINE_float("cutmix", 0.0, "Alpha of CutMix, in (0, 1]; with Mixup each step takes one of the two.")
_LABEL_SMOOTHING = flags.DEFINE_float("label_smoothing", 0.0, "Part of a training label spread over all classes, in [0, 1).")
_ORDER = flags.DEFINE_enum("order", "global", ["global", "buffer"], "How the training records are mixed.")
_SERVICE = flags.DEFINE_string("service", None, "tf.data service that preprocesses, grpc://host:port; with --order=buffer.")
_RESUME = flags.DEFINE_string("resume", None, "Folder that keeps the state of training, to go on from after a stop.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", None, "Steps after which that state is saved; by default those of an epoch.")
_SAVE = flags.DEFINE_string("save", None, "Where the trained model goes, a .keras file; for predict.py.")
_PROFILE_INPUT = flags.DEFINE_boolean("profile_input", False, "Measure how long the network waits for input, and advise.")
_LITTLE = 0.05  # of a step: what waiting less than that costs is not told from noise
HEADER = f"{'epoch':>5} {'loss':>8} {'accuracy':>9} {'val_loss':>9} {'val_accuracy':>13} {'images/s':>9}"

_SEED = flags.DEFINE_integer("seed", 0, "Seed of the network's weights and of order, crops and mirrors.")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files and --validation_files.")
    for name, least in (("epochs", 1), ("image_size", 1), ("seed", 0), ("num_classes", 1)):
        value = flags.FLAGS[name].value
        if value is not None and value < least:
            raise InputError(f"`{name}` must be at least {least}, got {value}.")
    if _MIXUP.value < 0 or not 0 <= _CUTMIX.value <= 1:
        raise InputError(f"`mixup` must be at least 0 and `cutmix` in [0, 1], got {_MIXUP.value} and {_CUTMIX.value}.")
    if _STRATEGY.value == "multi_worker" and (_MIXUP.value or _CUTMIX.value or _REPLICAS.value != 1):
        raise InputError("--mixup, --cutmix and --replicas are for --strategy=mirrored only.")
    if _OPTIONS.value and _BACKEND.present:
        raise InputError("--options says which backend it is: leave out --backend.")
    if _PROFILE_INPUT.value and _STRATEGY.value == "multi_worker":
        raise InputError("--profile_input is for --strategy=mirrored only: it is a callback of Keras's fit.")
    if _RESUME.value and _ORDER.value != "global":
        raise InputError(f"--resume takes an order that is planned: --order=global, got {_ORDER.value}.")
    if _SAVE_EVERY.value is not None and not _RESUME.value:
        raise InputError("--save_every is for --resume=FOLDER, which is not given.")
    if _SAVE.value and not _SAVE.value.endswith(".keras"):
        raise InputError(f"`save` must end in .keras, got {_SAVE.value}.")
    train_records = input_flags.dataset_spec(input_flags.FILES.value)
    num_classes = _NUM_CLASSES.value or count_classes(train_records)
    enable_memory_growth()
    strategy = multi_worker.make_strategy() if _STRATEGY.value == "multi_worker" else make_strategy(_REPLICAS.value)
    keras.utils.set_random_seed(_SEED.value)
    preprocess = dataclasses.replace(Preprocess.for_training(_IMAGE_SIZE.value), auto_augment=_AUTO_AUGMENT.value)
    soft_labels = bool(_MIXUP.value or _CUTMIX.value or _LABEL_SMOOTHING.value)
    one_hot = num_classes if soft_labels else None
    spec = InputSpec(
        dataset=train_records,
        preprocess=preprocess,
        order=_ORDER.value,
        seed=_SEED.value,
        one_hot=one_hot,
        label_smoothing=_LABEL_SMOOTHING.value,
    )
    options = load_options(_OPTIONS.value) if _OPTIONS.value else _BACKENDS[_BACKEND.value]
    if _SERVICE.value:
        if isinstance(options, DaliOptions):
            raise InputError(f"--service is for the tf.data backend, got {options!r}.")
        options = dataclasses.replace(options or TfDataOptions(), service=_SERVICE.value)
    train = distribute(
        spec,
        options,
        strategy=strategy,
        global_batch_size=_GLOBAL_BATCH_SIZE.value,
    )
    validation, validation_images = None, 0
    if _VALIDATION_FILES.value:
        validation, validation_images = make_validation(train, strategy, one_hot)
    if _STRATEGY.value == "multi_worker":
        print(f"worker      {strategy.cluster_resolver.task_id} of {strategy.num_replicas_in_sync // len(train.devices)}")
    print(f"input       {train.options!r}")
    print(f"replicas    {len(train.devices)}: {', '.join(train.devices)}")
    print(f"training    {train_records.num_records:,} records, {num_classes} classes, {train.steps_per_epoch:,} steps an epoch")
    print(f"validation  {validation_images:,} images an epoch")
    with strategy.scope() if strategy else tf.device(None):
        model = make_model(num_classes)
        trained = Mixing(model, mixup=_MIXUP.value, cutmix=_CUTMIX.value)
        loss = keras.losses.CategoricalCrossentropy if soft_labels else keras.losses.SparseCategoricalCrossentropy
        trained.compile(keras.optimizers.Adam(_LEARNING_RATE.value), loss=loss(from_logits=True), weighted_metrics=["accuracy"])
    is_chief = _STRATEGY.value == "mirrored" or strategy.cluster_resolver.task_id == 0
    resume = None
    if _RESUME.value:
        resume = Resume(
            _RESUME.value,
            train,
            save_every=_SAVE_EVERY.value,
            is_chief=is_chief,
        )
        if resume.step:
            print(f"resume      after step {resume.step:,} of {_EPOCHS.value * train.steps_per_epoch:,}, from {_RESUME.value}")
        trained(np.zeros((1, _IMAGE_SIZE.value, _IMAGE_SIZE.value, 3), np.float32))  # makes its variables
    with train.explain_errors(trained, *([validation] if validation else [])):
        if _STRATEGY.value == "multi_worker":
            multi_worker.check_agreement(strategy, train.position.step)
            fit_as_worker(strategy, trained, train, validation, resume)
        else:
            fit(trained, train, validation, resume, num_classes)
    if _SAVE.value and is_chief:
        model.save(_SAVE.value)
        print(f"model in {_SAVE.value}")
    return 0


def fit(model: keras.Model, train: Distributed, validation: Distributed | None, resume: Resume | None, num_classes: int) -> None:
    """Trains by Keras's `fit`, from where `resume` stands."""
    profile = [InputProfile(train)] if _PROFILE_INPUT.value else []
    arguments = {"verbose": 0, "callbacks": [*profile, EpochLine(_GLOBAL_BATCH_SIZE.value)]}
    if resume:
        fits = resume.fit(model, epochs=_EPOCHS.value, validation=validation, **arguments)
    else:
        fits = [
            model.fit(
                train.dataset,
                steps_per_epoch=train.steps_per_epoch,
                epochs=_EPOCHS.value,
                validation_data=validation.dataset if validation else None,
                shuffle=False,  # the spec's order is the shuffle; Keras warns otherwise
                **arguments,
            )
        ]
    if fits:
        print_result(fits, num_classes)
        for one in profile:
            print(advise(one))
    else:
        print(f"Nothing to do: {resume.step // train.steps_per_epoch} epochs are done.")


def fit_as_worker(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    train: Distributed,
    validation: Distributed | None,
    resume: Resume | None,
) -> None:
    """Trains by a loop of our own, together with the other workers."""
    if resume:
        resume.set_model(model)
        resume.restore(model)
    if train.position.step >= _EPOCHS.value * train.steps_per_epoch:
        print(f"Nothing to do: {train.position.step // train.steps_per_epoch} epochs are done.")
        return
    print(HEADER)
    multi_worker.fit(
        strategy,
        model,
        train,
        validation,
        global_batch_size=_GLOBAL_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        resume=resume,
        on_epoch_end=lambda epoch, logs: print(format_epoch(epoch, logs, logs["images_per_second"]), flush=True),
    )


def make_strategy(num_replicas: int) -> tf.distribute.Strategy | None:
    """Returns a MirroredStrategy over `num_replicas` GPUs, or logical CPU devices without a GPU; None for one replica."""
    if num_replicas < 1:
        raise InputError(f"`replicas` must be at least 1, got {num_replicas}.")
    if num_replicas == 1:
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and num_replicas > len(gpus):
        raise InputError(f"`replicas` must be at most the {len(gpus)} GPUs of this machine, got {num_replicas}.")
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    kind = "GPU" if gpus else "CPU"
    return tf.distribute.MirroredStrategy([f"{kind}:{replica_id}" for replica_id in range(num_replicas)])


def make_validation(train: Distributed, strategy: tf.distribute.Strategy | None, one_hot: int | None) -> tuple[Distributed, int]:
    """Returns the validation input, which sees each record once, and how many records that are."""
    records: DatasetSpec = input_flags.dataset_spec(_VALIDATION_FILES.value)
    validation = distribute(
        InputSpec(
            dataset=records,
            preprocess=Preprocess.for_evaluation(_IMAGE_SIZE.value),
            order="sequential",
            repeat=False,
            one_hot=one_hot,
        ),
        # Evaluation is planned, which a service cannot do; it is light work.
        TfDataOptions() if _SERVICE.value else train.options,
        strategy=strategy,
        global_batch_size=_GLOBAL_BATCH_SIZE.value,
    )
    return validation, records.num_records


def make_model(num_classes: int) -> keras.Model:
    """Returns a small convolutional network: images (height, width, 3), normalised, to `num_classes` logits."""
    layers = [keras.layers.Input((_IMAGE_SIZE.value, _IMAGE_SIZE.value, 3))]
    for filters in (16, 32, 64, 96):
        layers += [
            keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),  # training is short: the statistics must follow quickly
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)]
    return keras.Sequential(layers)


class EpochLine(keras.callbacks.Callback):
    """Prints a line after each epoch."""

    def __init__(self, images_per_step: int) -> None:
        super().__init__()
        self._images_per_step = images_per_step
        self._begun = False
        self._start = 0.0
        self._train_seconds = 0.0

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._begun:  # another `fit` of the same run
            return
        self._begun = True
        print(HEADER + (f" {'input_wait':>11}" if _PROFILE_INPUT.value else ""))

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._start = time.perf_counter()
        self._train_seconds = 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._train_seconds = time.perf_counter() - self._start  # what comes after, validation say, does not count

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        line = format_epoch(epoch, logs or {}, self.params["steps"] * self._images_per_step / self._train_seconds)
        print(line + (f" {logs['input_wait']:>11.0%}" if logs and "input_wait" in logs else ""), flush=True)


def format_epoch(epoch: int, logs: dict[str, float], images_per_second: float) -> str:
    """Returns the line of an epoch, under `HEADER`."""
    loss, accuracy, val_loss, val_accuracy = (
        f"{logs[name]:.3f}" if name in logs else "-" for name in ("loss", "accuracy", "val_loss", "val_accuracy")
    )
    return f"{epoch + 1:>5} {loss:>8} {accuracy:>9} {val_loss:>9} {val_accuracy:>13} {images_per_second:>9,.0f}"


def print_result(fits: list[keras.callbacks.History], num_classes: int) -> None:
    """Says in a line or two what the network learned."""
    losses = [loss for fit in fits for loss in fit.history["loss"]]
    print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} epochs")
    if "val_accuracy" in fits[-1].history:
        print(f"validation accuracy {fits[-1].history['val_accuracy'][-1]:.1%}; guessing would give about {1 / num_classes:.1%}")


def advise(profile: InputProfile) -> str:
    """Says in a sentence or two whether a faster input would help, by the epochs after the first (which warms up)."""
    epochs = [epoch for epoch in profile.epochs if epoch.steps]
    epochs = epochs[1:] or epochs
    if not epochs:
        return "input: too few steps an epoch to say whether the network waits for it."
    step = sum(epoch.step_seconds for epoch in epochs) / len(epochs)
    cached = sum(epoch.cached_step_seconds for epoch in epochs) / len(epochs)
    wait = max(0.0, 1 - cached / step)
    took = f"{1000 * step:.1f} ms ({1000 * cached:.1f} ms on a cached batch)"
    text = f"input: the network waits for it {wait:.0%} of a step of {took}."
    if wait < _LITTLE:
        return f"{text} It is fed well: faster input would gain that much at most."
    files = " ".join(shlex.quote(argument) for argument in input_flags.as_arguments(input_flags.FILES.value))
    size = f"--image_size={_IMAGE_SIZE.value} --batch_size={_GLOBAL_BATCH_SIZE.value} --order={_ORDER.value}"
    return (
        f"{text} With input that is always there training would be {step / cached:.2f} times as fast.\n"
        f"  what costs:      scripts/profile_stages.py {files} {size}\n"
        f"  faster options:  scripts/tune.py {files} {size}"
    )


def count_classes(records: DatasetSpec) -> int:
    """Counts the lines of labels.txt beside the first file; without it, as many as the highest label asks for."""
    path = os.path.join(os.path.dirname(records.files[0]), "labels.txt")
    if not os.path.exists(path):
        if records.label_range:
            return records.label_range[1] + 1
        raise InputError(
            f"There is no {path} to count the classes by: give their number with --num_classes, or index with --verify=schema."
        )
    with open(path, encoding="utf-8") as stream:
        return sum(1 for line in stream if line.strip())


if __name__ == "__main__":
    console.run(main)
