"""The losses of records, as `Input.blame` keeps them."""

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
Losses = npt.NDArray[np.float32]


def read_losses(folder: str, records: Records) -> tuple[Losses, list[tuple[int, float]]]:
    """Returns the losses and spikes that `Blame` stored in a folder; missing losses are NaN.

    A loss belongs to the record of that number in its file, so losses stay where they are when the
    index skips another record, and when files are added.

    Raises:
      InputError: the folder belongs to other files, or is damaged.
    """
    path = os.path.join(folder, _NAME)
    losses = np.full(records.num_all, np.nan, np.float32)
    try:
        with np.load(path) as stored:
            if "files" not in stored:
                raise ValueError("an earlier version of dali_tf_input wrote it")
            files = json.loads(str(stored["files"]))
            values, spikes = stored["losses"], stored["spikes"]
        if values.dtype != np.float32 or spikes.dtype != np.float64 or spikes.shape[1:] != (2,):
            raise ValueError("it holds other arrays")
        if values.shape != (sum(num_framed for _, num_framed, _ in files),):
            raise ValueError("it does not hold a loss for each record")
    except FileNotFoundError:
        return losses, []
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or name another.") from error
    firsts = dict(zip(map(tuple, _describe(records)), records.first_ids, strict=True))
    start = 0
    for name, num_framed, framing_crc in files:
        first = firsts.get((name, num_framed, framing_crc))
        if first is None:
            raise InputError(
                f"{path} holds the losses of other records, such as the {num_framed:,} of a file"
                f" {name}: name another folder, or the same files."
            )
        losses[first : first + num_framed] = values[start : start + num_framed]
        start += num_framed
    return losses, [(int(step), float(loss)) for step, loss in spikes]


def find_hardest(losses: Losses, records: Records) -> Integers:
    """Returns the ids of those of the records that have a loss, the largest first."""
    ids: Integers = records.ids[~np.isnan(losses[records.ids])]
    return ids[np.argsort(-losses[ids], kind="stable")]


def write_losses(
    folder: str, records: Records, losses: Losses, spikes: list[tuple[int, float]]
) -> None:
    """Writes what `read_losses` reads, as a whole."""
    path = os.path.join(folder, _NAME)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.new", "wb") as stream:
            np.savez(
                stream,
                files=json.dumps(_describe(records)),
                losses=losses,
                spikes=np.array(spikes, np.float64).reshape(-1, 2),
            )
        replace({f"{path}.new": path})
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _describe(records: Records) -> list[tuple[str, int, int]]:
    """Returns what identifies each file, whatever its index skips."""
    return [
        (os.path.basename(file.path), file.num_framed, file.framing_crc) for file in records.files
    ]
