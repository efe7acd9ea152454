"""Random numbers as functions of what they are for: one hash, one permutation, named streams.

Nothing here has a state, so any process can compute any number without those before it. The
permutation is in C++ too: backends/native/random.h.
"""

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

Unsigned = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads small counters
# Four rounds are enough for large sets (Luby and Rackoff, 1988). With fewer rounds or bits than
# these, some orders of five to seven records are drawn more often than others.
_ROUNDS, _MIN_BITS = 6, np.uint64(6)


class Purpose(enum.IntEnum):
    """What random numbers are for. No two purposes share numbers, whatever their seeds."""

    ORDER = 1  # which record fills a slot of an epoch
    BLOCKS = 2  # where the blocks of an epoch begin
    CLASS = 3  # the order of a class's records in an epoch
    PART = 4  # the order of a part of a mixture
    CROP = 5  # crops and mirrors
    AUGMENT = 6  # augmentations
    TRANSFORM = 7  # the seed that `InputSpec.transform` gets
    MIX = 8  # mixup and CutMix
    SPLIT = 9  # which part of a split a record belongs to


def hash_words(*words: Any) -> Unsigned:
    """Returns a 64-bit hash of integers, or of arrays of them: the shape that they broadcast to.

    Each word goes through SplitMix64's finalizer (Steele, Lea and Flood, 2014).
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        for word in words:
            state = _mix(state + _GOLDEN + np.asarray(word).astype(np.uint64))
    return state


def seed_of(seed: int, purpose: Purpose, *more: int) -> int:
    """Returns a seed for one purpose as a signed 64-bit integer."""
    return int(hash_words(seed, purpose, *more).astype(np.int64))


def permute(places: Any, sizes: Any, keys: Any) -> Integers:
    """Returns where keyed pseudo-random permutations move places: int64, of the same shape.

    For each key it is a permutation of [0, size): a Feistel network permutes the next power of
    two, and is applied again while the result is not below `size` (cycle walking; Black and
    Rogaway, 2002, https://doi.org/10.1007/3-540-45760-7_9). So no table is needed, and a place
    costs the same however many there are.

    Args:
      places: integers in [0, size).
      sizes: the size of the permutation of each place, or one for all; at least 1.
      keys: uint64, the same.
    """
    given = (np.asarray(values).astype(np.uint64) for values in (places, sizes, keys))
    places, sizes, keys = np.broadcast_arrays(*given)
    shape, places, sizes, keys = places.shape, places.ravel(), sizes.ravel(), keys.ravel()
    # Exact: bit lengths of float64 are right below 2**53 records.
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)
    bits = np.where(sizes > 1, np.maximum(bits, _MIN_BITS), bits)
    moved = _apply_rounds(places, bits, keys)
    outside = np.flatnonzero(moved >= sizes)
    while outside.size:
        moved[outside] = _apply_rounds(moved[outside], bits[outside], keys[outside])
        outside = outside[moved[outside] >= sizes[outside]]
    return moved.astype(np.int64).reshape(shape)


def _apply_rounds(values: Unsigned, bits: Unsigned, keys: Unsigned) -> Unsigned:
    """Returns a permutation of [0, 2**bits): the halves of a value change each other in turn."""
    one = np.uint64(1)
    low_bits = bits - (bits >> one)
    low_mask, high_mask = (one << low_bits) - one, (one << (bits >> one)) - one
    high, low = values >> low_bits, values & low_mask
    with np.errstate(over="ignore"):
        for number in range(_ROUNDS):
            round_keys = keys + np.uint64(number) * _GOLDEN
            if number % 2:
                low = low ^ (_mix(high + round_keys) & low_mask)
            else:
                high = high ^ (_mix(low + round_keys) & high_mask)
    return (high << low_bits) | low


def _mix(values: Unsigned) -> Unsigned:
    """Returns SplitMix64's finalizer: a permutation of 64 bits in which each bit changes half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
