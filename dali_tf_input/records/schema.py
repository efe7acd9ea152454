"""What is checked of TFRecord files, and how deeply."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dali_tf_input.errors import Count, InputError, check_fields
from dali_tf_input.records import labels
from dali_tf_input.records.labels import Features, Label, LabelKind, find_label_problem

Level = Literal["framing", "crc", "schema", "decode"]
Decoder = Literal["both", "dali", "tf_data"]

# Pillow's limit, above which it warns of a decompression bomb: 1/4 GB at 3 bytes per pixel.
MAX_PIXELS = 89_478_485

LEVELS: tuple[Level, ...] = get_args(Level)  # each one checks what the one before does, and more

# An image as it is in memory, uint8 (height, width, 3) in RGB, and the keys of its sides.
PIXELS_KEY, SIDE_KEYS = "image/pixels", ("image/height", "image/width")

# Feature keys of the image and of the label, as the most common writers of TFRecords name them.
KEY_PRESETS = {
    "TF-slim": ("image/encoded", "image/class/label"),
    "tfds": ("image", "label"),
    "raw pixels": (PIXELS_KEY, "image/class/label"),
}

# Both backends decode JPEGs with this DCT (libjpeg-turbo's "islow"), and so to the same bits.
DCT_METHOD = "INTEGER_ACCURATE"

_LABEL = ("label_key", "label_offset", "num_classes", "label", "label_size", "vocabulary")
_SCHEMA = ("image_key", *_LABEL, "mask_key")
_DEPENDS_ON: dict[Level, tuple[str, ...]] = {
    "framing": (),
    "crc": (),
    "schema": _SCHEMA,
    "decode": (*_SCHEMA, "decoder", "max_pixels"),
}

# Decodes an encoded image: returns its format, height and width, or raises `BadImage`.
TrialDecode = Callable[[bytes], tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is checked of every record.

    Attributes:
      verify: the depth. "framing": lengths, their CRCs, the file's end; no data is read. "crc": the
        CRCs of the data too. "schema": each record is an Example with one image and its label, and
        the label is in range. "decode": the image is a JPEG, PNG, BMP or WebP of at most
        `max_pixels`, and decodes; its mask is of its size.
      image_key: feature key of the encoded image; None tries those of `schema.KEY_PRESETS`.
      label_key: feature key of the label; None as above.
      label_offset: the label of the first class as stored; lower ones are bad. TF-slim's ImageNet
        counts from 1.
      num_classes: labels from ``label_offset + num_classes`` on are bad; None sets no such limit.
      label: what a label is: "class", one integer (with `vocabulary`, one name); "multi_hot", a
        list of integers of any length; "values", `label_size` numbers; "none".
      label_size: how many numbers, for "values" only.
      vocabulary: the names of the classes, for "class" only.
      mask_key: feature key of the segmentation mask; None is none.
      decoder: what decodes at "decode": "dali" (nvImageCodec, as in DALI's CPU operators),
        "tf_data" (`tf.io.decode_jpeg`), or "both", which must both succeed. They disagree on some
        damaged images: use "both" unless only one backend will ever train.
      max_pixels: height times width above which an image is bad, before it is decoded. The default
        is Pillow's.
    """

    verify: Level = "framing"
    image_key: str | None = None
    label_key: str | None = None
    label_offset: int = 0
    num_classes: Count | None = None
    label: LabelKind = "class"
    label_size: Count | None = None
    vocabulary: tuple[str, ...] | None = None
    mask_key: str | None = None
    decoder: Decoder = "both"
    max_pixels: Count = MAX_PIXELS

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in (("label_size", "values"), ("vocabulary", "class")):
            if getattr(self, name) is not None and self.label != kind:
                raise InputError(f"`{name}` is for `label` {kind!r} only, got {self.label!r}.")
        if self.label == "values" and self.label_size is None:
            raise InputError("`label` 'values' needs `label_size`, how many numbers.")

    @property
    def stored_label(self) -> labels.Label | None:
        """What a label must be."""
        key, count, offset = self.label_key, self.num_classes, self.label_offset
        if self.label == "multi_hot":
            return labels.MultiHot(key=key, num_classes=count, offset=offset)
        if self.label == "values":
            return labels.Values(key=key, size=self.label_size or 1)
        names = self.vocabulary
        made = labels.ClassLabel(key=key, num_classes=count, offset=offset, vocabulary=names)
        return made if self.label == "class" else None

    def depends_on(self) -> dict[str, Any]:
        """Returns what the outcome depends on besides the level, for the `FileEntry`."""
        values = {name: getattr(self, name) for name in _DEPENDS_ON[self.verify]}
        return {name: list(one) if isinstance(one, tuple) else one for name, one in values.items()}


class BadImage(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised by `TrialDecode` functions for bytes that are not a usable image: (reason, detail)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def check_mask(mask: bytes, size: Sequence[int], decode: TrialDecode | None) -> None:
    """Raises BadImage unless a mask is of its image's `size`: height and width in pixels."""
    height, width = size
    found = f"{len(mask):,} bytes"
    if mask.startswith(b"\x89PNG"):
        assert decode
        _, *held = decode(mask)
        found = f"a PNG of {held[1]}x{held[0]} pixels, bit depth and color type {[*mask[24:26]]}"
        if held == [*size] and mask[24:26] == b"\x08\x00":
            return
    elif len(mask) == height * width:
        return
    due = f"a grayscale PNG of 8 bits of {width}x{height} pixels, or a byte for each pixel"
    raise BadImage("mask kind", f"`mask_key`: expected {due}, found {found}.")


def find_keys(
    features: Iterable[str], *, image_key: str | None, label_key: str | None
) -> tuple[str | None, str | None]:
    """Completes the two keys with the first of `KEY_PRESETS` that fits `features`.

    None is a key that is not found; records may hold no label.
    """
    held = set(features)
    presets = [(image_key or image, label_key or label) for image, label in KEY_PRESETS.values()]
    for image, label in presets:
        if image in held and label in held:
            return image, label
    return next((image for image, _ in presets if image in held), image_key), label_key


def name_missing(name: str, key: str, held: Iterable[str]) -> InputError:
    """Returns the error for a feature key that no record holds; `name` is its argument."""
    names = ", ".join(f"'{one}'" for one in held)
    return InputError(f"`{name}` '{key}' is not in the records, which hold {names}.")


def name_keys(held: Iterable[str]) -> InputError:
    """Returns the error for records that hold other features than those of `KEY_PRESETS`."""
    return InputError(
        f"The records hold {', '.join(map(repr, sorted(held)[:30]))}, not the keys of"
        f" {' or '.join(KEY_PRESETS)}: name the two with `image_key` and `label_key`, or pass"
        " label=None (--label=none) where there are no labels."
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
            held = ", ".join(f"'{held}'" for held in sorted(features)[:20]) or "no features"
            return f"{what} missing", f"{name} is not in this record, which holds {held}."
        found, values = features[key]
        if found != "bytes_list" or len(values) != 1:
            detail = f"found {found or 'an empty feature'} of {len(values)}."
            return f"{what} kind", f"{name} must be bytes_list of 1 value, {detail}"
        if not values[0]:
            return f"empty {what}", f"{name} holds 0 bytes."
    if image_key == PIXELS_KEY and not find_size(features):
        return _wrong_size(features)
    return find_label_problem(label, features) if label else None


def find_size(features: Features) -> tuple[int, int] | None:
    """Returns height and width of an image that is stored as pixels; None if they do not fit."""
    (kind, height), (other, width) = (features.get(key, ("", [0])) for key in SIDE_KEYS)
    if {kind, other} != {"int64_list"} or len(height) != 1 or len(width) != 1:
        return None
    fits = height[0] > 0 and 3 * height[0] * width[0] == len(features[PIXELS_KEY][1][0])
    return (height[0], width[0]) if fits else None


def _wrong_size(features: Features) -> tuple[str, str]:
    sides = " and ".join(f"'{key}' {list(features.get(key, ('', []))[1])}" for key in SIDE_KEYS)
    found = f"found {len(features[PIXELS_KEY][1][0]):,}"
    return "pixels size", f"'{PIXELS_KEY}' must hold 3 bytes for each pixel of {sides}, {found}."
