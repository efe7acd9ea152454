"""What is checked of TFRecord files, and how deeply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dali_tf_input import labels
from dali_tf_input.errors import Count, InputError, check_fields
from dali_tf_input.index.contents import LEVELS, FileEntry, Level
from dali_tf_input.labels import LabelKind

Decoder = Literal["both", "dali", "tf_data"]

# Pillow's limit, above which it warns of a decompression bomb: 1/4 GB at 3 bytes per pixel.
MAX_PIXELS = 89_478_485

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
      image_key: feature key of the encoded image; None tries those of `contents.KEY_PRESETS`.
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

    def satisfied_by(self, entry: FileEntry) -> bool:
        """Whether the run that made `entry` checked everything that these checks ask for."""
        if LEVELS.index(entry.verified) < LEVELS.index(self.verify):
            return False
        held = entry.checked_by
        return all(
            held.get(name, getattr(Checks, name)) == value
            or (name == "decoder" and held.get(name) == "both")
            for name, value in self.depends_on().items()
        )


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
