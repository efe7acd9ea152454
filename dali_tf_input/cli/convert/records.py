"""The records made from the items of a catalog: image files, or records of TFRecord files."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli.convert import table, writer
from dali_tf_input.cli.convert.images import (
    Conversion,
    UnreadableImage,
    check_positions,
    convert_image,
    convert_mask,
)
from dali_tf_input.records.checks import PIXELS_KEY, SIZE_KEYS
from dali_tf_input.records.example import (
    FeatureValue,
    decode_example,
    encode_example,
    replace_features,
)
from dali_tf_input.records.tfrecord import read_data, unframe_record
from dali_tf_input.storage.objects import ByteRange, ObjectVersion, read_parts, read_whole

_THREADS = 16  # that read images


@dataclass(frozen=True)
class Catalog(Sequence[Any]):
    """The items of a file that has a line of JSON for each, by the offsets of their lines.

    Only the offset of an item, 8 bytes, is kept in memory.
    """

    path: str
    starts: Sequence[int]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: Any) -> list[Any]:
        items = []
        with open(self.path, "rb") as stream:
            for start in self.starts[which]:
                stream.seek(start)
                items.append(json.loads(stream.readline()))
        return items


def digest_images(items: list[Any]) -> list[bytes]:
    """Returns a digest of the bytes of each image, given as items of `make_records_of_images`.

    What cannot be read has one, too: it is left out later, with the reason.
    """
    stored = {name: ObjectVersion(*version) for _, name, _, version in items if version}
    if stored:
        holding = {name: version for name, version in stored.items() if version.size}
        data = dict.fromkeys(stored, b"")
        data |= zip(holding, read_whole(holding), strict=True)
        return [_digest(data[name]) for _, name, _, _ in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [*pool.map(_digest_file, (name for _, name, _, _ in items))]


def digest_records(image_key: str, items: list[Any]) -> list[bytes]:
    """Returns the same of the images of records, items of `make_records_of_records`."""
    digests = []
    for (file, _, offset, _), data in zip(items, _read_records(items), strict=True):
        try:
            digests.append(_digest(decode_example(data or b"")[image_key][1][0]))
        except (InputError, KeyError, IndexError):
            digests.append(_digest(f"{file} {offset}".encode()))
    return digests


def _digest_file(name: str) -> bytes:
    try:
        with open(name, "rb") as stream:
            return _digest(stream.read())
    except OSError:
        return _digest(os.fsencode(name))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def make_records_of_images(
    conversion: Conversion, source: str, items: list[Any]
) -> list[writer.Record]:
    """Makes records of images, given as items [features, path, mask path or None, version or None].

    Only a stored object has a version. Records name images by their paths below `source`.
    """
    stored = {name: ObjectVersion(*version) for _, name, _, version in items if version}
    holding = {name: version for name, version in stored.items() if version.size}
    data = dict.fromkeys(stored, b"")  # an empty object has no range to ask for
    data |= zip(holding, read_whole(holding), strict=True)
    return [
        _record_of_image(conversion, features, name, mask, data.get(name), source)
        for features, name, mask, _ in items
    ]


def _record_of_image(
    conversion: Conversion,
    features: dict[str, Any],
    name: str,
    mask: str | None,
    encoded: bytes | None,
    source: str,
) -> writer.Record:
    label = writer.label_of([features])
    try:
        if encoded is None:
            with open(name, "rb") as stream:
                encoded = stream.read()
        image = convert_image(encoded, conversion)
        if mask:
            with open(mask, "rb") as stream:
                frame = conversion.mask_frame
                features[table.KEYS["mask"]] = convert_mask(stream.read(), image, frame)
    except (UnreadableImage, OSError) as error:
        return writer.Record(None, name, (str(error),), label)
    key = PIXELS_KEY if conversion.store == "pixels" else "image/encoded"
    # The base name alone, such as 0001.jpg, may be that of an image of each class.
    is_below = name.startswith(f"{source.rstrip('/')}/")
    filename = name[len(source.rstrip("/")) + 1 :] if is_below else name
    about = {"key": key, "filename": filename}
    features |= writer.image_features(image.encoded, (image.height, image.width), **about)
    return writer.Record(encode_example(features), name, image.notes, label, _digest(encoded))


def make_records_of_records(
    conversion: Conversion, image_key: str, items: list[Any]
) -> list[writer.Record]:
    """Makes new records of records, given as items [file, etag or None, offset, size].

    Only the features of the image and its mask change, and only if the image is converted.
    """
    return [
        _record_of_record(conversion, image_key, f"{file} at byte {offset}", record)
        for (file, _, offset, _), record in zip(items, _read_records(items), strict=True)
    ]


def _read_records(items: list[Any]) -> list[bytes | None]:
    """Reads records, given as items [file, etag or None, offset, size]; None is a damaged one."""
    if items[0][1] is not None:
        parts = [ByteRange(file, etag, offset, offset + size) for file, etag, offset, size in items]
        return [*map(unframe_record, read_parts(parts))]
    found = []
    for file, _, offset, size in items:
        with open(file, "rb") as stream:
            found.append(read_data(stream.fileno(), offset, size))
    return found


def _record_of_record(
    conversion: Conversion, image_key: str, source: str, data: bytes | None
) -> writer.Record:
    if data is None:
        return writer.Record(None, source, ("the data of this record does not fit its CRC",))
    try:
        features = decode_example(data)
        encoded = features[image_key][1][0]
        image = convert_image(encoded, conversion)
        mask_key = conversion.mask_key
        check_positions(features, image, {image_key, mask_key, *conversion.keep_features})
        if mask_key in features:
            (mask,) = features[mask_key][1]
            converted = convert_mask(mask, image, conversion.mask_frame or "stored")
            if converted != mask:
                data = replace_features(data, {mask_key: converted})
    except (UnreadableImage, InputError, KeyError, IndexError) as error:
        return writer.Record(None, source, (str(error),))
    if conversion.store == "pixels":
        about = dict(zip(SIZE_KEYS, (image.height, image.width), strict=True))
        changes: dict[str, FeatureValue]
        changes = {PIXELS_KEY: image.encoded, **about, "image/format": "RGB"}
        data = replace_features(data, changes, without=image_key)
    elif image.encoded != encoded:
        changes = {"image/height": image.height, "image/width": image.width, "image/format": "JPEG"}
        changes = {key: value for key, value in changes.items() if key in features}
        data = replace_features(data, {image_key: image.encoded, **changes})
    return writer.Record(data, source, image.notes, digest=_digest(encoded))
