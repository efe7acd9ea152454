"""A training loop for MultiWorkerMirroredStrategy, one process for each worker: Keras's `fit` does not work under it."""

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input import InputError
from dali_tf_input.distribute import Distributed
from dali_tf_input.resume import Resume


def make_strategy() -> tf.distribute.MultiWorkerMirroredStrategy:
    """Makes the strategy of this process; the environment variable TF_CONFIG says which worker it is, and where all are."""
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, task = config["cluster"]["worker"], config["task"]
        if set(config["cluster"]) != {"worker"} or task["type"] != "worker" or not 0 <= task["index"] < len(workers):
            raise ValueError("`task` is none of the workers")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "Each worker needs the environment variable TF_CONFIG, the same list of all workers and its own number: "
            """TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}' """
            f"({error!r})"
        ) from error
    print(f"workers     {len(workers)}: {', '.join(map(str, workers))}; waiting until all of them are there", flush=True)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # TensorFlow waits in C++, and lets no Python run meanwhile
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


def check_agreement(strategy: tf.distribute.Strategy, step: int) -> None:
    """Checks that all workers stand at the same step, before any of them goes on; InputError in each of them otherwise."""

    @tf.function
    def add() -> Any:
        mine = tf.constant([step, step * step], tf.float64)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: mine), axis=None)

    count, (total, squares) = strategy.num_replicas_in_sync, add().numpy()
    if (total, squares) != (count * step, count * step * step):
        raise InputError(
            f"This worker is after step {step}, others are elsewhere ({total / count:g} on average): --resume must name a folder "
            "that all workers share."
        )


def fit(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    train: Distributed,
    validation: Distributed | None,
    *,
    global_batch_size: int,
    epochs: int,
    resume: Resume | None,
    on_epoch_end: Callable[[int, dict[str, float]], None],
) -> None:
    """Trains a compiled model whose loss is a Keras loss, until `epochs` epochs are done; validates after each."""
    optimizer, loss = model.optimizer, model.loss
    per_example = type(loss)(from_logits=True, reduction="none")

    @tf.function
    def train_step(batch: tuple[Any, ...]) -> Any:
        def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                mean = tf.reduce_sum(per_example(labels, logits)) / global_batch_size
            optimizer.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)
            return mean, tf.reduce_sum(_right(labels, logits)) / global_batch_size

        results = strategy.run(step, args=batch)
        return [strategy.reduce(tf.distribute.ReduceOp.SUM, result, axis=None) for result in results]

    @tf.function
    def validation_step(batch: tuple[Any, ...]) -> Any:
        def step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
            logits = model(images, training=False)
            sums = per_example(labels, logits) * weights, _right(labels, logits) * weights, weights
            return tuple(map(tf.reduce_sum, sums))

        results = strategy.run(step, args=batch)
        return [strategy.reduce(tf.distribute.ReduceOp.SUM, result, axis=None) for result in results]

    first = train.position.step
    batches = iter(train.dataset)
    for epoch in range(first // train.steps_per_epoch, epochs):
        start, totals = time.perf_counter(), [0.0, 0.0]
        steps = train.steps_per_epoch - (first % train.steps_per_epoch if epoch == first // train.steps_per_epoch else 0)
        for _ in range(steps):
            totals = [total + float(value) for total, value in zip(totals, train_step(next(batches)), strict=True)]
            if resume:
                resume.count_step()
        seconds = time.perf_counter() - start
        logs = {
            "loss": totals[0] / steps,
            "accuracy": totals[1] / steps,
            "images_per_second": steps * global_batch_size / seconds,
        }
        if validation:
            sums = [0.0, 0.0, 0.0]
            evaluation = iter(validation.dataset)
            for _ in range(validation.steps_per_epoch):
                sums = [total + float(value) for total, value in zip(sums, validation_step(next(evaluation)), strict=True)]
            logs |= {"val_loss": sums[0] / sums[2], "val_accuracy": sums[1] / sums[2]}
        on_epoch_end(epoch, logs)


def _right(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 for each image whose class is predicted rightly, else 0.0; labels are numbers or one-hot."""
    classes = labels if len(labels.shape) == 1 else tf.argmax(labels, 1)
    return tf.cast(tf.equal(classes, tf.argmax(logits, 1)), tf.float32)
