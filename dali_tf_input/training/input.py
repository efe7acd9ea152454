"""`Input`, the result of `load`: an input for training, evaluation and prediction with Keras."""

import contextlib
import dataclasses
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from dali_tf_input.backends.stream import MAX_EPOCHS, Stream
from dali_tf_input.errors import Count, InputError, Path, Within, check, check_keywords, checked
from dali_tf_input.random import Integers
from dali_tf_input.records.class_names import Names
from dali_tf_input.spec import meetings
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import Options
from dali_tf_input.spec.plan import Shard, StepCursor
from dali_tf_input.training import strategies
from dali_tf_input.training.blame import Blame, check_blames
from dali_tf_input.training.failures import explain
from dali_tf_input.training.fit import StepCounter
from dali_tf_input.training.models import (
    check_compiled,
    check_inputs,
    check_labels,
    check_model,
    check_noted,
    check_targets,
    count_classes,
    find_doubts,
    note_input,
)
from dali_tf_input.training.profile import InputProfile, profile_input
from dali_tf_input.training.resume import Resume
from dali_tf_input.training.run import train
from dali_tf_input.training.schedule import Schedule

_logger = logging.getLogger("dali_tf_input")

# Arguments of Keras that the input itself gives, or that go with arrays only.
_OF_ARRAYS = ("x", "y", "batch_size", "sample_weight", "return_dict", "kwargs")
_NOT_FOR_FIT = ("x", "y", "batch_size", "sample_weight", "validation_split")
_ORDERED = "`shuffle` is decided by the `order` of the spec: leave it out."


class Input:
    """An input for training, evaluation and prediction with Keras; made by `load`.

    Each iteration over it serves the next epoch; its length is the number of steps in an epoch.
    `fit` continues with the epoch after the last one that was served.

    Examples:
      >>> train = load(InputSpec.for_training("records/train-*", 224), batch_size=8)
      >>> history = train.fit(model, epochs=2, verbose=0)
      >>> for images, labels in train:  # the third epoch
      ...     pass
      >>> history = model.fit(train.dataset, epochs=2, verbose=0)  # Keras's own, the next two

    Attributes:
      spec: the batches it produces.
      schedule: the spec of each epoch.
      options: the options of the backend, including those chosen by `load`.
      batch_size: images in a step of all replicas.
      steps_per_epoch: number of steps in an epoch. In training, the remainder that does not fill a
        step is dropped; in evaluation, it is the last step.
      strategy: the strategy whose replicas are fed; None for plain TensorFlow.
      devices: the device of each replica, such as "GPU:0".
    """

    EXAMPLE: ClassVar[str] = "load(InputSpec.for_evaluation('records/*', 224), batch_size=256)"

    def __init__(
        self,
        spec: InputSpec,
        options: Options,
        *,
        batch_size: int,
        strategy: tf.distribute.Strategy | None,
        devices: tuple[str, ...],
        start_step: int,
        schedule: Schedule | None = None,
    ) -> None:
        self.spec, self.options = spec, options
        self.schedule = schedule or Schedule(spec, None, batch_size=batch_size)
        self.batch_size, self.strategy, self.devices = batch_size, strategy, devices
        self.steps_per_epoch = spec.plan(batch_size).steps_per_epoch
        # Each replica counts its own epochs, as their iterators start at different times.
        self._cursors = [StepCursor(start_step) for _ in devices]
        self._datasets: dict[InputSpec, Any] = {}

    @property
    def num_records(self) -> int:
        """How many records there are."""
        return self.spec.records.num_records

    @property
    def class_names(self) -> Names | None:
        """The names of the classes in their order, see `InputSpec.class_names`."""
        return self.spec.class_names

    @property
    def dataset(self) -> tf.data.Dataset:
        """A `tf.data.Dataset`, or a `tf.distribute.DistributedDataset`, for Keras or a loop.

        It is one epoch long, and each new iterator serves the next epoch; see `make_dataset`.

        Raises:
          InputError: there is a `schedule`, which one dataset cannot follow.
        """
        if not self.schedule.is_constant:
            raise InputError(
                "`dataset` cannot follow a `schedule`: use train.fit(model), or iterate over the"
                " input itself, which serves the next epoch each time."
            )
        return self._dataset_of(self.spec)

    def _dataset_of(self, spec: InputSpec) -> Any:
        if spec not in self._datasets:
            dataset = self._make_dataset(spec, self._cursors, endless=False)
            self._datasets = {spec: dataset}  # one: a schedule may have a spec for each epoch
        return self._datasets[spec]

    def _spec_at(self, step: int) -> InputSpec:
        return self.schedule.spec_of(step // self.steps_per_epoch)

    def __len__(self) -> int:
        """Returns the number of steps in an epoch."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the next epoch; if a record stops it, the error names the record.

        Raises:
          BadRecordError: (an InputError) a record cannot be read or decoded. The message has its
            file, its number and the command that skips it.
        """
        start, served = self.next_step, 0
        failure = tf.errors.OpError  # a local name, which still exists when the program exits
        try:
            iterator = iter(self._dataset_of(self._spec_at(start)))  # DALI starts reading here
            while served < self.steps_per_epoch:  # DALI's own reader on a GPU has no end
                batch = next(iterator, None)
                if batch is None:
                    return
                yield batch
                served += 1
        except failure as error:
            raise self.explain(error, start + served) from error

    @checked
    def records_of(self, step: int) -> Integers:
        """Returns the ids of the records of a step of training, in the order of its images.

        The ids are computed, so the step may be long past, from another process, or in the future,
        as long as the spec and the batch size are the same. `batch_at` returns the images.

        Examples:
          >>> train = load(InputSpec.for_training("records/train-*", 224), batch_size=8)
          >>> ids = train.records_of(81_233)  # of all replicas
          >>> label = train.spec.records.read(ids[0])["image/class/label"]

        Args:
          step: from 0, counted over all epochs, like `start_step` of `load` and in `Resume`.

        Returns:
          int64 (batch_size,); fewer in the last step of an evaluation.

        Raises:
          InputError: order "buffer" has no plan, or there is no such step.
        """
        self._check_step(step)
        return self._spec_at(step).ids_of_step(step, batch_size=self.batch_size)

    @checked
    def batch_at(self, step: int) -> Any:
        """Returns the batch of a step for all replicas together, with the pixels seen in training.

        On a CPU the pixels are bit-identical. This does not change which epoch is served next.

        Args:
          step: as for `records_of`.

        Raises:
          InputError: as `records_of`.
          BadRecordError: (an InputError) a record cannot be read or decoded.
        """
        self._check_step(step)
        one = Input(
            self._spec_at(step),
            self.options,
            batch_size=self.batch_size,
            strategy=None,
            devices=self.devices[:1],
            start_step=step if self.spec.repeat else 0,
        )
        skipped = 0 if self.spec.repeat else step
        return next(itertools.islice(iter(one), skipped, None))

    @checked
    def blame(self, folder: Path, *, loss: Any) -> Blame:
        """Returns a callback that tracks the loss of each record during `fit`.

        It needs no extra evaluation: the model computes the losses of a batch in the metric
        `blame.metric`, and the records that they belong to follow from the planned order.

        Examples:
          >>> train = load(InputSpec.for_training("records/train-*", 224), batch_size=8)
          >>> blame = train.blame("runs/blame", loss="sparse_categorical_crossentropy")
          >>> model.compile("sgd", "sparse_categorical_crossentropy", metrics=[blame.metric])
          >>> history = train.fit(model, epochs=2, callbacks=[blame], verbose=0)
          >>> rest = train.spec.records.exclude(blame.hardest(3))

        Args:
          folder: the folder for ``blame.npz``, four bytes per record, which is written atomically
            at the end of each epoch and whenever `Resume` saves; a later run continues with it.
          loss: the loss that the model is compiled with: a name, a function, or a `Loss`.

        Raises:
          InputError: order "buffer" has no plan, `loss` is not a Keras loss, or the folder cannot
            be written, is damaged or belongs to other records. `fit` raises it if the callback
            belongs to another input, or the model does not compute the metric.
        """
        size, strategy = self.batch_size, self.strategy
        return Blame(self.spec, folder, loss=loss, batch_size=size, strategy=strategy)

    def _check_step(self, step: int) -> None:
        """Raises InputError unless the plan has such a step."""
        if not self.spec.has_fixed_order:
            text = "Order 'buffer' has no plan of its steps: use order 'global'."
            raise InputError(text)
        end = MAX_EPOCHS * self.steps_per_epoch if self.spec.repeat else self.steps_per_epoch
        check(0 <= step < end, "step", f"in [0, {end:,})", step)

    def __repr__(self) -> str:
        """Returns a one-line description, including what to pass to Keras."""
        kind = "train" if self.spec.repeat else "valid"
        return (
            f"<dali_tf_input.Input of {self.num_records:,} records, {self.steps_per_epoch:,}"
            f" steps of {self.batch_size} per epoch, by {self.options.backend} for"
            f" {', '.join(self.devices)}; Keras takes its `dataset`: {kind}.dataset>"
        )

    @checked
    def fit(
        self,
        model: Any,
        *,
        epochs: Count = 1,
        validation: "Input | None" = None,
        resume: Resume | Path | None = None,
        profile: bool = False,
        compare: bool = True,
        initial_epoch: Annotated[int, Within(0, 2**31 - 1)] = 0,
        steps_per_epoch: Count | None = None,
        validation_freq: Count | Sequence[Count] = 1,
        **arguments: Any,
    ) -> keras.callbacks.History:
        """Trains a Keras model on this input by `model.fit`.

        Another call continues with the next epoch of the records. One pipeline serves all epochs.

        Args:
          model: a compiled `keras.Model`, made under the strategy's scope if there is a strategy.
          epochs: number of epochs, at least 1; with `resume`, the total, including those before.
          validation: an `Input` for evaluation, evaluated after each epoch.
          resume: a folder, or a `Resume`, that keeps the state; training continues from it. On
            SIGTERM the state is saved after the step that is running, and the program ends.
          profile: whether to add "images_per_second" to the logs of each epoch.
          compare: whether `validation` must agree with this input: in the names of the classes, the
            form of labels, the scale of pixels, and the names of the model's inputs. It also warns
            of records in both, smoothed labels in validation, a model with more outputs than
            classes have names, and one that normalizes pixels once more.
          initial_epoch: the epoch at which to start, of the model and of the records; at least 0,
            and below `epochs`.
          steps_per_epoch: number of steps in an epoch, at least 1; None is all of the records.
          validation_freq: after how many epochs to validate; or a list of the epochs, from 1.
          **arguments: further arguments for `model.fit`, such as `callbacks`. `class_weight` works
            under strategies too.

        Returns:
          Keras's History of all epochs, including those before a resume.

        Raises:
          BadRecordError: (an InputError) a record stops the input.
          InputError: this input is for evaluation, the model belongs to another strategy, it is not
            compiled, it does not take these images or its loss these labels, an argument is not one
            of `model.fit`, `resume` cannot restore the state (see `Resume.restore`), or another
            training run is using its folder.
        """
        check_model(model, self.strategy)
        if not self.spec.repeat:
            raise InputError(
                "`fit` needs an input for training, InputSpec.for_training(...); this one is for"
                " evaluation: train.fit(model, validation=valid)."
            )
        _check_arguments("fit", arguments, _NOT_FOR_FIT)
        check(initial_epoch < epochs, "initial_epoch", f"below `epochs` {epochs}", initial_epoch)
        if validation is not None and "validation_data" in arguments:
            raise InputError("`validation` and `validation_data` are the same: pass one of them.")
        held_out = arguments.pop("validation_data", None) if validation is None else validation
        if isinstance(held_out, Input) and compare:
            meetings.check_agreement(self.spec, held_out.spec, ("Training", "validation"))
        self.check_fits(model)
        if isinstance(held_out, Input):
            held_out.check_evaluation(model)
        check_blames(model, arguments.get("callbacks"))
        spec = self.spec
        if (class_weight := arguments.pop("class_weight", None)) is not None:
            spec = dataclasses.replace(spec, class_weight=class_weight)  # Keras's maps the dataset
        if compare:
            valid_spec = held_out.spec if isinstance(held_out, Input) else None
            doubts = [*find_doubts(model, spec), *meetings.find_doubts(self.spec, valid_spec)]
            for doubt in doubts:
                _logger.warning("%s", doubt)
        if isinstance(resume, str | os.PathLike):
            resume = Resume(resume)
        arguments |= {"initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch}
        arguments["validation_freq"] = validation_freq
        note_input(model, self.spec, self.options)
        with resume.hold() if resume else contextlib.nullcontext():
            return train(
                self, model, spec, held_out, resume, epochs=epochs, profile=profile, **arguments
            )

    @checked
    def evaluate(self, model: Any, *, compare: bool = True, **arguments: Any) -> dict[str, float]:
        """Evaluates a Keras model on each record once; returns loss and metrics by name.

        Args:
          model: a compiled `keras.Model`.
          compare: whether this input must agree with the one that the model was trained on in this
            program by `fit`, as `validation` there.
          **arguments: further arguments for `model.evaluate`.

        Raises:
          BadRecordError: (an InputError) a record stops the input.
          InputError: this input is for training, has no labels, belongs to another strategy, or
            differs from the one that the model was trained on.
        """
        self.check_evaluation(model)
        if compare:
            check_noted(model, self.spec, "evaluation")
        _check_arguments("evaluate", arguments, _OF_ARRAYS)
        return self._run_pass(model, model.evaluate, {"return_dict": True, **arguments})

    @checked
    def predict(self, model: Any, *, compare: bool = True, **arguments: Any) -> Any:
        """Predicts each record once with a Keras model.

        Args:
          model: any `keras.Model` whose outputs have one row per image.
          compare: as for `evaluate`, but for labels.
          **arguments: further arguments for `model.predict`.

        Returns:
          What `model.predict` returns: one row per record, in the order of the records.

        Raises:
          BadRecordError: (an InputError) a record stops the input.
          InputError: this input is for training, belongs to another strategy, or differs from the
            one that the model was trained on.
        """
        self._check_serves_once(model)
        if compare:
            check_noted(model, self.spec, "prediction")
        self._check_inputs(model)
        _check_arguments("predict", arguments, _OF_ARRAYS)
        return self._run_pass(model, model.predict, arguments)

    @checked
    def profile(self, model: keras.Model, *, steps: Count = 50) -> InputProfile:
        """Measures how much of a training step is spent waiting for this input.

        It times steps on the input and the same number on a single batch; then it restores the
        model. On a CPU, the model also runs slower while the input is being prepared; that counts
        as waiting.

        Args:
          model: a model compiled with steps_per_execution=1 and trained for at least one step.
          steps: number of steps to time in each case, at least 1.

        Raises:
          InputError: the model does not meet these conditions, or belongs to another strategy.
        """
        check_model(model, self.strategy)
        self.check_fits(model)
        return profile_input(
            iter(self.make_endless(self._spec_at(self.next_step), self.next_step)),
            model,
            batch_size=self.batch_size,
            steps=steps,
        )

    @property
    def next_step(self) -> int:
        """The step at which the next epoch starts."""
        return max(cursor.step for cursor in self._cursors)

    @next_step.setter
    def next_step(self, step: int) -> None:
        for cursor in self._cursors:
            cursor.step = step

    def make_endless(self, spec: InputSpec, step: int) -> Any:
        """Makes a dataset of all replicas that starts at a step and never ends."""
        return self._make_dataset(spec, [StepCursor(step) for _ in self.devices], endless=True)

    def _make_dataset(self, spec: InputSpec, cursors: list[StepCursor], *, endless: bool) -> Any:
        streams = [
            Stream(
                spec=spec,
                shard_batch_size=self.batch_size // len(cursors),
                shard=Shard(number, len(cursors)),
                cursor=cursor,
                endless=endless,
            )
            for number, cursor in enumerate(cursors)
        ]
        return strategies.make_dataset(streams, self.strategy, self.options, self.devices)

    def _check_serves_once(self, model: keras.Model) -> None:
        check_model(model, self.strategy)
        if self.spec.repeat:
            raise InputError(
                "To evaluate or predict needs an input that serves each record once:"
                " InputSpec.for_evaluation(...)."
            )

    def check_evaluation(self, model: keras.Model) -> None:
        """Raises InputError unless this input can evaluate `model`."""
        self._check_serves_once(model)
        self.check_fits(model)

    def check_fits(self, model: keras.Model) -> None:
        """Raises InputError unless a model can be trained or evaluated on such batches."""
        check_compiled(model)
        self._check_inputs(model)
        check_labels(model, self.spec.label_range)
        check_targets(model, self.spec)

    def _check_inputs(self, model: keras.Model) -> None:
        outputs = self.spec.outputs.items()
        targets = ("label", "mask", "weight")
        check_inputs(model, {name: shape for name, (shape, _) in outputs if name not in targets})

    def _run_pass(
        self, model: keras.Model, run: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Returns what `model.evaluate` or `model.predict` does."""
        counter = StepCounter()
        callbacks = keras.tree.flatten(arguments.pop("callbacks", None) or [])
        try:
            return run(self.dataset, callbacks=[*callbacks, counter], **arguments)
        except tf.errors.OpError as error:
            raise self.explain(error, counter.tested or 0, model) from error

    def explain(
        self, error: tf.errors.OpError, step: int, model: keras.Model | None = None
    ) -> Exception:
        """Returns the exception for a TensorFlow error; it names the record that caused it, if any.

        Args:
          error: the error that was raised while this input was iterated.
          step: number of batches served before; in training, since it began.
          model: the model that was fed, if there was one.
        """
        explained = explain(
            error,
            self._spec_at(step),
            self.options,
            batch_size=self.batch_size,
            step=step,
            num_classes=None if model is None else count_classes(model),
        )
        return explained or error


def _check_arguments(method: str, arguments: dict[str, Any], excluded: Sequence[str]) -> None:
    """Raises InputError for an argument that a method of Keras models has not, or not here."""
    if "shuffle" in arguments:
        raise InputError(_ORDERED)
    known = inspect.signature(getattr(keras.Model, method)).parameters
    check_keywords(method, arguments, [one for one in known if one not in ("self", *excluded)])
    verbose = arguments.get("verbose", "auto")
    is_known = isinstance(verbose, int | str) and verbose in ("auto", 0, 1, 2)
    check(is_known, "verbose", "'auto', 0, 1 or 2", verbose)
    for name in ("steps", "validation_steps"):
        steps = arguments.get(name)
        is_count = steps is None or (isinstance(steps, int | np.integer) and int(steps) >= 1)
        check(is_count, name, "a whole number of at least 1, or None", steps)
    given = arguments.get("callbacks")
    for callback in keras.tree.flatten(given) if given is not None else ():
        is_callback = isinstance(callback, keras.callbacks.Callback)
        check(is_callback, "callbacks", "keras.callbacks.Callback, or a list of them", callback)
