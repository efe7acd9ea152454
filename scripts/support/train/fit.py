"""Training a small network with Keras: what train.py does once its flags are checked."""

import contextlib
import dataclasses
import shlex
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dali_tf_input as dti
from dali_tf_input.backends.build import choose_options
from support.train import worker_loop
from support.train.flags import TrainFlags
from support.train.mixup import MixupCutmix

_LITTLE = 0.05  # of a step: less waiting than that is not told from noise


def train_model(
    flags: TrainFlags,
    spec: dti.InputSpec,
    options: dti.DaliOptions | dti.TfDataOptions | None,
    num_classes: int,
) -> int:
    """Trains; returns the exit code."""
    by_loop = flags.strategy.value == "multi_worker"
    strategy = worker_loop.make_strategy() if by_loop else make_strategy(flags.replicas.value)
    keras.utils.set_random_seed(flags.seed.value)
    batch_size, epochs = flags.batch_size.value, flags.epochs.value
    held_out = None
    if flags.validation_files.value:
        held_out = dti.InputSpec.for_evaluation(
            flags.records.dataset(flags.validation_files.value),
            flags.image_size.value,
            label=dataclasses.replace(spec.label, smoothing=0.0),
        )
    with strategy.scope() if strategy else contextlib.nullcontext():
        network = make_network(flags.image_size.value, num_classes)
        model = MixupCutmix(network, mixup=flags.mixup.value, cutmix=flags.cutmix.value)
        sparse = keras.losses.SparseCategoricalCrossentropy
        loss = keras.losses.CategoricalCrossentropy if spec.label.one_hot else sparse
        optimizer = keras.optimizers.Adam(flags.learning_rate.value)
        model.compile(optimizer, loss=loss(from_logits=True), metrics=["accuracy"])
    model(np.zeros((1, *spec.preprocess.image_size, 3), np.float32))  # creates its variables
    resume = None
    if flags.resume.value:
        resume = dti.Resume(flags.resume.value, save_every=flags.save_every.value)
    num_records = spec.records.num_records
    print(f"training    {num_records:,} records, {num_classes} classes")
    if held_out:
        print(f"validation  {held_out.records.num_records:,} records")
    train, is_chief = None, not by_loop or strategy.cluster_resolver.task_id == 0
    if by_loop:
        settings = {"batch_size": batch_size, "epochs": epochs, "resume": resume}
        history = worker_loop.fit(strategy, model, spec, held_out, options, **settings)
    else:
        shared = {"strategy": strategy, "batch_size": batch_size}
        train = dti.load(spec, options or choose_options(), **shared)
        print(f"input       {train!r}")
        # A service cannot serve a fixed order.
        own = dti.TfDataOptions() if flags.service.value else train.options
        valid = dti.load(held_out, own, **shared) if held_out else None
        profile = flags.profile_input.value
        settings = {"validation": valid, "resume": resume, "profile": profile, "verbose": 2}
        history = train.fit(model, epochs=epochs, **settings).history
    losses = history.get("loss", [])
    if losses:
        print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} epochs")
    if losses and held_out:
        chance = f"guessing would give about {1 / num_classes:.1%}"
        print(f"validation accuracy {history['val_accuracy'][-1]:.1%}; {chance}")
    if flags.profile_input.value and train:
        print(advise(flags, train.profile(model)))
    if flags.save.value and is_chief:
        network.save(flags.save.value)
        print(f"model in {flags.save.value}")
    return 0


def advise(flags: TrainFlags, profile: Any) -> str:
    """Says whether a faster input would help."""
    step, cached = 1000 * profile.step_seconds, 1000 * profile.cached_step_seconds
    took = f"{step:.1f} ms ({cached:.1f} ms on a cached batch)"
    text = f"input: the network waits for it {profile.wait:.0%} of a step of {took}."
    if profile.wait < _LITTLE:
        return f"{text} A faster input would gain at most that."
    replicas = flags.replicas.value
    words = [*flags.records.as_arguments(), f"--image_size={flags.image_size.value}"]
    words += [f"--batch_size={flags.batch_size.value // replicas}"]
    command = shlex.join([*words, f"--order={flags.order.value}"])
    return (
        f"{text}\n  what costs:      scripts/profile_stages.py {command}"
        f"\n  faster options:  scripts/tune.py {command} --replicas={replicas}"
    )


def make_strategy(num_replicas: int) -> tf.distribute.Strategy | None:
    """Returns a MirroredStrategy over GPUs, or over logical CPU devices."""
    if num_replicas == 1:
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and num_replicas > len(gpus):
        raise dti.InputError(
            f"`replicas` must be at most the {len(gpus)} GPUs, got {num_replicas}."
        )
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
