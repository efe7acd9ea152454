"""Whether training waits for its input, and how much: a Keras callback."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dali_tf_input.errors import Count, InputError, checked
from dali_tf_input.spec.options import AUTOTUNE, DaliOptions
from dali_tf_input.training.input import Input
from dali_tf_input.training.strategies import check_keras, scope_of, strategy_of

_QUEUED = 4  # batches that a pipeline holds in addition to its prefetching: nobody waited for them
_AUTOTUNED = 16  # batches that prefetching may hold if tf.data chooses
# Steps of an epoch that are not measured if nothing is known of the pipeline; at most half of it.
_MOST_SKIPPED = 64
_WARMUP = 2  # uncounted calls of the training function on the cached batch: one is traced
# Seconds. A shorter pause leaves the pipeline running, and on a CPU slows the cached steps.
_LONGEST_PAUSE = 60.0


class EpochProfile(NamedTuple):
    """What one epoch's steps took.

    Attributes:
      epoch: its number, from 0.
      steps: how many of its steps were measured; 0 if it has too few, and nothing else is known.
      step_seconds: mean time of a step, including its input.
      cached_step_seconds: mean time of the same step on a cached batch.
    """

    epoch: int
    steps: int
    step_seconds: float
    cached_step_seconds: float

    @property
    def wait(self) -> float:
        """The fraction of a step spent waiting for input, in [0, 1)."""
        return max(0.0, 1 - self.cached_step_seconds / self.step_seconds) if self.steps else 0.0


class InputProfile(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures the fraction of a step spent waiting for input, against steps on a cached batch.

    Use it as ``train.fit(model, epochs=..., profile=InputProfile(train))``, or as the first of
    `callbacks`. Its `epochs` hold an `EpochProfile` per epoch. Keras's progress bar, History and
    the callbacks that follow, such as TensorBoard, get "images_per_second" and, from the end of the
    first epoch on, "input_wait".

    On a CPU the model also runs slower while input is made beside it; that counts as waiting. The
    steps on the cached batch leave no trace: model, metrics and optimizers (also those that are
    attributes of the model) are restored exactly, but not TensorFlow's own random generators. Each
    step waits for the devices, as a host otherwise runs ahead of a GPU. The first steps of an epoch
    are not measured: they are fed from full queues. Epochs of no more steps than that are not
    measured.
    """

    @checked
    def __init__(
        self,
        train: Any,
        *,
        cached_steps: Count = 16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Makes a callback.

        Args:
          train: what `load` returned, or any dataset of tuples that `fit` iterates; one batch
            is taken from it, with an iterator of its own.
          cached_steps: steps on that batch after each epoch, at least 1; rounded up to
            `steps_per_execution`.
          clock: returns the wall time in seconds.

        Raises:
          InputError: `cached_steps` is below 1; or, when training begins, the model has
            `steps_per_execution` above 1 under a strategy of several replicas.
        """
        check_keras("InputProfile")
        super().__init__()
        self.epochs: list[EpochProfile] = []
        self.train = train
        self._dataset = train.dataset if isinstance(train, Input) else train
        self._queued = _QUEUED + _prefetched(train)
        self._known = isinstance(train, Input)
        self._cached_steps = cached_steps
        self._clock = clock
        self._batch: Any = None
        self._images = 0  # in a step
        self._calls: list[tuple[int, float]] = []  # (steps, seconds)
        self._start, self._first, self._sum = 0.0, 0, (0, 0.0)
        self._traced = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the batch."""
        strategy = strategy_of(self.model)
        if strategy and self.model.steps_per_execution > 1 < strategy.num_replicas_in_sync:
            raise InputError(
                f"`steps_per_execution` {self.model.steps_per_execution} cannot be profiled under a"
                " strategy of several replicas: compile with 1."
            )
        if self._batch is None:
            self._batch = next(iter(self._dataset))
            first = keras.tree.flatten(self._batch)[0]
            parts = strategy.experimental_local_results(first) if strategy else (first,)
            self._images = sum(len(part) for part in parts)
        self._traced = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the steps of the epoch before."""
        self._calls, self._sum = [], (0, 0.0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock: other callbacks do not count."""
        self._first = batch
        self._start = self._clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock when the devices are done."""
        tf.test.experimental.sync_devices()
        steps, seconds = batch + 1 - self._first, self._clock() - self._start
        if self._traced or self._calls:  # else this call was traced
            self._sum = (self._sum[0] + steps, self._sum[1] + seconds)
        self._calls.append((steps, seconds))
        if logs is not None and self._sum[0]:
            step_seconds = self._sum[1] / self._sum[0]
            logs["images_per_second"] = self._images / step_seconds
            if self.epochs and self.epochs[-1].steps:
                cached = self.epochs[-1].cached_step_seconds
                logs["input_wait"] = max(0.0, 1 - cached / step_seconds)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures the same steps on the cached batch."""
        per_call = self.model.steps_per_execution
        # The first call of a `fit` is traced, and the first batches were ready before the epoch.
        skipped = max(-(-self._queued // per_call), 0 if self._traced else _WARMUP)
        if not self._known:
            skipped = max(skipped, min(_MOST_SKIPPED // per_call, len(self._calls) // 2))
        self._traced = True
        calls = [call for call in self._calls[skipped:] if call[0] == per_call]
        if not calls:
            self.epochs.append(EpochProfile(epoch, 0, 0.0, 0.0))
            return
        seconds = sum(seconds for _, seconds in calls) / len(calls) / per_call
        time.sleep(min(_LONGEST_PAUSE, self._queued * seconds))  # until the input's queues are full
        cached = self._time_cached_step(per_call)
        found = EpochProfile(epoch, len(calls) * per_call, seconds, cached)
        self.epochs.append(found)
        if logs is not None:
            logs |= {"images_per_second": self._images / seconds, "input_wait": found.wait}

    def _time_cached_step(self, per_call: int) -> float:
        """Returns the mean time of a step on the cached batch; restores model and optimizers."""
        held = [*self.model.variables, *self.model.metrics_variables]
        for optimizer in _optimizers_of(self.model):
            held += optimizer.variables
        different = {id(variable): variable for variable in held}.values()
        before = [(variable, variable.numpy()) for variable in different]
        calls = -(-self._cached_steps // per_call)
        batches: Any = [self._batch]
        if per_call > 1:  # then Keras needs an iterator of TensorFlow's own
            batches = iter(tf.data.Dataset.from_tensors(self._batch).repeat())
        try:
            start = self._clock()
            for number in range(_WARMUP + calls):
                if number == _WARMUP:
                    start = self._clock()
                self.model.train_function(batches)
                tf.test.experimental.sync_devices()
            return (self._clock() - start) / (calls * per_call)
        finally:
            with scope_of(self.model):
                for variable, value in before:
                    variable.assign(value)


def _prefetched(train: Any) -> int:
    """Returns how many batches an input prefetches, as far as that is known."""
    if not isinstance(train, Input):
        return 0
    if isinstance(train.options, DaliOptions):
        return train.options.prefetch_queue_depth
    prefetch = train.options.prefetch_batches
    return _AUTOTUNED if prefetch == AUTOTUNE else prefetch


def _optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model: that of `compile`, and those among its attributes."""
    found = [model.optimizer]
    for value in vars(model).values():
        value = [*value.values()] if isinstance(value, dict) else value
        values = value if isinstance(value, list | tuple) else [value]
        found += [each for each in values if isinstance(each, keras.optimizers.Optimizer)]
    return found
