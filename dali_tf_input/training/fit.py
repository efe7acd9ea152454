"""The callbacks that make several calls of Keras's `fit` look like a single one."""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from dali_tf_input.errors import InputError
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.training.description import (
    as_plain,
    describe_callback,
    find_changes,
    find_names,
    is_plain,
    name_variables,
)
from dali_tf_input.training.resume import Arrays, CallbackState, Resume, State
from dali_tf_input.training.schedule import Schedule
from dali_tf_input.training.stopping import StopSignal
from dali_tf_input.training.strategies import scope_of

_logger = logging.getLogger("dali_tf_input")

# Settings of callbacks that must not change: a best value is of what was monitored.
_FIXED_SETTINGS = ("monitor", "mode")


class StepCounter(keras.callbacks.Callback):
    """Counts the batches of an evaluation or prediction, and keeps the logs of the last epoch.

    Attributes:
      tested: number of batches that the current evaluation or prediction has completed; None if
        none is running.
      epoch_logs: the logs of the last epoch, including values added by earlier callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tested: int | None = None
        self.epoch_logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the logs."""
        self.epoch_logs = dict(logs or {})

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that an evaluation begins."""
        self.tested = 0

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a step."""
        self.tested = batch + 1

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that the evaluation is over."""
        self.tested = None

    on_predict_begin, on_predict_batch_end = on_test_begin, on_test_batch_end
    on_predict_end = on_test_end


class StepCallback(keras.callbacks.Callback):
    """A callback for `train.fit` that knows the number of each step, counted over all epochs.

    `save` is called whenever `Resume` saves.

    Attributes:
      schedule: the spec of each epoch, set when training begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule | None = None
        self._offset: int | None = None
        self._steps = self._start = 0

    def begin(self, offset: int, steps: int, spec: InputSpec, batch_size: int) -> None:
        """Called before training; batch b of epoch e is step `offset` + e * `steps` + b."""
        self._offset, self._steps = offset, steps

    def save(self) -> None:
        """Writes what is known so far."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the first step of the epoch."""
        if self._offset is None or self.model.steps_per_execution > 1:
            name = type(self).__name__
            raise InputError(
                f"`{name}` works with train.fit(model, callbacks=[...]) and steps_per_execution=1."
            )
        self._start = self._offset + epoch * self._steps


class Training(keras.callbacks.CallbackList):
    """A list of callbacks to which several calls of `fit` look like a single one.

    Keras's `fit` cannot begin in the middle of an epoch, so the rest of an interrupted epoch needs
    a separate call. So does each stage of a schedule: `end_of` maps an epoch to the end of its
    stage. Callbacks see one training run: batches are counted from the start of the epoch, the logs
    cover the whole epoch, and `on_train_begin` and `on_train_end` are called once.

    Attributes:
      step: number of training steps done.
      history: Keras's History of all epochs.
      counter: counts the batches of validation.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        epochs: int,
        verbose: Any,
        state: State,
        arrays: Arrays,
        resume: Resume | None,
        stop: StopSignal,
        end_of: Callable[[int], int],
    ) -> None:
        self.history, self.counter = keras.callbacks.History(), StepCounter()
        self._watchers = [*callbacks, self.history]
        self._state, self._arrays, self._resume, self._stop = state, arrays, resume, stop
        self.step, self._epochs, self._end_of = state.step, epochs, end_of
        self._batches_before = 0  # of the epoch, in earlier calls of `fit`
        self._epoch_start = 0
        self._raw_weights: list[Any] = []
        self._pairs, changes = self._find_saved()
        self._goes_on = bool(changes)  # also if a callback stopped it, as that one may be another
        if state.epochs not in (0, epochs):
            changes = [f"`epochs` was {state.epochs}, is {epochs}", *changes]
        if changes and 0 < state.step < epochs * state.steps_per_epoch:
            level = logging.WARNING if self._goes_on else logging.INFO  # more epochs are no doubt
            text = "Training goes on after step %d: %s."
            _logger.log(level, text, state.step, "; ".join(changes))
        state.epochs = epochs
        # An epoch that a callback cut short is done now, and logged at its end.
        logged = state.logs[-1][0] + 1 if state.logs else 0  # epochs
        if self._goes_on and state.step < logged * state.steps_per_epoch:
            state.logs.pop()
        super().__init__(
            [*self._watchers, self.counter],
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=state.steps_per_epoch,
        )
        self._last_logs: Any = None

    def run(self, fit_part: Any) -> keras.callbacks.History:
        """Trains until all epochs are done, or a callback stops it.

        `fit_part` calls `model.fit`; its arguments select the epochs and steps to train.
        """
        steps, model = self._state.steps_per_epoch, self.model
        self._begin()
        stopped = self._state.stopped and not self._goes_on
        if stopped and self.step < self._epochs * steps:
            _logger.warning(
                "A callback stopped this training after step %d, so it is done. To go on, change"
                " what stopped it, such as `patience`, or leave that callback out.",
                self.step,
            )
        if stopped or self.step >= self._epochs * steps:
            model.optimizer.finalize_variable_values(model.trainable_variables)
        while not stopped and self.step < self._epochs * steps:
            epoch, self._batches_before = divmod(self.step, steps)
            end = epoch + 1 if self._batches_before else self._end_of(epoch)
            is_part = end < self._epochs
            before = self.step
            fit_part(
                initial_epoch=epoch,
                epochs=end,
                steps_per_epoch=steps - self._batches_before,
                callbacks=self,
            )
            stopped = model.stop_training or self.step == before
            if is_part and self._raw_weights and not stopped:
                # `fit` ends by replacing the weights by their averages, if the optimizer keeps any.
                with scope_of(model):
                    for variable, value in zip(
                        model.trainable_variables, self._raw_weights, strict=True
                    ):
                        variable.assign(value)
        super().on_train_end(self._last_logs)
        return self.history

    def _begin(self) -> None:
        """Begins the training for all callbacks, and restores their state from before a resume."""
        super().on_train_begin()
        self._initial = [_find_attributes(callback) for callback in self._watchers]
        replayed = [
            callback
            for callback in self._watchers
            if callback is self.history
            or (isinstance(callback, keras.callbacks.CSVLogger) and not callback.append)
        ]
        for epoch, logs in self._state.logs:
            for callback in replayed:
                callback.on_epoch_end(epoch, dict(logs))
            self._last_logs = logs
        self._restore_callbacks()

    def _find_saved(self) -> tuple[dict[int, int], list[str]]:
        """Finds what was saved of each callback, and what changed since.

        Callbacks of one class are told apart by their settings, then by their order.

        Returns:
          The place in the state of each callback that has one, by its number; and the changes.

        Raises:
          InputError: a callback monitors something else.
        """
        saved, changes = self._state.callbacks, list[str]()
        self._settings = [*map(describe_callback, self._watchers)]
        free, pairs = dict(enumerate(saved)), dict[int, int]()
        for is_same in (True, False):
            for number, callback in enumerate(self._watchers):
                for place, one in free.items() if number not in pairs else ():
                    alike = one.settings == self._settings[number] or not is_same
                    if one.kind == type(callback).__name__ and alike:
                        pairs[number] = place
                        del free[place]
                        break
        for number, callback in enumerate(self._watchers):
            kind = type(callback).__name__
            if _is_ours(callback) or not self._state.step:
                continue
            if number not in pairs:
                changes.append(f"{kind} is new")
                continue
            then, now = saved[pairs[number]].settings, self._settings[number]
            for name in _FIXED_SETTINGS if "monitor" in now else ():
                if then.get(name) != now.get(name):
                    text = f"{kind}'s `{name}` was {then.get(name)}, is {now.get(name)}"
                    remedy = "Use the same, or start in another folder"
                    raise InputError(f"{text}, and its best value is kept: {remedy}.")
            changes += [f"of {kind}, {change}" for change in find_changes(then, now)]
        changes += [f"{one.kind} is gone" for one in free.values() if one.kind != "History"]
        return pairs, changes

    def _restore_callbacks(self) -> None:
        """Gives callbacks the attributes that were saved."""
        for number, place in self._pairs.items():
            one = self._state.callbacks[place]
            attributes = copy.deepcopy(one.attributes)
            if find_changes(one.settings, self._settings[number]):  # the caller's take precedence
                attributes = {n: v for n, v in attributes.items() if n not in one.settings}
            prefix = f"callback/{place}/"
            for name, array in self._arrays.items():
                if name.startswith(prefix):
                    attribute, *index = name.removeprefix(prefix).split("/")
                    if index:
                        attributes.setdefault(attribute, []).append(array.copy())
                    else:
                        attributes[attribute] = array.copy()
            vars(self._watchers[number]).update(attributes)

    def build_metrics(self, element_spec: Any) -> None:
        """Builds the metrics of a resumed epoch; Keras would build them only in its first step."""
        saved = len(self._saved_metrics())
        if not self._batches_before or len(self.model.metrics_variables) == saved:
            return
        x, *targets = keras.tree.map_structure(
            lambda spec: np.zeros((1, *spec.shape[1:]), spec.dtype.as_numpy_dtype), element_spec
        )
        y, *weights = targets or [None]
        outputs = self.model(x, training=False)
        self.model.compute_metrics(x, y, outputs, *weights)

    def _saved_metrics(self) -> Arrays:
        """Returns the saved values of the metrics, by the names of their variables."""
        return {
            name.removeprefix("metric/"): value
            for name, value in self._arrays.items()
            if name.startswith("metric/")
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Does nothing: `run` has begun the training."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the logs: `run` ends the training."""
        self._last_logs = logs

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Continues the metrics of an epoch that was interrupted."""
        self._epoch_start = epoch * self._state.steps_per_epoch
        metrics = self._saved_metrics()
        if self._batches_before and metrics:
            variables = self.model.metrics_variables
            names = name_variables(variables)
            if {*names} != {*metrics}:
                raise InputError(
                    f"The metrics of the interrupted epoch were {', '.join(metrics)}, the model has"
                    f" {', '.join(names)}: compile it as before, or start in another folder."
                )
            with scope_of(self.model):
                for name, variable in zip(names, variables, strict=True):
                    variable.assign(metrics[name])
        rates = _find_rates(self.model.optimizer) if self._batches_before else []
        before = [float(rate.numpy()) for rate in rates]
        super().on_epoch_begin(epoch, logs)
        if self._batches_before:
            # For the callbacks this epoch begins a second time: what they changed then, such as
            # the learning rate, is changed already.
            self._restore_callbacks()
            with scope_of(self.model):
                for rate, value in zip(rates, before, strict=True):
                    rate.assign(value)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes on the number of the batch in its epoch."""
        super().on_train_batch_begin(batch + self._batches_before, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the step, and saves when due."""
        batch += self._batches_before
        self.step = self._epoch_start + batch + 1
        super().on_train_batch_end(batch, logs)
        if batch + 1 >= self._state.steps_per_epoch:  # it is saved at the epoch's end
            return
        if self._resume and (self._stop.has_come or self._resume.is_due(self.step)):
            self._save(with_metrics=True)
        self._end_if_stopped()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, including what the callbacks changed."""
        super().on_epoch_end(epoch, logs)
        self._batches_before = 0
        self._raw_weights = []
        logged = self.counter.epoch_logs.items()
        scalars = {name: float(value) for name, value in logged if np.ndim(value) == 0}
        self._state.logs.append((epoch, scalars))
        self._state.stopped = bool(self.model.stop_training)
        if self._resume or getattr(self.model.optimizer, "use_ema", False):
            self._raw_weights = [
                keras.ops.convert_to_numpy(variable) for variable in self.model.trainable_variables
            ]
        if self._resume:
            self._save(with_metrics=False)
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        """Ends the program after SIGTERM, as the state is saved."""
        if self._stop.has_come and self._resume:
            text = "SIGTERM: training ends after step %d, and its state is in %s. To go on, run the"
            _logger.warning(f"{text} same program again.", self.step, self._resume.folder)
            self._stop.pass_on()

    def _save(self, *, with_metrics: bool) -> None:
        arrays: Arrays = {}
        if with_metrics:
            variables = self.model.metrics_variables
            for name, variable in zip(name_variables(variables), variables, strict=True):
                arrays[f"metric/{name}"] = keras.ops.convert_to_numpy(variable)
        callbacks = []
        for number, callback in enumerate(self._watchers):
            changed = {
                name: value
                for name, value in _find_attributes(callback).items()
                if name not in self._initial[number] or value != self._initial[number][name]
            }
            kind, settings = type(callback).__name__, self._settings[number]
            now = describe_callback(callback)  # a callback may change what it was made with
            changed |= {name: now[name] for name in find_names(settings, now)}
            callbacks.append(CallbackState(kind, settings, changed))
            for name, value in vars(callback).items():
                if _is_array(value) and not name.startswith("_"):
                    arrays[f"callback/{number}/{name}"] = value
                if isinstance(value, list) and value and all(map(_is_array, value)):
                    for place, array in enumerate(value):
                        arrays[f"callback/{number}/{name}/{place:04d}"] = array
        self._state.step, self._state.callbacks = self.step, callbacks
        for callback in self._watchers:
            if isinstance(callback, StepCallback):
                callback.save()
        if self._resume:
            self._resume.save(self.model, self._state, arrays)


def _find_attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the public attributes of a callback that are numbers, text, None, or made of these.

    Constructor arguments are excluded, because the caller's current values take precedence; and so
    is what a History holds, which is kept as the logs of the epochs.
    """
    if isinstance(callback, keras.callbacks.History):
        return {}
    settings = describe_callback(callback)
    return {
        name: copy.deepcopy(as_plain(value))
        for name, value in vars(callback).items()
        if not name.startswith("_") and name not in settings and is_plain(as_plain(value))
    }


def _find_rates(optimizer: Any) -> list[keras.Variable]:
    """Returns the learning rates that callbacks may change, of each optimizer in an optimizer."""
    own = getattr(optimizer, "optimizers", None) or [optimizer]
    rates = [getattr(one, "learning_rate", None) for one in own]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype != object


def _is_ours(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is of this package, or Keras's own History, which are always there."""
    is_history = isinstance(callback, keras.callbacks.History)
    return is_history or type(callback).__module__.startswith("dali_tf_input.")
