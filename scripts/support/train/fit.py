"""Training a small network with Keras: what train.py does once its flags are checked."""

import contextlib
import dataclasses
import shlex

import keras
import numpy as np
import tensorflow as tf

import dali_tf_input as dti
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
    dti.enable_memory_growth()
    by_loop = flags.strategy.value == "multi_worker"
    strategy = worker_loop.make_strategy() if by_loop else make_strategy(flags.replicas.value)
    is_chief = not by_loop or strategy.cluster_resolver.task_id == 0
    keras.utils.set_random_seed(flags.seed.value)
    shared = {"strategy": strategy, "batch_size": flags.batch_size.value}
    train = dti.load(spec, options, **shared)
    print(f"input       {train.options!r}")
    print(f"replicas    {len(train.devices)}: {', '.join(train.devices)}")
    steps = f"{train.steps_per_epoch:,} steps per epoch"
    print(f"training    {spec.records.num_records:,} records, {num_classes} classes, {steps}")
    validation = None
    if flags.validation_files.value:
        held_out = dti.InputSpec(
            records=flags.records.dataset(flags.validation_files.value),
            preprocess=dti.Preprocess.for_evaluation(flags.image_size.value),
            order="sequential",
            repeat=False,
            label=dataclasses.replace(spec.label, smoothing=0.0),
        )
        # A service cannot serve a fixed order.
        own = dti.TfDataOptions() if flags.service.value else train.options
        validation = dti.load(held_out, own, **shared)
        print(f"validation  {held_out.records.num_records:,} records")
    with strategy.scope() if strategy else contextlib.nullcontext():
        network = make_network(flags.image_size.value, num_classes)
        model = MixupCutmix(network, mixup=flags.mixup.value, cutmix=flags.cutmix.value)
        sparse = keras.losses.SparseCategoricalCrossentropy
        loss = keras.losses.CategoricalCrossentropy if spec.label.one_hot else sparse
        optimizer = keras.optimizers.Adam(flags.learning_rate.value)
        model.compile(optimizer, loss=loss(from_logits=True), weighted_metrics=["accuracy"])
    epochs, resume = flags.epochs.value, None
    if flags.resume.value:
        every = flags.save_every.value
        resume = dti.Resume(flags.resume.value, train, save_every=every, is_chief=is_chief)
        if resume.step:
            where = f"step {resume.step:,} of {epochs * train.steps_per_epoch:,}"
            print(f"resume      after {where}, from {flags.resume.value}")
        model(np.zeros((1, *spec.preprocess.image_size, 3), np.float32))  # creates its variables
    profile = dti.InputProfile(train) if flags.profile_input.value else None
    if by_loop:
        with train.explain_errors(model, *([validation] if validation else [])):
            done = worker_loop.fit(strategy, model, train, validation, resume, epochs=epochs)
    else:
        shared = {"epochs": epochs, "validation": validation, "resume": resume, "verbose": 2}
        done = train.fit(model, profile=profile, **shared)
    if not done:
        print(f"Nothing to do: {train.start_step.step // train.steps_per_epoch} epochs are done.")
    else:
        losses = done["loss"]
        print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} epochs")
        if validation:
            accuracy = done["val_accuracy"][-1]
            chance = f"guessing would give about {1 / num_classes:.1%}"
            print(f"validation accuracy {accuracy:.1%}; {chance}")
    if done and profile:
        print(advise(flags, profile))
    if flags.save.value and is_chief:
        network.save(flags.save.value)
        print(f"model in {flags.save.value}")
    return 0


def advise(flags: TrainFlags, profile: dti.InputProfile) -> str:
    """Says whether a faster input would help, by the epochs after the first."""
    epochs = [epoch for epoch in profile.epochs if epoch.steps]
    if not epochs:
        return "input: too few steps per epoch to say whether the network waits for it."
    step, cached = np.mean([epoch[2:] for epoch in epochs[1:] or epochs], axis=0)
    wait = max(0.0, 1 - cached / step)
    took = f"{1000 * step:.1f} ms ({1000 * cached:.1f} ms on a cached batch)"
    text = f"input: the network waits for it {wait:.0%} of a step of {took}."
    if wait < _LITTLE:
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
