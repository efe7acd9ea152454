"""The levels of checking TFRecord files, and what each one checks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from dali_tf_input.errors import Count, InputError, checked
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.labels import (
    ClassLabel,
    Features,
    Label,
    find_label_problem,
    label_from_json,
    label_kind,
    label_to_json,
)
from dali_tf_input.records.orientation import has_several

Level = Literal["framing", "crc", "schema", "decode"]
Decoder = Literal["both", "dali", "tf_data"]

# Pillow's limit, above which it warns of a decompression bomb: 1/4 GB at 3 bytes per pixel.
MAX_PIXELS = 89_478_485

LEVELS: tuple[Level, ...] = get_args(Level)  # each one checks what the one before does, and more

# An image as it is in memory, uint8 (height, width, 3) in RGB, and the keys of its sides.
PIXELS_KEY, SIZE_KEYS = "image/pixels", ("image/height", "image/width")

# Feature keys of the image and of the label, as the most common writers of TFRecords name them.
KEY_PRESETS = {
    "TF-slim": ("image/encoded", "image/class/label"),
    "tfds": ("image", "label"),
    "raw pixels": (PIXELS_KEY, "image/class/label"),
}

_PNG = b"\x89PNG"  # the first bytes of one

# Both backends decode JPEGs with this DCT (libjpeg-turbo's "islow"), and so to the same bits.
DCT_METHOD = "INTEGER_ACCURATE"

_SCHEMA = ("image_key", "label", "mask_key")
_DEPENDS_ON: dict[Level, tuple[str, ...]] = {
    "framing": (),
    "crc": (),
    "schema": _SCHEMA,
    "decode": (*_SCHEMA, "decoder", "max_pixels"),
}

# Decodes an encoded image: returns its format, height and width, or raises `InvalidRecord`.
TrialDecode = Callable[[bytes], tuple[str, int, int]]


@checked
@dataclass(frozen=True, kw_only=True)
class Checks:
    """Describes what is checked of every record.

    Examples:
      >>> report = build_index("records/train-*", Checks(verify="crc"), on_bad="skip")
      >>> checks = Checks(verify="schema", label=ClassLabel(offset=1))
      >>> report = build_index("records/*", checks)

    Attributes:
      verify: the depth. "framing": lengths, their CRCs, the file's end; no data is read. "crc": the
        CRCs of the data too. "schema": each record is an Example with one image and its label, and
        the label is in range. "decode": the image is a JPEG, PNG, BMP or WebP of at most
        `max_pixels`, and decodes; its mask is of its size.
      image_key: feature key of the encoded image; None tries those of `KEY_PRESETS`.
      label: what every record must hold: a `ClassLabel`, `MultiHot` (with `num_classes` None,
        without an upper limit) or `Values`; None for no label. Integers below its `offset` are bad,
        and so are integers of ``offset + num_classes`` or more, if `num_classes` is set.
      mask_key: feature key of the segmentation mask; None means no mask.
      decoder: the decoder for level "decode": "dali" (nvImageCodec, as in DALI's CPU operators),
        "tf_data" (`tf.io.decode_jpeg`), or "both": both must succeed. They disagree on some damaged
        images: use "both" unless only one backend will ever train.
      max_pixels: the largest valid height times width; larger images are bad and are not decoded.
        The default is Pillow's limit.
    """

    verify: Level = "framing"
    image_key: str | None = None
    label: Label | None = field(default_factory=ClassLabel)
    mask_key: str | None = None
    decoder: Decoder = "both"
    max_pixels: Count = MAX_PIXELS

    def with_keys(self, image_key: str, label_key: str | None) -> "Checks":
        """Returns the same checks with the keys of the image and of the label."""
        label = self.label and replace(self.label, key=label_key)
        return replace(self, image_key=image_key, label=label)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {**vars(self), "label": label_to_json(self.label)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Checks":
        """Returns the checks that `to_json` described; raises InputError if there are none."""
        fields = dict(values)
        if "label" in fields:
            fields["label"] = label_from_json(fields["label"])
        return cls(**fields)

    def to_flags(self, *, vocabulary: str = "labels.txt", names_keys: bool = False) -> list[str]:
        """Returns the flags of ``dali-tf-input index`` that ask for these checks.

        Args:
          vocabulary: the file with the names of the classes, if labels are stored as names.
          names_keys: whether to name feature keys that the index step would find by itself; it
            finds those of the first file, and takes them for all.
        """
        label = self.label
        keys = {"image_key": self.image_key, "label_key": label.key if label else None}
        is_usual = tuple(keys.values()) in KEY_PRESETS.values() and not names_keys
        names = getattr(label, "vocabulary", None)
        values: dict[str, Any] = {"verify": self.verify, **({} if is_usual else keys)}
        values["label"] = label_kind(label)
        values["label_offset"] = getattr(label, "offset", None)
        values["label_size"] = getattr(label, "size", None)
        values["vocabulary"] = vocabulary if names else None
        values["num_classes"] = None if names else getattr(label, "num_classes", None)
        values |= {name: getattr(self, name) for name in ("mask_key", "decoder", "max_pixels")}
        usual = {"verify": "framing", "label": "class", "decoder": "both", "max_pixels": MAX_PIXELS}
        return [
            f"--{name}={value}"
            for name, value in values.items()
            if value and value != usual.get(name)
        ]

    def depends_on(self) -> dict[str, Any]:
        """Returns the fields, besides the level, that affect the outcome, for the `FileEntry`."""
        return {name: self.to_json()[name] for name in _DEPENDS_ON[self.verify]}


class InvalidRecord(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised by `TrialDecode` functions for bytes that are not a usable image: (reason, detail)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def check_mask(mask: bytes, size: Sequence[int], decode: TrialDecode | None) -> None:
    """Raises InvalidRecord unless a mask is of its image's `size`: height and width in pixels."""
    height, width = size
    actual = f"{len(mask):,} bytes"
    if mask.startswith(_PNG):
        assert decode
        _, *mask_size = decode(mask)
        actual = (
            f"a PNG of {mask_size[1]}x{mask_size[0]} pixels,"
            f" bit depth and color type {[*mask[24:26]]}"
        )
        if mask_size == [*size] and mask[24:26] == b"\x08\x00":
            return
    elif len(mask) == height * width:
        return
    expected = f"a grayscale PNG of 8 bits of {width}x{height} pixels, or a byte for each pixel"
    raise InvalidRecord("mask kind", f"`mask_key`: expected {expected}, found {actual}.")


def check_record(
    data: bytes, checks: Checks, decode: TrialDecode | None
) -> tuple[Features, tuple[str, int, int] | None]:
    """Checks the data of one record: the only place where that is done.

    Args:
      data: a serialized Example.
      checks: what the record must hold; with the keys of its image and of its label.
      decode: checks the encoded image, and an encoded mask; None checks neither.

    Returns:
      The features of the record; and format, height and width of its image, if `decode` is given.

    Raises:
      InvalidRecord: what is wrong.
    """
    try:
        features = decode_example(data, as_tensorflow=True)
    except InputError as error:
        raise InvalidRecord("not an Example", str(error)) from error
    problem = find_schema_problem(
        features, image_key=checks.image_key or "", label=checks.label, mask_key=checks.mask_key
    )
    if problem:
        raise InvalidRecord(*problem)
    return features, check_images(features, checks, decode) if decode else None


def check_images(features: Features, checks: Checks, decode: TrialDecode) -> tuple[str, int, int]:
    """Checks the image and the mask of a record; returns as `check_record`, and raises as it."""
    if checks.image_key == PIXELS_KEY:
        image = ("pixels", *(find_size(features) or (0, 0)))
    else:
        encoded = features[checks.image_key or ""][1][0]
        if checks.decoder != "tf_data" and has_several(encoded):
            detail = "it has EXIF data of several orientations, of which DALI mixes two."
            raise InvalidRecord("orientation", detail)
        image = decode(encoded)
    if checks.mask_key:
        check_mask(features[checks.mask_key][1][0], image[1:], decode)
    return image


def list_images(features: Features, checks: Checks) -> list[bytes]:
    """Returns what `check_images` decodes of a record, in order, unless the first one fails."""
    keys = [checks.image_key if checks.image_key != PIXELS_KEY else None, checks.mask_key]
    values = {key: features[key][1][0] for key in keys if key}
    if not values.get(checks.mask_key or "", _PNG).startswith(_PNG):  # a byte for each pixel
        del values[checks.mask_key or ""]
    return [*values.values()]


def find_keys(
    features: Iterable[str], *, image_key: str | None, label_key: str | None
) -> tuple[str | None, str | None]:
    """Fills in missing keys from the first of `KEY_PRESETS` that fits `features`.

    A key that is not found is None: records may have no label.
    """
    feature_keys = set(features)
    paired = sorted(KEY_PRESETS.values(), key=lambda keys: keys[0] != image_key)
    presets = [(image_key or image, label_key or label) for image, label in paired]
    for image, label in presets:
        if image in feature_keys and label in feature_keys:
            return image, label
    return next((image for image, _ in presets if image in feature_keys), image_key), label_key


def missing_key_error(name: str, key: str, feature_keys: Iterable[str]) -> InputError:
    """Returns the error for a feature key that no record holds; `name` is its argument."""
    names = ", ".join(f"'{feature_key}'" for feature_key in feature_keys)
    return InputError(f"`{name}` '{key}' is not in the records, which hold {names}.")


def unknown_keys_error(feature_keys: Iterable[str]) -> InputError:
    """Returns the error for records that hold other features than those of `KEY_PRESETS`."""
    return InputError(
        f"The records hold {', '.join(map(repr, sorted(feature_keys)[:30]))}, not the keys of"
        f" {' or '.join(KEY_PRESETS)}: name the two with `image_key` (--image_key) and"
        " label=ClassLabel(key=...) (--label_key), or pass label=None (--label=none) for none."
    )


def find_schema_problem(
    features: Features, *, image_key: str, label: Label | None, mask_key: str | None = None
) -> tuple[str, str] | None:
    """Returns (reason, detail) if a record does not hold one image, and its label and mask.

    Args:
      features: kind and values by key, as `decode_example` returns them.
      image_key: feature key of the image.
      label: what the label must be, with its key; None for none.
      mask_key: feature key of the mask; None for none.
    """
    for what, key in (("image", image_key), ("mask", mask_key)):
        if key is None:
            continue
        name = f"`{what}_key` '{key}'"
        if key not in features:
            keys = ", ".join(f"'{feature}'" for feature in sorted(features)[:20]) or "no features"
            return f"{what} missing", f"{name} is not in this record, which holds {keys}."
        kind, values = features[key]
        if kind != "bytes_list" or len(values) != 1:
            detail = f"found {kind or 'an empty feature'} of {len(values)}."
            return f"{what} kind", f"{name} must be bytes_list of 1 value, {detail}"
        if not values[0]:
            return f"empty {what}", f"{name} holds 0 bytes."
    if image_key == PIXELS_KEY and not find_size(features):
        return _wrong_size(features)
    return find_label_problem(label, features) if label else None


def find_size(features: Features) -> tuple[int, int] | None:
    """Returns height and width of an image that is stored as pixels; None if they do not fit."""
    (kind, height), (other, width) = (features.get(key, ("", [0])) for key in SIZE_KEYS)
    if {kind, other} != {"int64_list"} or len(height) != 1 or len(width) != 1:
        return None
    fits = height[0] > 0 and 3 * height[0] * width[0] == len(features[PIXELS_KEY][1][0])
    return (height[0], width[0]) if fits else None


def _wrong_size(features: Features) -> tuple[str, str]:
    sides = " and ".join(f"'{key}' {list(features.get(key, ('', []))[1])}" for key in SIZE_KEYS)
    actual = f"found {len(features[PIXELS_KEY][1][0]):,}"
    return "pixels size", f"'{PIXELS_KEY}' must hold 3 bytes for each pixel of {sides}, {actual}."
