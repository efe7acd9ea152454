"""Whether training waits for its input, and how much: a Keras callback."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dali_tf_input.tfrecord import InputError

_QUEUED = 4  # batches that pipelines hold ready: what they were made in, nobody waited for
_WARMUP = 2  # calls of the training function on a cached batch that are not counted: one is traced
_LONGEST_PAUSE = 5.0  # seconds


class EpochProfile(NamedTuple):
    """What one epoch's steps took.

    Attributes:
      epoch: its number, from 0.
      steps: how many of its steps were measured; 0 where it has too few, and nothing else is known.
      step_seconds: mean time of a step, input included.
      cached_step_seconds: mean time of the same step on a batch that is there already.
    """

    epoch: int
    steps: int
    step_seconds: float
    cached_step_seconds: float

    @property
    def wait(self) -> float:
        """Which part of a step the model waits for its input, in [0, 1): what a cached batch saves."""
        return max(0.0, 1 - self.cached_step_seconds / self.step_seconds) if self.steps else 0.0


class InputProfile(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures in each epoch which part of the step the model waits for input, against the same step on one cached batch.

    Give it to ``model.fit(train.dataset, callbacks=[InputProfile(train.dataset)], ...)``. Its `epochs` hold an `EpochProfile`
    for each epoch, and the logs of the epoch have "input_wait", for History and for callbacks behind this one.

    What the wait is depends on both: a model on CPU also runs slower while input is made beside it, which counts as waiting. The
    steps on the cached batch train for nothing: model, metrics and optimizer are brought back to what they were, exactly;
    TensorFlow's own random generators are not. Each step is waited for (on a GPU, the host otherwise runs ahead).
    """

    def __init__(self, dataset: Any, *, cached_steps: int = 16, clock: Callable[[], float] = time.perf_counter) -> None:
        """Makes a callback.

        Args:
          dataset: what `fit` iterates; one batch is taken from an iterator of its own.
          cached_steps: steps on that batch after each epoch, at least 1 (rounded up to `steps_per_execution`).
          clock: returns the wall time in seconds.
        """
        super().__init__()
        if cached_steps < 1:
            raise InputError(f"`cached_steps` must be at least 1, got {cached_steps}.")
        self.epochs: list[EpochProfile] = []
        self._dataset = dataset
        self._cached_steps = cached_steps
        self._clock = clock
        self._batch: Any = None
        self._calls: list[float] = []
        self._start = 0.0
        self._traced = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the batch."""
        if self._batch is None:
            self._batch = next(iter(self._dataset))
        self._traced = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins anew."""
        self._calls = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock: other callbacks do not count."""
        self._start = self._clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock when the devices are done."""
        tf.test.experimental.sync_devices()
        self._calls.append(self._clock() - self._start)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures the same steps on the cached batch."""
        per_call = self.model.steps_per_execution
        # The first call of a `fit` is traced, and the batches that were ready before the epoch were waited for by nobody.
        skipped = max(-(-_QUEUED // per_call), 0 if self._traced else _WARMUP)
        self._traced = True
        calls = self._calls[min(skipped, len(self._calls) // 2) :]
        if len(self._calls) < 2:
            self.epochs.append(EpochProfile(epoch, 0, 0.0, 0.0))
            return
        seconds = sum(calls) / len(calls) / per_call
        time.sleep(min(_LONGEST_PAUSE, _QUEUED * seconds))  # until the input has filled its queues and works no more
        found = EpochProfile(epoch, len(calls) * per_call, seconds, self._time_cached_step(per_call))
        self.epochs.append(found)
        if logs is not None:
            logs["input_wait"] = found.wait

    def _time_cached_step(self, per_call: int) -> float:
        """Returns the mean time of a step on the cached batch, and leaves model and optimizer as they are."""
        variables = {id(variable): variable for variable in [*self.model.variables, *self.model.optimizer.variables]}
        before = [(variable, variable.numpy()) for variable in variables.values()]
        calls = -(-self._cached_steps // per_call)
        try:
            start = self._clock()
            for number in range(_WARMUP + calls):
                if number == _WARMUP:
                    start = self._clock()
                self.model.train_function([self._batch] * per_call)
                tf.test.experimental.sync_devices()
            return (self._clock() - start) / (calls * per_call)
        finally:
            with self.model.distribute_strategy.scope():
                for variable, value in before:
                    variable.assign(value)
