"""The EXIF orientation of images, in Python and in TensorFlow's operations."""

import struct

import conftest
import numpy as np
import pytest
import tensorflow as tf
from backends.test_parity import by_batch, by_tensorflow, draw
from conftest import encode, jpeg
from PIL import Image

import dali_tf_input as dti
from dali_tf_input.backends import tf_native, tf_orientation
from dali_tf_input.backends.tf_formats import is_accepted
from dali_tf_input.records.orientation import find_orientation, has_several

TAG, SHORT, LONG, BYTE = 0x0112, 3, 4, 1


def exif_of(*entries, order="<", at=8, magic=42, count=None):
    """Returns EXIF data of (tag, type, count, value) entries."""
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", magic, at)
    body = struct.pack(f"{order}H", len(entries) if count is None else count)
    for tag, kind, number, value in entries:
        packed = struct.pack(f"{order}H", value) + b"\0\0" if kind == SHORT else b""
        packed = packed or (bytes([value]) + b"\0\0\0" if kind == BYTE else b"")
        body += struct.pack(f"{order}HHI", tag, kind, number)
        body += packed or struct.pack(f"{order}I", value)
    return head.ljust(at, b"\0") + body + b"\0\0\0\0"


def segment(marker, data):
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def with_segments(*segments, fill=b""):
    image = jpeg(8, 9)
    return image[:2] + fill + b"".join(segments) + image[2:]


def exif(data):
    return segment(0xE1, b"Exif\0\0" + data)


def saved(form, orientation, **how):
    return encode(Image.new("RGB", (9, 8)), form, exif=conftest.exif(orientation), **how)


SIX = exif(exif_of((TAG, SHORT, 1, 6)))
THREE = exif(exif_of((TAG, SHORT, 1, 3)))
XMP = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<tiff:Orientation>8")
OTHERS = [(256, LONG, 1, 40), (257, LONG, 1, 30)]
IMAGES = {
    "none": (jpeg(8, 9), 1),
    "before JFIF": (with_segments(SIX), 6),
    "after XMP": (with_segments(XMP, SIX), 6),
    "XMP alone": (with_segments(XMP), 1),
    "fill bytes": (with_segments(SIX, fill=b"\xff\xff"), 6),
    "after a comment": (with_segments(segment(0xFE, b"x" * 70_00), SIX), 6),
    "the first counts": (with_segments(SIX, THREE), 6),
    "big endian": (with_segments(exif(exif_of((TAG, SHORT, 1, 8), order=">"))), 8),
    "among others": (with_segments(exif(exif_of(*OTHERS, (TAG, SHORT, 1, 5)))), 5),
    "not sorted": (with_segments(exif(exif_of((TAG, SHORT, 1, 5), *OTHERS))), 5),
    "at 40": (with_segments(exif(exif_of((TAG, SHORT, 1, 7), at=40))), 7),
    "long": (with_segments(exif(exif_of((TAG, LONG, 1, 6)))), 6),
    "0": (with_segments(exif(exif_of((TAG, SHORT, 1, 0)))), 1),
    "9": (with_segments(exif(exif_of((TAG, SHORT, 1, 9)))), 1),
    "of bytes": (with_segments(exif(exif_of((TAG, BYTE, 1, 6)))), 1),
    "other magic": (with_segments(exif(exif_of((TAG, SHORT, 1, 6), magic=43))), 1),
    "beyond the end": (with_segments(exif(exif_of((TAG, SHORT, 1, 6))[:4] + b"\xff" * 4)), 1),
    "more entries than there are": (with_segments(exif(exif_of(*OTHERS, count=900)[:-4])), 1),
    "too short": (with_segments(exif(b"II*")), 1),
    "empty": (with_segments(exif(b"")), 1),
    "cut": (with_segments(SIX)[:14], 1),
    "nothing": (b"", 1),
    "one byte": (b"\xff", 1),
    "png": (saved("PNG", 6), 6),
    "webp": (saved("WEBP", 8), 8),
    "lossless webp": (saved("WEBP", 3, lossless=True), 3),
    "webp that announces none": (
        saved("WEBP", 8).replace(b"VP8X\n\0\0\0\x08", b"VP8X\n\0\0\0\0"),
        1,
    ),
    "header of a webp": (b"RIFF\0\0\0\0WEBPVP8X", 1),
    "bmp": (b"BM" + bytes(60), 1),
    **{f"orientation {number}": (saved("JPEG", number), number) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", IMAGES)
def test_readers_agree(name):
    image, expected = IMAGES[name]
    assert find_orientation(image) == expected
    assert int(READ(tf.constant(image))) == expected
    assert inspect(image) in (expected, None)


READ = tf.function(tf_orientation.find_orientation, autograph=False)
PLAIN = dti.Preprocess(image_size=(8, 8))
DESCRIBED = tf_native.describe_views([PLAIN], whole=True, maximum=np.inf)


def inspect(image):
    """Returns what the compiled operation finds; None for what it does not take for an image."""
    numbers = tf.zeros(PLAIN.num_uniforms)
    if not is_accepted(tf.constant(image)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no JPEG, PNG, BMP or WebP"):
            tf_native.inspect(tf.constant(image), tf.zeros(2, tf.int32), numbers, DESCRIBED)
        return None
    plan = tf_native.inspect(tf.constant(image), tf.zeros(2, tf.int32), numbers, DESCRIBED)
    return int(plan[1])


def test_damaged_bytes():
    """Any change of a byte gives the same number in all readers."""
    for entries in ([*OTHERS, (TAG, SHORT, 1, 6)], [(TAG, LONG, 1, 7)]):
        image = with_segments(exif(exif_of(*entries)))[:80]
        for place in range(len(image)):
            for value in (0, 1, 0xFF, image[place] ^ 0x10):
                damaged = image[:place] + bytes([value]) + image[place + 1 :]
                expected = find_orientation(damaged)
                assert int(READ(tf.constant(damaged))) == expected, (place, value)
                assert inspect(damaged) in (expected, None), (place, value)


def test_the_decoder_of_jpegs_agrees():
    """It goes through the segments itself. Seen by how it turns the pixels of valid JPEGs."""
    images = [image for image, _ in IMAGES.values() if image[:3] == b"\xff\xd8\xff"]
    images.remove(IMAGES["cut"][0])
    images += [with_segments(exif(exif_of((TAG, SHORT, 1, number)))) for number in range(1, 9)]
    preprocess = dti.Preprocess(image_size=(16, 16), interpolation="nearest", dtype="uint8")
    uniforms = draw(preprocess, len(images))
    made = by_batch(images, uniforms, preprocess)
    np.testing.assert_array_equal(made, by_tensorflow(images, uniforms, preprocess, eagerly=True))
    assert len({pixels.tobytes() for pixels in made[-8:]}) == 8


def test_several_that_differ():
    assert has_several(with_segments(SIX, THREE))
    assert not has_several(with_segments(SIX, SIX))
    assert not has_several(with_segments(SIX))
