"""Checking one TFRecord file: which of its records are valid, and what they hold."""

import contextlib
import dataclasses
import io
import itertools
import math
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from dali_tf_input.errors import InputError
from dali_tf_input.index.decode import DecodingChild
from dali_tf_input.random import Integers
from dali_tf_input.records import contents
from dali_tf_input.records.checks import (
    KEY_PRESETS,
    Checks,
    InvalidRecord,
    check_images,
    check_record,
    list_images,
)
from dali_tf_input.records.contents import FileEntry
from dali_tf_input.records.example import MAX_BYTES, decode_example
from dali_tf_input.records.labels import ClassLabel, Features
from dali_tf_input.records.orientation import UPRIGHT, find_orientation
from dali_tf_input.records.tfrecord import (
    FOOTER_SIZE,
    FRAME_SIZE,
    BadRecord,
    find_records,
    has_valid_data,
    read_data,
)

# How much of each batch (at most 4096 records) is sampled below level "schema": so little that it
# costs less than finding the records.
_MOST_SAMPLED = 32
_MOST_SAMPLED_BYTES = 1 << 20
_MOST_KEYS = 1000
_IMAGE_KEYS = tuple(image for image, _ in KEY_PRESETS.values())
_MOST_RANGED = 1024  # values of a list whose range is noted
_PROGRESS_SECONDS = 0.2
_DECODED_AT_ONCE = 8  # records whose images go to the decoding child in one call


def check_file(
    file: str,
    index: BinaryIO,
    checks: Checks,
    *,
    name: str | None = None,
    decode: DecodingChild | None,
    on_bad_record: Callable[[BadRecord], None],
    on_progress: Callable[[int, int], None],
) -> FileEntry:
    """Reads a TFRecord file once, writes its `index` and reports its bad records in order.

    Messages call it `name`, by default `file`. At level "schema" and above, `checks` must have both
    keys.

    Memory does not grow with the number of records, except for an 8-byte label per record at level
    "schema" and above. `decode` checks encoded images at level "decode". `on_progress` is called
    now and then with the records and bytes since the last call.

    Raises:
      InputError: the file changed in the meantime.
      OSError: it cannot be read, or `index` cannot be written.
    """
    name = name or file
    descriptor = os.open(file, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        content = _Content(checks, decode, descriptor)
        progress = _Progress(on_progress)
        crc, framing_crc, records, number, skipped_bytes = 0, 0, 0, 0, 0
        content_crc, footers = 0, bytearray()
        skipped = array("q")  # the numbers of bad records
        for batch in find_records(name, descriptor, footers):
            content_crc = google_crc32c.extend(content_crc, bytes(footers))
            footers.clear()
            bad: list[BadRecord] = []
            extents: list[tuple[int, int]] = []
            if isinstance(batch, BadRecord):
                bad.append(batch)
                skipped.append(number)
                progress.add(0, batch.size)
                number += 1
            elif checks.verify == "framing":
                extents = batch
                progress.add(len(batch), sum(size for _, size in batch))
                number += len(batch)
            else:
                for extent, outcome in zip(batch, content.check_all(batch), strict=True):
                    if isinstance(outcome, InvalidRecord):
                        why = {"reason": outcome.reason, "detail": outcome.detail}
                        offset, size = extent
                        bad.append(BadRecord(record=number, offset=offset, size=size, **why))
                        skipped.append(number)
                    else:
                        content.note(outcome, number)
                        extents.append(extent)
                    progress.add(1, extent[1])
                    number += 1
            if checks.verify in ("framing", "crc") and not isinstance(batch, BadRecord):
                content.sample(batch, number - len(batch))
            for wrong in bad:
                on_bad_record(wrong)
            text = _format_index(extents)
            index.write(text)
            crc = google_crc32c.extend(crc, text)
            if bad:
                framed = [(batch.offset, batch.size)] if isinstance(batch, BadRecord) else batch
                text = _format_index(framed)
            framing_crc = google_crc32c.extend(framing_crc, text)
            records += len(extents)
            skipped_bytes += sum(wrong.size for wrong in bad)
        progress.flush()
        last = os.pread(descriptor, FOOTER_SIZE, max(0, status.st_size - FOOTER_SIZE))
        content_crc = google_crc32c.extend(content_crc, last)
        after = os.stat(file)
        same = (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
        if not same:
            problem = f"{name} changed while it was indexed"
            raise InputError(f"{problem}: wait until it is complete, then retry.")
    finally:
        os.close(descriptor)
    return FileEntry(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        records=records,
        skipped=len(skipped),
        skipped_numbers=contents.pack_integers(skipped),
        skipped_bytes=skipped_bytes,
        index_crc=crc,
        framing_crc=framing_crc,
        content_crc=content_crc,
        verified=checks.verify,
        checked_by=checks.depends_on(),
        parsed=content.parsed,
        features=content.features(),
        images=content.images(),
        labels=content.labels(),
        turned=content.turned,
    )


class _Progress:
    """Reports progress a few times per second, not for every record."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress
        self._records, self._bytes = 0, 0
        self._next = time.monotonic() + _PROGRESS_SECONDS

    def add(self, records: int, size: int) -> None:
        self._records += records
        self._bytes += size
        if time.monotonic() > self._next:
            self.flush()

    def flush(self) -> None:
        if self._records or self._bytes:
            self._on_progress(self._records, self._bytes)
        self._records, self._bytes = 0, 0
        self._next = time.monotonic() + _PROGRESS_SECONDS


# The features of a valid record, and format, height and width of its image, as far as checked.
Outcome = tuple[Features, tuple[str, int, int] | None]


class _Content:
    """Checks the data of the records of an open file and sums up what they hold."""

    def __init__(self, checks: Checks, decode: DecodingChild | None, descriptor: int) -> None:
        self._checks, self._descriptor = checks, descriptor
        self._label = checks.label
        counted = self._label if checks.verify in ("schema", "decode") else None
        self._counted_key = counted.key if counted and counted.is_integer else None
        self._class_label = counted if isinstance(counted, ClassLabel) else None
        self._decode = decode
        self.parsed = 0
        self._first_parsed = 0
        # Of a key: kinds, shortest, longest, records, first without, range.
        self._features: dict[str, list[Any]] = {}
        self._mask_key = checks.mask_key if checks.verify == "decode" else None
        self._mask_values = np.zeros(256, np.int64)  # how many pixels have each
        self.turned = 0
        self._labels = array("q")
        self._largest = (0, 0)
        self._formats: Counter[str] = Counter()

    def sample(self, extents: list[tuple[int, int]], first: int) -> None:
        """Notes the features of some of the records from number `first` on; judges nothing."""
        last, size = len(extents) - 1, sum(size for _, size in extents)
        num_gaps = min(last, _MOST_SAMPLED - 1, _MOST_SAMPLED_BYTES * last // max(size, 1))
        for row in sorted({part * last // max(num_gaps, 1) for part in range(num_gaps + 1)}):
            data = None
            if extents[row][1] <= MAX_BYTES:
                data = read_data(self._descriptor, *extents[row])
            with contextlib.suppress(InputError):  # level "schema" says what it is
                if data:
                    self._note_features(decode_example(data), first + row)

    def check_all(self, extents: list[tuple[int, int]]) -> Iterator[Outcome | InvalidRecord]:
        """Yields what each record holds, or what is wrong with it.

        While the child process decodes the images of some records, this one reads the next ones.
        """
        if self._checks.verify != "decode":
            yield from map(self._check, extents)
            return
        with ThreadPoolExecutor(1) as pool:
            decoding: Future[list[Outcome | InvalidRecord]] | None = None
            for start in range(0, len(extents), _DECODED_AT_ONCE):
                some = [*map(self._check, extents[start : start + _DECODED_AT_ONCE])]
                if decoding:
                    yield from decoding.result()
                decoding = pool.submit(self._check_images, some)
            if decoding:
                yield from decoding.result()

    def _check(self, extent: tuple[int, int]) -> Outcome | InvalidRecord:
        """Checks the record at `extent` (offset, size), without its image."""
        offset, size = extent
        try:
            if self._checks.verify == "crc" or size - FRAME_SIZE > MAX_BYTES:
                if not has_valid_data(self._descriptor, offset, size):
                    raise InvalidRecord("data CRC", "the data of this record does not fit its CRC.")
                if self._checks.verify != "crc":
                    detail = f"expected at most {MAX_BYTES:,} bytes of data, found "
                    raise InvalidRecord("too large", f"{detail}{size - FRAME_SIZE:,}.")
                return {}, None
            data = read_data(self._descriptor, offset, size)
            if data is None:
                raise InvalidRecord("data CRC", "the data of this record does not fit its CRC.")
            return check_record(data, self._checks, None)
        except InvalidRecord as bad:
            return bad

    def _check_images(self, some: list[Outcome | InvalidRecord]) -> list[Outcome | InvalidRecord]:
        """Returns the outcomes of some records with their images checked."""
        valid = [outcome[0] for outcome in some if not isinstance(outcome, InvalidRecord)]
        images = [list_images(features, self._checks) for features in valid]
        encoded = [*itertools.chain(*images)]  # none of images that are stored as pixels
        decoded = iter(self._decode.decode_all(encoded) if self._decode else ())
        counts = iter(map(len, images))

        def check(features: Features) -> Outcome | InvalidRecord:
            results = iter([*itertools.islice(decoded, next(counts))])

            def take(_: bytes) -> tuple[str, int, int]:
                result = next(results)
                if isinstance(result, InvalidRecord):
                    raise result
                return result

            try:
                return features, check_images(features, self._checks, take)
            except InvalidRecord as bad:
                return bad

        return [bad if isinstance(bad, InvalidRecord) else check(bad[0]) for bad in some]

    def note(self, outcome: Outcome, number: int) -> None:
        """Sums up what valid record `number` holds."""
        features, image = outcome
        if self._checks.verify == "crc":
            return  # a sample is noted
        if image:
            image_format, height, width = image
            self._formats[image_format] += 1
            self._largest = (max(self._largest[0], height), max(self._largest[1], width))
        self._note_features(features, number)
        if self._mask_key:
            self._mask_values += _count_values(features[self._mask_key][1][0])
        if self._counted_key:
            values = features[self._counted_key][1]  # of several, each class counts once a record
            self._labels.extend(values if len(values) == 1 else sorted({*values}))
        elif self._class_label:
            label = self._class_label
            self._labels.append(label.positions[features[label.key or ""][1][0]])

    def _note_features(self, features: Features, number: int) -> None:
        if not self.parsed:
            self._first_parsed = number
        for key in (self._checks.image_key or "", *_IMAGE_KEYS):
            if key in features and features[key][0] == "bytes_list":
                images = features[key][1][:1]
                self.turned += any(find_orientation(image) != UPRIGHT for image in images)
                break
        num_noted = 0
        for key, (kind, values) in features.items():
            stats = self._features.get(key)
            if stats is None:
                if len(self._features) >= _MOST_KEYS:
                    continue
                first_without = self._first_parsed if self.parsed else None
                stats = [set(), len(values), len(values), 0, first_without, None]
                self._features[key] = stats
            stats[0].add(kind)
            stats[1] = min(stats[1], len(values))
            stats[2] = max(stats[2], len(values))
            stats[3] += 1
            if kind == "int64_list" and len(values) == 1:
                low, high = stats[5] or (values[0], values[0])
                stats[5] = (min(low, values[0]), max(high, values[0]))
            elif kind in ("int64_list", "float_list") and len(values) <= _MOST_RANGED:
                finite = [*filter(math.isfinite, values), *(stats[5] or ())]
                stats[5] = (min(finite), max(finite)) if finite else None
            num_noted += 1
        if num_noted < len(self._features):
            for key, stats in self._features.items():
                if stats[4] is None and key not in features:
                    stats[4] = number
        self.parsed += 1

    def features(self) -> dict[str, contents.FeatureStats]:
        found = self._features_of_lists()
        if self._mask_key in found and self._mask_values.any():
            values = np.flatnonzero(self._mask_values).tolist()
            counts = tuple((value, int(self._mask_values[value])) for value in values)
            feature = dataclasses.replace(found[self._mask_key], counts=counts)
            found[self._mask_key] = dataclasses.replace(feature, range=(values[0], values[-1]))
        return found

    def _features_of_lists(self) -> dict[str, contents.FeatureStats]:
        return {
            key: contents.FeatureStats(
                kinds=tuple(sorted(kinds)),
                lengths=(shortest, longest),
                records=records,
                first_without=first_without,
                range=value_range if len(kinds - {""}) == 1 and longest <= _MOST_RANGED else None,
                counts=self._count_labels() if key == self._counted_key else None,
            )
            for key, (kinds, shortest, longest, records, first_without, value_range) in sorted(
                self._features.items()
            )
        }

    def _count_labels(self) -> contents.Counts | None:
        return contents.count_classes(Counter(self._labels).items())

    def labels(self) -> bytes | None:
        return contents.pack_integers(self._labels) if self._class_label else None

    def images(self) -> contents.Images | None:
        if not self._formats:
            return None
        formats = dict(self._formats.most_common())
        return contents.Images(formats=formats, largest_size=self._largest)


def _count_values(mask: bytes) -> Integers:
    """Returns how many pixels of a checked mask have each value: int64 (256,)."""
    values = np.frombuffer(mask, np.uint8)
    if mask.startswith(b"\x89PNG"):
        from PIL import Image  # here, as few runs need it

        with Image.open(io.BytesIO(mask)) as image:
            values = np.asarray(image).ravel()
    return np.bincount(values, minlength=256)


def _format_index(extents: list[tuple[int, int]]) -> bytes:
    return "".join(map("%d %d\n".__mod__, extents)).encode()
