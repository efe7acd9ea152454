"""Going through one TFRecord file: which of its records are sound, by how deep a look, and what they hold."""

import contextlib
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, get_args

import google_crc32c

from dali_tf_input.example import decode_example
from dali_tf_input.options import check_choice
from dali_tf_input.summary import LEVELS, Feature, FileEntry, Images, Labels, Level, merge_runs, weighted_median
from dali_tf_input.tfrecord import Fault, InputError, find_records, has_sound_data, read_data

Decoder = Literal["both", "dali", "tf_data"]

# Pillow's bound, above which it warns of a decompression bomb: a quarter of a gigabyte at 3 bytes a pixel.
MAX_PIXELS = 89_478_485

_MOST_DATA_BYTES = 1 << 28  # to parse a record takes four times its size; protobuf itself ends at 2 GiB
_MOST_LOOKED_AT = 8
_MOST_LOOKED_AT_BYTES = 1 << 26
_MOST_KEYS = 1000
_MOST_RUNS = 1000

Decode = Callable[[bytes], tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is checked of every record.

    Attributes:
      verify: how deep. "framing": lengths, their CRCs, the file's end; no data is read. "crc": the CRCs of the data too.
        "schema": each record parses as an Example, holds one image and one integer label, the label in range. "decode": the image
        is a JPEG or PNG, of at most `max_pixels`, and is decoded.
      image_key: feature key of the encoded image; None looks for those of `summary.KEY_PRESETS` in the records.
      label_key: feature key of the integer label; None as above.
      label_offset: the label of the first class as stored; smaller labels are faults. TF-slim's ImageNet counts from 1.
      num_classes: labels from ``label_offset + num_classes`` on are faults; None sets no such bound.
      decoder: what decodes at "decode": "dali" (nvImageCodec, as DALI's CPU operators do), "tf_data" (`tf.io.decode_jpeg`) or
        "both", which all have to be content. The two differ on damaged images: use "both" unless one only will ever train.
      max_pixels: height times width above which an image is a fault, before it is decoded. The default is Pillow's.
    """

    verify: Level = "framing"
    image_key: str | None = None
    label_key: str | None = None
    label_offset: int = 0
    num_classes: int | None = None
    decoder: Decoder = "both"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, LEVELS)
        check_choice("decoder", self.decoder, get_args(Decoder))
        for name, value in (("num_classes", self.num_classes), ("max_pixels", self.max_pixels)):
            if value is not None and value < 1:
                raise InputError(f"`{name}` must be at least 1, got {value}.")

    def depends_on(self) -> dict[str, Any]:
        """Returns what else than the level the outcome depends on: what a `FileEntry` keeps as `checked_by`."""
        names = {
            "framing": (),
            "crc": (),
            "schema": ("image_key", "label_key", "label_offset", "num_classes"),
            "decode": ("image_key", "label_key", "label_offset", "num_classes", "decoder", "max_pixels"),
        }
        return {name: getattr(self, name) for name in names[self.verify]}

    def are_covered_by(self, entry: FileEntry) -> bool:
        """Whether the run that made `entry` checked all that these checks ask for."""
        if LEVELS.index(entry.verified) < LEVELS.index(self.verify):
            return False
        held = entry.checked_by
        return all(
            held.get(name) == value or (name == "decoder" and held.get(name) == "both")
            for name, value in self.depends_on().items()
        )


class BadImage(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised by a `Decode` function for an image that is none, or cannot be decoded: (reason, detail)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def check_file(
    file: str,
    index: BinaryIO,
    checks: Checks,
    *,
    decode: Decode | None,
    crashing: dict[int, tuple[str, str]],
    on_decode: Callable[[int | None], None],
    on_fault: Callable[[Fault], None],
    on_progress: Callable[[int, int], None],
) -> FileEntry:
    """Goes through a TFRecord file once; writes the index of its sound records and hands on its faults.

    Memory does not grow with the number of records, but for one 8-byte number each at "schema" and beyond.

    Args:
      file: path of the file.
      index: where the lines ``offset size`` are written to.
      checks: what is checked; at "schema" and beyond with both keys.
      decode: decodes an encoded image, returns its format, height and width, or raises `BadImage`; for level "decode".
      crashing: records not to be decoded, as doing so ended a process, or did not end: number in the file, (reason, detail).
      on_decode: called with the number of each record before it is decoded, and with None after.
      on_fault: called with each fault, in the order of the file.
      on_progress: called with the number of records and of bytes gone through since it was last called, now and then.

    Raises:
      InputError: the file changed meanwhile.
      OSError: it cannot be read, or `index` not be written.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        content = _Content(checks, decode, crashing, on_decode)
        crc, records, number = 0, 0, 0
        left_out, left_out_bytes = 0, 0
        progress = _Progress(on_progress)
        for found in find_records(file, descriptor):
            faults: list[Fault] = []
            if isinstance(found, Fault):
                faults.append(found)
                places = []
                progress.add(0, found.size)
                number += 1
            else:
                places = found
                if checks.verify == "framing":
                    progress.add(len(places), sum(size for _, size in places))
                else:
                    places = []
                    for place in found:
                        fault = content.check(descriptor, place, number + len(places) + len(faults))
                        if fault:
                            faults.append(fault)
                        else:
                            places.append(place)
                        progress.add(1, place[1])
                if not records and checks.verify in ("framing", "crc"):
                    content.look_at_first(descriptor, places)
                number += len(found)
            for fault in faults:
                on_fault(fault)
            text = "".join(map("%d %d\n".__mod__, places)).encode()
            index.write(text)
            crc = google_crc32c.extend(crc, text)
            records += len(places)
            left_out += len(faults)
            left_out_bytes += sum(fault.size for fault in faults)
        progress.flush()
        after = os.stat(file)
        if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise InputError(f"{file} changed while it was indexed: wait until it is written, then index it again.")
    finally:
        os.close(descriptor)
    return FileEntry(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        records=records,
        left_out=left_out,
        left_out_bytes=left_out_bytes,
        index_crc=crc,
        verified=checks.verify,
        checked_by=checks.depends_on(),
        parsed=content.parsed,
        features=content.features(),
        labels=content.labels(),
        images=content.images(),
    )


class _Progress:
    """Hands progress on a few times a second, not for every record."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress
        self._records, self._bytes = 0, 0
        self._next = time.monotonic() + 0.2

    def add(self, records: int, size: int) -> None:
        self._records += records
        self._bytes += size
        if time.monotonic() > self._next:
            self.flush()

    def flush(self) -> None:
        if self._records or self._bytes:
            self._on_progress(self._records, self._bytes)
        self._records, self._bytes = 0, 0
        self._next = time.monotonic() + 0.2


class _Content:
    """Checks the data of records one by one and sums up what they hold."""

    def __init__(
        self, checks: Checks, decode: Decode | None, crashing: dict[int, tuple[str, str]], on_decode: Callable[[int | None], None]
    ) -> None:
        self._checks = checks
        self._decode = decode
        self._crashing = crashing
        self._on_decode = on_decode
        self._depth = LEVELS.index(checks.verify)
        self.parsed = 0
        self._first_parsed = 0
        self._features: dict[str, list[Any]] = {}  # kinds, shortest, longest, records, first record without
        self._labels = array("q")
        self._heights: Counter[int] = Counter()
        self._widths: Counter[int] = Counter()
        self._formats: Counter[str] = Counter()

    def look_at_first(self, descriptor: int, places: list[tuple[int, int]]) -> None:
        """Notes the features of the first record that is an Example, of a few; judges nothing."""
        for place in places[:_MOST_LOOKED_AT]:
            if self.parsed:
                return
            data = read_data(descriptor, *place) if place[1] <= _MOST_LOOKED_AT_BYTES else None
            with contextlib.suppress(InputError):  # "schema" would say what it is
                if data:
                    self._note_features(decode_example(data), 0)

    def check(self, descriptor: int, place: tuple[int, int], number: int) -> Fault | None:
        """Returns what is wrong with the data of record `number` at `place` (offset, size), if anything is."""
        offset, size = place

        def fault(reason: str, detail: str) -> Fault:
            return Fault(record=number, offset=offset, size=size, reason=reason, detail=detail)

        if self._depth == 1 or size > _MOST_DATA_BYTES:
            if not has_sound_data(descriptor, offset, size):
                return fault("data CRC", "the data of this record does not fit its CRC.")
            if self._depth == 1:
                return None
            return fault(
                "too large", f"expected at most {_MOST_DATA_BYTES} bytes, which is the largest that is parsed here, found {size}."
            )
        data = read_data(descriptor, offset, size)
        if data is None:
            return fault("data CRC", "the data of this record does not fit its CRC.")
        try:
            features = decode_example(data)
        except InputError as error:
            return fault("no Example", str(error))
        wrong = self._find_schema_fault(features)
        if wrong:
            return fault(*wrong)
        if self._decode:
            if number in self._crashing:
                return fault(*self._crashing[number])
            self._on_decode(number)
            try:
                image_format, height, width = self._decode(features[self._checks.image_key or ""][1][0])
            except BadImage as bad:
                return fault(bad.reason, bad.detail)
            finally:
                self._on_decode(None)
            self._formats[image_format] += 1
            self._heights[height] += 1
            self._widths[width] += 1
        self._note_features(features, number)
        self._labels.append(features[self._checks.label_key or ""][1][0])
        return None

    def _note_features(self, features: dict[str, tuple[str, list[Any]]], number: int) -> None:
        if not self.parsed:
            self._first_parsed = number
        held = 0
        for key, (kind, values) in features.items():
            known = self._features.get(key)
            if known is None:
                if len(self._features) >= _MOST_KEYS:
                    continue
                first_without = self._first_parsed if self.parsed else None
                known = self._features[key] = [set(), len(values), len(values), 0, first_without]
            known[0].add(kind)
            known[1] = min(known[1], len(values))
            known[2] = max(known[2], len(values))
            known[3] += 1
            held += 1
        if held < len(self._features):
            for key, known in self._features.items():
                if known[4] is None and key not in features:
                    known[4] = number
        self.parsed += 1

    def _find_schema_fault(self, features: dict[str, tuple[str, list[Any]]]) -> tuple[str, str] | None:
        """Returns (reason, detail) if a record does not hold one image and one label in range."""
        checks = self._checks
        for what, key, kind in (("image", checks.image_key, "bytes_list"), ("label", checks.label_key, "int64_list")):
            if key not in features:
                held = ", ".join(f"'{held}'" for held in sorted(features)[:20]) or "no features"
                return f"{what} missing", f"`{what}_key` '{key}' is not in this record, which holds {held}."
            found, values = features[key]
            if found != kind or len(values) != 1:
                found = found or "an empty feature"
                return f"{what} kind", f"`{what}_key` '{key}' must be {kind} of 1 value, found {found} of {len(values)}."
        if not features[checks.image_key or ""][1][0]:
            return "empty image", f"`image_key` '{checks.image_key}' holds 0 bytes."
        label = features[checks.label_key or ""][1][0]
        last = None if checks.num_classes is None else checks.label_offset + checks.num_classes - 1
        if label < checks.label_offset or (last is not None and label > last):
            bound = f"at least {checks.label_offset}" if last is None else f"in {checks.label_offset} to {last}"
            return "label range", f"`label_key` '{checks.label_key}' must be {bound}, found {label}."
        return None

    def features(self) -> dict[str, Feature]:
        return {
            key: Feature(kinds=tuple(sorted(kinds)), lengths=(shortest, longest), records=records, first_without=first_without)
            for key, (kinds, shortest, longest, records, first_without) in sorted(self._features.items())
        }

    def labels(self) -> Labels | None:
        if not self._labels:
            return None
        runs = merge_runs((label, label) for label in set(self._labels))
        return Labels(
            range=(runs[0][0], runs[-1][1]),
            runs=tuple(runs) if len(runs) <= _MOST_RUNS else None,
            changes=sum(map(int.__ne__, self._labels[:-1], self._labels[1:])),
        )

    def images(self) -> Images | None:
        if not self._formats:
            return None
        return Images(
            formats=dict(self._formats.most_common()),
            median_size=(weighted_median(self._heights.items()), weighted_median(self._widths.items())),
            largest_size=(max(self._heights), max(self._widths)),
        )
