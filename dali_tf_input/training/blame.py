"""The loss of each record, noted while a model trains: which records are hard, or mislabeled."""

import functools
import hashlib
import json
import logging
import os
import zipfile
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dali_tf_input.errors import Count, InputError, Path, checked
from dali_tf_input.records.index_file import Integers
from dali_tf_input.records.records import Records
from dali_tf_input.storage.staging import replace
from dali_tf_input.training.fit import StepCallback
from dali_tf_input.training.input import Input

_KEPT = 0.7  # of a record's loss, when it is seen again
_USUAL_STEPS, _SPIKE = 100, 8.0  # how many steps are usual, and how far a spike is off
_NAME = "blame.npz"

_logger = logging.getLogger("dali_tf_input")


class Blame(StepCallback):
    """Notes the loss of each record while `train.fit` trains, without a further pass.

    The model computes the losses of a batch by `metric`; which records they belong to is
    arithmetic, as the order of the records is planned.

    Example:
      >>> blame = Blame(train, "blame", loss="sparse_categorical_crossentropy")
      >>> model.compile("sgd", "sparse_categorical_crossentropy", metrics=[blame.metric])
      >>> history = train.fit(model, epochs=2, callbacks=[blame], verbose=0)
      >>> hard = blame.hardest(3)  # the ids
      >>> batch = train.batch_at(0)  # what a step that stood out was about
      >>> rest = train.spec.records.exclude(hard)

    Attributes:
      losses: float32, one for each id of the records' files: how large the loss of the record was
        lately, 0.7 of what it was before and 0.3 of the last time; NaN if it was never seen.
      spikes: (step, mean loss of its batch) of the steps that stood out: whose loss was above the
        median of the 100 steps before by more than 8 times their median deviation. `train.batch_at`
        has the images.
    """

    def __init__(self, train: Input, folder: Path, *, loss: Any) -> None:
        """Takes up what the folder holds.

        Args:
          train: what is trained on, in a planned order.
          folder: keeps ``blame.npz``, which is written as a whole at the end of each epoch.
          loss: the loss that the model is compiled with.

        Raises:
          InputError: order "buffer" has no plan, or the folder belongs to other files.
        """
        super().__init__()
        if not train.spec.has_fixed_order:
            raise InputError("`Blame` needs to know the records of a step: use order 'global'.")
        self._train, self._folder, self._loss = train, os.fspath(folder), loss
        self.losses, self.spikes = read_losses(self._folder, train.spec.records)
        self._epoch, self._ids = -1, train.spec.records.ids[:0]
        self._recent: list[float] = []

    @functools.cached_property
    def metric(self) -> keras.metrics.Metric:
        """What the model is compiled with, among its metrics; under the strategy's scope if any.

        Its value in the logs is the largest loss of the last batch.
        """
        return RecordLosses(
            loss=self._loss,
            batch_size=self._train.batch_size,
            num_replicas=len(self._train.devices),
        )

    @checked
    def hardest(self, num_records: Count = 50) -> Integers:
        """Returns the ids of the records with the largest losses, the largest first."""
        seen = np.flatnonzero(~np.isnan(self.losses))
        ids: Integers = seen[np.argsort(-self.losses[seen], kind="stable")][:num_records]
        return ids

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the losses of a step."""
        if not any(self.metric.losses is known for known in self.model.metrics_variables):
            text = "The model does not compute the losses of the records"
            raise InputError(f"{text}: compile it with metrics=[blame.metric].")
        losses = keras.ops.convert_to_numpy(self.metric.losses)
        step = self._start + batch
        epoch, within = divmod(step, self._train.steps_per_epoch)
        size = self._train.batch_size
        if epoch != self._epoch:
            self._ids = self._train.spec.list_ids(epoch, batch_size=size)
            self._epoch = epoch
        ids = self._ids[within * size :][:size]
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
        """Writes what is known."""
        write_losses(self._folder, self._train.spec.records, self.losses, self.spikes)


@keras.saving.register_keras_serializable(package="dali_tf_input")
class RecordLosses(keras.metrics.Metric):
    """The losses of the images of the last batch; its value is the largest.

    Attributes:
      losses: float32 (batch_size,), of the replicas one after another.
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
        compute = getattr(self._loss, "call", self._loss)
        losses = keras.ops.cast(compute(y_true, y_pred), "float32")
        losses = keras.ops.mean(keras.ops.reshape(losses, (keras.ops.shape(y_pred)[0], -1)), 1)
        size = self._batch_size // self._num_replicas
        losses = keras.ops.pad(losses, [[0, size]])[:size]  # an evaluation may have other batches
        if self._num_replicas > 1:  # the sum over the replicas joins them
            context = tf.distribute.get_replica_context()  # none where Keras only builds
            replica = context.replica_id_in_sync_group if context else 0
            places = keras.ops.one_hot(replica, self._num_replicas)
            losses = keras.ops.reshape(places[:, None] * losses, (self._batch_size,))
        self.losses.assign(losses)

    def result(self) -> Any:
        """Returns the largest loss of the last batch."""
        return keras.ops.max(self.losses)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes another one, so that a compiled model can be saved."""
        return {
            "loss": keras.losses.serialize(self._loss),
            "batch_size": self._batch_size,
            "num_replicas": self._num_replicas,
            "name": self.name,
        }


def read_losses(
    folder: str, records: Records
) -> tuple[npt.NDArray[np.float32], list[tuple[int, float]]]:
    """Returns what `Blame` keeps in a folder; losses are NaN where it has none.

    Raises:
      InputError: the folder belongs to other files, or is damaged.
    """
    path = os.path.join(folder, _NAME)
    try:
        with np.load(path) as stored:
            about, losses, spikes = stored["about"], stored["losses"], stored["spikes"]
    except FileNotFoundError:
        return np.full(records.num_all, np.nan, np.float32), []
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or name another.") from error
    if str(about) != _describe(records) or losses.shape != (records.num_all,):
        raise InputError(
            f"{path} holds the losses of other records: name another folder, or the same files."
        )
    return losses, [(int(step), float(loss)) for step, loss in spikes]


def write_losses(
    folder: str, records: Records, losses: npt.NDArray[np.float32], spikes: list[tuple[int, float]]
) -> None:
    """Writes what `read_losses` reads, as a whole."""
    path = os.path.join(folder, _NAME)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.new", "wb") as stream:
            np.savez(
                stream,
                about=_describe(records),
                losses=losses,
                spikes=np.array(spikes, np.float64).reshape(-1, 2),
            )
        replace({f"{path}.new": path})
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _describe(records: Records) -> str:
    files = [(os.path.basename(file.path), file.index_crc) for file in records.files]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
