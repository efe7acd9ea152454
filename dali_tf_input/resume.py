"""Going on where training stopped: a Keras callback, and the state it keeps beside the model's weights."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import warnings
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.distribute import Distributed
from dali_tf_input.files import Path
from dali_tf_input.record_stream import MAX_EPOCHS
from dali_tf_input.spec import InputSpec
from dali_tf_input.tfrecord import InputError

_STATE_NAME = "state.json"
_FORMAT = "dali_tf_input training state"
_VERSION = 2

_logger = logging.getLogger("dali_tf_input")


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves where training stands, and takes it up there again after whatever ended it.

    ``Resume(folder, train).fit(model, epochs=...)`` is `model.fit`, begun or gone on with; a custom loop calls `set_model`,
    `restore` and, after each step, `count_step`. The folder holds the model's weights with the optimizer's
    (``step-<n>.weights.h5``) and ``state.json``, which names them: it comes last, by one rename, so a process that is killed at
    any moment leaves a state that is whole. What was done after it is done again.

    The next step sees the records that it would have seen, in the same order, with the same crops and mirrors, on either backend
    and with any number of replicas; augmentation (`auto_augment`) is drawn anew on DALI. Nothing of the steps before is read.
    Where the index leaves out more records than it did (``--on_bad=skip``, after one stopped training), the order is another one:
    training goes on at the same place of the epoch, of which some records may then come twice or not at all.
    What the state does not hold: what other callbacks know (that EarlyStopping stopped, say), TensorFlow's own random generators,
    and the bytes of the records: files of the same names, sizes and indexes count as the same.
    """

    def __init__(self, folder: Path, train: Distributed, *, save_every: int | None = None, is_chief: bool = True) -> None:
        """Reads the state, if there is one, and brings `train` to its step.

        Args:
          folder: where the state is kept; made if missing.
          train: what `distribute` returned, of order "global", at its first step.
          save_every: steps after which the state is saved, at least 1; None saves at the end of each epoch. Saving takes as long
            as writing the weights.
          is_chief: whether this process writes the state; of several workers one does, and all read it.

        Raises:
          InputError: `train` is of another order or starts elsewhere, the folder cannot be written to, its state is damaged, or
            it was left by training on other records, another spec or another global batch.
        """
        super().__init__()
        if train.spec.order != "global":
            raise InputError(f"To resume takes an `order` that is planned: 'global', got {train.spec.order!r}.")
        if train.position.step:
            raise InputError(
                f"`train` starts at step {train.position.step}: the state says where to start, leave `start_step` out."
            )
        if save_every is not None and save_every < 1:
            raise InputError(f"`save_every` must be at least 1 or None, got {save_every}.")
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._train = train
        self._is_chief = is_chief
        self._save_every = save_every or train.steps_per_epoch
        self._fingerprint = _fingerprint(train.spec, train.global_batch_size)
        if is_chief:
            _check_writable(self._folder)
        state = _read_state(self._folder, end=MAX_EPOCHS * train.steps_per_epoch)
        if state and _lost(state["fingerprint"], self._fingerprint):
            then, epoch_steps = state["fingerprint"]["records"], train.steps_per_epoch
            epoch, done = divmod(state["step"], then // train.global_batch_size)
            state["step"] = epoch * epoch_steps + min(done, epoch_steps - 1)
            _logger.warning(
                "The index leaves out %d records more than when the state was saved: training goes on at step %d, newly ordered.",
                then - train.spec.dataset.num_records,
                state["step"],
            )
        elif state:
            _check_fingerprint(state["fingerprint"], self._fingerprint, os.path.join(self._folder, _STATE_NAME))
        self._weights: str | None = state["weights"] if state else None
        self._optimizer: str | None = state["optimizer"] if state else None
        self._saved_step: int = state["step"] if state else 0
        self._epoch_start = self._saved_step
        train.position.step = self._saved_step

    @property
    def step(self) -> int:
        """How many steps of training are done."""
        return self._train.position.step

    def restore(self, model: keras.Model) -> None:
        """Brings a model, built and compiled, and the position of `train` to the state; does nothing where there is none.

        Raises:
          InputError: the model has no variables yet or is not compiled, or the weights are damaged or not of such a model.
        """
        if not self._weights:
            return
        if not model.trainable_variables or not model.compiled:
            raise InputError("`model` must be compiled and have its variables: call it on one batch of images first.")
        path = os.path.join(self._folder, self._weights)
        if self._optimizer != type(model.optimizer).__name__:
            raise InputError(
                f"{path} is of training by {self._optimizer}, the model is compiled with {type(model.optimizer).__name__}."
            )
        try:
            with model.distribute_strategy.scope(), warnings.catch_warnings():
                warnings.filterwarnings("error", message="Skipping variable loading")  # another kind of optimizer
                model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
        except (OSError, ValueError, KeyError, UserWarning) as error:
            raise InputError(
                f"{path} is damaged, or of another model or optimizer: {error} Go on with the model it was, or start in another "
                "folder."
            ) from error
        self._train.position.step = self._saved_step

    def fit(
        self, model: keras.Model, *, epochs: int, validation: Distributed | None = None, **arguments: Any
    ) -> list[keras.callbacks.History]:
        """Runs `model.fit` from the state's step until `epochs` epochs are done in all.

        Keras counts whole epochs from where it begins, so what is left of an epoch that was begun is a `fit` of its own:
        callbacks see training begin twice then (give CSVLogger ``append=True``).

        Args:
          model: built and compiled; its learning rate, if it is a variable of the optimizer, is that of the state.
          epochs: how many epochs training has, those before included.
          validation: what `distribute` returned for `validation_data`.
          **arguments: further ones for `fit`, without x, steps_per_epoch, initial_epoch, epochs and shuffle.

        Returns:
          What each `fit` returned: none, one or two.

        Raises:
          InputError: see `restore`; `steps_per_execution` does not divide the steps; the strategy is none for `fit`; or a record
            stops the input, which `Distributed.explain_errors` then names.
        """
        if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise InputError(
                "Keras's fit does not work under MultiWorkerMirroredStrategy: use a custom loop with `restore` and `count_step`, "
                "as scripts/train.py --strategy=multi_worker does."
            )
        given = {"x", "y", "steps_per_epoch", "initial_epoch", "shuffle"} & set(arguments)
        if given:
            raise InputError(f"`{min(given)}` is chosen by the state, leave it out.")
        self.restore(model)
        steps = self._train.steps_per_epoch
        if (steps % model.steps_per_execution) or (self.step % model.steps_per_execution):
            raise InputError(
                f"`steps_per_execution` must divide the {steps} steps of an epoch and the {self.step} that are done, got "
                f"{model.steps_per_execution}."
            )
        if validation is not None:
            arguments["validation_data"] = validation.dataset
        # This one counts first, so that the others see the step counted; the last one saves, with what the others changed.
        callbacks = [self, *(arguments.pop("callbacks", None) or ()), _Saver(self)]
        histories = []
        while self.step < epochs * steps:
            epoch, done = divmod(self.step, steps)
            before = self.step
            with self._train.explain_errors(model, *([validation] if validation else [])):
                history = model.fit(
                    self._train.dataset,
                    initial_epoch=epoch,
                    epochs=epoch + 1 if done else epochs,
                    steps_per_epoch=steps - done,
                    shuffle=False,
                    callbacks=callbacks,
                    **arguments,
                )
            histories.append(history)
            if model.stop_training or self.step == before:
                break
        return histories

    def count_step(self) -> None:
        """Counts a step of a custom loop; saves if it is time to, and after an epoch's last. `set_model` comes first."""
        self._train.position.step += 1
        if self.is_due or self.step % self._train.steps_per_epoch == 0:
            self.save()

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self.step >= self._saved_step + self._save_every

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the step."""
        self._epoch_start = self.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps (several, with `steps_per_execution`)."""
        self._train.position.step = self._epoch_start + batch + 1

    def save(self) -> None:
        """Saves the state now.

        Raises:
          InputError: it cannot be written; the state before is whole.
        """
        if not self._is_chief:
            self._saved_step = self.step
            return
        weights = f"step-{self.step}.weights.h5"
        path = os.path.join(self._folder, _STATE_NAME)
        written = [os.path.join(self._folder, "being-written.weights.h5"), f"{path}.new"]
        state = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "weights": weights,
            "optimizer": type(self.model.optimizer).__name__,
            "fingerprint": self._fingerprint,
        }
        try:
            self.model.save_weights(written[0], overwrite=True)
            with open(written[1], "w", encoding="utf-8") as stream:
                json.dump(state, stream, indent=2)
            os.replace(written[0], os.path.join(self._folder, weights))
            os.replace(written[1], path)
        except OSError as error:
            for file in written:
                with contextlib.suppress(OSError):
                    os.unlink(file)
            raise InputError(
                f"The state of training cannot be saved in {self._folder}: {error}."
                + (" The one before it is whole." if self._weights else "")
            ) from error
        self._weights, self._optimizer = weights, type(self.model.optimizer).__name__
        self._saved_step = self.step  # only now: what cannot be saved leaves the state before, weights and step
        for file in os.listdir(self._folder):
            if file.startswith("step-") and file.endswith(".weights.h5") and file != weights:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, file))


class _Saver(keras.callbacks.Callback):  # type: ignore[misc]
    """The last of the callbacks: saves when it is time to, and at the end of each epoch."""

    def __init__(self, resume: Resume) -> None:
        super().__init__()
        self._resume = resume

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._resume.is_due and batch + 1 < self.params["steps"]:  # the last one of an epoch is saved at its end
            self._resume.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._resume.save()


def _check_writable(folder: str) -> None:
    """Makes a folder, if it is missing; raises InputError where nothing can be written into it."""
    probe = os.path.join(folder, f".probe-{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(probe, "w", encoding="ascii"):
            pass
        os.unlink(probe)
    except OSError as error:
        raise InputError(f"Cannot keep the state of training in {folder}: {error}. Name another folder.") from error


def _read_state(folder: str, *, end: int) -> dict[str, Any] | None:
    """Reads the state in a folder, at a step before `end`; None where there is none; raises InputError if it is damaged."""
    path = os.path.join(folder, _STATE_NAME)
    try:
        with open(path, encoding="utf-8") as stream:
            state = json.load(stream)
        if (state["format"], state["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"expected {_FORMAT!r}, version {_VERSION}")
        if type(state["step"]) is not int or not 0 <= state["step"] < end or not isinstance(state["fingerprint"], dict):
            raise ValueError("no step, or no fingerprint")
        if not state["weights"].endswith(".weights.h5") or not isinstance(state["optimizer"], str):
            raise ValueError("no weights, or no optimizer")
        os.stat(os.path.join(folder, state["weights"]))
    except FileNotFoundError as error:
        if error.filename == path:
            return None
        raise InputError(f"{path}: the weights it names are gone: {error.filename}. Start in another folder.") from error
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise InputError(f"{path}: this is no state of training: {error!r}. Start in another folder.") from error
    return dict(state)


def _fingerprint(spec: InputSpec, global_batch_size: int) -> dict[str, Any]:
    """Returns what must be the same for the order of the records, and what is made of them, to be the same."""
    dataset = spec.dataset
    names = [os.path.basename(file) for file in dataset.files]
    sizes = [os.path.getsize(file) for file in dataset.files]
    files = hashlib.sha256(json.dumps(sorted(zip(names, sizes, strict=True))).encode())
    held = hashlib.sha256(json.dumps([dataset.records_per_file, dataset.left_out_per_file]).encode())
    for index_file in dataset.index_files:
        with open(index_file, "rb") as stream:
            held.update(stream.read())
    fields = {
        field.name: repr(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in ("dataset", "preprocess", "buffer_size")
    }
    preprocess = {
        f"preprocess.{field.name}": repr(getattr(spec.preprocess, field.name)) for field in dataclasses.fields(spec.preprocess)
    }
    return {
        "records": dataset.num_records,
        "left_out": sum(dataset.left_out_per_file),
        "files": files.hexdigest()[:16],
        "index": held.hexdigest()[:16],
        "label_offset": dataset.label_offset,
        **fields,
        **preprocess,
        "global_batch_size": global_batch_size,
    }


def _lost(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two fingerprints differ in nothing but that the index of the same files leaves out more records now."""
    changed = {name for name in now if then.get(name) != now[name]}
    if changed != {"records", "left_out", "index"}:
        return False
    more: int = now["left_out"] - then["left_out"]
    return more > 0 and then["records"] - now["records"] == more


def _check_fingerprint(then: dict[str, Any], now: dict[str, Any], path: str) -> None:
    """Raises InputError if two fingerprints differ."""
    other = [name for name, value in now.items() if then.get(name) != value]
    if other:
        differences = "; ".join(f"`{name}` was {then.get(name)}, is {now[name]}" for name in other)
        raise InputError(
            f"{path} was left by training with other input: {differences}. Go on with what it was, or start in another folder."
        )
