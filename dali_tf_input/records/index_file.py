"""The index of a TFRecord file: a line with the offset and the size of each record, in bytes."""

import google_crc32c
import numpy as np

from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers

_FRAME_SIZE = 16  # bytes of a record without data
_CHANGED = "{} changed since `Records.from_files` read it: {}. Call `Records.from_files` again."


def read_index(index_file: str, *, crc: int | None = None) -> bytes:
    """Reads an index file; raises InputError if that fails or its CRC-32C is not `crc`."""
    try:
        with open(index_file, "rb") as stream:
            text = stream.read()
        if crc is not None and google_crc32c.value(text) != crc:
            raise ValueError(f"its CRC-32C was {crc}")
        return text
    except (OSError, ValueError) as error:
        raise InputError(_CHANGED.format(index_file, error)) from error


def parse_index(text: bytes, index_file: str, num_records: int, file_size: int) -> Integers:
    """Returns offset and size in bytes of each record, in the order of the file: int64 (n, 2).

    Raises:
      InputError: `text` is damaged or does not hold `num_records` records, or its records overlap
        or end beyond the `file_size` bytes of their file.
    """
    try:
        extents = np.array(text.split(), dtype=np.int64).reshape(-1, 2)
        if (extents < (0, _FRAME_SIZE)).any() or (extents > file_size).any():
            raise ValueError(f"an extent is not in [0, {file_size}], or below {_FRAME_SIZE} bytes")
        starts, ends = extents[:, 0], extents.sum(1)
        if (starts[1:] < ends[:-1]).any() or (ends[-1:] > file_size).any():
            raise ValueError(f"records overlap, or end beyond {file_size} bytes")
        if len(extents) != num_records:
            raise ValueError(f"then {num_records} records, now {len(extents)}")
    except (ValueError, OverflowError) as error:
        raise InputError(_CHANGED.format(index_file, error)) from error
    return extents
