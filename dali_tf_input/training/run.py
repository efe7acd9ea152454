"""One training run: the calls of Keras's `fit` that it takes, and the datasets that they get."""

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.training.fit import StepCallback, Training
from dali_tf_input.training.profile import ImagesPerSecond
from dali_tf_input.training.resume import Arrays, Resume, State
from dali_tf_input.training.stopping import StopSignal

_logger = logging.getLogger("dali_tf_input")

if TYPE_CHECKING:
    from dali_tf_input.training.input import Input


def train(
    source: "Input",
    model: keras.Model,
    spec: InputSpec,
    held_out: Any,
    resume: Resume | None,
    *,
    epochs: int,
    profile: bool,
    initial_epoch: int,
    steps_per_epoch: int | None,
    **arguments: Any,
) -> keras.callbacks.History:
    """Does what `Input.fit` says, with arguments that were checked.

    Two counts of steps run side by side: those of the model, from 0, and those of the records,
    which are ahead by what earlier calls have served.

    Args:
      source: the input; its `next_step` is where the records go on.
      model: a compiled model.
      spec: the batches to train on.
      held_out: the validation data, for Keras, or an `Input`.
      resume: where the state is kept; its folder is locked.
      epochs: as for `Input.fit`.
      profile: as for `Input.fit`.
      initial_epoch: as for `Input.fit`.
      steps_per_epoch: as for `Input.fit`.
      **arguments: further arguments of `model.fit`.
    """
    schedule, steps = source.schedule, steps_per_epoch or source.steps_per_epoch
    if not schedule.is_constant and steps != source.steps_per_epoch:
        raise InputError(
            f"`steps_per_epoch` must be all {source.steps_per_epoch} of an epoch with a"
            f" `schedule`, got {steps}."
        )
    state, arrays = State(initial_epoch * steps, steps, "", {}), Arrays()
    if resume is None:
        offset = max(0, source.next_step - state.step)
    else:
        first, offset = state.step, 0
        _check_callbacks(arguments.get("callbacks"))
        state, arrays = resume.restore(
            model,
            spec,
            batch_size=source.batch_size,
            steps_per_epoch=steps,
            schedule="" if schedule.is_constant else repr(schedule),
        )
        if state.step and state.initial_epoch != initial_epoch:
            text = "`initial_epoch` was %d, is %d: training goes on after step %d."
            _logger.warning(text, state.initial_epoch, initial_epoch, state.step)
        state.step, state.initial_epoch = state.step or first, initial_epoch
    if not spec.has_fixed_order:  # which can start at an epoch's first step only
        offset += -(state.step + offset) % source.steps_per_epoch
    _check_execution(model, steps, state.step, len(source.devices))

    callbacks = keras.tree.flatten(arguments.pop("callbacks", None) or [])
    for callback in callbacks:
        if isinstance(callback, StepCallback):
            callback.begin(offset, steps, spec, source.batch_size)
            callback.schedule = schedule
    verbose = arguments.pop("verbose", "auto")
    stop = StopSignal()
    before = offset // source.steps_per_epoch  # epochs of the records
    training = Training(
        model,
        [ImagesPerSecond(source.batch_size), *callbacks] if profile else callbacks,
        epochs=epochs,
        verbose=verbose,
        state=state,
        arrays=arrays,
        resume=resume,
        stop=stop,
        end_of=lambda epoch: schedule.end_of(epoch + before, epochs + before) - before,
    )

    def fit_part(**part: Any) -> None:
        step = training.step + offset
        stage = schedule.spec_of(step // source.steps_per_epoch)
        stage = dataclasses.replace(stage, class_weight=spec.class_weight)
        dataset = source.make_endless(stage, step)
        if source.strategy is None:
            training.build_metrics(dataset.element_spec)
        valid = getattr(held_out, "dataset", held_out)
        shared = {"validation_data": valid, "shuffle": False, "verbose": verbose}
        model.fit(dataset, **shared, **part, **arguments)

    try:
        with stop if resume else contextlib.nullcontext():
            return training.run(fit_part)
    except tf.errors.OpError as error:
        failed, step = source, training.step + offset
        if training.counter.tested is not None and hasattr(held_out, "explain"):  # an `Input`
            failed, step = held_out, training.counter.tested
        raise failed.explain(error, step, model) from error
    except ValueError as error:
        if spec.class_weight is None or "too many values to unpack" not in str(error):
            raise
        text = "The model's own `train_step` takes (x, y), and `class_weight` adds the weights"
        raise InputError(f"{text} of the images: take (x, y, sample_weight).") from error
    finally:
        done = training.step + offset
        if steps == source.steps_per_epoch or not spec.has_fixed_order:
            done += -done % source.steps_per_epoch  # the rest of the epoch is left out
        source.next_step = done


def _check_callbacks(callbacks: Any) -> None:
    """Raises InputError for a callback whose own state cannot be kept beside `resume`."""
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            text = "BackupAndRestore restores what `resume` restores"
            raise InputError(f"{text}: leave one of them out.")
        is_swapping = isinstance(callback, keras.callbacks.SwapEMAWeights)
        if is_swapping and callback.swap_on_epoch:
            raise InputError(
                "SwapEMAWeights(swap_on_epoch=True) does not work with `resume`: it keeps to itself"
                " whether the model holds weights or their averages. Without it, validation sees"
                " the averages too."
            )


def _check_execution(model: keras.Model, steps: int, done: int, num_replicas: int) -> None:
    """Raises InputError unless each of the model's executions stays in one call of `fit`."""
    per_call = model.steps_per_execution
    if not isinstance(per_call, int):
        text = f"`steps_per_execution` must be a number, got {per_call!r}"
        raise InputError(f"{text}: compile the model with one, such as 1.")
    if steps % per_call or done % per_call or (per_call > 1 and num_replicas > 1):
        raise InputError(
            f"`steps_per_execution` must divide the {steps} steps of an epoch and the {done} that"
            f" are done, and be 1 on several replicas, got {per_call}."
        )
