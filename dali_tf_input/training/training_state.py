"""What is kept of training: ``state.json``, and what it must fit."""

import dataclasses
import hashlib
import json
import os
import re
from typing import Any, Literal

import msgspec

from dali_tf_input.errors import InputError
from dali_tf_input.spec.input import InputSpec

STATE_NAME = "state.json"
_WEIGHTS = re.compile(r"step-\d+\.weights\.h5")  # a plain name: the file is read and removed


class State(msgspec.Struct):
    """What ``state.json`` holds."""

    step: int
    weights: str
    optimizer: str
    fingerprint: dict[str, Any]
    format: Literal["dali_tf_input training state"] = "dali_tf_input training state"
    version: Literal[3] = 3


def check_writable(folder: str) -> None:
    """Creates a folder, if it is missing; raises InputError if nothing can be written into it."""
    probe = os.path.join(folder, f".probe-{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(probe, "w", encoding="ascii"):
            pass
        os.unlink(probe)
    except OSError as error:
        raise InputError(
            f"Cannot keep the state of training in {folder}: {error}. Name another folder."
        ) from error


def read_state(folder: str, *, end: int) -> State | None:
    """Reads the state in a folder, at a step before `end`; None if there is none."""
    path = os.path.join(folder, STATE_NAME)
    try:
        with open(path, "rb") as stream:
            state = msgspec.json.decode(stream.read(), type=State)
        if not 0 <= state.step < end or not _WEIGHTS.fullmatch(state.weights):
            raise InputError(
                f"{path}: expected a step in [0, {end}) and weights step-<n>.weights.h5, found"
                f" {state.step} and {state.weights!r}. Start in another folder."
            )
        for name in ("records", "skipped"):
            if type(state.fingerprint.get(name, 0)) is not int:
                raise InputError(f"{path}: `{name}` is no number. Start in another folder.")
        os.stat(os.path.join(folder, state.weights))
    except FileNotFoundError as error:
        if error.filename == path:
            return None
        raise InputError(
            f"{path}: the weights it names are gone: {error.filename}. Start in another folder."
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError, RecursionError) as error:
        text = f"{path} is not a state of training: {error}"
        raise InputError(f"{text}. Start in another folder.") from error
    return state


def make_fingerprint(spec: InputSpec, batch_size: int) -> dict[str, Any]:
    """Returns what must stay the same for the order of the records, and what is made of them."""
    dataset = spec.records
    sizes = [(os.path.basename(file.path), file.size) for file in dataset.files]
    files = hashlib.sha256(json.dumps(sorted(sizes)).encode())
    counts = [(file.num_records, file.num_skipped) for file in dataset.files]
    index = hashlib.sha256(json.dumps(counts).encode())
    for file in dataset.files:
        with open(file.index_file, "rb") as stream:
            index.update(stream.read())
    fields = {
        field.name: repr(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in ("records", "preprocess", "buffer_size")
    }
    preprocess = {
        f"preprocess.{field.name}": repr(getattr(spec.preprocess, field.name))
        for field in dataclasses.fields(spec.preprocess)
    }
    return {
        "records": dataset.num_records,
        "skipped": dataset.num_skipped,
        "files": files.hexdigest()[:16],
        "index": index.hexdigest()[:16],
        **fields,
        **preprocess,
        "batch_size": batch_size,
    }
