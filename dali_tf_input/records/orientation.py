"""The orientation of an image: how it is to be turned to be upright, as its EXIF data say.

Of a stored image, 2, 3 and 4 mirror it left to right, both ways, and top to bottom; 5 to 8 swap its
axes, and then do the same to 6 (both backward: 7). Source: the Exif standard, tag 0x0112. Cameras
write it instead of turning the pixels. `native/orientation.h` and `backends/tf_orientation.py` read
it to the same value.
"""

import io
from collections.abc import Iterator

UPRIGHT = 1
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_HAS_EXIF = 0x08  # a flag in the header of a WebP
_PREFIX = b"Exif\0\0"


def find_orientation(image: bytes) -> int:
    """Returns the orientation that the first EXIF data of a JPEG, PNG or WebP give, 1 to 8.

    It is 1 if there are none, or they are damaged. EXIF data of other formats are not read, nor
    those that the header of a WebP does not announce, as DALI does.
    """
    return next(_find_all(image), UPRIGHT)


def has_several(image: bytes) -> bool:
    """Whether an image has several EXIF data of different orientations: decoders then disagree."""
    return len({*_find_all(image)}) > 1


def is_transposed(orientation: int) -> bool:
    """Whether an image has height and width swapped when it is shown."""
    return orientation >= 5


def _find_all(image: bytes) -> Iterator[int]:
    if image.startswith(b"\xff\xd8"):
        segments = _segments_of_jpeg(image)
    elif image.startswith(b"\x89PNG\r\n\x1a\n"):
        segments = _chunks(image, 8, b"eXIf", is_png=True)
    elif (
        image[:4] == b"RIFF"
        and image[8:16] == b"WEBPVP8X"
        and image[20:21]
        and image[20] & _HAS_EXIF
    ):
        segments = _chunks(image, 12, b"EXIF", is_png=False)
    else:
        return
    for data in segments:
        yield _read(data)


def _segments_of_jpeg(image: bytes) -> Iterator[bytes]:
    at = 2
    while at + 4 <= len(image) and image[at] == 0xFF:
        marker = image[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = int.from_bytes(image[at + 2 : at + 4], "big")
        if marker == 0xDA or length < 2:  # the scan
            return
        data = image[at + 4 : at + 2 + length]
        if marker == 0xE1 and data.startswith(_PREFIX):
            yield data[len(_PREFIX) :]
        at += 2 + length


def _chunks(image: bytes, at: int, name: bytes, *, is_png: bool) -> Iterator[bytes]:
    """Yields the data of the chunks of a name."""
    while at + 8 <= len(image):
        head = image[at : at + 8]
        kind, size = (head[4:], head[:4]) if is_png else (head[:4], head[4:])
        length = int.from_bytes(size, "big" if is_png else "little")
        if kind == name:
            yield image[at + 8 : at + 8 + length].removeprefix(_PREFIX)
        at += 8 + length + (4 if is_png else length % 2)  # its CRC, or a byte of padding


def _read(data: bytes) -> int:
    """Returns what EXIF data say."""
    if data[:2] not in (b"II", b"MM") or len(data) < 8:
        return UPRIGHT
    stream = io.BytesIO(data)

    def number(size: int) -> int:
        return int.from_bytes(stream.read(size), "big" if data[:1] == b"M" else "little")

    stream.seek(2)
    magic, at = number(2), number(4)
    if magic != 42 or at > len(data) - 2:
        return UPRIGHT
    stream.seek(at)
    count = number(2)
    for place in range(at + 2, min(at + 2 + 12 * count, len(data) - 11), 12):
        stream.seek(place)
        if number(2) == _TAG:
            kind, _ = number(2), number(4)
            value = number(2) if kind == _SHORT else number(4) if kind == _LONG else UPRIGHT
            return value if 1 <= value <= 8 else UPRIGHT
    return UPRIGHT
