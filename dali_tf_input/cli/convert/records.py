"""The records made from the items of a catalog: image files, or records of TFRecord files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli.convert import table, writer
from dali_tf_input.cli.convert.images import (
    Conversion,
    UnreadableImage,
    convert_image,
    convert_mask,
)
from dali_tf_input.records.checks import PIXELS_KEY, SIDE_KEYS
from dali_tf_input.records.example import (
    FeatureValue,
    decode_example,
    encode_example,
    replace_features,
)
from dali_tf_input.records.tfrecord import read_data, unframe_record
from dali_tf_input.storage.objects import Part, Status, read_parts, read_whole


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


def make_records_of_images(
    conversion: Conversion, source: str, items: list[Any]
) -> list[writer.Record]:
    """Makes records of images, given as items [features, path, mask path or None, status or None].

    Only a stored object has a status. Records name images by their paths below `source`.
    """
    stored = {name: Status(*status) for _, name, _, status in items if status}
    holding = {name: status for name, status in stored.items() if status.size}
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
    try:
        if encoded is None:
            with open(name, "rb") as stream:
                encoded = stream.read()
        image = convert_image(encoded, conversion)
        if mask:
            with open(mask, "rb") as stream:
                features[table.KEYS["mask"]] = convert_mask(stream.read(), image)
    except (UnreadableImage, OSError) as error:
        return writer.Record(None, name, (str(error),))
    key = PIXELS_KEY if conversion.store == "pixels" else "image/encoded"
    # The base name alone, such as 0001.jpg, may be that of an image of each class.
    is_below = name.startswith(f"{source.rstrip('/')}/")
    filename = name[len(source.rstrip("/")) + 1 :] if is_below else name
    about = {"key": key, "filename": filename}
    features |= writer.image_features(image.encoded, (image.height, image.width), **about)
    return writer.Record(encode_example(features), name, image.notes)


def make_records_of_records(
    conversion: Conversion, image_key: str, items: list[Any]
) -> list[writer.Record]:
    """Makes new records of records, given as items [file, etag or None, offset, size].

    Only the image features change, and only if the image is converted.
    """
    parts = [Part(file, etag or "", start, start + size) for file, etag, start, size in items]
    if items[0][1] is None:
        data = [_read_locally(part) for part in parts]
    else:
        data = [*map(unframe_record, read_parts(parts))]
    return [
        _record_of_record(conversion, image_key, f"{part.url} at byte {part.start}", record)
        for part, record in zip(parts, data, strict=True)
    ]


def _read_locally(part: Part) -> bytes | None:
    with open(part.url, "rb") as stream:
        return read_data(stream.fileno(), part.start, part.end - part.start)


def _record_of_record(
    conversion: Conversion, image_key: str, source: str, data: bytes | None
) -> writer.Record:
    if data is None:
        return writer.Record(None, source, ("the data of this record does not fit its CRC",))
    try:
        features = decode_example(data)
        encoded = features[image_key][1][0]
        image = convert_image(encoded, conversion)
    except (UnreadableImage, InputError, KeyError, IndexError) as error:
        return writer.Record(None, source, (str(error),))
    if conversion.store == "pixels":
        about = dict(zip(SIDE_KEYS, (image.height, image.width), strict=True))
        changes: dict[str, FeatureValue]
        changes = {PIXELS_KEY: image.encoded, **about, "image/format": "RGB"}
        data = replace_features(data, changes, without=image_key)
    elif image.encoded != encoded:
        changes = {"image/height": image.height, "image/width": image.width, "image/format": "JPEG"}
        changes = {key: value for key, value in changes.items() if key in features}
        data = replace_features(data, {image_key: image.encoded, **changes})
    return writer.Record(data, source, image.notes)
