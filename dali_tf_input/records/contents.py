"""The contents of TFRecord files, per file and in total, as an index run found them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from dali_tf_input.random import Integers
from dali_tf_input.records.checks import LEVELS, Level

Range = tuple[int | float, int | float]
_Number = Annotated[int, msgspec.Meta(ge=0)]  # of a manifest, which may be forged

Counts = tuple[tuple[int, _Number], ...]

MAX_CLASSES = 10_000  # that are counted


@dataclass(frozen=True, kw_only=True)
class FeatureStats:
    """One feature key, over the records whose features were read.

    Attributes:
      kinds: the kinds of list found, sorted: "bytes_list", "float_list", "int64_list", or "" for a
        feature without a value.
      lengths: shortest and longest list.
      records: how many records have the key.
      first_without: number of the first record, in its file, that lacks the key; None if all have
        it.
      range: lowest and highest value, if all are lists of numbers with a value; else None.
      counts: for an integer label checked at level "schema": the integers that occur, in order, and
        how often each one does; None above 10,000 different integers. For a mask checked at level
        "decode": the same of its pixels.
    """

    kinds: tuple[str, ...]
    lengths: tuple[_Number, _Number]
    records: _Number
    first_without: int | None = None
    range: Range | None = None
    counts: Counts | None = None


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images that were checked; the largest height and the largest width among them."""

    formats: dict[str, _Number]
    largest_size: tuple[_Number, _Number]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The manifest's entry for one file.

    Attributes:
      size: size of the file in bytes when it was indexed.
      mtime_ns: its modification time then, in nanoseconds; 0 for a stored object.
      etag: the version of a stored object; None for a local file.
      records: how many records the index holds.
      skipped: how many bad records it skips; ``bad_records.jsonl`` lists them.
      skipped_numbers: their numbers in the file, ascending, packed by `pack_integers`; None in the
        manifests of earlier versions, which must be made again.
      skipped_bytes: how many bytes of the file the skipped records take up.
      index_crc: CRC-32C of the index file's bytes.
      framing_crc: CRC-32C of the bytes that it would have if it skipped no record.
      content_crc: CRC-32C of the CRCs of the records' data, as the file stores them. With
        `framing_crc` it tells whether a file is a copy of another; None in earlier manifests.
      verified: the level of checking.
      checked_by: what else the checks depended on (keys, label range, decoders), so that a run that
        asks for the same checks need not repeat them.
      parsed: how many records had their features read; below level "schema", a sample.
      features: what is known about each feature key.
      folder: absolute path of the file's folder, if that is not the folder of the index.
      images: what is known about the images; None below level "decode".
      labels: the stored class of each record in the index, packed by `pack_integers`; for labels
        stored as names, the position in the vocabulary. None below level "schema", and for labels
        that are not a `ClassLabel`.
      turned: how many images of the `parsed` records are turned by their EXIF orientation.
    """

    size: _Number
    mtime_ns: int
    etag: str | None = None
    records: _Number
    skipped: _Number
    skipped_numbers: bytes | None = None
    skipped_bytes: _Number
    index_crc: _Number
    framing_crc: _Number = 0
    content_crc: _Number | None = None
    verified: Level
    checked_by: dict[str, Any] = field(default_factory=dict)
    parsed: _Number
    features: dict[str, FeatureStats]
    folder: str | None = None
    images: Images | None = None
    labels: bytes | None = None
    turned: _Number = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The merged entries of several files.

    `without` maps each key that only some records have to the (file, record number) of the first
    record that lacks it.
    """

    files: int
    records: int
    skipped: int
    size: int
    verified: dict[str, int]
    features: dict[str, FeatureStats]
    without: dict[str, tuple[str, int]]
    images: Images | None
    parsed: int
    turned: int


def pack_integers(integers: npt.ArrayLike) -> bytes:
    """Packs integers into bytes: first the bytes per integer, then the integers, little-endian."""
    values = np.asarray(integers, np.int64)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    size = next(n for n in (1, 2, 4, 8) if -(1 << 8 * n - 1) <= low and high < 1 << 8 * n - 1)
    return bytes([size]) + values.astype(f"<i{size}").tobytes()


def unpack_integers(packed: bytes) -> Integers:
    """Returns what `pack_integers` packed: int64 (n,); raises ValueError if it is damaged."""
    return np.frombuffer(packed[1:], np.dtype(f"<i{packed[0]}" if packed else "")).astype(np.int64)


def summarize(entries: Mapping[str, FileEntry]) -> Summary:
    """Merges the entries of several files, given by file, into a summary."""
    features: dict[str, FeatureStats] = {}
    without: dict[str, tuple[str, int]] = {}
    parsed = [(file, entry) for file, entry in sorted(entries.items()) if entry.parsed]
    for key in sorted({key for _, entry in parsed for key in entry.features}):
        for file, entry in parsed:
            record = entry.features[key].first_without if key in entry.features else 0
            if record is not None:
                without[key] = (file, record)
                break
        features[key] = merge_features([entry.features.get(key) for _, entry in parsed])
    values = entries.values()
    levels = Counter(entry.verified for entry in values)
    return Summary(
        files=len(entries),
        records=sum(entry.records for entry in values),
        skipped=sum(entry.skipped for entry in values),
        size=sum(entry.size for entry in values),
        verified={level: levels[level] for level in LEVELS if levels[level]},
        features=features,
        without=without,
        images=merge_images([entry.images for entry in values if entry.images]),
        parsed=sum(entry.parsed for entry in values),
        turned=sum(entry.turned for entry in values),
    )


def merge_features(features: Sequence[FeatureStats | None]) -> FeatureStats:
    """Merges what several sets of records say about one feature key; None is a set without it."""
    known = [feature for feature in features if feature]
    shortest, longest = zip(*(feature.lengths for feature in known), strict=True)
    firsts = (feature.first_without if feature else 0 for feature in features)
    return FeatureStats(
        kinds=tuple(sorted({kind for feature in known for kind in feature.kinds})),
        lengths=(min(shortest), max(longest)),
        records=sum(feature.records for feature in known),
        range=merge_ranges([feature.range for feature in known]),
        counts=merge_counts([feature.counts for feature in known]),
        first_without=next((first for first in firsts if first is not None), None),
    )


def merge_all_features(
    first: Mapping[str, FeatureStats], second: Mapping[str, FeatureStats]
) -> dict[str, FeatureStats]:
    """Returns what two sets of records hold together, by key."""
    keys = sorted({*first, *second})
    return {key: merge_features([first.get(key), second.get(key)]) for key in keys}


def merge_sizes(
    first: tuple[int, int] | None, second: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Returns the largest height and the largest width; None if one is unknown."""
    if not first or not second:
        return None
    return max(first[0], second[0]), max(first[1], second[1])


def merge_ranges(ranges: Sequence[Range | None]) -> Range | None:
    """Returns the lowest and the highest of some ranges; None if one of them is."""
    known = [bounds for bounds in ranges if bounds]
    if len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def merge_counts(counts: Sequence[Counts | None]) -> Counts | None:
    """Returns how often each integer occurs in all; None if that is unknown of some."""
    total: Counter[int] = Counter()
    for file_counts in counts:
        if file_counts is None:
            return None
        total.update(dict(file_counts))
    return count_classes(total.items())


def count_classes(counts: Iterable[tuple[int, int]]) -> Counts | None:
    """Returns how often each integer occurs, in order; None of more than 10,000."""
    known = tuple(sorted(counts))
    return known if len(known) <= MAX_CLASSES else None


def merge_images(file_images: list[Images]) -> Images | None:
    """Returns the images of several files together; None of none."""
    if not file_images:
        return None
    formats: Counter[str] = Counter()
    for images in file_images:
        formats.update(images.formats)
    heights, widths = zip(*(images.largest_size for images in file_images), strict=True)
    return Images(formats=dict(formats.most_common()), largest_size=(max(heights), max(widths)))
