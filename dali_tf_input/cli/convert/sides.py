"""Which images are held out for validation: it depends on nothing but the image, or its group.

So an image stays on its side when others come or go, when files are renamed, and in every run; and
copies of an image, or the images of a group, are never divided. One exception: a class whose images
all fall on one side has one moved to the other. The card lists what was moved, so that it stays
there when the class grows; `KnownSides` keeps the sides of any earlier set.
"""

import array
import collections
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.convert.records import Catalog
from dali_tf_input.cli.convert.writer import find_split
from dali_tf_input.records.records import Records

_AT_ONCE = 256  # items that are read
_FEW = 5  # a class with as many images has one for validation

Digest = Callable[[list[Any]], list[bytes]]  # of what the sources of items hold
Chosen = dict[str, list[str]]  # what has another side than its digest says: digests by their side


@dataclass
class Sides:
    """How the items of a source are divided.

    Attributes:
      train: where the lines of items for training start.
      validation: the same for validation.
      copies: how many items have the bytes of another one.
      conflicts: how many images are in several classes.
      lacking: the classes that validation has none of.
      known: how many items are in an earlier set.
      moved: the classes whose side of one item was chosen, as all were on the other one.
      chosen: the digests of what has another side than by its digest, by side.
      joined: how many groups are one with another, as they share an image.
      divided: how many groups the earlier set divides; all their images are for training.
    """

    train: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    validation: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    copies: int = 0
    known: int = 0
    conflicts: int = 0
    lacking: list[Any] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)
    chosen: Chosen = field(default_factory=dict)
    joined: int = 0
    divided: int = 0


def choose_sides(
    catalog: str,
    classes: "dict[Any, array.array[int]]",
    digest: Digest,
    *,
    fraction: float,
    seed: int,
    known: "KnownSides | None" = None,
    chosen: Chosen | None = None,
) -> Sides:
    """Divides items class by class; each is held out with the probability `fraction`.

    Args:
      catalog: the file that holds the items.
      classes: where the lines of each class start.
      digest: returns digests of the sources of items, which are read.
      fraction: the part for validation, in [0, 1). A class of 5 items or more has one there.
      seed: other seeds hold out other items.
      known: the sides that images have in an earlier set, which they keep.
      chosen: what an earlier set, of the same seed and fraction, says of itself.
    """
    sides = Sides()
    if not fraction and not known:
        for starts in classes.values():
            sides.train += starts
        return sides
    groups = _Groups()
    drawn = {label: _draw(catalog, starts, digest, groups) for label, starts in classes.items()}
    sides.joined = groups.num_joins
    seen = collections.Counter(itertools.chain.from_iterable(drawn.values()))
    sides.copies = sum(count - 1 for count in seen.values())
    sides.conflicts = sum(len({*keys}) for keys in drawn.values()) - len(seen)
    roots = {label: [groups.find(key) for key in keys] for label, keys in drawn.items()}
    hashes = {
        root: _hash_to_unit(root, seed) for root in {*itertools.chain.from_iterable(roots.values())}
    }
    by_hash = {root for root, hashed in hashes.items() if hashed < fraction}
    held_out = {*by_hash}
    for earlier, digests in (chosen or {}).items():
        listed = {groups.find(bytes.fromhex(digest)) for digest in digests} & hashes.keys()
        held_out = held_out | listed if earlier == "validation" else held_out - listed
    if known:
        found: dict[str, set[bytes]] = {"train": set(), "validation": set()}
        for label, starts in classes.items():
            items = itertools.chain.from_iterable(_read(catalog, starts))
            for item, key, root in zip(items, drawn[label], roots[label], strict=True):
                side = known.find(item, key)
                sides.known += side is not None
                if side is not None:
                    found[side].add(root)
        # A model may have been trained on a part of a group that was divided.
        sides.divided = len(found["train"] & found["validation"])
        held_out = (held_out | found["validation"]) - found["train"]
        return _divide(sides, classes, roots, held_out, by_hash)
    # What is moved is moved in all classes: a group may have images of several.
    for label, own in roots.items():
        if len(own) >= _FEW and not held_out & {*own}:
            held_out.add(min(own, key=hashes.__getitem__))
            sides.moved.append(label)
    for label, own in roots.items():
        if held_out >= {*own}:
            held_out.discard(max(own, key=hashes.__getitem__))
            sides.moved.append(label)
        if not held_out & {*own}:
            sides.lacking.append(label)
    return _divide(sides, classes, roots, held_out, by_hash)


def _divide(
    sides: Sides,
    classes: "dict[Any, array.array[int]]",
    roots: dict[Any, list[bytes]],
    held_out: set[bytes],
    by_hash: set[bytes],
) -> Sides:
    """Divides items by what their sides depend on, and notes what has another side than it had."""
    moved = {"validation": held_out - by_hash, "train": by_hash - held_out}
    sides.chosen = {side: sorted(map(bytes.hex, own)) for side, own in moved.items() if own}
    for label, starts in classes.items():
        for start, root in zip(starts, roots[label], strict=True):
            (sides.validation if root in held_out else sides.train).append(start)
    return sides


class KnownSides:
    """The sides of the images of an earlier set, by their bytes, or by their names.

    Bytes are other ones if `convert` re-encoded an image.
    """

    def __init__(self, records: Records, source: str) -> None:
        self._source = f"{source.rstrip('/')}/"
        self._digests, self._names = dict[bytes, str](), dict[str, str | None]()
        splits = [find_split(path) for path in records.paths]
        if "test" in splits:
            raise InputError(
                "--like names files of a test split, whose images would be divided: name those of"
                " training and validation, and keep the images of the test split apart."
            )
        ends = [*records.first_ids[1:], records.num_all]
        what, file = "reading the earlier set", 0
        for record in command.progress(records.ids.tolist(), what=what, total=records.num_records):
            while record >= ends[file]:
                file += 1
            features = records.read(record)
            (image,) = features[records.image_key]
            self._digests[hashlib.blake2b(image, digest_size=8).digest()] = splits[file]
            for name in features.get("image/filename", ()):
                text = os.fsdecode(name)
                if "/" not in text:  # of a set of before paths were stored
                    (class_name,) = features.get("image/class/text", (b"",))
                    text = f"{os.fsdecode(class_name)}/{text}"
                other = self._names.setdefault(text, splits[file])
                if other != splits[file]:  # a name in several folders
                    self._names[text] = None

    def find(self, item: Any, digest: bytes) -> str | None:
        """Returns the split of an image in the earlier set; None if it is not there."""
        if digest in self._digests or not isinstance(item[0], dict):
            return self._digests.get(digest)
        name = item[1].removeprefix(self._source)
        of_class = f"{item[0].get('image/class/text', '')}/{os.path.basename(name)}"
        return self._names.get(name) or self._names.get(of_class)


class _Groups:
    """Groups of images: those of a name, and equal images of any name."""

    def __init__(self) -> None:
        self._joined: dict[bytes, bytes] = {}
        self.num_joins = 0  # of two names, by an image that is in both

    def find(self, key: bytes) -> bytes:
        """Returns what the side of an image depends on, given the digest of its bytes."""
        while (other := self._joined.get(key)) is not None:
            key = other
        return key

    def add(self, key: bytes, name: bytes) -> None:
        """Notes that an image is in the group of a name."""
        first, second = self.find(key), self.find(name)
        if first == key:
            self._joined[key] = second
        elif first != second:  # an image in two groups joins them
            self._joined[max(first, second)] = min(first, second)
            self.num_joins += 1


def _draw(catalog: str, starts: Sequence[int], digest: Digest, groups: _Groups) -> list[bytes]:
    """Returns what the side of each item depends on: its group, or the bytes of its image."""
    keys = []
    chunks = _read(catalog, starts)
    drawn = (pair for chunk in chunks for pair in zip(chunk, digest(chunk), strict=True))
    what = "choosing what is held out"
    for item, own in command.progress(drawn, what=what, total=len(starts)):
        group = item[0].get("image/group") if isinstance(item[0], dict) else None
        if group is not None:
            named = hashlib.blake2b(b"group " + str(group).encode(), digest_size=8).digest()
            groups.add(own, named)
        keys.append(own)
    return keys


def _read(catalog: str, starts: Sequence[int]) -> Iterator[list[Any]]:
    """Yields items, some at a time."""
    items = Catalog(catalog, starts)
    for first in range(0, len(items), _AT_ONCE):
        yield items[first : first + _AT_ONCE]


def _hash_to_unit(key: bytes, seed: int) -> float:
    """Returns a number in [0, 1) for a key."""
    data = seed.to_bytes(8, "little", signed=True) + key
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") / 2**64
