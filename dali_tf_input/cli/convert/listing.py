"""What a source holds: the images that are converted, by split and class, and what is left out."""

import array
import collections
import json
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from dali_tf_input import InputError
from dali_tf_input.records.card import Described

# What people call the splits, in any case. None is a split that is yet to be chosen.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
Split = str | None
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
    starts: "dict[tuple[Split, Any], array.array[int]]" = field(default_factory=dict)

    def add(self, split: Split, label: Any, start: int) -> None:
        """Adds an item."""
        self.starts.setdefault((split, label), array.array("Q")).append(start)

    def of_split(self, split: Split) -> "list[array.array[int]]":
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
