"""Trains a small network on several hosts, by a loop: Keras's `fit` fails under this strategy.

Start it on each host, or once for each GPU with its own CUDA_VISIBLE_DEVICES. TF_CONFIG says which
worker a process is, and where all are: '{"cluster": {"worker": ["host0:12345", "host1:12345"]},
"task": {"type": "worker", "index": 0}}'. Each worker reads its own shard of the records. With
--resume all continue from a folder that they share. An example to copy from.

example: python scripts/train_multi_worker.py --files='path/train-*' --resume=/shared/run
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dali_tf_input import (
    ClassLabel,
    DaliOptions,
    InputError,
    InputSpec,
    Records,
    Resume,
    Shard,
    TfDataOptions,
    make_dataset,
)

BACKENDS = {
    "auto": None,
    "tf_data": TfDataOptions(),
    "dali_cpu": DaliOptions(device="cpu"),
    "dali_gpu": DaliOptions(device="gpu"),
}

# What TensorFlow raises in the workers that are left when one has ended.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index":'
    " 0}}"
)


def read_arguments() -> argparse.Namespace:
    description, example = __doc__.split("\n\nexample: ")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"action": "append", "metavar": "PATTERN"}
    add("--files", required=True, **several, help="indexed TFRecords for training")
    add("--validation_files", **several, help="those for validation")
    add("--index_dir", help="folder of the indexes (default: beside the files)")
    add("--cache_dir", help="local folder for copies of remote files")
    add("--image_key", help="feature key of the image (default: detected)")
    add("--label_key", help="feature key of the label (default: detected)")
    add("--label_offset", default=0, type=int, help="stored label of the first class")
    add("--backend", default="auto", choices=BACKENDS, help="what feeds the network")
    add("--batch_size", default=32, type=int, help="images in a step of all workers")
    add("--epochs", default=12, type=int, help="epochs in all")
    add("--image_size", default=96, type=int, help="height and width of the images")
    add("--num_classes", type=int, help="number of classes (default: that of labels.txt)")
    add("--resume", help="folder that keeps the state of training")
    add("--save_every", type=int, help="steps between saves (default: an epoch)")
    add("--save", help="file for the trained model, a .keras")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    how = {name: vars(arguments)[name] for name in ("index_dir", "cache_dir", "image_key")}
    label = ClassLabel(key=arguments.label_key, offset=arguments.label_offset)
    records = Records.from_files(arguments.files, **how)
    spec = InputSpec.for_training(records, arguments.image_size, label=label)
    num_classes = arguments.num_classes or len(spec.class_names or ())
    if not num_classes:
        raise InputError("The number of classes is unknown: pass --num_classes=N.")
    held_out = None
    if arguments.validation_files:
        records = Records.from_files(arguments.validation_files, **how)
        held_out = InputSpec.for_evaluation(records, arguments.image_size, label=label)
    strategy = make_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_network(arguments.image_size, num_classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model(np.zeros((1, *spec.preprocess.image_size, 3), np.float32))  # creates its variables
    resume = None
    if arguments.resume:
        resume = Resume(arguments.resume, save_every=arguments.save_every)
    settings = {"batch_size": arguments.batch_size, "epochs": arguments.epochs, "resume": resume}
    to_go_on = "To go on, start all workers again"
    to_go_on += (
        f", with --resume={resume.folder}." if resume else "; --resume would keep the state."
    )
    try:
        history = fit(strategy, model, spec, held_out, BACKENDS[arguments.backend], **settings)
    except _LOST as error:
        text = f"Another worker ended, or cannot be reached: {error.message.splitlines()[0]}"
        raise InputError(f"{text}. {to_go_on}") from error
    except KeyboardInterrupt:  # the others end with the error above
        sys.exit(to_go_on)
    if losses := history.get("loss"):
        print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} epochs")
    if arguments.save and strategy.cluster_resolver.task_id == 0:
        model.save(arguments.save)
        print(f"model in {arguments.save}")


def make_network(image_size: int, num_classes: int) -> keras.Model:
    """Returns a small convolutional network from normalized images to `num_classes` logits."""
    layers = [keras.layers.Input((image_size, image_size, 3))]
    for filters in (16, 32, 64, 96):
        layers += [
            keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)]
    return keras.Sequential(layers)


def make_strategy() -> tf.distribute.MultiWorkerMirroredStrategy:
    """Makes the strategy of this process; TF_CONFIG says which worker it is, and where all are."""
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        cluster, task = config["cluster"], config["task"]
        workers = list(map(str, cluster["worker"]))
        alone = set(cluster) == {"worker"} and task["type"] == "worker"
        if not alone or not 0 <= task["index"] < len(workers):
            raise ValueError("`task` is none of the workers")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "Each worker needs the environment variable TF_CONFIG: the list of all workers and its"
            f" number: TF_CONFIG='{_EXAMPLE}' ({error!r})"
        ) from error
    print(f"workers     {len(workers)}: {', '.join(workers)}; waiting for all", flush=True)
    # TensorFlow waits in C++, where Python cannot handle Ctrl-C: its default action ends it.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        signal.signal(signal.SIGINT, handler)
    if strategy.num_replicas_in_sync != len(workers):
        raise InputError(
            f"Each worker must have one replica, but {len(workers)} workers have"
            f" {strategy.num_replicas_in_sync}: start one process per GPU, each with its own"
            " CUDA_VISIBLE_DEVICES."
        )
    return strategy


def read_step(resume: Resume | None) -> int:
    """Returns the step of the state that this worker sees; 0 if there is none, or a damaged one."""
    if not resume:
        return 0
    try:
        with open(os.path.join(resume.folder, "state.json"), encoding="utf-8") as stream:
            return int(json.load(stream)["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def check_agreement(strategy: tf.distribute.Strategy, step: int) -> None:
    """Raises InputError in every worker unless all of them are at the same step."""

    @tf.function
    def add() -> Any:
        mine = tf.constant([step, step * step], tf.float64)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: mine), axis=None)

    count, (total, squares) = strategy.num_replicas_in_sync, add().numpy()
    if (total, squares) != (count * step, count * step * step):
        raise InputError(
            f"This worker is after step {step}, others are not ({total / count:g} on average):"
            " --resume must name a folder that all workers share."
        )


def fit(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    spec: InputSpec,
    held_out: InputSpec | None,
    options: DaliOptions | TfDataOptions | None,
    *,
    batch_size: int,
    epochs: int,
    resume: Resume | None,
) -> dict[str, list[float]]:
    """Trains a compiled model until `epochs` epochs are done; validates after each.

    Each worker reads its own shard of the records.

    Returns:
      What Keras's `fit` would log, by epoch; nothing if all epochs were done before.
    """
    num_workers, worker = strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id
    if batch_size % num_workers:
        raise InputError(f"`batch_size` must be a multiple of {num_workers}, got {batch_size}.")
    shared = {"batch_size": batch_size // num_workers, "shard": Shard(worker, num_workers)}
    per_epoch, first = spec.records.num_records // batch_size, 0
    check_agreement(strategy, read_step(resume))  # all workers read the weights, or none
    if resume:
        state, _ = resume.restore(model, spec, batch_size=batch_size)
        if first := state.step:
            print(f"resume      after step {first:,} of {epochs * per_epoch:,} by {resume.folder}")
    if first >= epochs * per_epoch:
        return {}
    dataset = make_dataset(spec, options, start_step=first, endless=True, **shared)
    history = keras.callbacks.History()
    callbacks = keras.callbacks.CallbackList(
        [history], add_progbar=True, model=model, verbose=2, epochs=epochs, steps=per_epoch
    )
    train_step, validation_step = _make_steps(strategy, model, batch_size)
    batches = iter(dataset)
    callbacks.on_train_begin()
    for epoch in range(first // per_epoch, epochs):
        callbacks.on_epoch_begin(epoch)
        steps = range(max(first, epoch * per_epoch), (epoch + 1) * per_epoch)
        totals = np.zeros(2)
        for step in steps:
            totals += [float(value) for value in train_step(next(batches))]
            is_last = step + 1 == steps.stop
            if resume and worker == 0 and (resume.is_due(step + 1) or is_last):
                state.step = step + 1
                resume.save(model, state)
        logs = {"accuracy": totals[1] / len(steps), "loss": totals[0] / len(steps)}
        if held_out:
            sums = np.zeros(3)
            for batch in _pad(make_dataset(held_out, options, **shared), held_out, batch_size):
                sums += [float(value) for value in validation_step(batch)]
            logs |= {"val_accuracy": sums[1] / sums[2], "val_loss": sums[0] / sums[2]}
        callbacks.on_epoch_end(epoch, logs)
    callbacks.on_train_end()
    return dict(history.history)


def _pad(dataset: tf.data.Dataset, spec: InputSpec, batch_size: int) -> Iterator[tuple[Any, ...]]:
    """Yields (images, labels, weights), equally many on each worker; padding has weight 0."""
    iterator, last = iter(dataset), None
    for _ in range(-(-spec.records.num_records // batch_size)):
        batch = next(iterator, None)
        last = batch or last
        assert last, "each worker has at least a batch"
        images, labels = last
        if batch:
            yield images, labels, tf.ones(len(images))
        else:  # the others still have records
            yield images[:1], labels[:1], tf.zeros(1)


def _make_steps(
    strategy: tf.distribute.Strategy, model: keras.Model, batch_size: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a training step (mean loss and accuracy) and a validation step (sums)."""
    per_example = type(model.loss)(from_logits=True, reduction="none")

    def reduce(results: tuple[Any, ...]) -> list[Any]:
        sum_all = tf.distribute.ReduceOp.SUM
        return [strategy.reduce(sum_all, result, axis=None) for result in results]

    @tf.function
    def train_step(batch: tuple[Any, ...]) -> Any:
        def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                mean = tf.reduce_sum(per_example(labels, logits)) / batch_size
            gradient = tape.gradient(mean, model.trainable_variables)
            model.optimizer.apply(gradient, model.trainable_variables)
            return mean, tf.reduce_sum(_is_correct(labels, logits)) / batch_size

        return reduce(strategy.run(step, args=batch))

    @tf.function
    def validation_step(batch: tuple[Any, ...]) -> Any:
        def step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
            logits = model(images, training=False)
            losses, correct = per_example(labels, logits), _is_correct(labels, logits)
            return tuple(map(tf.reduce_sum, (losses * weights, correct * weights, weights)))

        return reduce(strategy.run(step, args=batch))

    return train_step, validation_step


def _is_correct(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 for each correctly classified image, else 0.0; labels are numbers or one-hot."""
    classes = labels if len(labels.shape) == 1 else tf.argmax(labels, 1)
    return tf.cast(tf.equal(classes, tf.argmax(logits, 1)), tf.float32)


if __name__ == "__main__":
    try:
        main(read_arguments())
    except InputError as error:
        sys.exit(f"error: {error}")
