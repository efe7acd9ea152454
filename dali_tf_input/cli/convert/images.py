"""Converting images to JPEGs in RGB or grayscale that are not larger than needed."""

import functools
import io
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from PIL import Image, ImageFile

from dali_tf_input.errors import InputError
from dali_tf_input.index.decoders import make_trial_decode_of_worker
from dali_tf_input.records.checks import Checks, Decoder, InvalidRecord, TrialDecode
from dali_tf_input.records.orientation import UPRIGHT, find_orientation, is_transposed

Frame = Literal["stored", "shown"]  # how a mask lies: as its image is stored, or as it is shown

_MOST_JPEG_PIXELS = 65535
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BACK = {6: 8, 8: 6}  # what undoes a turn; others undo themselves
_LOSSLESS = ("PNG", "BMP", "TIFF", "GIF")  # formats of masks
_POSITIONS = re.compile(r"box|polygon|point|landmark|segment|mask|depth|pose", re.IGNORECASE)
_FEW_VALUES = 4096  # below it, an image of 16 bits is one of 12, and almost black

# Over 89 million pixels: refused, as the index step does.
warnings.simplefilter("error", Image.DecompressionBombWarning)


class UnreadableImage(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised for an image that cannot be decoded."""


class Conversion(NamedTuple):
    """What is done to images, masks, and features in image coordinates: see the flags."""

    resize_shorter: int | None = None
    quality: int = 95
    keep_orientation: bool = False
    decoder: Decoder | Literal["none"] = "both"
    store: Literal["jpeg", "pixels"] = "jpeg"
    mask_frame: Frame | None = None
    mask_key: str = "image/segmentation/class/encoded"
    keep_features: tuple[str, ...] = ()


class Converted(NamedTuple):
    """One image: its bytes, its height and width in pixels, and what was done.

    Attributes:
      stored: the width and height of the source as it is stored.
      orientation: that of the source.
      is_upright: whether it was turned by it.
    """

    encoded: bytes
    height: int
    width: int
    notes: tuple[str, ...]
    stored: tuple[int, int]
    orientation: int
    is_upright: bool


def convert_image(encoded: bytes, conversion: Conversion) -> Converted:
    """Returns an image as a JPEG that both backends decode.

    The bytes of a JPEG in RGB or grayscale are kept if it is upright, not too large, and `decoder`
    accepts it. Otherwise the image is decoded, turned upright by its EXIF orientation, made RGB
    (transparency is dropped, as TensorFlow and DALI do), resized until its shorter side is
    `resize_shorter`, and encoded. If pixels are stored, they are uint8 (height, width, 3) in RGB.

    With `keep_orientation` no image is turned, and all have the EXIF orientation that they had.

    Raises:
      UnreadableImage: it cannot be decoded, or is larger than Pillow's bound.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return _convert(image, encoded, conversion)
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # of Pillow
        raise UnreadableImage(f"over {most:,} pixels: make it smaller first") from error
    except InputError:  # a decoder is not installed, which says nothing of the image
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything over damaged bytes
        raise UnreadableImage(str(error).partition(" <")[0] or type(error).__name__) from error


def _convert(image: ImageFile.ImageFile, encoded: bytes, conversion: Conversion) -> Converted:
    orientation = find_orientation(encoded)  # as the decoders do; Pillow itself turns TIFF
    stored, turns = image.size, orientation != UPRIGHT
    shorter = min(image.size)
    most = conversion.resize_shorter or shorter
    too_large = shorter > most
    reasons = [f"{image.format} made JPEG"] if image.format not in ("JPEG", "MPO") else []
    reasons += [f"{image.mode} made RGB"] if not reasons and image.mode not in ("RGB", "L") else []
    reasons += [f"resized to {most}"] if too_large else []
    stores_pixels = conversion.store == "pixels"
    is_upright = stores_pixels or not conversion.keep_orientation
    is_turned = turns and is_upright
    if image.format == "TIFF":
        is_turned = image.getexif().get(_ORIENTATION, UPRIGHT) in _TURNS
    reasons += ["turned upright"] if is_turned else []
    about: dict[str, Any] = {"stored": stored, "orientation": orientation, "is_upright": is_upright}
    if not reasons and conversion.decoder != "none" and not stores_pixels:
        try:
            _trial_decode(conversion.decoder)(encoded)
        except InvalidRecord as bad:
            image.load()  # raises if it is damaged; otherwise it is only odd
            reasons.append(f"{bad.reason} re-encoded")
    if not reasons and not stores_pixels:
        width, height = image.size
        return Converted(encoded, height, width, _kept(turns), **about)
    if too_large:
        width, height = (max(1, round(side * most / shorter)) for side in image.size)
        # JPEGs decode faster at a reduced size; twice the target size loses nothing visible.
        image.draft(None, (2 * width, 2 * height))
    pixels = _as_rgb(image)
    if image.mode.startswith("I"):
        reasons.append("16 bits made 8")
        highest: Any = image.getextrema()[1]
        if highest < _FEW_VALUES:
            reasons.append("12 bits in 16, almost black")
    if too_large:
        pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)
    if is_upright:
        pixels = _turn(pixels, orientation)
    if stores_pixels:
        pixels = pixels.convert("RGB")
        return Converted(pixels.tobytes(), pixels.height, pixels.width, tuple(reasons), **about)
    if max(pixels.size) > _MOST_JPEG_PIXELS:
        holds = f"a JPEG holds {_MOST_JPEG_PIXELS} pixels each way; see --resize_shorter"
        raise ValueError(f"{pixels.width}x{pixels.height}: {holds}")
    stream = io.BytesIO()
    exif = Image.Exif()
    if turns and not is_upright:
        exif[_ORIENTATION] = orientation
    pixels.save(stream, "JPEG", quality=conversion.quality, icc_profile=None, exif=exif)
    notes = (*reasons, *_kept(turns and not is_upright))
    return Converted(stream.getvalue(), pixels.height, pixels.width, notes, **about)


def _kept(turns: bool) -> tuple[str, ...]:
    return ("EXIF orientation kept",) if turns else ()


def _turn(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def convert_mask(encoded: bytes, image: Converted, frame: Frame | None = None) -> bytes:
    """Returns a mask in the frame of its image, of its size, without loss.

    A mask is of its image's size before it was shrunk, and lies either as the image is stored, or
    as it is shown by its EXIF orientation. Where its size does not tell, `frame` does, by default
    "shown", as annotation tools show images.

    Args:
      encoded: an image of one 8-bit channel, or raw bytes, one a pixel, as the image is stored.
      image: the converted image.
      frame: how masks lie whose size tells nothing; None is "stored" for raw bytes.

    Returns:
      A grayscale PNG; of raw bytes, raw bytes.

    Raises:
      UnreadableImage: it is of another size, has colors, is damaged, or of a format with loss.
    """
    width, height = image.stored
    sizes: dict[Frame, tuple[int, int]] = {"stored": image.stored, "shown": image.stored}
    if is_transposed(image.orientation):
        sizes["shown"] = (height, width)
    is_raw = len(encoded) == width * height and not encoded.startswith(b"\x89PNG")
    if is_raw:
        own = frame or "stored"
        pixels = Image.frombytes("L", sizes[own], encoded)
    else:
        pixels = _open_mask(encoded)
        fits = [name for name, size in sizes.items() if pixels.size == size]
        if not fits:
            found = f"its mask has {pixels.width}x{pixels.height} pixels"
            raise UnreadableImage(f"{found}, and the image {width}x{height}")
        own = fits[0] if len(fits) == 1 else frame or "shown"
    if own == "stored" and image.is_upright:
        pixels = _turn(pixels, image.orientation)
    elif own == "shown" and not image.is_upright:
        pixels = _turn(pixels, _BACK.get(image.orientation, image.orientation))
    size = (image.width, image.height)
    if pixels.size != size:
        pixels = pixels.resize(size, Image.Resampling.NEAREST)
    if is_raw:
        return pixels.tobytes()
    stream = io.BytesIO()
    pixels.save(stream, "PNG")
    return stream.getvalue()


def check_positions(
    features: Mapping[str, tuple[str, Sequence[Any]]], image: Converted, kept: Collection[str]
) -> None:
    """Raises UnreadableImage if a feature holds positions in an image that has changed.

    They are known by their keys. Positions from 0 to 1 fit an image that was shrunk.
    """
    is_turned = image.is_upright and image.orientation != UPRIGHT
    shown = image.stored[::-1] if is_turned and is_transposed(image.orientation) else image.stored
    is_resized = shown != (image.width, image.height)
    for key, (kind, values) in features.items():
        if key in kept or not _POSITIONS.search(key) or not values:
            continue
        is_relative = kind == "float_list" and min(values) >= 0 and max(values) <= 1
        if is_turned or (is_resized and not is_relative):
            what = "turned upright" if is_turned else "resized"
            raise UnreadableImage(
                f"`{key}` may be positions in its image, which would be {what}:"
                f" --keep_features={key} keeps it as it is, --keep_orientation and no"
                " --resize_shorter keep the image"
            )


def _open_mask(encoded: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(encoded)) as mask:
            if mask.mode not in ("L", "P"):  # indexes of a palette are classes
                raise UnreadableImage(f"its mask is of mode {mask.mode}, not of one 8-bit channel")
            if mask.format not in _LOSSLESS:
                words = f"its mask is a {mask.format}, which may change classes: save it as PNG"
                raise UnreadableImage(words)
            return Image.frombytes("L", mask.size, mask.tobytes())
    except (OSError, ValueError, SyntaxError) as error:
        raise UnreadableImage(f"its mask: {error}") from error


@functools.cache
def _trial_decode(decoder: Decoder) -> TrialDecode:
    try:
        return make_trial_decode_of_worker(Checks(verify="decode", decoder=decoder))
    except ImportError as error:
        raise InputError(f"The decoder of TensorFlow cannot be used: {error}.") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in RGB, or in L if it is gray."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError(f"pixels of mode {image.mode}, whose value range is unknown")
    if image.mode.startswith("I"):  # 16 bits a pixel: Pillow would cut off what is over 255
        return image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    if image.mode in ("RGB", "L"):
        return image
    return image.convert("L" if image.mode in ("1", "LA") else "RGB")
