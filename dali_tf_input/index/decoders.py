"""Trial decoding of single images, which finds those that training could not decode."""

import gc
import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from dali_tf_input.errors import InputError
from dali_tf_input.records.checks import DCT_METHOD, Checks, InvalidRecord, TrialDecode
from dali_tf_input.records.installing import DALI, pip_install
from dali_tf_input.records.tfrecord import name_content

# What both backends decode to the same pixels; one of them refuses any other format.
_FORMATS = ("JPEG", "PNG", "BMP", "WebP")
_NAMES = {"WEBP": "WebP", "MPO": "JPEG"}  # MPO: a JPEG followed by further pictures, from cameras
_END_OF_JPEG = b"\xff\xd9"
# Mean difference, of 255. Where the decoders agree, their pixels are bit-identical.
_MOST_DIFFERENCE = 1.0


def make_trial_decode(checks: Checks) -> TrialDecode:
    """Makes the function that checks one encoded image, by `decoder` and `max_pixels`.

    It returns (format, height, width). The format is "JPEG", "grayscale JPEG", "CMYK JPEG",
    "YCCK JPEG", "PNG", "16-bit PNG", "BMP" or "WebP", and a "16-bit PNG of 12 bits, almost
    black" has the values of a camera or scanner of 12 bits, unscaled. The size is in pixels. It
    raises `InvalidRecord` for any other format and for images that cannot be decoded.
    """
    makers = {"dali": _make_dali_decoder, "tf_data": _make_tf_data_decoder}
    decoders = [make() for name, make in makers.items() if checks.decoder in (name, "both")]

    def decode(encoded: bytes) -> tuple[str, int, int]:
        image_format, height, width = read_header(encoded)
        if height * width > checks.max_pixels:
            size = f"{width}x{height} in {len(encoded):,} bytes"
            raise InvalidRecord("too many pixels", f"{size}: over {checks.max_pixels:,} pixels.")
        results = [decoder(encoded) for decoder in decoders]
        for result in results:
            if isinstance(result, str):
                cut = image_format.endswith("JPEG") and _END_OF_JPEG not in encoded[-64:]
                kind = image_format.rpartition(" ")[2]
                raise InvalidRecord(f"{'truncated' if cut else 'damaged'} {kind}", result)
        if len(results) > 1:
            _compare(*results)
        if image_format == "PNG" and encoded[24:25] == b"\x10":
            image_format = "16-bit PNG"
            if 0 < results[0].max() < 16:  # of 255, after the decoder's scaling
                image_format += " of 12 bits, almost black"
        return image_format, height, width

    return decode


def make_trial_decode_of_worker(checks: Checks) -> TrialDecode:
    """Makes the same function in a process that only decodes.

    It starts sooner. TensorFlow would import Keras and JAX if it could, and goes without. And its
    import makes many objects, which all stay. So no garbage is collected meanwhile, and later
    collections, also the one at exit, skip these objects.
    """
    for unused in ("keras", "jax"):
        sys.modules.setdefault(unused, None)  # type: ignore[arg-type]
    gc.disable()
    try:
        return make_trial_decode(checks)
    finally:
        gc.enable()
        gc.freeze()


def read_header(encoded: bytes) -> tuple[str, int, int]:
    """Returns the format of an image, its height and its width, without decoding it.

    Raises:
      InvalidRecord: it is of another format; the reason names what it is.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            (width, height), mode = image.size, image.mode
            kind = _NAMES.get(str(image.format), str(image.format))
            transform = image.info.get("adobe_transform")
            animated = getattr(image, "is_animated", False)
    except Image.DecompressionBombError as error:
        raise InvalidRecord("too many pixels", str(error)) from error
    except Exception as error:  # Pillow's readers raise nearly anything over damaged bytes
        raise InvalidRecord(*_describe_content(encoded, error)) from error
    if kind not in _FORMATS:
        raise InvalidRecord(
            f"{kind} image",
            f"expected a JPEG, PNG, BMP or WebP, which both backends decode, found {kind},"
            f" {width}x{height}.",
        )
    if animated and kind in ("PNG", "WebP"):
        detail = f"expected one image, found a {kind} of several, which DALI and TensorFlow decode"
        raise InvalidRecord(f"animated {kind}", f"{detail} differently.")
    if kind == "WebP" and mode == "RGBA":
        detail = "TensorFlow does not decode it: save it without, or as PNG."
        raise InvalidRecord("WebP with transparency", detail)
    if kind == "WebP" and not _finds_exif(encoded):
        detail = "DALI does not decode it: save it without EXIF, or as PNG."
        raise InvalidRecord("WebP whose EXIF data DALI does not find", detail)
    if kind == "BMP" and mode not in ("RGB", "RGBA", "L"):
        detail = "TensorFlow takes the indexes of a palette for shades of gray."
        raise InvalidRecord("BMP with a palette", detail)
    if kind == "JPEG" and mode == "CMYK":
        kind = "YCCK JPEG" if transform == 2 else "CMYK JPEG"
    elif kind == "JPEG" and mode == "L":
        kind = "grayscale JPEG"
    return kind, height, width


def _finds_exif(webp: bytes) -> bool:
    """Returns whether DALI's parser finds the EXIF data that the header of a WebP announces.

    It does not skip the byte that pads a chunk of odd size, and refuses the image if it finds none.
    """
    place, has_exif = 12, webp[12:16] == b"VP8X" and bool(webp[20] & 0x08)
    while has_exif and place + 8 <= len(webp):
        name = webp[place : place + 4]
        place += 8 + int.from_bytes(webp[place + 4 : place + 8], "little")
        if name == b"EXIF":
            return place <= len(webp)
    return not has_exif


def _describe_content(encoded: bytes, error: Exception) -> tuple[str, str]:
    """Returns (reason, detail) for bytes that no image format claims."""
    count, start = f"{len(encoded):,}", encoded[:64]
    if encoded[:2] == b"\xff\xd8":
        words = str(error).partition(" <")[0]
        return "damaged JPEG", f"the header of this JPEG of {count} bytes cannot be read: {words}"
    if not any(encoded):
        return "zero bytes", f"expected an encoded image, found {count} bytes of zero."
    name, _ = name_content(start) or ("not an image", "")
    if name in ("text", "HTML page", "XML document"):
        return name, f"expected an encoded image, found {start[:40]!r} ..."
    starts = f"{count} bytes that start with {start[:8].hex(' ')}"
    return name, f"expected an encoded image, found {starts}."


def _compare(first: Any, second: Any) -> None:
    """Raises InvalidRecord if two decoders disagree, judged by every eighth pixel each way."""
    if first.shape != second.shape:
        detail = f"DALI decodes it to {first.shape}, TensorFlow to {second.shape}."
        raise InvalidRecord("decoders disagree", detail)
    first_pixels, second_pixels = (image[::8, ::8].astype(np.int16) for image in (first, second))
    difference = float(np.abs(first_pixels - second_pixels).mean())
    if difference > _MOST_DIFFERENCE:
        detail = f"DALI's pixels and TensorFlow's differ by {difference:.0f} of 255 on average."
        raise InvalidRecord("decoders disagree", detail)


def _make_tf_data_decoder() -> Callable[[bytes], Any]:
    # Imported here because TensorFlow takes seconds, and only this decoder needs it.
    import tensorflow as tf

    def decode(encoded: bytes) -> Any:
        try:
            if encoded.startswith(b"\xff\xd8\xff"):
                image = tf.io.decode_jpeg(encoded, channels=3, dct_method=DCT_METHOD)
            else:
                image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        except tf.errors.OpError as error:
            return f"TensorFlow's decoder refuses it: {error.message.rpartition('}} ')[2]}"
        return image.numpy()

    return decode


def _make_dali_decoder() -> Callable[[bytes], Any]:
    # nvImageCodec is what DALI decodes with; unlike a DALI pipeline it continues after a bad image.
    # Imported here because it need not be installed to check with TensorFlow alone.
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise InputError(
            f"To decode as DALI does needs nvImageCodec: {error}. Install it: {pip_install(DALI)}"
        ) from error

    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        max_num_cpu_threads=1,
    )
    color = nvimgcodec.ColorSpec.SRGB
    parameters: Any = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=color)

    def decode(encoded: bytes) -> Any:
        image = decoder.decode(encoded, params=parameters)
        return "DALI's decoder (nvImageCodec) refuses it." if image is None else np.asarray(image)

    return decode
