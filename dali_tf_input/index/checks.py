"""What is checked of TFRecord files, and how deeply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dali_tf_input.errors import Count, check_fields
from dali_tf_input.index.contents import LEVELS, FileEntry, Level

Decoder = Literal["both", "dali", "tf_data"]

# Pillow's limit, above which it warns of a decompression bomb: 1/4 GB at 3 bytes per pixel.
MAX_PIXELS = 89_478_485

_DEPENDS_ON: dict[Level, tuple[str, ...]] = {
    "framing": (),
    "crc": (),
    "schema": ("image_key", "label_key", "label_offset", "num_classes"),
    "decode": ("image_key", "label_key", "label_offset", "num_classes", "decoder", "max_pixels"),
}

# Decodes an encoded image: returns its format, height and width, or raises `BadImage`.
TrialDecode = Callable[[bytes], tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is checked of every record.

    Attributes:
      verify: the depth. "framing": lengths, their CRCs, the file's end; no data is read. "crc": the
        CRCs of the data too. "schema": each record is an Example with one image and one integer
        label, and the label is in range. "decode": the image is a JPEG or PNG of at most
        `max_pixels`, and decodes.
      image_key: feature key of the encoded image; None tries those of `contents.KEY_PRESETS`.
      label_key: feature key of the integer label; None as above.
      label_offset: the label of the first class as stored; lower ones are bad. TF-slim's ImageNet
        counts from 1.
      num_classes: labels from ``label_offset + num_classes`` on are bad; None sets no such limit.
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
    decoder: Decoder = "both"
    max_pixels: Count = MAX_PIXELS

    def __post_init__(self) -> None:
        check_fields(self)

    def depends_on(self) -> dict[str, Any]:
        """Returns what the outcome depends on beside the level: what a `FileEntry` keeps."""
        return {name: getattr(self, name) for name in _DEPENDS_ON[self.verify]}

    def satisfied_by(self, entry: FileEntry) -> bool:
        """Whether the run that made `entry` checked everything that these checks ask for."""
        if LEVELS.index(entry.verified) < LEVELS.index(self.verify):
            return False
        held = entry.checked_by
        return all(
            held.get(name) == value or (name == "decoder" and held.get(name) == "both")
            for name, value in self.depends_on().items()
        )


class BadImage(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised by `TrialDecode` functions for bytes that are not a usable image: (reason, detail)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
