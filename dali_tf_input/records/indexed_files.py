"""Indexed TFRecord files, and their records by id and by name."""

import bisect
import functools
import itertools
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dali_tf_input.errors import InputError, check, checked
from dali_tf_input.random import Integers
from dali_tf_input.records import subsets
from dali_tf_input.records.class_names import MAIN_KEYS, find_class_names, find_difference
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.indexed_file import Extent, IndexedFile, Mask
from dali_tf_input.records.manifest import StoredNames, find_change, find_change_of_object
from dali_tf_input.records.tfrecord import read_record, unframe_record
from dali_tf_input.storage.copies import drop_copy, find_copy
from dali_tf_input.storage.objects import RETRY_SECONDS, ByteRange, find_object_versions, read_parts


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexedFiles:
    """Indexed TFRecord files.

    A record's id is its position among all records of the files, from 0, counting the bad ones that
    the index skips: so it stays the same when the index skips another record later. Its name, its
    file and its number there, stays the same when files are added, too.

    Attributes:
      files: the files, sorted by path.
      index_dir: the folder of the index files, as given; None means beside each file.
      cache_dir: the folder of complete local copies of stored objects; None reads byte ranges of
        the objects.
      retry_seconds: how long to retry an object whose store does not answer.
      stored_names: the names of classes in stores, as the index step found them.
    """

    files: tuple[IndexedFile, ...]
    index_dir: str | None = None
    cache_dir: str | None = None
    retry_seconds: float = RETRY_SECONDS
    stored_names: StoredNames = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")

    @property
    def num_all(self) -> int:
        """The number of records in the files, also of those that are skipped or not in the subset.

        Ids are below it.
        """
        return self._ends[-1]

    @property
    def num_skipped(self) -> int:
        """How many bad records the indexes skip."""
        return sum(file.num_skipped for file in self.files)

    @property
    def first_ids(self) -> list[int]:
        """The id of the first record of each file."""
        return [0, *self._ends[:-1]]

    @property
    def is_remote(self) -> bool:
        """Whether the files are stored objects."""
        return self.files[0].etag is not None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or URL of each file."""
        return tuple(file.path for file in self.files)

    def find_names(self, key: str | None = None) -> tuple[str, ...] | None:
        """Returns the names of classes beside the files, see `find_class_names`; None if unknown.

        Those in a store are as the last index step found them.

        Raises:
          InputError: a file of names cannot be read, is not UTF-8, or has an empty line; or files
            in several folders name a class differently.
        """
        # A folder of indexes may say what data that cannot be written to do not.
        if self.index_dir and (names := self._names_in(self.index_dir, key)):
            return names
        found: dict[str, tuple[str, ...]] = {}
        for folder in dict.fromkeys(os.path.dirname(path) for path in self.paths):
            if names := self._names_in(folder, key):
                found[folder] = names
        longest = max(found, key=lambda folder: len(found[folder]), default="")
        all_names = found.get(longest)
        for folder, names in found.items():
            number = find_difference(all_names, names)
            if number is not None and all_names:
                raise InputError(
                    f"Class {number} is {all_names[number]!r} in {longest}, and {names[number]!r}"
                    f" in {folder}: their records number classes differently. Open each by itself,"
                    " and number one like the other: records.relabel(names=other.class_names). Or,"
                    " if that is right, one.union(other, compare=False)"
                )
        return all_names

    def _names_in(self, folder: str, key: str | None) -> tuple[str, ...] | None:
        if folder.rstrip("/") not in self.stored_names:
            return find_class_names(folder, key)
        known = self.stored_names[folder.rstrip("/")]
        found = known.get("" if key is None or key in MAIN_KEYS else key)
        if isinstance(found, str):
            raise InputError(f"{found} Then index again.")
        return found

    @checked
    def find(self, names: Iterable[Any]) -> Integers:
        """Returns the ids of records: int64 (n,).

        Examples:
          >>> records = Records.from_files("records/train-*")
          >>> records.find([("train-00000-of-00001", 3)]).tolist()
          [3]

        Args:
          names: names of records as `locate` returns them, (file, number) and perhaps more; or ids,
            which are returned. A file is named by its path, or by as much of the end of its path as
            tells it from the others, such as its base name.

        Raises:
          InputError: there is no such file or record, or several files have that name.
        """
        is_array = isinstance(names, np.ndarray) and names.ndim == 1
        check(is_array or getattr(names, "shape", None) != (), "ids", "a list of ids", names)
        check(not isinstance(names, str | bytes), "ids", "a list of ids", repr(names))
        given = names if is_array else [*names]
        ids = [self._find_id(one) if isinstance(one, tuple | list) else one for one in given]
        return subsets.check_ids(subsets.check_integers("ids", ids), self.num_all)

    def _find_id(self, name: Sequence[Any]) -> int:
        """Returns the id of a record, by its name."""
        file, number = name[:2] if len(name) > 1 else ("", None)
        if not isinstance(file, str) or not isinstance(number, int | np.integer):
            raise InputError(f"`ids` must be ids, or (file, number) of records, got {name!r}.")
        paths = [path for path in self.paths if f"/{path}".endswith(f"/{file.lstrip('/')}")]
        if len(paths) != 1:
            count = f"{len(paths)} of these files have" if paths else "no file here has"
            raise InputError(f"`ids` names a record of {file!r}: {count} that name.")
        position = self.paths.index(paths[0])
        num_framed = self.files[position].num_framed
        rule = f"a number of a record of {file}, in [0, {num_framed:,})"
        check(0 <= int(number) < num_framed, "ids", rule, number)
        return self.first_ids[position] + int(number)

    @checked
    def locate(self, record: int) -> Extent:
        """Returns the location of a record, by its id: (file, number in the file, offset, size).

        Raises:
          InputError: there is no such record, or the index skips it.
        """
        file, number = self._find_file(record)
        return file.extent(number)

    def _find_file(self, record: int) -> tuple[IndexedFile, int]:
        """Returns the file of a record, and the number of the record in it."""
        check(0 <= record < self.num_all, "record", f"in [0, {self.num_all})", record)
        record = operator.index(record)  # also of NumPy
        position = bisect.bisect_right(self._ends, record)
        file = self.files[position]
        return file, record - self._ends[position] + file.num_framed

    @checked
    def read(self, record: int) -> dict[str, Sequence[Any]]:
        """Reads a record, by its id: feature keys and their values, bytes, int or float.

        Raises:
          InputError: it is damaged.
          OSError: its file cannot be read.
        """
        features = decode_example(self.read_data(record))
        return {key: values for key, (_, values) in features.items()}

    @checked
    def read_data(self, record: int) -> bytes:
        """Reads a record, by its id: a serialized Example; raises as `read`."""
        file, number = self._find_file(record)
        _, _, offset, size = file.extent(number)
        if file.version is None or file.etag is None:
            return read_record(file.path, offset)
        copy = find_copy(file.path, file.version, self.cache_dir) if self.cache_dir else None
        if copy:
            try:
                return read_record(copy, offset)
            except (InputError, OSError):  # the object may be valid
                drop_copy(file.path, file.version, self.cache_dir or "")
        part = ByteRange(file.path, file.etag, offset, offset + size)
        (framed,) = read_parts([part], retry_seconds=self.retry_seconds)
        data = unframe_record(framed)
        if data is None:
            raise InputError(f"{file.path}: byte {offset}: the record does not fit its CRC.")
        return data

    def find_change(self) -> str | None:
        """Returns how the first file that changed differs from what was indexed; None if none."""
        versions = find_object_versions(self.paths) if self.is_remote else {}
        for file in self.files:
            if file.version is None:
                change = find_change(file.path, file.size, file.mtime_ns)
            else:
                change = find_change_of_object(file.path, versions.get(file.path), file.version)
            if change:
                return change
        return None

    @property
    def _is_valid(self) -> Mask:
        """Whether the index holds each record of the files: bool, one for each id."""
        return np.concatenate([file.is_valid for file in self.files])

    @property
    def _num_valid(self) -> list[int]:
        return [file.num_records for file in self.files]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [*itertools.accumulate(file.num_framed for file in self.files)]
