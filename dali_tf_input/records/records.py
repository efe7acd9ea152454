"""The records there are: indexed TFRecord files, and where each record is."""

import bisect
import functools
import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dali_tf_input.errors import InputError, Path, check, check_fields, checked
from dali_tf_input.records import contents, schema
from dali_tf_input.records.contents import Feature
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.index_file import Integers, parse_index, read_index
from dali_tf_input.records.labels import ClassLabel, Label, Lengths, Values, describe_list
from dali_tf_input.records.manifest import find_change, find_change_of_object, read_entries
from dali_tf_input.records.mirror import find_local
from dali_tf_input.records.paths import absolute, find_versions, index_command, index_files_of
from dali_tf_input.records.tfrecord import read_record, unframe_record
from dali_tf_input.storage.copies import drop_copy, find_copy, resolve_cache_dir
from dali_tf_input.storage.objects import RETRY_SECONDS, Part, Status, find_statuses, read_parts


class Extent(NamedTuple):
    """Where a record is.

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
class Records:
    """The records there are. Made by `from_files`, which checks them.

    Attributes:
      files: absolute paths, or URLs, of the TFRecord files that hold records, sorted.
      index_files: absolute path of each file's index, or of a local copy of it.
      records_per_file: how many records each index holds.
      skipped_per_file: how many bad records each index skips.
      image_key: feature key of the encoded image, a bytes_list of one value.
      label_key: feature key of the label; None if records hold none that is known.
      label_offset: subtracted from every stored label, so that classes count from 0.
      label_range: lowest and highest label that comes out, of the records that the index step
        read: all from level "schema" on, else a sample; None if not known, or not integers.
      class_counts: the classes that occur and how many records of each, if all files were checked
        at level "schema" with this key and there are at most 10,000; else None.
      largest_image: (height, width) in pixels of the tallest and of the widest image, from level
        "decode" on; else None. DALI's GPU decoder allocates memory for it.
      states: (size in bytes, time of modification in nanoseconds, CRC-32C of the index) of each
        file when it was checked, so that later changes are noticed; () notices none.
      etags: versions of the objects, of files in a store; () of local files.
      index_dir: the folder of the index files as it was named; None is beside each file.
      cache_dir: the folder of complete local copies of objects; None reads parts of them.
      retry_seconds: how long to retry an object whose store does not answer.
      features: what the records hold by key, as far as the index step read them.
    """

    files: tuple[str, ...]
    index_files: tuple[str, ...]
    records_per_file: tuple[int, ...]
    skipped_per_file: tuple[int, ...]
    image_key: str
    label_key: str | None
    label_offset: int = 0
    label_range: tuple[int, int] | None = None
    class_counts: tuple[tuple[int, int], ...] | None = None
    largest_image: tuple[int, int] | None = None
    states: tuple[tuple[int, int, int], ...] = ()
    etags: tuple[str, ...] = ()
    index_dir: str | None = None
    cache_dir: str | None = None
    retry_seconds: float = RETRY_SECONDS
    features: dict[str, Feature] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")
        for name in ("index_files", "records_per_file", "skipped_per_file", "states"):
            if len(getattr(self, name)) != len(self.files) and (self.states or name != "states"):
                raise InputError(
                    f"`{name}` must have one entry per file, {len(self.files)}, got "
                    f"{len(getattr(self, name))}."
                )

    @property
    def num_records(self) -> int:
        """How many records all files hold together, without skipped ones."""
        return sum(self.records_per_file)

    @property
    def num_classes(self) -> int | None:
        """How many different labels there are, if `class_counts` are known."""
        return None if self.class_counts is None else len(self.class_counts)

    @property
    def label(self) -> Label | None:
        """The kind of label, if the records determine it; else None."""
        found = self.features.get(self.label_key or "")
        if found and found.kinds == ("int64_list",) and found.lengths == (1, 1):
            return ClassLabel(key=self.label_key)
        if found and found.kinds == ("float_list",) and found.lengths[0] == found.lengths[1]:
            return Values(key=self.label_key, size=found.lengths[0])
        return None

    @property
    def stores_pixels(self) -> bool:
        """Whether images are stored as pixels, see `make_tfrecords.py --store=pixels`."""
        return self.image_key == schema.PIXELS_KEY

    def index_text(self, file: int) -> bytes:
        """Reads the index of a file, by its number; raises InputError if it changed."""
        return read_index(self.index_files[file], crc=self._index_crc(file))

    def _index_crc(self, file: int) -> int | None:
        return self.states[file][2] if self.states else None

    def index(self, file: int) -> Integers:
        """Returns offset and size in bytes of each record of a file: int64 (records, 2)."""
        text = self.index_text(file)
        return parse_index(text, self.index_files[file], self.records_per_file[file])

    def locate(self, record: int) -> Extent:
        """Returns where a record is, by its number over all files, in [0, num_records)."""
        check(0 <= record < self.num_records, "record", f"in [0, {self.num_records})", record)
        file = bisect.bisect_right(self._ends, record)
        count = self.records_per_file[file]
        number = record - self._ends[file] + count
        index = _read_index(self.index_files[file], self._index_crc(file), count)
        return Extent(self.files[file], number, *index[number].tolist())

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [*itertools.accumulate(self.records_per_file)]

    def read(self, record: int) -> dict[str, Sequence[Any]]:
        """Reads a record, by its number: feature keys and their values, bytes, int or float.

        Raises:
          InputError: it is damaged.
          OSError: its file cannot be read.
        """
        features = decode_example(self.read_data(record))
        return {key: values for key, (_, values) in features.items()}

    def read_data(self, record: int) -> bytes:
        """Reads a record, by its number: a serialized Example; raises as `read`."""
        file, _, offset, size = self.locate(record)
        status = self.status(self.files.index(file))
        if status is None:
            return read_record(file, offset)
        copy = find_copy(file, status, self.cache_dir) if self.cache_dir else None
        if copy:
            try:
                return read_record(copy, offset)
            except (InputError, OSError):  # the object may be sound
                drop_copy(file, status, self.cache_dir or "")
        part = Part(file, status.etag, offset, offset + size)
        (framed,) = read_parts([part], retry_seconds=self.retry_seconds)
        data = unframe_record(framed)
        if data is None:
            raise InputError(f"{file}: byte {offset}: the record does not fit its CRC.")
        return data

    def status(self, file: int) -> Status | None:
        """Returns the version of an object, by the number of its file; None of a local file."""
        return Status(self.states[file][0], self.etags[file]) if self.etags else None

    def dtype_of(self, key: str) -> str:
        """Returns the type of a feature's values: "string", "float32" or "int64"."""
        kinds = self.features[key].kinds if key in self.features else ()
        return {"bytes_list": "string", "float_list": "float32"}.get("".join(kinds), "int64")

    def check_feature(self, name: str, key: str, kinds: Collection[str], lengths: Lengths) -> None:
        """Checks that records hold a list of one of `kinds` at `key`, as far as they were read.

        Raises:
          InputError: one does not; `name` is the argument that named the key.
        """

        def fits(feature: Feature | None) -> bool:
            if feature is None or not {*feature.kinds} <= {*kinds}:
                return False
            return lengths[0] <= feature.lengths[0] and feature.lengths[1] <= lengths[1]

        if not self.features:
            return  # made by hand
        if key not in self.features:
            raise schema.name_missing(name, key, self.features)
        found = self.features[key]
        if fits(found) and found.first_without is None:
            return
        place, arguments = self.index_dir, ["--verify=schema"]
        command = index_command(self.files, index_dir=place, arguments=arguments)
        versions = {file: self.status(number) for number, file in enumerate(self.files)}
        entries = read_entries(versions, self.index_files, self.files, place)
        for file, entry in zip(self.files, entries, strict=True):
            one = entry.features.get(key)
            if one is None or one.first_without is not None:
                record = one.first_without if one else 0
                problem = f"is not in record {record} of {file}"
            elif not fits(one):
                kinds_found = " or ".join(kind or "an empty feature" for kind in one.kinds)
                due = describe_list([*kinds], lengths)
                problem = f"must be {due}, found {kinds_found} of {one.lengths[1]} in {file}"
            else:
                continue
            raise InputError(f"`{name}` '{key}' {problem}. To see all that is wrong: {command}")

    def find_change(self) -> str | None:
        """Returns how the first file that changed differs from what was indexed; None if none."""
        there = find_statuses(self.files) if self.etags else {}
        for number, (file, state) in enumerate(zip(self.files, self.states, strict=False)):
            status = self.status(number)
            change = find_change(file, *state[:2]) if status is None else None
            change = find_change_of_object(file, there.get(file), status) if status else change
            if change:
                return change
        return None

    @classmethod
    @checked
    def from_files(
        cls,
        files: Path | Sequence[Path],
        *,
        index_dir: Path | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        label_offset: int = 0,
        cache_dir: Path | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> "Records":
        """Describes indexed TFRecord files by the manifest beside their indexes.

        It checks that no file and no index has changed since it was indexed. What each record holds
        is known as far as the index step checked: of a sample of each file, or of all records from
        level "schema" on. Below that level, if another record lacks the label, tf.data stops but
        DALI serves an arbitrary number.

        Args:
          files: a path, a URL of an object (s3://, gs://, az://, https://), a pattern, or several
            of them. Index files that match are ignored.
          index_dir: the folder of the index files, which may be in a store; None means beside each
            file, as ``<file>.idx``.
          image_key: feature key of the image; None finds TF-slim's "image/encoded" or tfds'
            "image".
          label_key: feature key of the label; None finds TF-slim's "image/class/label" or tfds'
            "label".
          label_offset: the label of the first class as stored, subtracted from every label; 1 for
            TF-slim's ImageNet.
          cache_dir: a local folder for complete copies of stored objects, which processes may
            share. Every order then reads the copies. None reads ranges of the objects, which order
            "buffer" cannot.
          retry_seconds: how long to retry an object whose store does not answer.

        Raises:
          InputError: no file matches, an index is missing, a file or its index changed, a record
            lacks the image, or a label is below `label_offset`. `InputSpec` checks labels.
        """
        # Absolute, as a program may change its folder.
        found = {absolute(file): status for file, status in find_versions(files).items()}
        stores = {status is not None for status in found.values()}
        check(len(stores) == 1, "files", "all local, or all in a store", files)
        index_files = tuple(map(absolute, index_files_of([*found], index_dir=index_dir)))
        index_files = find_local(index_files)
        read = read_entries(found, index_files, files, index_dir)
        entries = dict(zip(found, read, strict=True))
        summary = contents.summarize(entries)
        command = index_command(files, index_dir=index_dir, arguments=["--verify=schema"])
        if not summary.records:
            raise InputError(
                f"All {summary.skipped:,} records of these {summary.files:,} files are skipped: the"
                " index has no valid records."
            )
        features = summary.features
        if not features:
            raise InputError(
                "The first records of these files are not Examples with features. To see what they"
                f" are: {command}"
            )
        for file, entry in entries.items():
            if entry.records and not entry.parsed:
                text = f"The first record of {file} is not a tf.train.Example"
                raise InputError(f"{text}. To see all that is wrong: {command}")
        keys = {"image_key": image_key, "label_key": label_key}
        image_key, label_key = schema.find_keys(features, **keys)
        if not image_key:
            raise schema.name_keys(features)
        held = [file for file in found if entries[file].records]  # DALI refuses an empty index

        def collect(what: str, name: str, key: str) -> list[Any]:
            """Returns what is known of each file; nothing if it is not known of all."""
            checked = [entries[file] for file in held if entries[file].checked_by.get(name) == key]
            found = [one for one in (getattr(entry, what) for entry in checked) if one]
            return found if len(found) == len(held) else []

        known = contents.merge_labels(collect("labels", "label_key", label_key or ""))
        sized = contents.merge_images(collect("images", "image_key", image_key))
        label = features.get(label_key or "")
        found_range = label.range if label and label.kinds == ("int64_list",) else None
        low, high = found_range or (label_offset, 0)
        if low < label_offset:
            raise InputError(
                f"`label_offset` must be at most the lowest label, {low:g}, got "
                f"{label_offset}: it is subtracted from every label, and classes count from 0."
            )
        by_file = dict(zip(found, index_files, strict=True))
        made = cls(
            files=tuple(held),
            index_files=tuple(by_file[file] for file in held),
            records_per_file=tuple(entries[file].records for file in held),
            states=tuple(
                (entries[file].size, entries[file].mtime_ns, entries[file].index_crc)
                for file in held
            ),
            etags=tuple(entries[file].etag or "" for file in held) if stores == {True} else (),
            index_dir=None if index_dir is None else absolute(os.fspath(index_dir)),
            cache_dir=resolve_cache_dir(cache_dir) if stores == {True} else None,
            retry_seconds=retry_seconds,
            skipped_per_file=tuple(entries[file].skipped for file in held),
            image_key=image_key,
            label_key=label_key,
            label_offset=label_offset,
            label_range=found_range and (int(low) - label_offset, int(high) - label_offset),
            class_counts=known.counts and tuple((one - label_offset, n) for one, n in known.counts)
            if known
            else None,
            largest_image=sized.largest_size if sized else None,
            features=features,
        )
        made.check_feature("image_key", image_key, ("bytes_list",), (1, 1))
        return made


@functools.lru_cache(64)  # not those of thousands of files at once
def _read_index(index_file: str, crc: int | None, num_records: int) -> Integers:
    return parse_index(read_index(index_file, crc=crc), index_file, num_records)
