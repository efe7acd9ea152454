"""Training a small network with Keras `fit`: what train.py does once its flags are checked."""

import contextlib
import shlex
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dali_tf_input import (
    DaliOptions,
    Distributed,
    InputError,
    InputProfile,
    InputSpec,
    Preprocess,
    Resume,
    TfDataOptions,
    distribute,
    enable_memory_growth,
)
from support.train import worker_loop
from support.train.flags import TrainFlags
from support.train.mixup import MixupCutmix

_LITTLE = 0.05  # of a step: less waiting than that is not told from noise
_COLUMNS = ("epoch", "loss", "accuracy", "val_loss", "val_accuracy", "images/s", "input_wait")


class Training:
    """One training run."""

    def __init__(
        self,
        flags: TrainFlags,
        spec: InputSpec,
        options: DaliOptions | TfDataOptions | None,
        num_classes: int,
    ) -> None:
        self.flags, self.spec, self.options, self.num_classes = flags, spec, options, num_classes
        self.by_loop = flags.strategy.value == "multi_worker"

    def run(self) -> int:
        """Trains; returns the exit code."""
        flags, spec = self.flags, self.spec
        enable_memory_growth()
        if self.by_loop:
            strategy = worker_loop.make_strategy()
        else:
            strategy = make_strategy(flags.replicas.value)
        keras.utils.set_random_seed(flags.seed.value)
        batch = flags.global_batch_size.value
        train = distribute(spec, self.options, strategy=strategy, global_batch_size=batch)
        validation = self.make_validation(train, strategy) if flags.validation_files.value else None
        print(f"input       {train.options!r}")
        print(f"replicas    {len(train.devices)}: {', '.join(train.devices)}")
        print(f"training    {spec.dataset.num_records:,} records, {self.num_classes} classes, "
              f"{train.steps_per_epoch:,} steps per epoch")  # fmt: skip
        if validation:
            print(f"validation  {validation.spec.dataset.num_records:,} records")
        with strategy.scope() if strategy else contextlib.nullcontext():
            network = make_network(flags.image_size.value, self.num_classes)
            model = MixupCutmix(network, mixup=flags.mixup.value, cutmix=flags.cutmix.value)
            sparse = keras.losses.SparseCategoricalCrossentropy
            loss = keras.losses.CategoricalCrossentropy if spec.one_hot else sparse
            optimizer = keras.optimizers.Adam(flags.learning_rate.value)
            model.compile(optimizer, loss=loss(from_logits=True), weighted_metrics=["accuracy"])
        is_chief = not self.by_loop or strategy.cluster_resolver.task_id == 0
        resume = None
        if flags.resume.value:
            every = flags.save_every.value
            resume = Resume(flags.resume.value, train, save_every=every, is_chief=is_chief)
            if resume.step:
                steps = flags.epochs.value * train.steps_per_epoch
                print(
                    f"resume      after step {resume.step:,} of {steps:,}, from"
                    f" {flags.resume.value}"
                )
            model(
                np.zeros((1, *spec.preprocess.image_size, 3), np.float32)
            )  # creates its variables
        with train.explain_errors(model, *([validation] if validation else [])):
            if self.by_loop:
                worker_loop.fit(
                    strategy,
                    model,
                    train,
                    validation,
                    resume,
                    epochs=flags.epochs.value,
                    on_epoch_end=lambda epoch, logs: print_epoch(
                        epoch, logs, logs["images_per_second"], header=logs["is_first"]
                    ),
                )
            else:
                self.fit(model, train, validation, resume)
        if flags.save.value and is_chief:
            network.save(flags.save.value)
            print(f"model in {flags.save.value}")
        return 0

    def make_validation(self, train: Distributed, strategy: Any) -> Distributed:
        """Returns the validation input, which serves each record once."""
        spec = InputSpec(
            dataset=self.flags.records.dataset(self.flags.validation_files.value),
            preprocess=Preprocess.for_evaluation(self.flags.image_size.value),
            order="sequential",
            repeat=False,
            one_hot=self.spec.one_hot,
        )
        # A service cannot serve a fixed order.
        options = TfDataOptions() if self.flags.service.value else train.options
        batch = self.flags.global_batch_size.value
        return distribute(spec, options, strategy=strategy, global_batch_size=batch)

    def fit(
        self, model: Any, train: Distributed, validation: Distributed | None, resume: Resume | None
    ) -> None:
        """Trains with Keras's `fit`, from where `resume` is."""
        profile = InputProfile(train) if self.flags.profile_input.value else None
        callbacks = [*([profile] if profile else []), EpochLine(self.flags.global_batch_size.value)]
        arguments: dict[str, Any] = {"verbose": 0, "callbacks": callbacks}
        epochs = self.flags.epochs.value
        if resume:
            fits = resume.fit(model, epochs=epochs, validation=validation, **arguments)
        else:
            history = model.fit(
                train.dataset,
                steps_per_epoch=train.steps_per_epoch,
                epochs=epochs,
                validation_data=validation.dataset if validation else None,
                shuffle=False,  # the spec's order is the shuffle; Keras warns otherwise
                **arguments,
            )
            fits = [history]
        if not fits:
            print(
                f"Nothing to do: {train.start_step.step // train.steps_per_epoch} epochs are done."
            )
            return
        losses = [loss for one in fits for loss in one.history["loss"]]
        print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} epochs")
        if "val_accuracy" in fits[-1].history:
            accuracy, chance = fits[-1].history["val_accuracy"][-1], 1 / self.num_classes
            print(f"validation accuracy {accuracy:.1%}; guessing would give about {chance:.1%}")
        if profile:
            print(self.advise(profile))

    def advise(self, profile: InputProfile) -> str:
        """Says whether a faster input would help, by the epochs after the first."""
        epochs = [epoch for epoch in profile.epochs if epoch.steps]
        epochs = epochs[1:] or epochs
        if not epochs:
            return "input: too few steps per epoch to say whether the network waits for it."
        step = sum(epoch.step_seconds for epoch in epochs) / len(epochs)
        cached = sum(epoch.cached_step_seconds for epoch in epochs) / len(epochs)
        wait = max(0.0, 1 - cached / step)
        took = f"{1000 * step:.1f} ms ({1000 * cached:.1f} ms on a cached batch)"
        text = f"input: the network waits for it {wait:.0%} of a step of {took}."
        if wait < _LITTLE:
            return f"{text} A faster input would gain at most that."
        flags = self.flags
        replicas, size = flags.replicas.value, flags.image_size.value
        batch = flags.global_batch_size.value // replicas
        arguments = [*flags.records.as_arguments(), f"--image_size={size}", f"--batch_size={batch}"]
        words = shlex.join([*arguments, f"--order={flags.order.value}"])
        return (
            f"{text} With input that is always ready, training would be {step / cached:.2f} times"
            f" as fast.\n  what costs:      scripts/profile_stages.py {words}"
            f"\n  faster options:  scripts/tune.py {words} --replicas={replicas}"
        )


def make_strategy(num_replicas: int) -> tf.distribute.Strategy | None:
    """Returns a MirroredStrategy over GPUs, or over logical CPU devices."""
    if num_replicas == 1:
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and num_replicas > len(gpus):
        raise InputError(f"`replicas` must be at most the {len(gpus)} GPUs, got {num_replicas}.")
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * num_replicas
        tf.config.set_logical_device_configuration(cpu, logical)
    kind = "GPU" if gpus else "CPU"
    return tf.distribute.MirroredStrategy([f"{kind}:{number}" for number in range(num_replicas)])


def make_network(image_size: int, num_classes: int) -> keras.Model:
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


class EpochLine(keras.callbacks.Callback):
    """Prints a line after each epoch."""

    def __init__(self, images_per_step: int) -> None:
        super().__init__()
        self._images_per_step = images_per_step
        self._begun = False
        self._start = self._train_seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._start, self._train_seconds = time.perf_counter(), 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._train_seconds = time.perf_counter() - self._start  # without validation

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        images = self.params["steps"] * self._images_per_step
        print_epoch(epoch, logs or {}, images / self._train_seconds, header=not self._begun)
        self._begun = True


def print_epoch(epoch: int, logs: dict, images_per_second: float, *, header: bool) -> None:
    """Prints the line of an epoch, under a header if it is the first."""
    columns = _COLUMNS if "input_wait" in logs else _COLUMNS[:-1]
    if header:
        print(" ".join(f"{name:>12}" for name in columns))
    values = [f"{logs[name]:.3f}" if name in logs else "-" for name in columns[1:5]]
    values = [str(epoch + 1), *values, f"{images_per_second:,.0f}"]
    values += [f"{logs['input_wait']:.0%}"] if "input_wait" in logs else []
    print(" ".join(f"{value:>12}" for value in values), flush=True)
