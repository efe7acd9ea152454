"""The indexed TFRecord files of a dataset and the location of each record."""

import bisect
import functools
import glob
import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dali_tf_input.errors import InputError, Path, check, checked
from dali_tf_input.records import contents, schema
from dali_tf_input.records.contents import Feature
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.index_file import Integers, parse_index, read_index
from dali_tf_input.records.labels import Lengths, describe_list
from dali_tf_input.records.manifest import find_change, find_change_of_object, read_entries
from dali_tf_input.records.mirror import find_local
from dali_tf_input.records.paths import absolute, find_versions, index_command, index_files_of
from dali_tf_input.records.tfrecord import read_record, unframe_record
from dali_tf_input.storage.copies import drop_copy, find_copy, resolve_cache_dir
from dali_tf_input.storage.objects import RETRY_SECONDS, Part, Status, find_statuses, read_parts


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
    """

    path: str
    index_file: str
    num_records: int
    num_skipped: int
    size: int
    mtime_ns: int
    index_crc: int
    etag: str | None = None

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


@checked
@dataclass(frozen=True, kw_only=True)
class Records:
    """The indexed TFRecord files of a dataset. Made by `from_files`, which checks them.

    Example:
      >>> records = Records.from_files("records/train-*")
      >>> records.num_records
      24
      >>> label = records.read(0)["image/class/label"]

    Attributes:
      files: the files that hold records, sorted by path.
      image_key: feature key of the encoded image, a bytes_list of one value.
      largest_image: (height, width) in pixels of the tallest and of the widest image, from level
        "decode" on; else None. DALI's GPU decoder allocates memory for it.
      index_dir: the folder of the index files as it was named; None is beside each file.
      cache_dir: the folder of complete local copies of stored objects; None reads parts of them.
      retry_seconds: how long to retry an object whose store does not answer.
      features: what the records hold by key, as far as the index step read them: all records from
        level "schema" on, else a sample.
    """

    files: tuple[IndexedFile, ...]
    image_key: str
    largest_image: tuple[int, int] | None = None
    index_dir: str | None = None
    cache_dir: str | None = None
    retry_seconds: float = RETRY_SECONDS
    features: dict[str, Feature] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")

    @property
    def num_records(self) -> int:
        """How many records all files hold together, without skipped ones."""
        return sum(file.num_records for file in self.files)

    @property
    def num_skipped(self) -> int:
        """How many bad records the indexes skip."""
        return sum(file.num_skipped for file in self.files)

    @property
    def is_remote(self) -> bool:
        """Whether the files are stored objects."""
        return self.files[0].etag is not None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or URL of each file."""
        return tuple(file.path for file in self.files)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names in ``labels.txt``, or tfds' ``label.labels.txt``, beside the files."""
        if self.is_remote:
            return None
        folder = glob.escape(os.path.dirname(self.files[0].path))
        for name in ("labels.txt", "label.labels.txt"):
            for path in glob.glob(os.path.join(folder, name)):
                with open(path, encoding="utf-8") as stream:
                    return tuple(stream.read().splitlines())
        return None

    @property
    def stores_pixels(self) -> bool:
        """Whether images are stored as pixels, see ``dali-tf-input convert --store=pixels``."""
        return self.image_key == schema.PIXELS_KEY

    def index(self, number: int) -> Integers:
        """Returns offset and size in bytes of each record of a file: int64 (records, 2)."""
        return self.files[number].index()

    def locate(self, record: int) -> Extent:
        """Returns the location of a record, by its number over all files, in [0, num_records)."""
        file, number = self._find_file(record)
        return Extent(file.path, number, *_read_index(file)[number].tolist())

    def _find_file(self, record: int) -> tuple[IndexedFile, int]:
        """Returns the file of a record, and the number of the record in it."""
        check(0 <= record < self.num_records, "record", f"in [0, {self.num_records})", record)
        position = bisect.bisect_right(self._ends, record)
        file = self.files[position]
        return file, record - self._ends[position] + file.num_records

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [*itertools.accumulate(file.num_records for file in self.files)]

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
        file, number = self._find_file(record)
        offset, size = _read_index(file)[number].tolist()
        if file.status is None or file.etag is None:
            return read_record(file.path, offset)
        copy = find_copy(file.path, file.status, self.cache_dir) if self.cache_dir else None
        if copy:
            try:
                return read_record(copy, offset)
            except (InputError, OSError):  # the object may be sound
                drop_copy(file.path, file.status, self.cache_dir or "")
        part = Part(file.path, file.etag, offset, offset + size)
        (framed,) = read_parts([part], retry_seconds=self.retry_seconds)
        data = unframe_record(framed)
        if data is None:
            raise InputError(f"{file.path}: byte {offset}: the record does not fit its CRC.")
        return data

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
            raise schema.missing_key_error(name, key, self.features)
        if fits(self.features[key]) and self.features[key].first_without is None:
            return
        place, arguments = self.index_dir, ["--verify=schema"]
        command = index_command(self.paths, index_dir=place, arguments=arguments)
        statuses = {file.path: file.status for file in self.files}
        index_files = [file.index_file for file in self.files]
        entries = read_entries(statuses, index_files, self.paths, place)
        for path, entry in zip(self.paths, entries, strict=True):
            feature = entry.features.get(key)
            if feature is None or feature.first_without is not None:
                record = feature.first_without if feature else 0
                problem = f"is not in record {record} of {path}"
            elif not fits(feature):
                kinds_found = " or ".join(kind or "an empty feature" for kind in feature.kinds)
                due = describe_list([*kinds], lengths)
                problem = f"must be {due}, found {kinds_found} of {feature.lengths[1]} in {path}"
            else:
                continue
            raise InputError(f"`{name}` '{key}' {problem}. To see all that is wrong: {command}")

    def find_change(self) -> str | None:
        """Returns how the first file that changed differs from what was indexed; None if none."""
        statuses = find_statuses(self.paths) if self.is_remote else {}
        for file in self.files:
            if file.status is None:
                change = find_change(file.path, file.size, file.mtime_ns)
            else:
                change = find_change_of_object(file.path, statuses.get(file.path), file.status)
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
          cache_dir: a local folder for complete copies of stored objects, which processes may
            share. Every order then reads the copies. None reads ranges of the objects, which order
            "buffer" cannot.
          retry_seconds: how long to retry an object whose store does not answer.

        Raises:
          InputError: no file matches, an index is missing, a file or its index changed, or a
            record lacks the image. `InputSpec` checks labels.
        """
        # Absolute, as a program may change its folder.
        statuses = {absolute(file): status for file, status in find_versions(files).items()}
        is_remote = {status is not None for status in statuses.values()}
        check(len(is_remote) == 1, "files", "all local, or all in a store", files)
        index_files = tuple(map(absolute, index_files_of([*statuses], index_dir=index_dir)))
        index_files = find_local(index_files)
        entries = read_entries(statuses, index_files, files, index_dir)
        summary = contents.summarize(dict(zip(statuses, entries, strict=True)))
        command = index_command(files, index_dir=index_dir, arguments=["--verify=schema"])
        if not summary.records:
            raise InputError(
                f"All {summary.skipped:,} records of these {summary.files:,} files are skipped: the"
                " index has no valid records."
            )
        if not summary.features:
            raise InputError(
                "The first records of these files are not Examples with features. To see what they"
                f" are: {command}"
            )
        for file, entry in zip(statuses, entries, strict=True):
            if entry.records and not entry.parsed:
                text = f"The first record of {file} is not a tf.train.Example"
                raise InputError(f"{text}. To see all that is wrong: {command}")
        image_key, _ = schema.find_keys(summary.features, image_key=image_key, label_key=None)
        if not image_key:
            raise schema.unknown_keys_error(summary.features)
        indexed = [
            IndexedFile(
                path=path,
                index_file=index_file,
                num_records=entry.records,
                num_skipped=entry.skipped,
                size=entry.size,
                mtime_ns=entry.mtime_ns,
                index_crc=entry.index_crc,
                etag=entry.etag,
            )
            for path, index_file, entry in zip(statuses, index_files, entries, strict=True)
            if entry.records  # DALI refuses an empty index
        ]
        images = [
            entry.images
            for entry in entries
            if entry.images and entry.checked_by.get("image_key") == image_key
        ]
        largest = contents.merge_images(images) if len(images) == len(indexed) else None
        records = cls(
            files=tuple(indexed),
            image_key=image_key,
            largest_image=largest.largest_size if largest else None,
            index_dir=None if index_dir is None else absolute(os.fspath(index_dir)),
            cache_dir=resolve_cache_dir(cache_dir) if is_remote == {True} else None,
            retry_seconds=retry_seconds,
            features=summary.features,
        )
        records.check_feature("image_key", image_key, ("bytes_list",), (1, 1))
        return records


@functools.lru_cache(64)  # not those of thousands of files at once
def _read_index(file: IndexedFile) -> Integers:
    return file.index()
