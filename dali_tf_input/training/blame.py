"""Per-record losses during training, which reveal hard and mislabeled records."""

import contextlib
import dataclasses
import functools
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dali_tf_input.errors import Count, InputError, Path, check, checked
from dali_tf_input.random import Integers
from dali_tf_input.records.losses import find_hardest, read_losses, write_losses
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.storage.objects import local_path
from dali_tf_input.training.description import describe_compiled
from dali_tf_input.training.fit import StepCallback
from dali_tf_input.training.models import check_loss

_KEPT = 0.7  # the weight of a record's previous loss when the record is seen again
_USUAL_STEPS, _SPIKE = 100, 8.0  # steps that define the usual loss; deviations that make a spike

_logger = logging.getLogger("dali_tf_input")


class Blame(StepCallback):
    """Tracks the loss of each record during `train.fit`; made by `Input.blame`.

    The model computes the losses of a batch in `metric`. The planned order of the records tells
    which records they belong to.

    Attributes:
      losses: float32, one for each record id of the files: a moving average of the record's loss,
        0.7 times the previous value plus 0.3 times the latest loss; NaN for records never seen.
      spikes: (step, mean loss of its batch) of each step whose loss exceeded the median of the
        preceding 100 steps by more than 8 times their median absolute deviation. `train.batch_at`
        returns the images.
    """

    def __init__(
        self,
        spec: InputSpec,
        folder: Path,
        *,
        loss: Any,
        batch_size: int,
        strategy: tf.distribute.Strategy | None,
    ) -> None:
        """Loads the losses that are stored in the folder, if any; see `Input.blame`."""
        super().__init__()
        if not spec.has_fixed_order:
            raise InputError("`blame` needs to know the records of a step: use order 'global'.")
        try:
            self._loss = keras.losses.get(loss)
        except (ValueError, TypeError) as error:
            raise InputError(f"`loss` {loss!r} is no loss of Keras: {error}") from error
        check(callable(self._loss), "loss", "a loss of Keras", repr(loss))
        self._spec, self._folder = spec, local_path("folder", folder)
        self._batch_size, self._strategy = batch_size, strategy
        self._per_epoch = spec.plan(batch_size).steps_per_epoch
        self.losses, self.spikes = read_losses(self._folder, spec.records)
        self.save()  # fails now, and not after an epoch, if the folder cannot be written
        self._epoch, self._spec_of_epoch = -1, spec
        self._recent: list[float] = []

    @functools.cached_property
    def metric(self) -> keras.metrics.Metric:
        """The metric to compile the model with.

        Its value in the logs is the largest loss of the last batch.
        """
        strategy = self._strategy
        # Each replica needs its own losses, also of a metric that is taken outside the scope.
        with strategy.scope() if strategy else contextlib.nullcontext():
            return RecordLosses(
                loss=self._loss,
                batch_size=self._batch_size,
                num_replicas=strategy.num_replicas_in_sync if strategy else 1,
            )

    @checked
    def hardest(self, num_records: Count = 50) -> Integers:
        """Returns the ids of the input's records with the largest losses, the largest first."""
        return find_hardest(self.losses, self._spec.records)[:num_records]

    def check_fits(self, model: keras.Model) -> None:
        """Raises InputError unless this loss fits what a model is trained on."""
        outputs = getattr(model, "outputs", None) or []
        if len(outputs) != 1 or len({"label", "mask"} & {*self._spec.outputs}) != 1:
            return  # a model that computes more, or only it knows
        try:
            check_loss(self._loss, tuple(outputs[0].shape[1:]), self._spec)
        except InputError as error:
            raise InputError(f"The loss of `blame` does not fit this training. {error}") from error

    def begin(self, offset: int, steps: int, spec: InputSpec, batch_size: int) -> None:
        """Checks that this callback belongs to the input that is trained on."""
        same = dataclasses.replace(spec, class_weight=self._spec.class_weight) == self._spec
        if not same or batch_size != self._batch_size:
            raise InputError(
                "This `blame` is of another input: its records or batches are not those of this"
                " `fit`. Make it by the `blame` of the input that is fitted."
            )
        super().begin(offset, steps, spec, batch_size)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the losses of the step's records."""
        if not any(self.metric.losses is known for known in self.model.metrics_variables):
            text = "The model does not compute the losses of the records"
            raise InputError(f"{text}: compile it with metrics=[blame.metric].")
        losses = keras.ops.convert_to_numpy(self.metric.losses)
        step = self._start + batch
        epoch = step // self._per_epoch
        if epoch != self._epoch and self.schedule:
            self._epoch, self._spec_of_epoch = epoch, self.schedule.spec_of(epoch)
        ids = self._spec_of_epoch.ids_of_step(step, batch_size=self._batch_size)
        before = self.losses[ids]
        self.losses[ids] = np.where(np.isnan(before), losses, _KEPT * before + (1 - _KEPT) * losses)
        self._note_spike(step, float(losses.mean()))

    def _note_spike(self, step: int, loss: float) -> None:
        usual = np.array(self._recent)
        self._recent = [*self._recent[1 - _USUAL_STEPS :], loss]
        if len(usual) < _USUAL_STEPS:
            return
        median = float(np.median(usual))
        deviation = float(np.median(abs(usual - median)))
        if not loss <= median + _SPIKE * deviation:  # also if it is no number
            self.spikes.append((step, loss))
            _logger.warning(
                "Step %d stands out: its loss was %.4g, the median of the %d before %.4g. Its"
                " images: train.batch_at(%d)",
                step,
                loss,
                _USUAL_STEPS,
                median,
                step,
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves the losses and spikes."""
        self.save()

    def save(self) -> None:
        """Writes the losses and spikes so far, atomically."""
        write_losses(self._folder, self._spec.records, self.losses, self.spikes)


def check_blames(model: keras.Model, callbacks: Any) -> None:
    """Raises InputError unless each `blame` among callbacks fits a model.

    It warns if the model computes losses of records that no callback keeps.
    """
    blames = [one for one in keras.tree.flatten(callbacks) if isinstance(one, Blame)]
    for blame in blames:
        blame.check_fits(model)
    if not blames and RecordLosses.__name__ in str(describe_compiled(model)):
        text = "The model is compiled with `blame.metric`, and nothing keeps it"
        _logger.warning("%s: pass callbacks=[blame].", text)


@keras.saving.register_keras_serializable(package="dali_tf_input")
class RecordLosses(keras.metrics.Metric):
    """Keeps the loss of each image of the last batch; the metric's value is the largest.

    Attributes:
      losses: float32 (batch_size,), concatenated over the replicas.
    """

    def __init__(
        self, *, loss: Any, batch_size: int, num_replicas: int, name: str = "largest_loss"
    ) -> None:
        super().__init__(name=name)
        self._loss = keras.losses.get(loss)
        self._batch_size, self._num_replicas = batch_size, num_replicas
        self.losses = self.add_variable((batch_size,), "zeros", name="losses", aggregation="sum")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Notes the losses of a batch."""
        losses = self._compute(y_true, y_pred)
        size = self._batch_size // self._num_replicas
        losses = keras.ops.pad(losses, [[0, size]])[:size]  # evaluation batches may differ in size
        if self._num_replicas > 1:  # summing over the replicas concatenates their losses
            context = tf.distribute.get_replica_context()  # None while Keras builds
            replica = context.replica_id_in_sync_group if context else 0
            places = keras.ops.one_hot(replica, self._num_replicas)
            losses = keras.ops.reshape(places[:, None] * losses, (self._batch_size,))
        self.losses.assign(losses)

    def _compute(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each image, as the model's own loss would have it."""
        y_true, y_pred = (keras.ops.convert_to_tensor(y, "float32") for y in (y_true, y_pred))
        if len(y_true.shape) + 1 == len(y_pred.shape) and y_pred.shape[-1] == 1:
            y_true = y_true[..., None]  # as Keras does for labels (n,) and outputs (n, 1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_pred = y_pred[..., None]
        losses = keras.ops.cast(getattr(self._loss, "call", self._loss)(y_true, y_pred), "float32")
        if len(losses.shape) == 0:
            raise InputError("`blame` needs a loss for each image: `loss` returns one of a batch.")
        return keras.ops.mean(keras.ops.reshape(losses, (keras.ops.shape(y_pred)[0], -1)), 1)

    def result(self) -> Any:
        """Returns the largest loss of the last batch."""
        return keras.ops.max(self.losses)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments, so that a compiled model can be saved."""
        return {
            "loss": keras.losses.serialize(self._loss),
            "batch_size": self._batch_size,
            "num_replicas": self._num_replicas,
            "name": self.name,
        }
