"""What records hold, as a table and as findings: what would hurt training."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_tf_input import Records
from dali_tf_input.cli import command
from dali_tf_input.cli.explore.near import find_groups
from dali_tf_input.random import Integers
from dali_tf_input.records.class_names import Names, find_difference

_TINY, _LARGE, _LONG = 32, 640, 3.0  # pixels of the shorter side, twice; an aspect ratio
_RARE, _UNEVEN = 10, 10.0  # records of a class; how many times fewer than of the largest


@dataclass
class Set:
    """The records that one --files names, and what is known of each.

    Attributes:
      name: the value of --files.
      records: the records that are examined: all, or a sample.
      num_all: how many records the set has.
      labels: the class of each as training gets it; None if the index does not have them.
      all_labels: the class of each of all records, or None.
      sizes: int64 (records, 2), height and width in pixels, as shown; 0 where it is not an image.
      hashes: uint64 (records,), a hash of the encoded image.
      pictures: uint64 (records,), a perceptual hash, see near.py; None if it was not asked for.
      problems: why the image of each cannot be used; "" if it can.
      num_bytes: int64 (records,), of the whole record.
      names: the names of the classes, as `labels` number them; none if they are not known.
      num_turned: how many images are turned upright by their EXIF orientation.
    """

    name: str
    records: Records
    num_all: int
    labels: Integers | None
    all_labels: Integers | None
    sizes: Integers
    hashes: npt.NDArray[np.uint64]
    pictures: npt.NDArray[np.uint64] | None
    problems: tuple[str, ...]
    num_bytes: Integers
    names: Names = ()
    num_turned: int = 0

    def name_of(self, label: int) -> str:
        """Returns a class as text."""
        name = self.names[label] if 0 <= label < len(self.names) else None
        return f"class {label}" if name is None else name

    @property
    def scope(self) -> str:
        """Its name, with a word on the sample where only that was looked at."""
        num_seen = self.records.num_records
        return self.name if num_seen == self.num_all else f"{self.name}, sample of {num_seen:,}"


@dataclass
class Finding:
    """A problem that would hurt training: a text that says what to do, and the records concerned.

    `groups` are groups of records that belong together, each record as (set, position in it).
    """

    name: str
    text: str
    groups: list[list[tuple[Set, int]]] = field(default_factory=list)


def summarize(sets: list[Set]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table."""
    yield ("records", *(f"{one.num_all:,}" for one in sets))
    if any(one.records.num_records < one.num_all for one in sets):
        yield ("looked at a sample of", *(f"{one.records.num_records:,}" for one in sets))
    yield ("files", *(f"{len(one.records.files):,}" for one in sets))
    yield ("bad ones skipped", *(f"{one.records.num_skipped:,}" for one in sets))
    yield ("MB", *(f"{one.num_bytes.sum() / 1e6:,.1f}" for one in sets))
    yield ("KB each", *(_spread(one.num_bytes / 1000) for one in sets))
    yield ("height", *(_spread(one.sizes[:, 0]) for one in sets))
    yield ("width", *(_spread(one.sizes[:, 1]) for one in sets))
    shapes = [one.sizes[one.sizes.all(1)] for one in sets]
    yield ("width to height", *(_spread(shape[:, 1] / shape[:, 0], ".2f") for shape in shapes))
    if any(one.num_turned for one in sets):
        yield ("turned by EXIF", *(f"{one.num_turned:,}" for one in sets))
    yield ("classes", *(_describe_classes(one) for one in sets))


def _spread(values: Any, form: str = ",.0f") -> str:
    low, middle, high = np.quantile(values, (0, 0.5, 1)) if len(values) else (0, 0, 0)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def _describe_classes(one: Set) -> str:
    if one.all_labels is None:
        return "- (the index has no class of each record)"
    classes, counts = np.unique(one.all_labels, return_counts=True)
    fewest, most = (one.name_of(int(classes[place(counts)])) for place in (np.argmin, np.argmax))
    counted = f"{counts.min():,} ({fewest}) to {counts.max():,} ({most})"
    return f"{len(classes):,}, {counted if len(classes) > 1 else f'{counts[0]:,}'} records each"


def find_problems(sets: list[Set]) -> Iterator[Finding]:
    """Yields what would hurt training, the worst first."""
    for first, second in itertools.combinations(sets, 2):
        yield from _find_other_numbers(first, second)
    for one in sets:
        yield from _find_missing_names(one)
    for first, second in itertools.combinations(sets, 2):
        yield from _find_leaks(first, second)
    for one in sets:
        yield from _find_copies(one)
        yield from _find_sizes(one)
        if one.all_labels is not None:
            yield from _find_imbalance(one, one.all_labels)
    yield from _find_near(sets)
    yield from _find_order(sets[0])


def _find_other_numbers(first: Set, second: Set) -> Iterator[Finding]:
    number = find_difference(first.names, second.names)
    if number is not None:
        yield Finding(
            "numbers",
            f"{second.name}: class {number} is {second.name_of(number)}, in {first.name} it is"
            f" {first.name_of(number)}: number them alike, records.relabel(names=...).",
        )


def _find_missing_names(one: Set) -> Iterator[Finding]:
    if one.all_labels is None or not one.names or not len(one.all_labels):
        return
    highest = int(one.all_labels.max())
    if highest >= len(one.names):
        names = f"{len(one.names):,} name{'' if len(one.names) == 1 else 's'} of classes"
        text = f"{one.name}: there are {names}, and labels run to {highest:,}: complete labels.txt."
        yield Finding("names", text)


def _find_near(sets: list[Set]) -> Iterator[Finding]:
    """Finds pictures that are nearly alike, of which not all are identical files."""
    seen = [
        (one, int(place))
        for one in sets
        if one.pictures is not None
        for place in np.flatnonzero([not problem for problem in one.problems])
    ]
    if not seen:
        return
    hashes = np.array([one.pictures[place] for one, place in seen if one.pictures is not None])
    across, within = list[list[tuple[Set, int]]](), list[list[tuple[Set, int]]]()
    for places in find_groups(hashes):
        group = [seen[place] for place in places]
        if len({one.hashes[place] for one, place in group}) > 1:
            (across if len({one.name for one, _ in group}) > 1 else within).append(group)
    kind = "near duplicates: the same picture saved again, resized, or slightly changed"
    for name, groups, where, remedy in (
        ("near leaks", across, "across the sets", "leave them out of one of the sets"),
        ("near copies", within, "within a set", "leave the others out"),
    ):
        if groups:
            count = command.format_count(len(groups), "group")
            text = f"{count} of {kind}, {where}: look at them, and {remedy}, records.exclude(ids)."
            yield Finding(name, text, groups)


def _find_leaks(first: Set, second: Set) -> Iterator[Finding]:
    shared = np.intersect1d(first.hashes, second.hashes)
    if not len(shared):
        return
    groups: list[list[tuple[Set, int]]] = [[] for _ in shared]
    for one in (first, second):
        places = np.flatnonzero(np.isin(one.hashes, shared))
        for place, group in zip(places, np.searchsorted(shared, one.hashes[places]), strict=True):
            groups[group].append((one, int(place)))
    text = f"{second.scope}: {_count(len(shared))} also in {first.scope} (identical files): leave"
    yield Finding("leaks", f"{text} them out of one of the two, records.exclude(ids).", groups)


def _find_copies(one: Set) -> Iterator[Finding]:
    order = np.argsort(one.hashes, kind="stable")
    sums = one.hashes[order]
    starts = np.flatnonzero(np.append(True, sums[1:] != sums[:-1]))
    groups = [part for part in np.split(order, starts[1:]) if len(part) > 1]
    differ = 0
    if one.labels is not None:
        differ = sum(len({*one.labels[part].tolist()}) > 1 for part in groups)
    if groups:
        more = f", {differ:,} of them with different labels" if differ else ""
        yield Finding(
            "copies",
            f"{one.scope}: {_count(len(groups))} more than once (identical files){more}: leave the"
            " others out, records.exclude(ids).",
            [[(one, int(place)) for place in part] for part in groups],
        )


def _find_sizes(one: Set) -> Iterator[Finding]:
    short, long = one.sizes.min(1), one.sizes.max(1)
    is_image = short > 0
    reasons = np.array([problem.partition(":")[0] for problem in one.problems])
    unusable = [
        ("unreadable", reasons == reason, f"cannot be used ({reason}): index with --verify=decode.")
        for reason in sorted({*reasons.tolist()} - {""})
    ]
    for name, where, text in (
        *unusable,
        ("tiny", is_image & (short < _TINY), f"below {_TINY} pixels, which say little."),
        (
            "long",
            is_image & (long > _LONG * short),
            f"with an aspect ratio above {_LONG:g}:1, of which crops lose the most.",
        ),
    ):
        places = np.flatnonzero(where)
        if len(places):
            groups = [[(one, int(place))] for place in places]
            yield Finding(name, f"{one.scope}: {_count(len(places))} {text}", groups)
    if np.median(short) > _LARGE:
        yield Finding(
            "large",
            f"{one.scope}: half of the images have over {_LARGE} pixels each way: stored smaller,"
            " they are read several times as fast, dali-tf-input convert --resize_shorter=320.",
        )


def _find_imbalance(one: Set, labels: Integers) -> Iterator[Finding]:
    classes, counts = np.unique(labels, return_counts=True)
    few, most = int(counts.argmin()), int(counts.argmax())
    if counts[most] > _UNEVEN * counts[few]:
        yield Finding(
            "imbalance",
            f"{one.name}: {counts[few]:,} records of {one.name_of(int(classes[few]))},"
            f" {counts[most]:,} of {one.name_of(int(classes[most]))}: balance='class' in the"
            " spec serves them alike, temperature=2 goes half the way.",
        )
    rare = classes[counts < _RARE].tolist()
    if rare:
        listed = ", ".join(one.name_of(label) for label in rare[:5])
        more = f" and {len(rare) - 5:,} more" if len(rare) > 5 else ""
        has = "class has" if len(rare) == 1 else "classes have"
        text = f"{one.name}: {len(rare):,} {has} fewer than {_RARE} images ({listed}{more})"
        yield Finding("rare", f"{text}: too few to train on, or to evaluate.")


def _find_order(one: Set) -> Iterator[Finding]:
    labels = one.all_labels
    if labels is None or len(labels) < 100:
        return
    _, counts = np.unique(labels, return_counts=True)
    expected = len(labels) * (1 - ((counts / counts.sum()) ** 2).sum())
    changes = np.count_nonzero(np.diff(labels))
    if changes < expected / 2:
        yield Finding(
            "sorted",
            f"{one.name}: more or less sorted by class: order 'buffer' would make batches of few"
            " classes. The default order, 'global', is unaffected.",
        )


def _count(number: int) -> str:
    return command.format_count(number, "image")
