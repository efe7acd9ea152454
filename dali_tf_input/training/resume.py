"""Saving the state of training after each epoch or some steps, and resuming from it."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import keras
import msgspec
import numpy as np

from dali_tf_input import __version__
from dali_tf_input.errors import Count, InputError, Path, Within, checked
from dali_tf_input.records.class_names import find_difference
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.storage.objects import local_path
from dali_tf_input.storage.staging import locked_if_free, replace, write_whole
from dali_tf_input.storage.versions import refuse_newer
from dali_tf_input.training.description import (
    METRICS,
    Description,
    describe_model,
    find_changes,
    name_variables,
)
from dali_tf_input.training.schedule import describe_function
from dali_tf_input.training.strategies import scope_of

_STATE_NAME = "state.json"
_VERSION = 6
_ALL, _STORED = "all", "as stored"  # fingerprints of all records, and of their stored labels
_OURS = re.compile(r"step-\d+(?:-2)?\.(weights\.h5|npz)")

_logger = logging.getLogger("dali_tf_input")

Logs = dict[str, float]
Arrays = dict[str, Any]  # NumPy arrays by name


class CallbackState(msgspec.Struct):
    """What is kept of a callback.

    Attributes:
      kind: the name of its class.
      settings: the arguments that it was made with, as far as it keeps them.
      attributes: its other attributes that changed in training.
    """

    kind: str
    settings: dict[str, Any] = {}
    attributes: dict[str, Any] = {}


class State(msgspec.Struct):
    """The contents of ``state.json``.

    Attributes:
      step: number of training steps done.
      steps_per_epoch: number of steps in a Keras epoch.
      optimizer: the class name of the optimizer.
      fingerprint: values that determine the records' order and preprocessing.
      logs: the number of each finished epoch and the values that Keras logged for it.
      callbacks: what is kept of each callback.
      stopped: whether a callback stopped the training.
      model: the optimizer, loss, metrics and layers, see `describe_model`.
      epochs: how many epochs were asked for.
      initial_epoch: the epoch that training began with.
      files: the files of weights and arrays, and the SHA-256 of each.
      obsolete: files of earlier states, which may still be there.
      release: the release that wrote it.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    steps_per_epoch: Annotated[int, msgspec.Meta(ge=1)]
    optimizer: str
    fingerprint: dict[str, Any]
    logs: list[tuple[int, Logs]] = []
    callbacks: list[CallbackState] = []
    stopped: bool = False
    model: dict[str, Any] = {}
    epochs: int = 0
    initial_epoch: int = 0
    files: dict[str, str] = {}
    obsolete: list[str] = []
    format: Literal["dali_tf_input training state"] = "dali_tf_input training state"
    version: Literal[6] = 6  # `_VERSION`
    release: str = ""


class Resume:
    """Saves the state of training in a folder, and resumes from it after any interruption.

    `Input.fit` takes one, or the folder alone.

    Examples:
      >>> train = load(InputSpec.for_training("records/train-*", 224), batch_size=8)
      >>> history = train.fit(model, epochs=2, resume="runs/1", verbose=0)
      >>> resume = Resume("runs/2", save_every=1000)  # also after each thousand steps
      >>> history = train.fit(model, epochs=2, resume=resume, verbose=0)

    A resumed run sees the same records as an uninterrupted one, in the same order, with the same
    crops and mirrors, on either backend and with any number of replicas; earlier records are not
    read. Weights, optimizer, metrics, History and callbacks continue as if nothing had happened.

    The folder holds the weights of the model and the optimizer (``step-<n>.weights.h5``), arrays of
    metrics and callbacks (``step-<n>.npz``) and ``state.json``, which is renamed into place last.
    So a complete state remains even if the process is killed or the machine loses power at any
    moment. Steps after the saved one are repeated. One training at a time may use the folder.

    If the index skips more records than before (``--on_bad=skip``, after a bad record stopped
    training), the order differs: training resumes at the same point of the epoch, and some records
    of that epoch may be served twice or not at all.

    Functions, `transform` and `schedule`, are compared by their names and their source.

    The optimizer, loss and layers, with their settings, must be those of the saved state; what of
    metrics and callbacks changed is named in a warning, or refused: see docs/training.md. Weights
    that are not finite are not saved, and a warning says so.

    The state does not include TensorFlow's own random generators, private attributes of callbacks
    (such as the batches that `ModelCheckpoint(save_freq=n)` counts), or the bytes of the records:
    files of the same names, sizes and indexes count as equal.
    """

    @checked
    def __init__(
        self, folder: Path, *, save_every: Count | None = None, allow_changed_data: bool = False
    ) -> None:
        """Sets the folder, without reading or writing anything yet.

        Args:
          folder: where the state is kept; created when training begins.
          save_every: steps after which the state is saved, at least 1; None saves at the end of
            each epoch. Saving takes as long as writing the weights.
          allow_changed_data: whether the records and the spec, but not the batch size, may differ
            from those of the saved state. Training then continues in the new order, at the same
            epoch and, if it still exists, the same step; the changes are logged. If False, a
            difference raises an InputError.
        """
        self.folder = local_path("folder", folder)
        self.save_every, self.allow_changed_data = save_every, allow_changed_data
        self._saved_step = 0
        self._looked_step = 0  # when weights were last looked at, and not saved
        # The files that the last state names, and those that it replaced: a run that was killed
        # may have left some.
        self._saved_names: list[str] = []

    def __repr__(self) -> str:
        """Names the folder."""
        changes = ", allow_changed_data=True" if self.allow_changed_data else ""
        return f"Resume({self.folder!r}, save_every={self.save_every}{changes})"

    @checked
    def restore(
        self,
        model: keras.Model,
        spec: InputSpec,
        *,
        batch_size: Count,
        steps_per_epoch: Annotated[int, Within(0, 2**31 - 1)] = 0,
        schedule: str = "",
    ) -> tuple[State, Arrays]:
        """Restores a compiled model from the state, if there is one.

        A custom loop calls it before `make_dataset(..., start_step=state.step)`.

        Args:
          model: a compiled model whose variables are built.
          spec: the spec that it is trained on, with a fixed order.
          batch_size: images in a step of all replicas.
          steps_per_epoch: number of steps in a Keras epoch; 0 is all records.
          schedule: the changes for later epochs, as text.

        Returns:
          The state, at step 0 if none was saved, and the arrays that were saved with it.

        Raises:
          InputError: `spec` has no fixed order, the folder cannot be written to, its state is
            damaged or belongs to other records, another spec or another batch size, the model has
            no variables yet or is not compiled, or it or its optimizer, loss or metrics differ.
        """
        if not spec.has_fixed_order:
            raise InputError(f"Resuming needs a fixed `order`, 'global', got {spec.order!r}.")
        if not model.trainable_variables or not model.compiled:
            text = "`model` must be compiled and have its variables"
            raise InputError(f"{text}: call it on one batch of images first.")
        self._check_writable()
        steps_per_epoch = steps_per_epoch or spec.plan(batch_size).steps_per_epoch
        fingerprint = {**make_fingerprint(spec, batch_size), "schedule": schedule}
        state = self._read()
        described = describe_model(model)
        self._looked_step = 0
        if state is None:
            self._saved_step = 0
            optimizer = type(model.optimizer).__name__
            return State(0, steps_per_epoch, optimizer, fingerprint, model=described), {}
        self._check_fingerprint(state, fingerprint, batch_size, steps_per_epoch)
        self._check_model(state, model, described)
        weights, stored = self._check_files(state)
        self._saved_step = state.step
        self._load_weights(model, weights)
        with np.load(stored) as loaded:
            arrays = dict(loaded)
        self._load_seeds(model, arrays)
        return state, arrays

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Locks the folder against other trainings.

        Raises:
          InputError: another training is using the folder, or it cannot be written to.
        """
        self._check_writable()
        with locked_if_free(self._path(".lock")) as is_free:
            if not is_free:
                raise InputError(
                    f"Another training that runs now keeps its state in {self.folder}: wait until"
                    " it has ended, or name another folder."
                )
            yield

    @checked
    def is_due(self, step: int) -> bool:
        """Whether it is time to save, by `save_every`."""
        last = max(self._saved_step, self._looked_step)
        return self.save_every is not None and step >= last + self.save_every

    @checked
    def save(self, model: keras.Model, state: State, arrays: Arrays | None = None) -> None:
        """Saves a state: first the weights of `model` and the arrays, then ``state.json``.

        Weights that are not finite are not saved: a warning says so, and the last state remains.

        Raises:
          InputError: it cannot be written; the previous state remains.
        """
        if not _is_finite(model):
            kept = f"the state of step {self._saved_step} remains"
            kept = kept if self._saved_names else "nothing is saved yet"
            text = "The weights are not finite after step %d, and are not saved in %s: %s."
            _logger.warning(text, state.step, self.folder, kept)
            self._looked_step = state.step
            return
        seeds = _list_seeds(model)
        named = zip(name_variables(seeds), seeds, strict=True)
        stored = {f"seed/{name}": keras.ops.convert_to_numpy(value) for name, value in named}
        name = f"step-{state.step}"
        if f"{name}.npz" in self._saved_names:  # those of the last state stay until this one is
            name += "-2"
        names = [f"{name}.weights.h5", f"{name}.npz"]
        partial = [self._path(f"partial.{name.partition('.')[2]}") for name in names]
        try:
            model.save_weights(partial[0], overwrite=True)
            np.savez(partial[1], **stored, **(arrays or {}))
            state.files = {name: _digest(path) for name, path in zip(names, partial, strict=True)}
            replace(dict(zip(partial, map(self._path, names), strict=True)))
            state.obsolete = sorted({*self._saved_names} - {*names})
            document = {**msgspec.to_builtins(state), "release": __version__}
            document["sha256"] = _digest_document(document)
            write_whole(self._path(_STATE_NAME), json.dumps(document, indent=2))
        except OSError as error:
            for path in (*partial, self._path(f"{_STATE_NAME}.new")):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise InputError(
                f"The state of training cannot be saved in {self.folder}: {error}."
                + (" The previous state remains." if self._saved_step else "")
            ) from error
        # Only these, which the state names: other files of such names may be a callback's.
        for name in state.obsolete:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))
        self._saved_step, self._saved_names = state.step, names

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _check_writable(self) -> None:
        probe = self._path(f".probe-{os.getpid()}")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(probe, "w", encoding="ascii"):
                pass
            os.unlink(probe)
        except OSError as error:
            raise InputError(
                f"Cannot keep the state of training in {self.folder}: {error}. Name another folder."
            ) from error

    def _read(self) -> State | None:
        path = self._path(_STATE_NAME)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
            refuse_newer(path, data, _VERSION)
            document = json.loads(data)
            version = document.get("version")
            if isinstance(version, int) and version < _VERSION:
                raise InputError(
                    f"{path} is of an earlier version of dali_tf_input: finish that training with"
                    " it, or start in another folder."
                )
            digest = document.pop("sha256", None)
            if digest not in (None, _digest_document(document)):
                raise ValueError("it is damaged, as its SHA-256 says")
            state = msgspec.convert(document, State)
            kinds = sorted(match[1] for match in map(_OURS.fullmatch, state.files) if match)
            if kinds != ["npz", "weights.h5"] or len(state.files) != len(kinds):
                raise ValueError(f"its files are {[*state.files]}")
            if state.epochs and state.step > state.epochs * state.steps_per_epoch:
                raise ValueError(f"step {state.step} is after the {state.epochs} epochs")
        except FileNotFoundError:
            return None
        except InputError:
            raise
        except (
            *(OSError, ValueError, TypeError, AttributeError, RecursionError),
            msgspec.MsgspecError,
        ) as error:
            raise InputError(
                f"{path} is not a state of training: {error}. Start in another folder."
            ) from error
        self._saved_names = [*state.files, *filter(_OURS.fullmatch, state.obsolete)]
        return state

    def _check_files(self, state: State) -> list[str]:
        """Returns the paths of the weights and of the arrays, which are those that were saved."""
        for name, digest in state.files.items():
            try:
                found = _digest(self._path(name))
            except OSError as error:
                raise InputError(
                    f"{self._path(_STATE_NAME)} names {name}, which cannot be read: {error}. Start"
                    " in another folder."
                ) from error
            if found != digest:
                raise InputError(
                    f"{self._path(name)} is damaged: it is not as it was saved. Start in another"
                    " folder."
                )
        return [self._path(name) for name in sorted(state.files, reverse=True)]

    def _check_model(self, state: State, model: keras.Model, described: Description) -> None:
        """Raises InputError if the state is of another model, or adapts it to other metrics."""
        optimizer, path = type(model.optimizer).__name__, self._path(_STATE_NAME)
        if state.optimizer != optimizer:
            raise InputError(
                f"{path} belongs to training with {state.optimizer}, the model is compiled"
                f" with {optimizer}."
            )
        then, now = (
            {name: value for name, value in one.items() if not name.startswith(METRICS)}
            for one in (state.model, described)
        )
        changes = find_changes(then, now)
        others = [] if changes else find_changes(state.model, described)
        if others and not state.step % state.steps_per_epoch:
            _logger.warning("%s: training goes on, and %s.", path, "; ".join(others))
        elif changes or others:
            where = "" if changes else " It is in the middle of an epoch."
            raise InputError(
                f"{path} belongs to training of another model, or it was compiled otherwise:"
                f" {'; '.join([*changes, *others])}.{where} Use the same model, or start in another"
                " folder."
            )
        state.model = described

    def _check_fingerprint(
        self, state: State, now: dict[str, Any], batch_size: int, steps_per_epoch: int
    ) -> None:
        """Raises InputError if the state is of other input, or adapts it if that is allowed."""
        then = state.fingerprint
        changed = [name for name, value in now.items() if then.get(name) != value]
        if find_difference(then.get("class_names"), now["class_names"]) is None:
            # Names may be added, and one of the two may not know them.
            changed = [name for name in changed if name != "class_names"]
            then["class_names"] = max(
                then.get("class_names") or [], now["class_names"] or [], key=len
            )
        words = [f"`{name}` was {then.get(name)}, is {now[name]}" for name in changed]
        if not changed and state.steps_per_epoch != steps_per_epoch:
            words = [f"`steps_per_epoch` was {state.steps_per_epoch}, is {steps_per_epoch}"]
        if not words:
            return
        why, allowed = "", self.allow_changed_data and "batch_size" not in changed
        if set(changed) - {"records", "subset"} == {"skipped", "index"}:
            lost = then["records"] - now["records"]
            skipped = now["skipped"] - then["skipped"]
            if lost == skipped > 0 or (now["subset"] != _ALL and 0 <= lost <= skipped):
                more = f"{lost:,} more record{'' if lost == 1 else 's'}"
                why = f"The index skips {more} than the saved state"
        if allowed:
            why = why or f"This is other input than the saved state's: {'; '.join(words)}"
        if not why:
            remedy = "; Resume(..., allow_changed_data=True) goes on with this one"
            remedy = "" if "batch_size" in changed else remedy
            raise InputError(
                f"{self._path(_STATE_NAME)} belongs to training on other input:"
                f" {'; '.join(words)}. Use the same input, or start in another folder{remedy}."
            )
        epoch, done = divmod(state.step, state.steps_per_epoch)
        state.step = epoch * steps_per_epoch + min(done, steps_per_epoch - 1)
        state.steps_per_epoch, state.fingerprint = steps_per_epoch, now
        _logger.warning("%s: resuming at step %d, in a new order.", why, state.step)

    def _load_weights(self, model: keras.Model, path: str) -> None:
        try:
            with scope_of(model), warnings.catch_warnings():
                # Keras's word for another kind of optimizer.
                warnings.filterwarnings("error", message="Skipping variable loading")
                if not model.optimizer.built:  # LossScaleOptimizer would add variables
                    model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
        except (OSError, RuntimeError, ValueError, KeyError, UserWarning) as error:
            raise InputError(
                f"{path} belongs to another model or optimizer: {error} Use the same model, or"
                " start in another folder."
            ) from error

    def _load_seeds(self, model: keras.Model, arrays: Arrays) -> None:
        """Restores the state of random layers, and removes it from the arrays."""
        seeds = _list_seeds(model)
        names = [f"seed/{name}" for name in name_variables(seeds)]
        stored = {name: arrays.pop(name) for name in [*arrays] if name.startswith("seed/")}
        if {*names} != {*stored}:
            raise InputError(
                f"{self.folder} keeps the state of a model with {len(stored)} random layers,"
                f" such as Dropout, this one has {len(seeds)}: use the same model, or start in"
                " another folder."
            )
        with scope_of(model):
            for name, variable in zip(names, seeds, strict=True):
                variable.assign(stored[name])


def _list_seeds(model: keras.Model) -> list[keras.Variable]:
    """Returns the state of random layers such as Dropout, which is not among the weights."""
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [variable for variable in model.variables if id(variable) not in others]


def _is_finite(model: keras.Model) -> bool:
    """Whether all weights that a model learns are finite; a constant may be infinite."""
    values = map(keras.ops.convert_to_numpy, model.trainable_variables)
    return all(np.isfinite(value).all() for value in values if value.dtype.kind not in "bSU")


def _digest_document(document: dict[str, Any]) -> str:
    """Returns the SHA-256 of what ``state.json`` holds besides it."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest(path: str) -> str:
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def make_fingerprint(spec: InputSpec, batch_size: int) -> dict[str, Any]:
    """Returns the values that determine the order of the records and their preprocessing."""
    records = spec.records
    sizes = [(os.path.basename(file.path), file.size) for file in records.files]
    files = hashlib.sha256(json.dumps(sorted(sizes)).encode())
    indexes = [(file.num_records, file.num_skipped, file.index_crc) for file in records.files]
    index = hashlib.sha256(json.dumps(indexes).encode())
    fields = {
        field.name: repr(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in ("records", "preprocess", "buffer_size", "transform")
    }
    preprocess = {
        f"preprocess.{field.name}": repr(getattr(spec.preprocess, field.name))
        for field in dataclasses.fields(spec.preprocess)
    }
    labels = hashlib.sha256(records.labels.tobytes()) if records.relabeled else None
    return {
        "records": records.num_records,
        "skipped": records.num_skipped,
        "files": files.hexdigest()[:16],
        "index": index.hexdigest()[:16],
        "subset": hashlib.sha256(records.ids.tobytes()).hexdigest()[:16]
        if records.subset
        else _ALL,
        "labels": labels.hexdigest()[:16] if labels else _STORED,
        "class_names": None if spec.class_names is None else [*spec.class_names],
        **fields,
        "transform": describe_function(spec.transform) if spec.transform else "None",
        **preprocess,
        "batch_size": batch_size,
    }
