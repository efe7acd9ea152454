"""Turning images upright by their EXIF data, with TensorFlow's operations alone.

TensorFlow does not read EXIF data. An exported model must, where no library is compiled.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced_once(*signature: tf.TensorSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of tensors whose graph is built once in a process, as that takes time."""
    return functools.partial(tf.function, input_signature=signature, autograph=False)


_EXIF = b"Exif\0\0"

# A step of a walk over segments or chunks: where the next one is, 0 at the end; where EXIF data
# start, 0 if not here; and their size.
_Step = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
_Look = Callable[..., _Step]


@traced_once(tf.TensorSpec((), tf.string))
def find_orientation(image: tf.Tensor) -> tf.Tensor:
    """Returns the orientation of an image, a scalar string, as records/orientation.py: int32."""
    start, size = _find_exif(image)

    def read() -> tf.Tensor:
        data = tf.io.decode_raw(tf.strings.substr(image, start, size), tf.uint8)
        return _read(tf.cast(data, tf.int64))

    return tf.cond(start > 0, read, lambda: tf.constant(1, tf.int32))


@traced_once(tf.TensorSpec((None, None, None), tf.uint8), tf.TensorSpec((), tf.int32))
def turn(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns an image (height, width, channels) as an orientation says, int32 in [1, 8]."""

    def swap(*axes: int) -> tf.Tensor:
        return tf.transpose(tf.reverse(image, axes) if axes else image, [1, 0, 2])

    return tf.switch_case(
        orientation - 1,
        [
            lambda: image,
            lambda: tf.reverse(image, [1]),
            lambda: tf.reverse(image, [0, 1]),
            lambda: tf.reverse(image, [0]),
            swap,
            lambda: swap(0),
            lambda: swap(0, 1),
            lambda: swap(1),
        ],
    )


def swap_axes(size: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns height and width of a stored image as it is shown, or the reverse: (2,)."""
    return tf.where(orientation >= 5, tf.reverse(size, [0]), size)


def find_stored(
    first: tf.Tensor, last: tf.Tensor, size: tf.Tensor, orientation: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first and last pixel, (2,) each, of a window of the image as it is shown.

    They count in the stored image, whose `size` is given.
    """
    first, last = (swap_axes(side, orientation) for side in (first, last))
    is_backward = tf.stack(
        [
            tf.reduce_any(tf.equal(orientation, backward))
            for backward in ([3, 4, 6, 7], [2, 3, 7, 8])
        ]
    )
    return (
        tf.where(is_backward, size - 1 - last, first),
        tf.where(is_backward, size - 1 - first, last),
    )


def _find_exif(image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where the first EXIF data of an image start, 0 if there are none; and their size."""
    length = tf.strings.length(image)

    def part(at: tf.Tensor | int, size: int) -> tf.Tensor:
        return tf.strings.substr(image, tf.minimum(at, length), size)

    def number(at: tf.Tensor, size: int, *, big: bool = True) -> tf.Tensor:
        """Returns an integer; -1 behind the end of the image."""
        data = part(at, size)
        kind = tf.uint16 if size == 2 else tf.int32  # `decode_raw` knows no uint32
        padded = tf.strings.join([data, b"\0" * size])
        value = tf.io.decode_raw(tf.strings.substr(padded, 0, size), kind, little_endian=not big)[0]
        value = tf.cast(value, tf.int64) % (1 << 32)
        return tf.where(tf.strings.length(data) < size, tf.constant(-1, tf.int64), value)

    nothing = tf.constant(0)

    def limit(at: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.minimum(at, tf.cast(length, tf.int64)), tf.int32)

    def look_at_segment(at: tf.Tensor, *_: tf.Tensor) -> _Step:
        head, size = part(at, 2), number(at + 2, 2)
        is_fill = tf.equal(head, b"\xff\xff")
        is_last = tf.equal(head, b"\xff\xda") | (size < 2)
        is_marker = tf.equal(tf.strings.substr(head, 0, 1), b"\xff")
        is_exif = tf.equal(head, b"\xff\xe1") & tf.equal(part(at + 4, 6), _EXIF) & (size >= 8)
        after = tf.where(is_fill, at + 1, limit(tf.cast(at, tf.int64) + 2 + size))
        goes_on = is_marker & (is_fill | ~is_last) & ~is_exif
        found = is_marker & ~is_fill & ~is_last & is_exif
        return (
            tf.where(goes_on, after, nothing),
            tf.where(found, at + 10, nothing),
            tf.cast(size, tf.int32) - 8,
        )

    def look_at_chunk(is_png: bool) -> _Look:
        def look(at: tf.Tensor, *_: tf.Tensor) -> _Step:
            size = number(at + (0 if is_png else 4), 4, big=is_png)
            name = part(at + (4 if is_png else 0), 4)
            is_exif = tf.equal(name, b"eXIf" if is_png else b"EXIF") & (size >= 0)
            after = tf.cast(at, tf.int64) + 8 + size + (4 if is_png else size % 2)
            prefix = tf.where(tf.equal(part(at + 8, 6), _EXIF), 6, 0)
            return (
                tf.where(is_exif | (size < 0), nothing, limit(after)),
                tf.where(is_exif, at + 8 + prefix, nothing),
                limit(size) - prefix,
            )

        return look

    def walk(first: int, look: _Look) -> tuple[tf.Tensor, tf.Tensor]:
        _, start, size = tf.while_loop(
            lambda at, start, _: (at > 0) & (at < length) & tf.equal(start, 0),
            look,
            (tf.constant(first), nothing, nothing),
        )
        return start, size

    is_jpeg = tf.equal(part(0, 2), b"\xff\xd8")
    is_png = tf.equal(part(0, 8), b"\x89PNG\r\n\x1a\n")
    is_webp = tf.equal(part(0, 4), b"RIFF") & tf.equal(part(8, 8), b"WEBPVP8X")
    is_webp &= (
        tf.bitwise.bitwise_and(number(20, 2, big=False), 0x08) > 0
    )  # its header announces EXIF data
    # Most JPEGs have no EXIF data, and to search all bytes for its name is faster than a walk.
    unnamed = tf.strings.regex_replace(image, "Exif", "", replace_global=False)
    is_jpeg &= tf.strings.length(unnamed) < length
    return tf.case(
        [
            (is_jpeg, lambda: walk(2, look_at_segment)),
            (is_png, lambda: walk(8, look_at_chunk(True))),
            (is_webp, lambda: walk(12, look_at_chunk(False))),
        ],
        default=lambda: (nothing, nothing),
    )


def _read(data: tf.Tensor) -> tf.Tensor:
    """Returns what EXIF data say, given as int64 (size,)."""
    size = tf.size(data, tf.int64)
    data = tf.concat([data, tf.zeros(8, tf.int64)], 0)
    is_big = tf.equal(data[0], ord("M"))

    def number(at: tf.Tensor | int, count: int) -> tf.Tensor:
        digits = data[at : at + count]
        powers = [256**place for place in range(count)]
        little, big = (tf.constant(one, tf.int64) for one in (powers, powers[::-1]))
        return tf.reduce_sum(digits * tf.where(is_big, big, little))

    is_exif = (
        (size >= 8)
        & tf.equal(data[0], data[1])
        & (is_big | tf.equal(data[0], ord("I")))
        & tf.equal(number(2, 2), 42)
    )
    at = number(4, 4)
    is_exif &= at <= size - 2

    def find() -> tf.Tensor:
        count = tf.minimum(number(at, 2), (size - at - 2) // 12)
        entries = tf.reshape(data[at + 2 : at + 2 + 12 * count], (-1, 12))
        tags = tf.where(
            is_big, 256 * entries[:, 0] + entries[:, 1], entries[:, 0] + 256 * entries[:, 1]
        )
        places = tf.where(tf.equal(tags, 0x0112))[:, 0]

        def value() -> tf.Tensor:
            place = at + 2 + 12 * places[0]
            kind = number(place + 2, 2)
            short = tf.where(tf.equal(kind, 3), number(place + 8, 2), tf.constant(1, tf.int64))
            value = tf.where(tf.equal(kind, 4), number(place + 8, 4), short)
            is_one = (value >= 1) & (value <= 8)
            return tf.cast(tf.where(is_one, value, tf.constant(1, tf.int64)), tf.int32)

        return tf.cond(tf.size(places) > 0, value, lambda: tf.constant(1))

    return tf.cond(is_exif, find, lambda: tf.constant(1))
