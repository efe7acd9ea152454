"""Converting images to JPEGs in RGB or grayscale that are not larger than needed."""

import functools
import io
import warnings
from typing import Literal, NamedTuple

from PIL import Image, ImageFile, ImageOps

from dali_tf_input.index.decoders import make_trial_decode_of_worker
from dali_tf_input.records.checks import Checks, Decoder, InvalidRecord, TrialDecode

_MOST_JPEG_PIXELS = 65535
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright

# Over 89 million pixels: refused, as the index step does.
warnings.simplefilter("error", Image.DecompressionBombWarning)


class UnreadableImage(Exception):  # noqa: N818 (a verdict, not an error)
    """Raised for an image that cannot be decoded."""


class Conversion(NamedTuple):
    """What is done to images: see the flags of the command."""

    resize_shorter: int | None = None
    quality: int = 95
    apply_orientation: bool = False
    decoder: Decoder | Literal["none"] = "both"
    store: Literal["jpeg", "pixels"] = "jpeg"


class Converted(NamedTuple):
    """One image: its bytes, its height and width in pixels, and what was done."""

    encoded: bytes
    height: int
    width: int
    notes: tuple[str, ...]


def convert_image(encoded: bytes, conversion: Conversion) -> Converted:
    """Returns an image as a JPEG that both backends decode.

    The bytes of a JPEG in RGB or grayscale are kept if it is not too large and `decoder` accepts
    it. Otherwise the image is decoded, turned upright by its EXIF orientation,
    made RGB (transparency is dropped, as TensorFlow and DALI do), resized until its shorter side is
    `resize_shorter`, and encoded. If pixels are stored, they are uint8 (height, width, 3) in RGB.

    Raises:
      UnreadableImage: it cannot be decoded, or is larger than Pillow's bound.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return _convert(image, encoded, conversion)
    except Exception as error:  # Pillow's decoders raise nearly anything over damaged bytes
        raise UnreadableImage(str(error).partition(" <")[0] or type(error).__name__) from error


def _convert(image: ImageFile.ImageFile, encoded: bytes, conversion: Conversion) -> Converted:
    turned = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    shorter = min(image.size)
    most = conversion.resize_shorter or shorter
    too_large = shorter > most
    reasons = [f"{image.format} made JPEG"] if image.format not in ("JPEG", "MPO") else []
    reasons += [f"{image.mode} made RGB"] if not reasons and image.mode not in ("RGB", "L") else []
    reasons += [f"resized to {most}"] if too_large else []
    changes = reasons or conversion.apply_orientation or conversion.store == "pixels"
    reasons += ["turned upright"] if turned and changes else []
    stores_pixels = conversion.store == "pixels"
    if not reasons and conversion.decoder != "none" and not stores_pixels:
        try:
            _trial_decode(conversion.decoder)(encoded)
        except InvalidRecord as bad:
            image.load()  # raises if it is damaged; otherwise it is only odd
            reasons.append(f"{bad.reason} re-encoded")
    if not reasons and not stores_pixels:
        width, height = image.size
        return Converted(encoded, height, width, ("EXIF orientation kept",) if turned else ())
    if too_large:
        width, height = (max(1, round(side * most / shorter)) for side in image.size)
        # JPEGs decode faster at a reduced size; twice the target size loses nothing visible.
        image.draft(None, (2 * width, 2 * height))
    pixels = _as_rgb(image)
    if too_large:
        pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)
    pixels = ImageOps.exif_transpose(pixels)
    if stores_pixels:
        pixels = pixels.convert("RGB")
        return Converted(pixels.tobytes(), pixels.height, pixels.width, tuple(reasons))
    if max(pixels.size) > _MOST_JPEG_PIXELS:
        holds = f"a JPEG holds {_MOST_JPEG_PIXELS} pixels each way; see --resize_shorter"
        raise ValueError(f"{pixels.width}x{pixels.height}: {holds}")
    stream = io.BytesIO()
    pixels.save(stream, "JPEG", quality=conversion.quality, icc_profile=None, exif=b"")
    return Converted(stream.getvalue(), pixels.height, pixels.width, tuple(reasons))


def convert_mask(encoded: bytes, image: Converted) -> bytes:
    """Returns a mask as a grayscale PNG of its image's size; keeps raw bytes of that size.

    Raises:
      UnreadableImage: it has colors, is damaged, or its image was turned upright.
    """
    size = (image.width, image.height)
    if len(encoded) == image.width * image.height and not encoded.startswith(b"\x89PNG"):
        return encoded
    if "turned upright" in image.notes:
        raise UnreadableImage("its image was turned upright, and the mask may not be")
    try:
        with Image.open(io.BytesIO(encoded)) as mask:
            if mask.mode not in ("L", "P"):  # indexes of a palette are classes
                raise UnreadableImage(f"its mask is of mode {mask.mode}, not of one 8-bit channel")
            pixels = mask.resize(size, Image.Resampling.NEAREST)
    except (OSError, ValueError, SyntaxError) as error:
        raise UnreadableImage(f"its mask: {error}") from error
    stream = io.BytesIO()
    Image.frombytes("L", size, pixels.tobytes()).save(stream, "PNG")
    return stream.getvalue()


@functools.cache
def _trial_decode(decoder: Decoder) -> TrialDecode:
    return make_trial_decode_of_worker(Checks(verify="decode", decoder=decoder))


def _as_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in RGB, or in L if it is gray."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError(f"pixels of mode {image.mode}, whose value range is unknown")
    if image.mode.startswith("I"):  # 16 bits a pixel: Pillow would cut off what is over 255
        gray = image.convert("I").point(lambda value: value / 256).convert("L")
        gray.info.update(image.info)  # the EXIF orientation
        return gray
    if image.mode in ("RGB", "L"):
        return image
    return image.convert("L" if image.mode in ("1", "LA") else "RGB")
