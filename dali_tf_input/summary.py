"""What TFRecord files hold: for each file, as the index run found it, and for many together."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["framing", "crc", "schema", "decode"]
CHECKED_BY = ("image_key", "label_key", "label_offset", "num_classes", "decoder", "max_pixels")  # see `FileEntry`
LEVELS: tuple[Level, ...] = ("framing", "crc", "schema", "decode")  # each one checks what the one before does, and more

# Feature keys of the image and of the label, as the commonest writers of TFRecords name them.
KEY_PRESETS = {"TF-slim": ("image/encoded", "image/class/label"), "tfds": ("image", "label")}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature key, over the records whose features were looked at.

    Attributes:
      kinds: the kinds of list found, sorted: "bytes_list", "float_list", "int64_list", "" for a feature without a value.
      lengths: shortest and longest list.
      records: how many records hold the key.
      first_without: number of the first record, in its file, that lacks the key; None if all hold it.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, int]
    records: int
    first_without: int | None = None


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels as stored, over records that were checked.

    Attributes:
      range: lowest and highest.
      runs: the labels that occur, as runs (first, last) of consecutive numbers; None beyond 1000 runs.
      changes: how often two neighbouring records of a file differ in label. A set sorted by label has few.
    """

    range: tuple[int, int]
    runs: tuple[tuple[int, int], ...] | None
    changes: int

    @property
    def num_classes(self) -> int | None:
        """How many different labels occur."""
        return None if self.runs is None else sum(last - first + 1 for first, last in self.runs)


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images, over records that were checked. Sizes are (height, width) in pixels, each side by itself."""

    formats: dict[str, int]
    median_size: tuple[int, int]
    largest_size: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What is known of one file.

    Attributes:
      size: bytes of the file when it was indexed.
      mtime_ns: its time of modification then, in nanoseconds.
      records: how many records the index holds.
      left_out: how many faults it leaves out; they stand in ``bad_records.jsonl``.
      left_out_bytes: bytes of the file that those take.
      index_crc: CRC-32C of the index file's bytes.
      verified: the level of checking.
      checked_by: what else the checking depended on (keys, label range, decoders): another run that asks for the same is spared.
      parsed: how many records' features were looked at: the first one below "schema".
      features: by key.
      folder: absolute path of the folder of the file, if that is not the folder of the index.
      labels: from "schema" on.
      images: from "decode" on.
    """

    size: int
    mtime_ns: int
    records: int
    left_out: int
    left_out_bytes: int
    index_crc: int
    verified: Level
    checked_by: dict[str, Any] = field(default_factory=dict)
    parsed: int
    features: dict[str, Feature]
    folder: str | None = None
    labels: Labels | None = None
    images: Images | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "FileEntry":
        """Makes an entry of what `dataclasses.asdict` and JSON made of one.

        Raises:
          ValueError, TypeError, KeyError or AttributeError: it is no such thing.
        """
        features = {
            key: Feature(
                kinds=tuple(map(_text, feature["kinds"])),
                lengths=_pair(feature["lengths"]),
                records=_count(feature["records"]),
                first_without=None if feature["first_without"] is None else _count(feature["first_without"]),
            )
            for key, feature in values["features"].items()
        }
        labels, images = values["labels"], values["images"]
        if labels is not None:
            runs = labels["runs"]
            labels = Labels(
                range=_pair(labels["range"]),
                runs=None if runs is None else tuple(map(_pair, runs)),
                changes=_count(labels["changes"]),
            )
        if images is not None:
            images = Images(
                formats={_text(name): _count(count) for name, count in images["formats"].items()},
                median_size=_pair(images["median_size"]),
                largest_size=_pair(images["largest_size"]),
            )
        if values["verified"] not in LEVELS:
            raise ValueError(f"expected one of {LEVELS}, found {values['verified']!r}")
        counts = {
            name: _count(values[name])
            for name in ("size", "mtime_ns", "records", "left_out", "left_out_bytes", "index_crc", "parsed")
        }
        return cls(
            **counts,
            verified=values["verified"],
            checked_by={_text(name): value for name, value in values["checked_by"].items() if name in CHECKED_BY},
            folder=None if values["folder"] is None else _text(values["folder"]),
            features=features,
            labels=labels,
            images=images,
        )


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected an integer, found {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r}")
    return value


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return _count(first), _count(second)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What several files hold together; sums and merges of their entries.

    `without` names, for a key that only some records hold, the (file, record number) of the first that lacks it. `median_size` of
    the images is the median of the files' medians, each file counted by its records.
    """

    files: int
    records: int
    left_out: int
    size: int
    verified: dict[str, int]
    features: dict[str, Feature]
    without: dict[str, tuple[str, int]]
    labels: Labels | None
    images: Images | None


def find_keys(features: Iterable[str], *, image_key: str | None, label_key: str | None) -> tuple[str | None, str | None]:
    """Completes the keys of image and label: those not given are those of the first of `KEY_PRESETS` that fits `features`."""
    held = set(features)
    for image, label in KEY_PRESETS.values():
        image, label = image_key or image, label_key or label
        if image in held and label in held:
            return image, label
    return image_key, label_key


def summarise(entries: dict[str, FileEntry]) -> Summary:
    """Returns what `entries`, by file, hold together."""
    features: dict[str, Feature] = {}
    without: dict[str, tuple[str, int]] = {}
    parsed = [(file, entry) for file, entry in sorted(entries.items()) if entry.parsed]
    for key in sorted({key for _, entry in parsed for key in entry.features}):
        found = [entry.features[key] for _, entry in parsed if key in entry.features]
        features[key] = Feature(
            kinds=tuple(sorted({kind for feature in found for kind in feature.kinds})),
            lengths=(min(feature.lengths[0] for feature in found), max(feature.lengths[1] for feature in found)),
            records=sum(feature.records for feature in found),
        )
        for file, entry in parsed:
            record = entry.features[key].first_without if key in entry.features else 0
            if record is not None:
                without[key] = (file, record)
                break
    values = entries.values()
    return Summary(
        files=len(entries),
        records=sum(entry.records for entry in values),
        left_out=sum(entry.left_out for entry in values),
        size=sum(entry.size for entry in values),
        verified={level: count for level in LEVELS if (count := sum(entry.verified == level for entry in values))},
        features=features,
        without=without,
        labels=_merge_labels([entry.labels for entry in values if entry.labels]),
        images=_merge_images([(entry.records, entry.images) for entry in values if entry.images]),
    )


def _merge_labels(found: list[Labels]) -> Labels | None:
    if not found:
        return None
    runs: list[tuple[int, int]] | None = None
    if all(labels.runs is not None for labels in found):
        runs = merge_runs(run for labels in found for run in labels.runs or ())
    return Labels(
        range=(min(labels.range[0] for labels in found), max(labels.range[1] for labels in found)),
        runs=None if runs is None else tuple(runs),
        changes=sum(labels.changes for labels in found),
    )


def merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins runs (first, last) of integers that overlap or touch; returns them in order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _merge_images(found: list[tuple[int, Images]]) -> Images | None:
    if not found:
        return None
    formats: Counter[str] = Counter()
    for _, images in found:
        formats.update(images.formats)
    heights, widths = (weighted_median((images.median_size[axis], records) for records, images in found) for axis in (0, 1))
    return Images(
        formats=dict(formats.most_common()),
        median_size=(heights, widths),
        largest_size=(
            max(images.largest_size[0] for _, images in found),
            max(images.largest_size[1] for _, images in found),
        ),
    )


def weighted_median(values: Iterable[tuple[int, int]]) -> int:
    """Returns the lower median of (value, how often) pairs; 0 of none."""
    counted = sorted(values)
    half = sum(count for _, count in counted) / 2
    seen = 0
    for value, count in counted:
        seen += count
        if seen >= half:
            return value
    return 0
