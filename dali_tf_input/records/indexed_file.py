"""A TFRecord file, its index, and the location of each of its records.

An index file has a line for each record: its offset and its size, in bytes.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers
from dali_tf_input.records.contents import unpack_integers
from dali_tf_input.records.paths import BAD_RECORDS_NAME
from dali_tf_input.storage.objects import ObjectVersion

Mask = npt.NDArray[np.bool_]

_FRAME_SIZE = 16  # bytes of a record without data
_CHANGED = "{} changed since `Records.from_files` read it: {}. Call `Records.from_files` again."


class Extent(NamedTuple):
    """The location of a record.

    Attributes:
      file: its TFRecord file.
      number: its number in the file, from 0, counting skipped records too.
      offset: the byte at which it starts.
      size: in bytes, with its frame.
    """

    file: str
    number: int
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """A TFRecord file and its index, as they were when the file was indexed.

    Attributes:
      path: absolute path or URL of the file.
      index_file: absolute path of its index, or of a local copy of it.
      num_records: how many records the index holds.
      skipped: the numbers of the bad records that it skips, packed.
      size: bytes of the file.
      mtime_ns: its time of modification in nanoseconds; 0 for a stored object.
      index_crc: CRC-32C of the index.
      framing_crc: CRC-32C of the index as it would be if it skipped no record, which identifies the
        records of the file.
      etag: the version of a stored object; None for a local file.
      labels: the stored class of each record, packed; None if the index step did not read it.
    """

    path: str
    index_file: str
    num_records: int
    skipped: bytes = field(repr=False)
    size: int
    mtime_ns: int
    index_crc: int
    framing_crc: int
    etag: str | None = None
    labels: bytes | None = field(default=None, repr=False)

    @functools.cached_property
    def skipped_numbers(self) -> Integers:
        """The numbers of the skipped records in the file, ascending: int64 (num_skipped,)."""
        return unpack_integers(self.skipped)

    @property
    def num_skipped(self) -> int:
        """How many bad records the index skips."""
        return len(self.skipped_numbers)

    @property
    def num_framed(self) -> int:
        """How many records the file has, including skipped ones."""
        return self.num_records + self.num_skipped

    @property
    def is_valid(self) -> Mask:
        """Whether the index holds each record of the file: bool (num_framed,)."""
        mask = np.ones(self.num_framed, bool)
        mask[self.skipped_numbers] = False
        return mask

    @property
    def version(self) -> ObjectVersion | None:
        """The version of a stored object; None for a local file."""
        return None if self.etag is None else ObjectVersion(self.size, self.etag)

    def index_text(self) -> bytes:
        """Reads the index; raises InputError if it changed."""
        return _read_text(self.index_file, crc=self.index_crc)

    def index(self) -> Integers:
        """Returns offset and size in bytes of each record: int64 (num_records, 2)."""
        return _parse_index(self.index_text(), self.index_file, self.num_records, self.size)

    def extent(self, number: int) -> Extent:
        """Returns the location of a record, by its number in the file.

        Raises:
          InputError: the index skips it.
        """
        before = int(np.searchsorted(self.skipped_numbers, number))
        if number in self.skipped_numbers[before : before + 1]:
            raise InputError(
                f"The index skips record {number:,} of {self.path}, which is bad:"
                f" {BAD_RECORDS_NAME} beside the manifest says why."
            )
        return Extent(self.path, number, *_read_index(self)[number - before].tolist())


@functools.lru_cache(64)  # not those of thousands of files at once
def _read_index(file: IndexedFile) -> Integers:
    return file.index()


def _read_text(index_file: str, *, crc: int) -> bytes:
    """Reads an index file; raises InputError if that fails or its CRC-32C is not `crc`."""
    try:
        with open(index_file, "rb") as stream:
            text = stream.read()
        if google_crc32c.value(text) != crc:
            raise ValueError(f"its CRC-32C was {crc}")
        return text
    except (OSError, ValueError) as error:
        raise InputError(_CHANGED.format(index_file, error)) from error


def _parse_index(text: bytes, index_file: str, num_records: int, file_size: int) -> Integers:
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
