"""The losses of records, as `Input.blame` keeps them."""

import hashlib
import json
import os
import zipfile

import numpy as np
import numpy.typing as npt

from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers
from dali_tf_input.records.records import Records
from dali_tf_input.storage.staging import replace

_NAME = "blame.npz"


def read_losses(
    folder: str, records: Records
) -> tuple[npt.NDArray[np.float32], list[tuple[int, float]]]:
    """Returns the losses and spikes that `Blame` stored in a folder; missing losses are NaN.

    Raises:
      InputError: the folder belongs to other files, or is damaged.
    """
    path = os.path.join(folder, _NAME)
    try:
        with np.load(path) as stored:
            about, losses, spikes = stored["about"], stored["losses"], stored["spikes"]
        if losses.dtype != np.float32 or spikes.dtype != np.float64 or spikes.shape[1:] != (2,):
            raise ValueError("it holds other arrays")
    except FileNotFoundError:
        return np.full(records.num_all, np.nan, np.float32), []
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or name another.") from error
    if str(about) != _describe(records) or losses.shape != (records.num_all,):
        raise InputError(
            f"{path} holds the losses of other records: name another folder, or the same files."
        )
    return losses, [(int(step), float(loss)) for step, loss in spikes]


def find_hardest(losses: npt.NDArray[np.float32], records: Records) -> Integers:
    """Returns the ids of those of the records that have a loss, the largest first."""
    ids: Integers = records.ids[~np.isnan(losses[records.ids])]
    return ids[np.argsort(-losses[ids], kind="stable")]


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
