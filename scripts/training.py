"""What train.py does, once its flags are checked: a small network, fed by either backend, by Keras `fit`."""

import shlex
import time

import numpy as np

import console
import input_flags
import train_flags
from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions

tf = console.import_tensorflow()
import keras  # noqa: E402  (after TensorFlow, whose chatter is held back)

import multi_worker  # noqa: E402
from dali_tf_input.distribute import Distributed, distribute, enable_memory_growth  # noqa: E402
from dali_tf_input.input_profile import InputProfile  # noqa: E402
from dali_tf_input.resume import Resume  # noqa: E402
from mixing import Mixing  # noqa: E402

_LITTLE = 0.05  # of a step: what waiting less than that costs is not told from noise
HEADER = f"{'epoch':>5} {'loss':>8} {'accuracy':>9} {'val_loss':>9} {'val_accuracy':>13} {'images/s':>9}"


def train_network(spec: InputSpec, options: DaliOptions | TfDataOptions | None, num_classes: int) -> int:
    """Trains as the flags say; returns the exit code."""
    enable_memory_growth()
    of_workers = train_flags.STRATEGY.value == "multi_worker"
    strategy = multi_worker.make_strategy() if of_workers else make_strategy(train_flags.REPLICAS.value)
    keras.utils.set_random_seed(train_flags.SEED.value)
    train = distribute(
        spec,
        options,
        strategy=strategy,
        global_batch_size=train_flags.GLOBAL_BATCH_SIZE.value,
    )
    validation, validation_images = None, 0
    if train_flags.VALIDATION_FILES.value:
        validation, validation_images = make_validation(train, strategy, spec.one_hot)
    if of_workers:
        print(f"worker      {strategy.cluster_resolver.task_id} of {strategy.num_replicas_in_sync // len(train.devices)}")
    print(f"input       {train.options!r}")
    print(f"replicas    {len(train.devices)}: {', '.join(train.devices)}")
    print(f"training    {spec.dataset.num_records:,} records, {num_classes} classes, {train.steps_per_epoch:,} steps an epoch")
    print(f"validation  {validation_images:,} images an epoch")
    with strategy.scope() if strategy else tf.device(None):
        model = make_model(num_classes)
        trained = Mixing(model, mixup=train_flags.MIXUP.value, cutmix=train_flags.CUTMIX.value)
        loss = keras.losses.CategoricalCrossentropy if spec.one_hot else keras.losses.SparseCategoricalCrossentropy
        trained.compile(
            keras.optimizers.Adam(train_flags.LEARNING_RATE.value), loss=loss(from_logits=True), weighted_metrics=["accuracy"]
        )
    is_chief = not of_workers or strategy.cluster_resolver.task_id == 0
    resume = None
    if train_flags.RESUME.value:
        resume = Resume(
            train_flags.RESUME.value,
            train,
            save_every=train_flags.SAVE_EVERY.value,
            is_chief=is_chief,
        )
        if resume.step:
            steps = train_flags.EPOCHS.value * train.steps_per_epoch
            print(f"resume      after step {resume.step:,} of {steps:,}, from {train_flags.RESUME.value}")
        trained(np.zeros((1, *spec.preprocess.image_size, 3), np.float32))  # makes its variables
    with train.explain_errors(trained, *([validation] if validation else [])):
        if of_workers:
            multi_worker.check_agreement(strategy, train.position.step)
            fit_as_worker(strategy, trained, train, validation, resume)
        else:
            fit(trained, train, validation, resume, num_classes)
    if train_flags.SAVE.value and is_chief:
        model.save(train_flags.SAVE.value)
        print(f"model in {train_flags.SAVE.value}")
    return 0


def fit(model: keras.Model, train: Distributed, validation: Distributed | None, resume: Resume | None, num_classes: int) -> None:
    """Trains by Keras's `fit`, from where `resume` stands."""
    profile = [InputProfile(train)] if train_flags.PROFILE_INPUT.value else []
    arguments = {"verbose": 0, "callbacks": [*profile, EpochLine(train_flags.GLOBAL_BATCH_SIZE.value)]}
    if resume:
        fits = resume.fit(model, epochs=train_flags.EPOCHS.value, validation=validation, **arguments)
    else:
        fits = [
            model.fit(
                train.dataset,
                steps_per_epoch=train.steps_per_epoch,
                epochs=train_flags.EPOCHS.value,
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
    if train.position.step >= train_flags.EPOCHS.value * train.steps_per_epoch:
        print(f"Nothing to do: {train.position.step // train.steps_per_epoch} epochs are done.")
        return
    print(HEADER)
    multi_worker.fit(
        strategy,
        model,
        train,
        validation,
        global_batch_size=train_flags.GLOBAL_BATCH_SIZE.value,
        epochs=train_flags.EPOCHS.value,
        resume=resume,
        on_epoch_end=lambda epoch, logs: print(format_epoch(epoch, logs, logs["images_per_second"]), flush=True),
    )


def make_strategy(num_replicas: int) -> tf.distribute.Strategy | None:
    """Returns a MirroredStrategy over `num_replicas` GPUs, or logical CPU devices without a GPU; None for one replica."""
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
    records: DatasetSpec = input_flags.dataset_spec(train_flags.VALIDATION_FILES.value)
    validation = distribute(
        InputSpec(
            dataset=records,
            preprocess=Preprocess.for_evaluation(train_flags.IMAGE_SIZE.value),
            order="sequential",
            repeat=False,
            one_hot=one_hot,
        ),
        # Evaluation is planned, which a service cannot do; it is light work.
        TfDataOptions() if train_flags.SERVICE.value else train.options,
        strategy=strategy,
        global_batch_size=train_flags.GLOBAL_BATCH_SIZE.value,
    )
    return validation, records.num_records


def make_model(num_classes: int) -> keras.Model:
    """Returns a small convolutional network: images (height, width, 3), normalised, to `num_classes` logits."""
    layers = [keras.layers.Input((train_flags.IMAGE_SIZE.value, train_flags.IMAGE_SIZE.value, 3))]
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
        print(HEADER + (f" {'input_wait':>11}" if train_flags.PROFILE_INPUT.value else ""))

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
    replicas, image_size, order = train_flags.REPLICAS.value, train_flags.IMAGE_SIZE.value, train_flags.ORDER.value
    size = f"--image_size={image_size} --batch_size={train_flags.GLOBAL_BATCH_SIZE.value // replicas} --order={order}"
    return (
        f"{text} With input that is always there training would be {step / cached:.2f} times as fast.\n"
        f"  what costs:      scripts/profile_stages.py {files} {size}\n"
        f"  faster options:  scripts/tune.py {files} {size} --replicas={replicas}"
    )
