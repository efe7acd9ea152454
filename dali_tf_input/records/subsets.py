"""Subsets of records, as masks, and the random division into subsets."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

import numpy as np

from dali_tf_input.errors import InputError, check
from dali_tf_input.random import Integers, Purpose, Unsigned, hash_words
from dali_tf_input.records.indexed_file import IndexedFile, Mask


def pack_mask(mask: Mask) -> bytes:
    """Packs a mask, bool (n,), into a bit for each record."""
    return np.packbits(mask).tobytes()


def unpack_mask(packed: bytes, count: int) -> Mask:
    """Returns the mask of `count` records that `pack_mask` packed: bool (count,)."""
    mask: Mask = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(bool)
    return mask


def check_shares(shares: dict[str, float]) -> None:
    """Raises InputError unless shares are positive and 1 together."""
    for name, share in shares.items():
        is_number = isinstance(share, Real) and not isinstance(share, bool)
        check(is_number and 0 < share <= 1, name, "a share in (0, 1]", share)
    total = sum(shares.values())
    check(abs(total - 1) < 1e-9, ", ".join(shares) or "shares", "1 together", f"{total:.6g}")


def draw_split_keys(files: Sequence[IndexedFile], draw: str) -> Unsigned:
    """Draws a uniformly distributed uint64 for each record of the indexes: (num_records,).

    It depends only on `draw`, on the base name of the file without the number of files ("-of-4"),
    and on the offset of the record; not on other files, or on which bad records are skipped.
    """
    return np.concatenate([_draw_in_file(file, draw) for file in files])


def _draw_in_file(file: IndexedFile, draw: str) -> Unsigned:
    own = re.sub(r"-of-\d+", "", os.path.basename(file.path))
    name = f"{draw}/{own}".encode()
    key = np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))
    return hash_words(key, Purpose.SPLIT, file.index()[:, 0])


def draw_split_keys_of_groups(groups: Iterable[bytes], draw: str) -> Unsigned:
    """Draws the same for each record of a group: uint64 (records,), given the group of each."""
    key = hashlib.blake2b(draw.encode(), digest_size=8).digest()
    digests = (hashlib.blake2b(group, digest_size=8, key=key).digest() for group in groups)
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)


def divide(split_keys: Unsigned, shares: Sequence[float], classes: Integers | None) -> Integers:
    """Divides records into parts; returns the number of the part of each, int64 (records,).

    With `classes` each part gets its share of each class, to within one record.
    """
    if classes is None:  # the key alone decides
        bounds = [min(1.0, bound) for bound in itertools.accumulate(shares)][:-1]
        edges = np.array([min(2**64 - 1, round(bound * 2**64)) for bound in bounds], np.uint64)
        parts: Integers = np.searchsorted(edges, split_keys, side="right").astype(np.int64)
        return parts
    order = np.lexsort((split_keys, classes))
    _, counts = np.unique(classes, return_counts=True)
    rank = np.arange(len(split_keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.zeros(len(split_keys), np.int64)
    for bound in np.cumsum(apportion(counts, shares), axis=1).T[:-1]:
        parts[order] += rank >= np.repeat(bound, counts)
    return parts


def apportion(counts: Integers, shares: Sequence[float]) -> Integers:
    """Returns how many records of each class each part gets: int64 (classes, parts).

    Each number is within one of the exact share. The leftover records of a class go to the parts
    that are furthest behind so far, so that the parts' total sizes fit their shares too.
    """
    due = counts[:, None] * np.array(shares)
    given: Integers = np.floor(due + 1e-9).astype(np.int64)
    behind = np.zeros(len(shares))
    for row in range(len(counts)):
        behind += due[row] - given[row]
        num_left = int(counts[row] - given[row].sum())
        is_open = due[row] > given[row] + 1e-9
        neediest = np.argsort(-np.where(is_open, behind, -np.inf), kind="stable")[:num_left]
        given[row, neediest] += 1
        behind[neediest] -= 1
    return given


def take_first(split_keys: Unsigned, count: int, classes: Integers | None) -> Mask:
    """Returns the mask of the `count` records with the smallest keys: bool (records,)."""
    if classes is not None:
        share = count / len(split_keys)
        is_first: Mask = divide(split_keys, [share, 1 - share], classes) == 0
        return is_first
    mask = np.zeros(len(split_keys), bool)
    mask[np.argpartition(split_keys, count - 1)[:count]] = True
    return mask


def check_integers(name: str, values: Iterable[int]) -> Integers:
    """Returns integers as int64 (n,); raises InputError if they are not."""
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        given = np.asarray(values if isinstance(values, np.ndarray) else [*values])
    except (TypeError, ValueError):
        raise InputError(f"`{name}` must be a list of integers, got {values!r}.") from None
    holds = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
    check(holds, name, "a list of integers", values)
    return given.astype(np.int64)


def check_ids(given: Integers, num_all: int) -> Integers:
    """Returns ids of records, int64 (n,); raises InputError if one is not in [0, num_all)."""
    wrong = given[(given < 0) | (given >= num_all)]
    rule = f"in [0, {num_all:,}), ids of records"
    check(not wrong.size, "ids", rule, ", ".join(map(str, wrong[:10])))
    return given


def check_label(label: int) -> int:
    """Returns a label as an int; raises InputError if it is none of 64 bits."""
    try:
        return int(np.array(label).astype(np.int64, casting="safe"))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"A new label must be an integer, got {label!r}.") from None


def unite(
    files: Sequence[IndexedFile], mask: Mask, others: Sequence[IndexedFile], other_mask: Mask
) -> tuple[tuple[IndexedFile, ...], Mask]:
    """Returns the files of two subsets, sorted by path, and the mask of the subsets' union."""
    masks: dict[IndexedFile, Mask] = {}
    for file, part in [*_split(files, mask), *_split(others, other_mask)]:
        if (masks.get(file, False) & part).any():
            raise InputError(f"Both have the same records of {file.path}: each must come once.")
        masks[file] = masks.get(file, False) | part
    united = tuple(sorted(masks, key=lambda file: file.path))
    if len({file.path for file in united}) < len(united):
        text = "A file was indexed again in between, or has other labels in one of the two"
        raise InputError(f"{text}: make both from one Records.from_files(...).relabel(...).")
    return united, np.concatenate([masks[file] for file in united])


def _split(files: Sequence[IndexedFile], mask: Mask) -> Iterator[tuple[IndexedFile, Mask]]:
    ends = itertools.accumulate(file.num_framed for file in files)
    for file, end in zip(files, ends, strict=True):
        yield file, mask[end - file.num_framed : end]
