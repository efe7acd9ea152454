"""A TFRecord file, its index, and the location of each of its records."""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_tf_input.random import Integers
from dali_tf_input.records.index_file import parse_index, read_index
from dali_tf_input.storage.objects import Status


class Extent(NamedTuple):
    """The location of a record.

    Attributes:
      file: its TFRecord file.
      number: its position in the file, from 0, not counting skipped records.
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
      num_skipped: how many bad records it skips.
      size: bytes of the file.
      mtime_ns: its time of modification in nanoseconds; 0 for a stored object.
      index_crc: CRC-32C of the index.
      etag: the version of a stored object; None for a local file.
      labels: the stored class of each record, packed; None if the index step did not read it.
    """

    path: str
    index_file: str
    num_records: int
    num_skipped: int
    size: int
    mtime_ns: int
    index_crc: int
    etag: str | None = None
    labels: bytes | None = field(default=None, repr=False)

    @property
    def status(self) -> Status | None:
        """The version of a stored object; None for a local file."""
        return None if self.etag is None else Status(self.size, self.etag)

    def index_text(self) -> bytes:
        """Reads the index; raises InputError if it changed."""
        return read_index(self.index_file, crc=self.index_crc)

    def index(self) -> Integers:
        """Returns offset and size in bytes of each record: int64 (num_records, 2)."""
        return parse_index(self.index_text(), self.index_file, self.num_records, self.size)

    def extent(self, number: int) -> Extent:
        """Returns the location of a record, by its number in the file."""
        return Extent(self.path, number, *_read_index(self)[number].tolist())


@functools.lru_cache(64)  # not those of thousands of files at once
def _read_index(file: IndexedFile) -> Integers:
    return file.index()
