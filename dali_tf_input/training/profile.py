"""The speed of an input: images per second of each epoch, and the wait for input in a step."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.training.strategies import check_keras, scope_of

_WARMUP_STEPS = 8  # the first step is traced, and the first batches were already queued


class ImagesPerSecond(keras.callbacks.Callback):
    """Adds "images_per_second" to the logs of each epoch, without its first step."""

    def __init__(self, batch_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._batch_size, self._clock = batch_size, clock
        self._first = self._last = (0, 0.0)  # (batch, time)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the epoch before."""
        self._first = self._last = (-1, 0.0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the time."""
        self._last = (batch, self._clock())
        if self._first[0] < 0:
            self._first = self._last

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate, unless the epoch has one step only."""
        steps = self._last[0] - self._first[0]
        if logs is not None and steps > 0:
            seconds = self._last[1] - self._first[1]
            logs["images_per_second"] = steps * self._batch_size / seconds


class InputProfile(NamedTuple):
    """The result of `Input.profile`.

    Attributes:
      images_per_second: the speed of training on the input.
      step_seconds: mean time of a step on the input.
      cached_step_seconds: mean time of the same step on a batch that is already in memory.
    """

    images_per_second: float
    step_seconds: float
    cached_step_seconds: float

    @property
    def wait(self) -> float:
        """The fraction of a step spent waiting for input, in [0, 1)."""
        return max(0.0, 1 - self.cached_step_seconds / self.step_seconds)


def profile_input(
    batches: Any,
    model: keras.Model,
    *,
    batch_size: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> InputProfile:
    """Times steps on `batches`, an endless iterator, and the same number on a single batch.

    The model, its metrics and its optimizer are restored exactly.
    """
    check_keras("`profile`")
    if model.steps_per_execution > 1:
        raise InputError("`profile` needs a model that is compiled with steps_per_execution=1.")
    if not model.built or not model.optimizer.built:
        raise InputError("`profile` needs a model that was trained: call `fit` for an epoch first.")
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [(variable, variable.numpy()) for variable in variables]
    model.make_train_function()

    def time_steps(next_batch: Callable[[], Any]) -> float:
        start = 0.0
        for number in range(_WARMUP_STEPS + steps):
            if number == _WARMUP_STEPS:
                start = clock()
            model.train_function([next_batch()])
            tf.test.experimental.sync_devices()  # else a host runs ahead of its GPU
        return (clock() - start) / steps

    try:
        step_seconds = time_steps(lambda: next(batches))
        batch = next(batches)
        cached_step_seconds = time_steps(lambda: batch)
    finally:
        with scope_of(model):
            for variable, value in before:
                variable.assign(value)
    return InputProfile(batch_size / step_seconds, step_seconds, cached_step_seconds)
