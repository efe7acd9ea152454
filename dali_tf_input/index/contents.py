"""What TFRecord files hold, as the index run found it: each file, and all together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import msgspec

from dali_tf_input.errors import InputError

Level = Literal["framing", "crc", "schema", "decode"]
_Number = Annotated[int, msgspec.Meta(ge=0)]  # of a manifest, which may be forged

LEVELS: tuple[Level, ...] = get_args(Level)  # each one checks what the one before does, and more

# An image as it is in memory, uint8 (height, width, 3) in RGB, and the keys of its sides.
PIXELS_KEY, SIDE_KEYS = "image/pixels", ("image/height", "image/width")

# Feature keys of the image and of the label, as the most common writers of TFRecords name them.
KEY_PRESETS = {
    "TF-slim": ("image/encoded", "image/class/label"),
    "tfds": ("image", "label"),
    "raw pixels": (PIXELS_KEY, "image/class/label"),
}

# What a record must hold, as (what, argument that names its key, kind of list of one value).
REQUIRED = (("image", "image_key", "bytes_list"), ("label", "label_key", "int64_list"))


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature key, over the records whose features were read.

    Attributes:
      kinds: the kinds of list found, sorted: "bytes_list", "float_list", "int64_list", or "" for a
        feature without a value.
      lengths: shortest and longest list.
      records: how many records have the key.
      first_without: number of the first record, in its file, that lacks the key; None if all have
        it.
      range: lowest and highest value, if all are int64_lists of one value; else None.
    """

    kinds: tuple[str, ...]
    lengths: tuple[_Number, _Number]
    records: _Number
    first_without: int | None = None
    range: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels as stored, over the records that were checked.

    Attributes:
      range: lowest and highest.
      runs: the labels that occur, as runs (first, last) of consecutive numbers; None above 1000
        runs.
    """

    range: tuple[int, int]
    runs: tuple[tuple[int, int], ...] | None

    @property
    def num_classes(self) -> int | None:
        """How many different labels occur."""
        return None if self.runs is None else sum(last - first + 1 for first, last in self.runs)


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images that were checked; the largest height and the largest width among them."""

    formats: dict[str, _Number]
    largest_size: tuple[_Number, _Number]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What is known of one file; what the manifest holds of it.

    Attributes:
      size: bytes of the file when it was indexed.
      mtime_ns: its time of modification then, in nanoseconds.
      records: how many records the index holds.
      skipped: how many bad records it skips; ``bad_records.jsonl`` lists them.
      skipped_bytes: bytes of the file that they take.
      index_crc: CRC-32C of the index file's bytes.
      verified: the level of checking.
      checked_by: what else the checks depended on (keys, label range, decoders), so that a run that
        asks for the same need not check again.
      parsed: of how many records the features were read: below "schema", of a sample.
      features: by key.
      folder: absolute path of the file's folder, if that is not the folder of the index.
      labels: from level "schema" on.
      images: from level "decode" on.
    """

    size: _Number
    mtime_ns: int
    records: _Number
    skipped: _Number
    skipped_bytes: _Number
    index_crc: _Number
    verified: Level
    checked_by: dict[str, Any] = field(default_factory=dict)
    parsed: _Number
    features: dict[str, Feature]
    folder: str | None = None
    labels: Labels | None = None
    images: Images | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What several files hold together: sums and merges of their entries.

    `without` gives, for a key that only some records have, the (file, record number) of the first
    that lacks it.
    """

    files: int
    records: int
    skipped: int
    size: int
    verified: dict[str, int]
    features: dict[str, Feature]
    without: dict[str, tuple[str, int]]
    labels: Labels | None
    images: Images | None


def find_keys(
    features: Iterable[str], *, image_key: str | None, label_key: str | None
) -> tuple[str | None, str | None]:
    """Completes the two keys with the first of `KEY_PRESETS` that fits `features`."""
    held = set(features)
    for image, label in KEY_PRESETS.values():
        image, label = image_key or image, label_key or label
        if image in held and label in held:
            return image, label
    return image_key, label_key


def name_keys(held: Iterable[str]) -> InputError:
    """Returns the error for records that hold other features than those of `KEY_PRESETS`."""
    return InputError(
        f"The records hold {', '.join(map(repr, sorted(held)[:30]))}, not the keys of"
        f" {' or '.join(KEY_PRESETS)}: name the two with `image_key` and `label_key`."
    )


def find_schema_problem(
    features: Mapping[str, tuple[str, Sequence[Any]]], *, image_key: str, label_key: str
) -> tuple[str, str] | None:
    """Returns (reason, detail) if a record does not hold one image and one integer label.

    Args:
      features: kind and values by key, as `decode_example` returns them.
      image_key: feature key of the image.
      label_key: feature key of the label.
    """
    keys = {"image_key": image_key, "label_key": label_key}
    for what, name, kind in REQUIRED:
        key = keys[name]
        if key not in features:
            held = ", ".join(f"'{held}'" for held in sorted(features)[:20]) or "no features"
            return f"{what} missing", f"`{name}` '{key}' is not in this record, which holds {held}."
        found, values = features[key]
        if found != kind or len(values) != 1:
            found = found or "an empty feature"
            detail = f"`{name}` '{key}' must be {kind} of 1 value, found {found} of {len(values)}."
            return f"{what} kind", detail
    if not features[image_key][1][0]:
        return "empty image", f"`image_key` '{image_key}' holds 0 bytes."
    return None if image_key != PIXELS_KEY or find_size(features) else _wrong_size(features)


def find_size(features: Mapping[str, tuple[str, Sequence[Any]]]) -> tuple[int, int] | None:
    """Returns height and width of an image that is stored as pixels; None if they do not fit."""
    (kind, height), (other, width) = (features.get(key, ("", [0])) for key in SIDE_KEYS)
    if {kind, other} != {"int64_list"} or len(height) != 1 or len(width) != 1:
        return None
    fits = height[0] > 0 and 3 * height[0] * width[0] == len(features[PIXELS_KEY][1][0])
    return (height[0], width[0]) if fits else None


def _wrong_size(features: Mapping[str, tuple[str, Sequence[Any]]]) -> tuple[str, str]:
    sides = " and ".join(f"'{key}' {list(features.get(key, ('', []))[1])}" for key in SIDE_KEYS)
    found = f"found {len(features[PIXELS_KEY][1][0]):,}"
    return "pixels size", f"'{PIXELS_KEY}' must hold 3 bytes for each pixel of {sides}, {found}."


def summarize(entries: Mapping[str, FileEntry]) -> Summary:
    """Returns what `entries`, by file, hold together."""
    features: dict[str, Feature] = {}
    without: dict[str, tuple[str, int]] = {}
    parsed = [(file, entry) for file, entry in sorted(entries.items()) if entry.parsed]
    for key in sorted({key for _, entry in parsed for key in entry.features}):
        found = [entry.features[key] for _, entry in parsed if key in entry.features]
        shortest, longest = zip(*(feature.lengths for feature in found), strict=True)
        features[key] = Feature(
            kinds=tuple(sorted({kind for feature in found for kind in feature.kinds})),
            lengths=(min(shortest), max(longest)),
            records=sum(feature.records for feature in found),
            range=merge_ranges([feature.range for feature in found]),
        )
        for file, entry in parsed:
            record = entry.features[key].first_without if key in entry.features else 0
            if record is not None:
                without[key] = (file, record)
                break
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
        labels=merge_labels([entry.labels for entry in values if entry.labels]),
        images=merge_images([entry.images for entry in values if entry.images]),
    )


def merge_ranges(ranges: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Returns the lowest and the highest of some ranges; None if one of them is."""
    known = [one for one in ranges if one]
    if len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def merge_labels(found: list[Labels]) -> Labels | None:
    """Returns the labels of several files together; None of none."""
    if not found:
        return None
    runs: tuple[tuple[int, int], ...] | None = None
    if all(labels.runs is not None for labels in found):
        runs = tuple(merge_runs(run for labels in found for run in labels.runs or ()))
    whole = merge_ranges([labels.range for labels in found])
    return Labels(range=whole, runs=runs) if whole else None


def merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins runs (first, last) of integers that overlap or touch; returns them in order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def merge_images(found: list[Images]) -> Images | None:
    """Returns the images of several files together; None of none."""
    if not found:
        return None
    formats: Counter[str] = Counter()
    for images in found:
        formats.update(images.formats)
    heights, widths = zip(*(images.largest_size for images in found), strict=True)
    return Images(formats=dict(formats.most_common()), largest_size=(max(heights), max(widths)))
