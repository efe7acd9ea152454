"""What a source holds: the images that are converted, by split and class, and what is left out."""

import array
import collections
import json
import shutil
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from dali_tf_input import InputError
from dali_tf_input.records.card import Described
from dali_tf_input.records.class_names import LABELS_NAME, NUMBERED

# What people call the splits, in any case. None is a split that is yet to be chosen.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SplitName = str | None
Starts = array.array  # of lines in the catalog, "Q"


@dataclass
class Listed:
    """The items of a source, which a catalog holds, a line each.

    Attributes:
      labels: the names of the classes in their order; None if labels are not named.
      label_key: the feature key of the labels that `labels` names.
      other_labels: the names of the classes of other features, by key.
      features: what is known of each feature key of TFRecords, None where not all records have it;
        None of another source, all of whose records have the features of the first one.
      starts: where the lines of a split and class start.
    """

    labels: list[str] | None = None
    label_key: str = "image/class/label"
    other_labels: dict[str, list[str]] = field(default_factory=dict)
    features: dict[str, Described | None] | None = None
    starts: "dict[tuple[SplitName, Any], array.array[int]]" = field(default_factory=dict)

    def add(self, split: SplitName, label: Any, start: int) -> None:
        """Adds an item."""
        self.starts.setdefault((split, label), array.array("Q")).append(start)

    def of_split(self, split: SplitName) -> "list[array.array[int]]":
        """Returns the items of a split, class by class."""
        return [starts for (own, _), starts in self.starts.items() if own == split]


class LeftOut:
    """What is left out, listed in a file: a line of JSON for each, and counted by its reason.

    Attributes:
      num_images: how many of them are images, or may be.
      first: the first of these, and why.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.reasons = collections.Counter[str]()
        self.num_images, self.first = 0, ""

    def add(self, path: str, reason: str, *, is_image: bool, kind: str | None = None) -> None:
        """Lists a file, or a record."""
        line = {"path": path, "reason": reason}
        self._stream.write(json.dumps(line).encode() + b"\n")
        self.reasons[kind or reason] += 1
        if is_image:
            self.num_images += 1
            self.first = self.first or f"{path} ({reason})"

    def copy_to(self, stream: BinaryIO) -> None:
        """Copies the list."""
        self._stream.seek(0)
        shutil.copyfileobj(self._stream, stream)


def extend_names(
    found: Collection[str], labels: Sequence[str], what: str, *, grow: bool
) -> list[str]:
    """Returns the names of classes in the order of `labels`, and then new ones.

    Args:
      found: the names of the source.
      labels: those of --labels.
      what: the source.
      grow: whether the source may have new ones.

    Raises:
      InputError: it may not; or a class of the source is in `labels` twice, or looks like another.
    """
    for name in sorted(found):
        lines = [number for number, one in enumerate(labels, 1) if one == name]
        if len(lines) > 1:
            raise InputError(
                f"--labels names {name!r} in lines {lines[0]} and {lines[1]}, so that its number is"
                " not known: name it once."
            )
    new = sorted({*found} - {*labels})
    if new and not grow:
        raise InputError(
            f"{what} has classes that --labels does not name: {', '.join(new[:10])}. Add them at"
            " the end of that file, or: --labels_grow"
        )
    places = [(name, "in --labels") for name in labels]
    check_names_differ([*places, *((name, "new") for name in new)], what)
    return [*labels, *new]


def check_numbered(names: Sequence[str] | None) -> None:
    """Raises InputError if a file of these names would be read as one of numbered names."""
    if names and all(NUMBERED.fullmatch(name) for name in names):
        raise InputError(
            f"All classes are called like {names[0]!r}, and {LABELS_NAME} would be read as lines"
            " of a number and a name: call one without a number and a colon."
        )


def check_names_differ(places: Iterable[tuple[str, str]], what: str) -> None:
    """Raises InputError if names differ by white space, case or Unicode form only.

    Args:
      places: each name, and where it is.
      what: the source.
    """
    seen: dict[str, tuple[str, str]] = {}
    for name, place in places:
        form = unicodedata.normalize("NFC", name).strip().casefold()
        other, other_place = seen.setdefault(form, (name, place))
        if other != name:
            raise InputError(
                f"{what}: {other!r} ({other_place}) and {name!r} ({place}) look like one class:"
                " name both alike, or tell them apart by more than case and spaces."
            )
