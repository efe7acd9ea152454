"""What an encoded image is, by its first bytes, with TensorFlow's operations alone.

An exported model must know it, where no library is compiled.
"""

from functools import partial

import tensorflow as tf

from dali_tf_input.backends.tf_orientation import traced_once


@traced_once(tf.TensorSpec((), tf.string))
def is_accepted(encoded: tf.Tensor) -> tf.Tensor:
    """Returns whether both backends decode an image, a scalar string, to the same pixels: bool.

    That is a JPEG, PNG, or a BMP or WebP without a palette, transparency, and animation. The list
    in words is that of index/decoders.py; native/format.h does the same.
    """
    part = partial(_part, encoded)

    def has_flag(at: int, flag: int) -> tf.Tensor:
        padded = tf.strings.join([part(at, 1), b"\0"])  # there is a first byte
        byte = tf.io.decode_raw(tf.strings.substr(padded, 0, 1), tf.uint8)[0]
        return tf.bitwise.bitwise_and(byte, tf.constant(flag, tf.uint8)) > 0

    bits, kind = part(28, 2), part(12, 4)
    is_bmp, palette = tf.equal(part(0, 2), b"BM"), part(54, 4 * 256)
    may_be_gray = is_bmp & tf.equal(bits, b"\x08\0") & tf.equal(part(14, 1), b"\x28")
    may_be_gray &= tf.equal(tf.strings.length(palette), 4 * 256)
    is_gray = tf.cond(may_be_gray, lambda: _is_gray(palette), lambda: False)
    is_bmp &= tf.equal(bits, b"\x18\0") | tf.equal(bits, b"\x20\0") | is_gray
    is_webp = tf.equal(part(0, 4), b"RIFF") & tf.equal(part(8, 4), b"WEBP")
    is_webp &= tf.strings.length(encoded) >= 25
    is_webp &= (
        tf.equal(kind, b"VP8 ")
        | (tf.equal(kind, b"VP8L") & ~has_flag(24, 0x10))
        | (
            tf.equal(kind, b"VP8X")
            & ~has_flag(20, 0x12)
            & (~has_flag(20, 0x08) | _finds_exif(encoded))
        )
    )
    return (
        tf.equal(part(0, 3), b"\xff\xd8\xff")
        | tf.equal(part(0, 8), b"\x89PNG\r\n\x1a\n")
        | is_bmp
        | is_webp
    )


def _is_gray(palette: tf.Tensor) -> tf.Tensor:
    """Returns whether a palette of a BMP has the shades of gray in their order: bool.

    Each color is blue, green, red and a byte that means nothing: Pillow wrote the shade before 11.
    """
    colors = tf.reshape(tf.io.decode_raw(palette, tf.uint8), (256, 4))
    shades = tf.cast(tf.range(256), tf.uint8)[:, tf.newaxis]
    return tf.reduce_all(tf.equal(colors[:, :3], shades))


def _finds_exif(webp: tf.Tensor) -> tf.Tensor:
    """Returns whether DALI's parser finds the EXIF data that the header of a WebP announces: bool.

    It does not skip the byte that pads a chunk of odd size, and refuses the image if it finds none.
    """
    length = tf.cast(tf.strings.length(webp), tf.int64)

    def look(place: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        at = tf.cast(place, tf.int32)
        size = tf.io.decode_raw(tf.strings.substr(webp, at + 4, 4), tf.uint8)[:4]
        size = tf.reduce_sum(tf.cast(size, tf.int64) * [1, 1 << 8, 1 << 16, 1 << 24])
        return place + 8 + size, tf.equal(tf.strings.substr(webp, at, 4), b"EXIF")

    place, found = tf.while_loop(
        lambda place, found: ~found & (place + 8 <= length),
        look,
        (tf.constant(12, tf.int64), tf.constant(False)),
    )
    return found & (place <= length)


def is_deep_png(encoded: tf.Tensor) -> tf.Tensor:
    """Returns whether an image, a scalar string, is a PNG of 16 bits a channel: bool."""
    is_deep = tf.equal(_part(encoded, 24, 1), b"\x10")
    return tf.equal(_part(encoded, 0, 4), b"\x89PNG") & is_deep


@traced_once(tf.TensorSpec((), tf.string))
def count_pixels(encoded: tf.Tensor) -> tf.Tensor:
    """Returns height times width of an accepted image, by its header: int64.

    It is 0 for a BMP, whose pixels are there, so that it cannot be larger than it looks, and for a
    header that is cut off, which a decoder refuses.
    """
    is_whole = tf.strings.length(encoded) >= 30

    def number(*at: int) -> tf.Tensor:
        """Returns the number whose bytes are at these places, the lowest first."""
        data = tf.cast(tf.io.decode_raw(_part(encoded, min(at), len(at)), tf.uint8), tf.int64)
        return sum(data[place - min(at)] * 256**power for power, place in enumerate(at))

    def count_jpeg() -> tf.Tensor:
        return tf.reduce_prod(tf.io.extract_jpeg_shape(encoded, tf.int64)[:2])

    def count_png() -> tf.Tensor:
        return number(19, 18, 17, 16) * number(23, 22, 21, 20)

    def count_webp() -> tf.Tensor:
        kind, both = _part(encoded, 12, 4), number(21, 22, 23, 24)
        return tf.case(
            [
                (
                    tf.equal(kind, b"VP8X"),
                    lambda: (number(24, 25, 26) + 1) * (number(27, 28, 29) + 1),
                ),
                (
                    tf.equal(kind, b"VP8L"),
                    lambda: (both % 0x4000 + 1) * (both // 0x4000 % 0x4000 + 1),
                ),
            ],
            lambda: (number(26, 27) % 0x4000) * (number(28, 29) % 0x4000),
        )

    return tf.case(
        [
            (tf.io.is_jpeg(encoded), count_jpeg),
            (is_whole & tf.equal(_part(encoded, 0, 4), b"\x89PNG"), count_png),
            (is_whole & tf.equal(_part(encoded, 0, 4), b"RIFF"), count_webp),
        ],
        lambda: tf.constant(0, tf.int64),
    )


def _part(encoded: tf.Tensor, at: int, size: int) -> tf.Tensor:
    """Returns some bytes of a string, as many as there are."""
    return tf.strings.substr(encoded, tf.minimum(at, tf.strings.length(encoded)), size)
