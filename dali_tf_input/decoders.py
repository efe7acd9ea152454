"""Decoding one image as training will: for finding out, before it, which images cannot be decoded."""

import io
import re
from collections.abc import Callable
from typing import Any

from PIL import Image

from dali_tf_input.checks import BadImage, Checks, Decode

# What both backends decode, to the same pixels. Of other formats TensorFlow or DALI, or both, refuse each.
_FORMATS = ("JPEG", "PNG")
_NAMES = {"WEBP": "WebP"}
_END_OF_JPEG = b"\xff\xd9"


def make_decode(checks: Checks) -> Decode:
    """Makes the function that judges one encoded image.

    Args:
      checks: `decoder` and `max_pixels` count here.

    Returns:
      A function of the encoded bytes that returns (format, height, width), the format one of "JPEG", "grayscale JPEG", "CMYK
      JPEG", "YCCK JPEG" and "PNG", the size in pixels; it raises `BadImage` for what is no such image or cannot be decoded.
    """
    makers = {"tf_data": {"tf_data": _tf_data_decoder}, "dali": {"dali": _dali_decoder}}
    makers["both"] = makers["dali"] | makers["tf_data"]
    decoders = [make() for make in makers[checks.decoder].values()]

    def decode(encoded: bytes) -> tuple[str, int, int]:
        image_format, height, width = read_header(encoded)
        if height * width > checks.max_pixels:
            raise BadImage("too many pixels", f"{width}x{height} in {len(encoded):,} bytes: over {checks.max_pixels:,} pixels.")
        for refuse in decoders:
            refusal = refuse(encoded)
            if refusal:
                cut = image_format.endswith("JPEG") and _END_OF_JPEG not in encoded[-64:]
                raise BadImage(f"{'truncated' if cut else 'damaged'} {image_format.rpartition(' ')[2]}", refusal)
        return image_format, height, width

    return decode


def read_header(encoded: bytes) -> tuple[str, int, int]:
    """Returns the format of an image, its height and its width, without decoding it.

    Raises:
      BadImage: it is no JPEG and no PNG; the reason names what it is.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            (width, height), kind, mode = image.size, image.format, image.mode
            transform = image.info.get("adobe_transform")
    except Image.DecompressionBombError as error:
        raise BadImage("too many pixels", str(error)) from error
    except Exception as error:  # Pillow's readers raise nearly anything over damaged bytes
        raise BadImage(*_name_content(encoded, error)) from error
    kind = _NAMES.get(str(kind), kind)
    if kind == "MPO":  # a JPEG with further pictures behind it, as cameras write
        kind = "JPEG"
    if kind not in _FORMATS:
        raise BadImage(f"{kind} image", f"expected a JPEG or PNG, which both backends decode, found {kind}, {width}x{height}.")
    if kind == "JPEG" and mode == "CMYK":
        kind = "YCCK JPEG" if transform == 2 else "CMYK JPEG"
    elif kind == "JPEG" and mode == "L":
        kind = "grayscale JPEG"
    return str(kind), height, width


def _name_content(encoded: bytes, error: Exception) -> tuple[str, str]:
    """Returns (reason, detail) for bytes that no image format claims."""
    start = encoded[:64]
    if encoded[:2] == b"\xff\xd8":
        return (
            "damaged JPEG",
            f"the header of this JPEG of {len(encoded):,} bytes cannot be read: {str(error).partition(' <')[0]}",
        )
    if not any(encoded):
        return "zero bytes", f"expected an encoded image, found {len(encoded):,} bytes of zero."
    if re.match(rb"\s*(?i:<!doctype|<html|<\?xml)", start):
        return "HTML page", f"expected an encoded image, found {start[:40]!r} ..."
    if re.fullmatch(rb"[\t\r\n\x20-\x7e]+", start):
        return "text", f"expected an encoded image, found {start[:40]!r} ..."
    return "not an image", f"expected an encoded image, found {len(encoded):,} bytes that start with {start[:8].hex(' ')}."


def _tf_data_decoder() -> Callable[[bytes], str | None]:
    # Imported here because TensorFlow takes seconds to import, and only this decoder needs it.
    import tensorflow as tf

    from dali_tf_input.tf_images import decode_image

    def refuse(encoded: bytes) -> str | None:
        try:
            decode_image(tf.constant(encoded))
        except tf.errors.OpError as error:
            return f"tf.io.decode_jpeg refuses it: {error.message.rpartition('}} ')[2]}"
        return None

    return refuse


def _dali_decoder() -> Callable[[bytes], str | None]:
    # nvImageCodec is what DALI's decoders are made of; unlike a DALI pipeline it goes on after an image that it refuses.
    from nvidia import nvimgcodec  # imported here because who checks by TensorFlow alone need not wait for it

    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        max_num_cpu_threads=1,
    )
    parameters: Any = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def refuse(encoded: bytes) -> str | None:
        return None if decoder.decode(encoded, params=parameters) is not None else "DALI's decoder (nvImageCodec) refuses it."

    return refuse
