"""Resuming training where it stopped: a Keras callback and the state that it keeps."""

import contextlib
import json
import logging
import os
import warnings
from typing import Any

import keras
import msgspec
import tensorflow as tf

from dali_tf_input.backends.reading import MAX_EPOCHS
from dali_tf_input.errors import Count, InputError, Path, checked
from dali_tf_input.storage.staging import write_whole
from dali_tf_input.training.input import Input, as_validation
from dali_tf_input.training.strategies import scope_of, strategy_of
from dali_tf_input.training.training_state import (
    STATE_NAME,
    State,
    check_writable,
    make_fingerprint,
    read_state,
)

_logger = logging.getLogger("dali_tf_input")


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the state of training, and resumes from it after an interruption of any kind.

    ``Resume(folder, train).fit(model, epochs=...)`` is `model.fit`, started or resumed. A custom
    loop calls `set_model`, `restore` and, after each step, `count_step`. The folder holds the
    weights of the model and the optimizer (``step-<n>.weights.h5``) and ``state.json``, which names
    them and is renamed into place last: a process that is killed at any moment leaves a complete
    state. Steps after the saved one are repeated.

    A resumed run sees the records that it would have seen, in the same order, with the same crops
    and mirrors, on either backend and with any number of replicas; nothing before them is read.
    `auto_augment` on DALI draws new augmentations. If the index skips more records than before
    (``--on_bad=skip``, after a bad record stopped training), the order differs: training resumes at
    the same point of the epoch, in which some records may then come twice or not at all.

    The state does not include what other callbacks know (such as EarlyStopping), TensorFlow's own
    random generators, or the bytes of the records: files of the same names, sizes and indexes count
    as equal.
    """

    @checked
    def __init__(
        self, folder: Path, train: Input, *, save_every: Count | None = None, is_chief: bool = True
    ) -> None:
        """Reads the state, if there is one, and moves `train` to its step.

        Args:
          folder: where the state is kept; created if missing.
          train: what `load` returned, with order "global", at its first step.
          save_every: steps after which the state is saved, at least 1; None saves at the end of
            each epoch. Saving takes as long as writing the weights.
          is_chief: whether this process writes the state; of several workers one does, and all read
            it.

        Raises:
          InputError: `train` has another order or starts elsewhere, the folder cannot be written
            to, or its state is damaged or belongs to other records, another spec or another global
            batch.
        """
        super().__init__()
        if train.spec.order != "global":
            raise InputError(f"Resuming needs a fixed `order`, 'global', got {train.spec.order!r}.")
        if train.start_step.step:
            raise InputError(
                f"`train` starts at step {train.start_step.step}, by `start_step` or as it was used"
                " before: the state says where to start, so call load(...) again without it."
            )
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self.train = train
        self._is_chief = is_chief
        self._save_every = save_every or train.steps_per_epoch
        self._fingerprint = make_fingerprint(train.spec, train.batch_size)
        if is_chief:
            check_writable(self._folder)
        self._state = read_state(self._folder, end=MAX_EPOCHS * train.steps_per_epoch)
        if self._state:
            self._check_fingerprint(self._state)
        self._saved_step = self._state.step if self._state else 0
        self._epoch_start = self._saved_step
        train.start_step.step = self._saved_step

    def _check_fingerprint(self, state: State) -> None:
        """Refuses the state of other input; adapts it if more records are skipped now."""
        then, now, train = state.fingerprint, self._fingerprint, self.train
        changed = [name for name, value in now.items() if then.get(name) != value]
        records, skipped = then.get("records"), then.get("skipped")
        if set(changed) == {"records", "skipped", "index"} and records and skipped is not None:
            lost = records - now["records"]
            if lost == now["skipped"] - skipped > 0:
                epoch, done = divmod(state.step, records // train.batch_size)
                steps = train.steps_per_epoch
                state.step = epoch * steps + min(done, steps - 1)
                _logger.warning(
                    "The index skips %d more records than the saved state: resuming at step %d, in"
                    " a new order.",
                    lost,
                    state.step,
                )
                return
        if changed:
            words = (f"`{name}` was {then.get(name)}, is {now[name]}" for name in changed)
            differences = "; ".join(words)
            raise InputError(
                f"{os.path.join(self._folder, STATE_NAME)} belongs to training on other input: "
                f"{differences}. Use the same input, or start in another folder."
            )

    @property
    def step(self) -> int:
        """How many steps of training are done."""
        return self.train.start_step.step

    def restore(self, model: keras.Model) -> None:
        """Restores a built and compiled model and the step, if there is a state.

        Raises:
          InputError: the model has no variables yet or is not compiled, or the weights are damaged
            or belong to another model.
        """
        if not self._state:
            return
        if not model.trainable_variables or not model.compiled:
            text = "`model` must be compiled and have its variables"
            raise InputError(f"{text}: call it on one batch of images first.")
        path = os.path.join(self._folder, self._state.weights)
        if self._state.optimizer != type(model.optimizer).__name__:
            raise InputError(
                f"{path} belongs to training with {self._state.optimizer}, the model is compiled"
                f" with {type(model.optimizer).__name__}."
            )
        try:
            with scope_of(model), warnings.catch_warnings():
                # Keras's word for another kind of optimizer.
                warnings.filterwarnings("error", message="Skipping variable loading")
                model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
        except (OSError, ValueError, KeyError, UserWarning) as error:
            raise InputError(
                f"{path} is damaged, or belongs to another model or optimizer: {error} Use the same"
                " model, or start in another folder."
            ) from error
        self.train.start_step.step = self._saved_step

    @checked
    def fit(
        self, model: keras.Model, *, epochs: int, validation: Input | None = None, **arguments: Any
    ) -> list[keras.callbacks.History]:
        """Runs `model.fit` from the state's step until `epochs` epochs are done in all.

        Keras counts whole epochs from where it starts, so the rest of an interrupted epoch is a
        `fit` of its own: callbacks see training begin twice (give CSVLogger ``append=True``).

        Args:
          model: built and compiled. Its learning rate, if a variable of the optimizer, is the
            state's.
          epochs: how many epochs training has, including those before.
          validation: what `load` returned for `validation_data`.
          **arguments: further ones for `fit`, except x, y, steps_per_epoch, initial_epoch and
            shuffle.

        Returns:
          What each `fit` returned: none, one or two.

        Raises:
          InputError: see `restore`; `steps_per_execution` does not divide the steps; the strategy
            does not work with `fit`; or a record stops the input (see
            `Input.explain_errors`).
        """
        if isinstance(strategy_of(model), tf.distribute.MultiWorkerMirroredStrategy):
            raise InputError(
                "Keras's fit does not work under MultiWorkerMirroredStrategy: use a custom loop"
                " with `restore` and `count_step`, as in docs/distributed_training.md."
            )
        given = {"x", "y", "steps_per_epoch", "initial_epoch", "shuffle"} & set(arguments)
        if given:
            raise InputError(f"`{min(given)}` follows from the state: omit it.")
        self.restore(model)
        steps, per_call = self.train.steps_per_epoch, model.steps_per_execution
        if steps % per_call or self.step % per_call:
            raise InputError(
                f"`steps_per_execution` must divide the {steps} steps of an epoch and the"
                f" {self.step} that are done, got {per_call}."
            )
        if validation is not None:
            arguments |= as_validation(validation, model, arguments)
        # This one counts first, so that the others see the step counted; the last one saves,
        # including what the others changed.
        callbacks = [self, *(arguments.pop("callbacks", None) or ()), _Saver(self)]
        histories = []
        while self.step < epochs * steps:
            epoch, done = divmod(self.step, steps)
            before = self.step
            with self.train.explain_errors(model, *([validation] if validation else [])):
                history = model.fit(
                    self.train.dataset.repeat(),
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
        """Counts a step of a custom loop, and saves when due. Needs `set_model`."""
        self.train.start_step.step += 1
        if self.is_due or self.step % self.train.steps_per_epoch == 0:
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
        self.train.start_step.step = self._epoch_start + batch + 1

    def save(self) -> None:
        """Saves the state now.

        Raises:
          InputError: it cannot be written; the previous state remains.
        """
        if not self._is_chief:
            self._saved_step = self.step
            return
        weights = f"step-{self.step}.weights.h5"
        optimizer = type(self.model.optimizer).__name__
        state = State(self.step, weights, optimizer, self._fingerprint)
        path = os.path.join(self._folder, STATE_NAME)
        partial_weights = os.path.join(self._folder, "partial.weights.h5")
        try:
            self.model.save_weights(partial_weights, overwrite=True)
            os.replace(partial_weights, os.path.join(self._folder, weights))
            write_whole(path, json.dumps(msgspec.to_builtins(state), indent=2))
        except OSError as error:
            for file in (partial_weights, f"{path}.new"):
                with contextlib.suppress(OSError):
                    os.unlink(file)
            raise InputError(
                f"The state of training cannot be saved in {self._folder}: {error}."
                + (" The previous state remains." if self._state else "")
            ) from error
        self._state, self._saved_step = state, self.step
        for file in os.listdir(self._folder):
            if file.startswith("step-") and file.endswith(".weights.h5") and file != weights:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, file))


class _Saver(keras.callbacks.Callback):  # type: ignore[misc]
    """The last of the callbacks: saves when due, and at the end of each epoch."""

    def __init__(self, resume: Resume) -> None:
        super().__init__()
        self._resume = resume

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # The last batch of an epoch is saved at the epoch's end.
        if self._resume.is_due and batch + 1 < self.params["steps"]:
            self._resume.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._resume.save()
