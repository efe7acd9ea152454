"""Going on where training stopped: a Keras callback, and the state it keeps beside the model's weights."""

import contextlib
import dataclasses
import hashlib
import json
import os
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.distribute import Distributed
from dali_tf_input.files import Path
from dali_tf_input.spec import InputSpec
from dali_tf_input.tfrecord import InputError

_STATE_NAME = "state.json"
_FORMAT = "dali_tf_input training state"
_VERSION = 1


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves where training stands, and takes it up there again after whatever ended it.

    ``Resume(folder, spec, train, global_batch_size=...).fit(model, epochs=...)`` is `model.fit`, begun or gone on with. The
    folder holds the model's weights with the optimizer's (``step-<n>.weights.h5``) and ``state.json``, which names them: it comes
    last, by one rename, so a process that is killed at any moment leaves a state that is whole. What was done after it is done
    again.

    The next step sees the records that it would have seen, in the same order, with the same crops and mirrors, on either backend
    and with any number of replicas; augmentation (`auto_augment`) is drawn anew on DALI. Nothing of the steps before is read.
    """

    def __init__(
        self,
        folder: Path,
        spec: InputSpec,
        train: Distributed,
        *,
        global_batch_size: int,
        save_every: int | None = None,
        is_chief: bool = True,
    ) -> None:
        """Reads the state, if there is one, and brings `train` to its step.

        Args:
          folder: where the state is kept; made if missing.
          spec: what `train` was made of; of order "global".
          train: what `distribute` returned.
          global_batch_size: images in a step.
          save_every: steps after which the state is saved, at least 1; None saves at the end of each epoch. Saving takes as long
            as writing the weights.
          is_chief: whether this process writes the state; of several workers one does, and all read it.

        Raises:
          InputError: `spec` is of another order, the folder cannot be used, its state is damaged, or it was left by training
            on other records, another spec or another global batch.
        """
        super().__init__()
        if spec.order != "global":
            raise InputError(f"To resume takes an `order` that is planned: 'global', got {spec.order!r}.")
        if save_every is not None and save_every < 1:
            raise InputError(f"`save_every` must be at least 1 or None, got {save_every}.")
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._train = train
        self._is_chief = is_chief
        self._save_every = save_every or train.steps_per_epoch
        self._fingerprint = _fingerprint(spec, global_batch_size)
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot keep the state of training in {self._folder}: {error}.") from error
        state = _read_state(self._folder)
        if state:
            _check_fingerprint(state["fingerprint"], self._fingerprint, os.path.join(self._folder, _STATE_NAME))
        self._weights: str | None = state["weights"] if state else None
        self._epoch_start = self._saved_step = state["step"] if state else 0
        train.position.step = state["step"] if state else 0

    @property
    def step(self) -> int:
        """How many steps of training are done."""
        return self._train.position.step

    def restore(self, model: keras.Model) -> None:
        """Gives a model, built and compiled, the weights of the state; does nothing where there is none.

        Raises:
          InputError: the model has no variables yet, or is not compiled.
        """
        if self._weights:
            if not model.trainable_variables or not model.compiled:
                raise InputError("`model` must be compiled and have its variables: call it on one batch of images first.")
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
                model.load_weights(os.path.join(self._folder, self._weights))

    def fit(self, model: keras.Model, *, epochs: int, **arguments: Any) -> list[keras.callbacks.History]:
        """Runs `model.fit` from the state's step until `epochs` epochs are done in all.

        Keras counts whole epochs from where it begins, so what is left of an epoch that was begun is a `fit` of its own.

        Args:
          model: built and compiled.
          epochs: how many epochs training has, those before included.
          **arguments: further ones for `fit`, without x, steps_per_epoch, initial_epoch, epochs and shuffle.

        Returns:
          What each `fit` returned: none, one or two.
        """
        if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise InputError(
                "Keras's fit does not work under MultiWorkerMirroredStrategy: use a custom loop with `restore` and `count_step`, "
                "as scripts/train.py --strategy=multi_worker does."
            )
        self.restore(model)
        steps = self._train.steps_per_epoch
        callbacks = [self, *(arguments.pop("callbacks", None) or ())]  # first, so that the others see the step counted
        histories = []
        while self.step < epochs * steps:
            epoch, done = divmod(self.step, steps)
            before = self.step
            histories.append(
                model.fit(
                    self._train.dataset,
                    initial_epoch=epoch,
                    epochs=epoch + 1 if done else epochs,
                    steps_per_epoch=steps - done,
                    shuffle=False,
                    callbacks=callbacks,
                    **arguments,
                )
            )
            if model.stop_training or self.step == before:
                break
        return histories

    def count_step(self) -> None:
        """Counts a step of a custom loop; saves if it is time to. `set_model` comes first."""
        self._train.position.step += 1
        if self.step >= self._saved_step + self._save_every:
            self.save()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the step."""
        self._epoch_start = self.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps (several, with `steps_per_execution`); saves if it is time to."""
        self._train.position.step = self._epoch_start + batch + 1
        if self.step >= self._saved_step + self._save_every:
            self.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if the last step did not."""
        if self.step > self._saved_step:
            self.save()

    def save(self) -> None:
        """Saves the state now."""
        self._saved_step = self.step
        if not self._is_chief:
            return
        weights = f"step-{self.step}.weights.h5"
        being_written = os.path.join(self._folder, "being-written.weights.h5")
        self.model.save_weights(being_written, overwrite=True)
        os.replace(being_written, os.path.join(self._folder, weights))
        state = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "weights": weights,
            "fingerprint": self._fingerprint,
        }
        path = os.path.join(self._folder, _STATE_NAME)
        with open(f"{path}.new", "w", encoding="utf-8") as stream:
            json.dump(state, stream, indent=2)
        os.replace(f"{path}.new", path)
        if self._weights and self._weights != weights:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, self._weights))
        self._weights = weights


def _read_state(folder: str) -> dict[str, Any] | None:
    """Reads the state in a folder, None where there is none; raises InputError if it is damaged."""
    path = os.path.join(folder, _STATE_NAME)
    try:
        with open(path, encoding="utf-8") as stream:
            state = json.load(stream)
        if (state["format"], state["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"expected {_FORMAT!r}, version {_VERSION}")
        if not isinstance(state["step"], int) or state["step"] < 0 or not isinstance(state["fingerprint"], dict):
            raise ValueError("a step below 0, or no fingerprint")
        os.stat(os.path.join(folder, state["weights"]))
    except FileNotFoundError as error:
        if error.filename == path:
            return None
        raise InputError(f"{path}: the weights it names are gone: {error.filename}. Start in another folder.") from error
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path}: this is no state of training: {error!r}. Start in another folder.") from error
    return dict(state)


def _fingerprint(spec: InputSpec, global_batch_size: int) -> dict[str, Any]:
    """Returns what must be the same for the order of the records, and what is made of them, to be the same."""
    dataset = spec.dataset
    names = [os.path.basename(file) for file in dataset.files]
    sizes = [os.path.getsize(file) for file in dataset.files]
    held = json.dumps([names, sizes, dataset.records_per_file, dataset.left_out_per_file])
    fields = {
        field.name: repr(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in ("dataset", "buffer_size")
    }
    return {
        "records": dataset.num_records,
        "files": hashlib.sha256(held.encode()).hexdigest(),
        "label_offset": dataset.label_offset,
        **fields,
        "global_batch_size": global_batch_size,
    }


def _check_fingerprint(then: dict[str, Any], now: dict[str, Any], path: str) -> None:
    """Raises InputError if two fingerprints differ."""
    for name, value in now.items():
        if then.get(name) != value:
            raise InputError(
                f"{path} was left by training with other input: `{name}` was {then.get(name)}, is {value}. Go on with what it "
                "was, or start in another folder."
            )
