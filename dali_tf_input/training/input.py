"""An input that Keras trains on, evaluates and predicts: what `load` returns."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options
from dali_tf_input.spec.order import StartStep
from dali_tf_input.training.epochs import EpochDataset, Epochs
from dali_tf_input.training.failures import FailedInput, explain, find_label, skip_command
from dali_tf_input.training.strategies import check_keras, is_gpu, strategy_of

# What TensorFlow says on a CPU; on a GPU the loss is not a number.
_LABEL_RANGE = re.compile(
    r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)


class Input(NamedTuple):
    """What `load` returns; ``dataset, steps, *_ = load(...)`` unpacks it.

    Attributes:
      dataset: what Keras `fit` or a custom loop iterates: a `tf.data.Dataset`, or under a strategy
        a `tf.distribute.DistributedDataset`. It ends with its epoch, and the next iterator serves
        the next epoch; a partly consumed epoch starts again. Its `repeat()`
        has no end. Under MultiWorkerMirroredStrategy it has none either. With `spec.repeat` False
        it is TensorFlow's own, of one pass.
      steps_per_epoch: how many global batches one pass over the records fills; rounded up if
        `spec.repeat` is False.
      options: the options used; the chosen ones if None was given.
      devices: the device on which each replica's first batch arrived.
      start_step: where each new iterator of the dataset starts, with order "global"; `Resume` sets
        it.
      spec: what comes out.
      batch_size: images in a step.
    """

    dataset: EpochDataset
    steps_per_epoch: int
    options: Options
    devices: tuple[str, ...]
    start_step: StartStep
    spec: InputSpec
    batch_size: int
    strategy: tf.distribute.Strategy | None = None

    def fit(
        self,
        model: keras.Model,
        *,
        epochs: int,
        validation: "Input | None" = None,
        resume: Any = None,
        profile: keras.callbacks.Callback | None = None,
        **arguments: Any,
    ) -> dict[str, list[float]]:
        """Trains a Keras model: `model.fit` with what belongs to this input.

        A further call continues with the next epoch of the records; with order "buffer" and
        `class_weight`, for which Keras maps the dataset, it starts again.

        Args:
          model: compiled; made under the strategy's scope if there is a strategy.
          epochs: how many; with `resume` in all, including those before.
          validation: what `load` returned for validation, which follows each epoch.
          resume: a `Resume` of this input, which saves the state and continues from it.
          profile: an `InputProfile` of this input: images/s and the wait for input in the progress
            bar and in all logs.
          **arguments: further ones for `model.fit`, such as callbacks.

        Returns:
          Each value that Keras logs, by epoch; empty if `resume` has nothing left to do.

        Raises:
          InputError: the model belongs to another strategy, an argument to another input, or the
            input fails (see `explain_errors`).
        """
        self._check_model(model)
        self._check_labels(model)
        for name, value in (("Resume(folder, train)", resume), ("InputProfile(train)", profile)):
            if value is not None and getattr(value, "train", None) is not self:
                raise InputError(f"Expected {name} of this input, `train`, got {value!r}.")
        per_call = model.steps_per_execution
        if self.steps_per_epoch % per_call or (per_call > 1 and len(self.devices) > 1):
            raise InputError(
                f"`steps_per_execution` must divide the {self.steps_per_epoch} steps of an epoch,"
                f" and be 1 on several replicas, got {per_call}."
            )
        callbacks = keras.tree.flatten(arguments.pop("callbacks", None) or [])
        callbacks = [profile, *callbacks] if profile else callbacks
        arguments |= {"epochs": epochs, "callbacks": callbacks}
        if resume is not None:
            histories = resume.fit(model, validation=validation, **arguments)
        else:
            if validation is not None:
                arguments |= as_validation(validation, model, arguments)
            with self.explain_errors(model, *([validation] if validation else [])):
                histories = [model.fit(self.dataset, shuffle=False, **arguments)]
        found: dict[str, list[float]] = {}
        for history in histories:
            for name, values in history.history.items():
                found.setdefault(name, []).extend(values)
        return found

    def evaluate(self, model: keras.Model, **arguments: Any) -> dict[str, float]:
        """Evaluates a Keras model on one pass (`spec.repeat` False): loss and metrics by name.

        They are those of the records, each of weight 1, also where padding fills the last step: on
        several replicas, or a GPU. There this call traces the model again, without XLA. Keras's own
        `evaluate` counts the padding in plain `metrics`, and in `weighted_metrics` that are counts.

        Args:
          model: compiled.
          **arguments: further ones for `model.evaluate`.

        Raises:
          InputError: `spec.repeat` is True, the model belongs to another strategy, or the input
            fails.
        """
        self._check_one_pass(model)
        if not (self.spec.label or self.spec.mask):
            raise InputError("To evaluate needs labels or masks: this input has none.")
        exact = _without_padding(model) if self._is_weighted else contextlib.nullcontext()
        with self.explain_errors(model), exact:
            found: dict[str, float] = model.evaluate(self.dataset, return_dict=True, **arguments)
        return found

    def predict(self, model: keras.Model, **arguments: Any) -> Any:
        """Predicts one pass (`spec.repeat` False) with a Keras model.

        Args:
          model: any whose outputs have a row per image.
          **arguments: further ones for `model.predict`.

        Returns:
          What `model.predict` returns: one row per record, in the order of the records.

        Raises:
          InputError: `spec.repeat` is True, the model belongs to another strategy, or the input
            fails.
        """
        self._check_one_pass(model)
        with self.explain_errors(model):
            rows = model.predict(self.dataset, **arguments)
        return keras.tree.map_structure(lambda one: one[: self.spec.records.num_records], rows)

    def unpack(self, batch: Any) -> Any:
        """Returns a batch as (x, y, sample weights), see `InputSpec.arrange`.

        That is what `dataset` yields, but for DALI on a GPU, whose batches cannot be mapped: where
        there is more than (image, label, weight) call this in a custom loop, or in `train_step`.
        """
        flat = isinstance(self.options, DaliOptions) and self.options.device == "gpu"
        return self.spec.arrange(batch) if flat and self.spec.is_structured else batch

    @property
    def _is_weighted(self) -> bool:
        """Whether Keras must not see the weights of a pass.

        Either images of weight 0 fill the last step, or there are masks, for which a loss
        with `ignore_class` takes no weight per image.
        """
        padding = self.steps_per_epoch * self.batch_size - self.spec.records.num_records
        padded = padding > 0 and (len(self.devices) > 1 or is_gpu(self.devices[0]))
        return padded or self.spec.mask is not None

    def _check_labels(self, model: keras.Model) -> None:
        """Raises InputError if a classifier has fewer outputs than there are labels."""
        known, shape = self.spec.label_range, getattr(model, "output_shape", None)
        loss = getattr(model, "loss", None)
        name = str(getattr(loss, "name", None) or getattr(loss, "__name__", loss))
        if known and "sparse_categorical" in name and isinstance(shape, tuple):
            outputs = shape[-1]
            if isinstance(outputs, int) and outputs <= known[1]:
                raise InputError(
                    f"Labels run from {known[0]} to {known[1]}, the model has {outputs} outputs,"
                    f" for labels 0 to {outputs - 1}. {self._label_remedy(outputs)}"
                )

    def _label_remedy(self, num_classes: int) -> str:
        skip = skip_command(self.spec, self.options, num_classes)
        return (
            "Where labels count from 1, pass label=ClassLabel(offset=1) to InputSpec. To skip the"
            f" records of other labels: {skip}"
        )

    def _check_one_pass(self, model: keras.Model) -> None:
        self._check_model(model)
        if self.spec.repeat:
            raise InputError(
                "To evaluate or predict needs a pass that serves each record once:"
                " InputSpec(..., order='sequential', repeat=False)."
            )

    def _check_model(self, model: keras.Model) -> None:
        """Raises InputError unless Keras runs `model` on the devices that this input feeds."""
        if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise InputError(
                "Keras's fit, evaluate and predict do not work under MultiWorkerMirroredStrategy:"
                " use a custom loop, as in docs/distributed_training.md."
            )
        if not isinstance(model, keras.Model):
            raise InputError(
                f"`model` must be a keras.Model, got {type(model)}: for models of tf_keras call"
                " model.fit(train.dataset), their own."
            )
        if self.strategy is not None:
            check_keras("A strategy")
        own = strategy_of(model)
        if own is not self.strategy:
            if self.strategy is None:
                name = type(own).__name__
                remedy = f"load(..., strategy=...) needs the {name} of the model's scope"
            else:
                remedy = "make and compile it in `with strategy.scope():`"
            raise InputError(f"`model` was made under another strategy than this input: {remedy}.")

    @contextlib.contextmanager
    def explain_errors(self, model: keras.Model | None = None, *others: "Input") -> Iterator[None]:
        """Names a record that stops the input: ``with train.explain_errors(model): ...``.

        Args:
          model: the compiled Keras model that is trained; its optimizer counts the steps. Without
            it more records have to be checked.
          *others: further inputs that are iterated, such as that of validation.

        Raises:
          BadRecordError: (an InputError) a record cannot be read or decoded. The message holds its
            file, its number and the command that skips it.
          InputError: the input failed, but no bad record was found within a minute.
        """
        start = self.dataset.next_step if isinstance(self.dataset, Epochs) else 0
        done = _count_steps(model)
        try:
            yield
        except tf.errors.OpError as error:
            counted = _count_steps(model)
            step = None if done is None or counted is None else start + counted - done
            inputs = [FailedInput(self.spec, self.options, step, self.batch_size)]
            for one in others:
                inputs.append(FailedInput(one.spec, one.options, None, one.batch_size))
            label = _LABEL_RANGE.search(str(error.message))
            if label:
                where = find_label(inputs, int(label[1])) or "A record"
                raise InputError(
                    f"{where} has label {label[1]}, the model's classes are 0 to"
                    f" {int(label[2]) - 1}. {self._label_remedy(int(label[2]))}"
                ) from error
            found = explain(error, inputs)
            if found is None:
                raise
            raise found from error


def as_validation(
    validation: Input, model: keras.Model, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of `model.fit` that validate: the data, or callbacks with one more."""
    if not isinstance(validation, Input):
        raise InputError(f"`validation` must be what `load` returned, got {validation!r}.")
    validation._check_one_pass(model)
    if not validation._is_weighted:
        return {"validation_data": validation.dataset}
    every, steps = arguments.pop("validation_freq", 1), arguments.pop("validation_steps", None)
    callbacks = keras.tree.flatten(arguments.get("callbacks") or [])
    return {"callbacks": [_Validation(validation, every, steps), *callbacks]}


class _Validation(keras.callbacks.Callback):  # type: ignore[misc]
    """Validates at the end of an epoch, before other callbacks, where Keras would count padding."""

    def __init__(self, held_out: Input, every: Any, steps: int | None) -> None:
        super().__init__()
        self._held_out, self._every, self._steps = held_out, every, steps

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        every = self._every
        if (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every:
            found = self._held_out.evaluate(self.model, steps=self._steps, verbose=0)
            if logs is not None:
                logs |= {f"val_{name}": value for name, value in found.items()}


@contextlib.contextmanager
def _without_padding(model: keras.Model) -> Iterator[None]:
    """Lets the model's `test_step` see records only, and no weights."""
    test_step, jit_compile = model.test_step, model.jit_compile

    def step_of_records(data: Any) -> Any:
        is_record = tf.not_equal(data[-1], 0)
        parts = keras.tree.map_structure(
            lambda part: tf.boolean_mask(part, is_record), (*data[:-1],)
        )
        return tf.cond(
            tf.reduce_any(is_record),
            lambda: test_step(parts),
            model.get_metrics_result,  # of a replica that has nothing left
        )

    model.test_step, model.jit_compile = step_of_records, False
    model.make_test_function(force=True)
    try:
        yield
    finally:
        del model.test_step
        model.jit_compile = jit_compile
        model.make_test_function(force=True)


def _count_steps(model: keras.Model | None) -> int | None:
    """Returns how many steps the model's optimizer has made; None without one."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return None if iterations is None else int(keras.ops.convert_to_numpy(iterations))
