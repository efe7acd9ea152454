"""Near duplicates: the same picture, saved again, resized, or slightly changed.

A picture is known by its perceptual hash of 64 bits (phash of the library imagehash). Of 60 photos,
97% had one within 4 bits after JPEG of quality 20, a quarter of the size, or brightness by 1.2;
unrelated photos differed in 14 bits and more. Crops by 5% and mirrored pictures are not found.
"""

import io
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from dali_tf_input import InputError
from dali_tf_input.records.installing import pip_install

Hashes = npt.NDArray[np.uint64]
_MOST_BITS, _NUM_BITS = 4, 64
_DRAFT = (64, 64)  # pixels: a JPEG is decoded at an eighth of its size, if that is enough
_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


def check_installed() -> None:
    """Raises InputError unless the library is installed."""
    try:
        import imagehash  # noqa: F401
    except ImportError as error:
        text = "`near_duplicates` needs the library imagehash"
        raise InputError(f"{text}: {pip_install('imagehash')}") from error


def hash_picture(encoded: bytes) -> int:
    """Returns the perceptual hash of an encoded image, as it is shown."""
    import imagehash

    with Image.open(io.BytesIO(encoded)) as image:
        image.draft("L", _DRAFT)
        bits = imagehash.phash(ImageOps.exif_transpose(image)).hash
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def find_groups(hashes: Hashes) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the places of the pictures that are alike, at least two each.

    Pictures are in one group if a chain of others connects them, each within 4 bits of the next.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Among different hashes, those that agree in one of five parts are compared: if two differ in
    # at most four bits, they do.
    unique, number_of = np.unique(hashes, return_inverse=True)
    pairs = [*_find_pairs(unique)]
    first, second = np.concatenate(pairs, 1) if pairs else np.zeros((2, 0), np.int64)
    size = len(unique)
    edges = coo_array((np.ones(len(first), bool), (first, second)), (size, size))
    _, group_of = connected_components(edges, directed=False)
    own = group_of[number_of]
    order = np.argsort(own, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(own[order])) + 1):
        if len(group) > 1:
            yield group


def _find_pairs(hashes: Hashes) -> Iterator[npt.NDArray[np.int64]]:
    """Yields (2, n) places of different hashes that differ in at most four bits."""
    num_parts = _MOST_BITS + 1
    bounds = [_NUM_BITS * number // num_parts for number in range(num_parts + 1)]
    for low, high in itertools.pairwise(bounds):
        part = hashes >> np.uint64(low) & np.uint64((1 << high - low) - 1)
        order = np.argsort(part, kind="stable")
        part, sorted_hashes = part[order], hashes[order]
        places = np.arange(len(order) - 1)
        for step in range(1, len(order)):
            places = places[places + step < len(order)]
            places = places[part[places] == part[places + step]]  # and so at smaller steps
            if not len(places):
                break
            differing = sorted_hashes[places] ^ sorted_hashes[places + step]
            near = places[_ONES[differing.view(np.uint16).reshape(-1, 4)].sum(1) <= _MOST_BITS]
            if len(near):
                yield np.stack([order[near], order[near + step]])
