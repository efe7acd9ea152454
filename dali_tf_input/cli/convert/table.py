"""Images that a table names: a CSV, TSV or JSON-lines file with their labels, values and masks."""

import csv
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_tf_input import InputError
from dali_tf_input.cli.convert.listing import SPLITS, Listed, check_names_differ, extend_names
from dali_tf_input.records.class_names import check_class_name

# Columns beside "path", and the feature keys that hold them; that of masks is DeepLab's.
KEYS = {
    "label": "image/class/label",
    "labels": "image/class/labels",
    "values": "image/values",
    "mask": "image/segmentation/class/encoded",
}
GROUP_KEY = "image/group"
SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_MEANT = {"filename": "path", "file": "path", "image": "path", "class": "label"}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")  # also as pandas writes a column with a gap
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Columns:
    """What is done with columns that have no meaning of their own.

    Attributes:
      keep: those that are stored, as features of their names.
      drop: those that are left out.
      group: the one whose equal values are never divided between training and validation.
    """

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    group: str = "group"

    @property
    def known(self) -> set[str]:
        """All columns that a table may have."""
        return {"path", "split", self.group, *KEYS, *self.keep, *self.drop}


def is_table(source: str) -> bool:
    """Whether a source is a table, by its suffix."""
    return source.lower().endswith(SUFFIXES)


def list_rows(
    table: str,
    catalog: str,
    *,
    columns: Columns = Columns(),
    labels: Sequence[str] | None = None,
    labels_grow: bool = False,
) -> Listed:
    """Writes a line [features, path, path of the mask, None] per row to the file `catalog`.

    A row has a path, relative to the table's folder, and any of: "label", an integer or a name;
    "labels", integers, or names separated by "|"; "values", numbers; "mask", the path of a PNG or
    of raw bytes; "split", train, validation or test; and "group". In a CSV several numbers are
    separated by spaces.

    Args:
      table: the path of the table.
      catalog: a new file.
      columns: what is done with other columns.
      labels: the names of the classes in their order; None sorts those that are found.
      labels_grow: whether classes that are not in `labels` come after them.

    Raises:
      InputError: a row has no path, or that of another row; or other columns than the first row; a
        value is empty or not a number; labels are numbers in some rows and names in others, or
        names, or numbers of names, that are not in `labels`; a column has no name, or that of
        another one.
    """
    folder = os.path.dirname(os.path.abspath(table))
    names = {column: _find_names(table, column) for column in ("label", "labels")}
    numbered = {
        column: _number(table, found, labels if column == "label" else None, grow=labels_grow)
        for column, found in names.items()
    }
    numbers = {
        column: None if found is None else {name: number for number, name in enumerate(found)}
        for column, found in numbered.items()
    }
    kept = _find_types(table, columns.keep)
    # Labels that are integers may have names, too.
    integers = [*labels] if labels is not None and names["label"] is None else None
    listed = Listed(labels=numbered["label"] if integers is None else integers)
    if numbered["labels"] is not None:
        listed.other_labels[KEYS["labels"]] = numbered["labels"]
    first_columns, paths = None, dict[bytes, int]()
    splits = dict[bytes, tuple[str, int]]()  # of groups, and the first row of each
    with open(catalog, "xb") as stream:
        for number, row in _read_rows(table):
            where = f"{table}: row {number}"
            first_columns = first_columns or {*row}
            _check_columns(where, row, first_columns, columns)
            digest = _digest(where, "path", row["path"])
            if (other := paths.setdefault(digest, number)) != number:
                raise InputError(
                    f"{where}: {row['path']} is in row {other}, too: an image comes once, with all"
                    " that is known of it."
                )
            features = _make_features(where, row, numbers, columns, kept)
            if "mask" in row:
                _digest(where, "mask", row["mask"])
            mask = os.path.join(folder, row["mask"]) if "mask" in row else None
            split = None
            if "split" in row:
                split = SPLITS.get(str(row["split"]).strip().lower())
                if split is None:
                    known = ", ".join(SPLITS)
                    got = f"got {row['split']!r}"
                    raise InputError(f"{where}: `split` must be one of {known}, {got}.")
            if split and (group := features.get(GROUP_KEY)) is not None:
                first = splits.setdefault(_digest(where, columns.group, group), (split, number))
                if first[0] != split:
                    raise InputError(
                        f"{where}: group {group!r} is in {split}, and in {first[0]} in row"
                        f" {first[1]}: a group stays together. If that is right, leave it out:"
                        f" --drop={columns.group}"
                    )
            label = features.get(KEYS["label"])
            if integers and (label is None or not 0 <= label < len(integers)):
                raise InputError(
                    f"{where}: --labels names the classes 0 to {len(integers) - 1}, and `label` is"
                    f" {'missing' if label is None else label}."
                )
            listed.add(split, label, stream.tell())
            line = [features, os.path.join(folder, row["path"]), mask, None]
            stream.write(json.dumps(line).encode() + b"\n")
    if not paths:
        raise InputError(f"{table} has no rows.")
    return listed


def _digest(where: str, column: str, value: str) -> bytes:
    """Returns a digest of a text; raises InputError if no file system can hold it."""
    try:
        return hashlib.blake2b(os.fsencode(value), digest_size=8).digest()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: `{column}` is not Unicode text: {value!r}.") from error


def _check_columns(where: str, row: dict[str, Any], first: set[str], columns: Columns) -> None:
    """Raises InputError unless a row has the columns of the first one, which are all known."""
    if "path" not in row:
        meant = [column for column in row if _MEANT.get(column) == "path"]
        hint = f" Rename `{meant[0]}`." if meant else ""
        raise InputError(f"{where}: a column `path` is needed, found {', '.join(row)}.{hint}")
    unknown = [column for column in row if column not in columns.known]
    if unknown:
        column = unknown[0]
        hint = f" Is it `{_MEANT[column]}`?" if column in _MEANT else ""
        raise InputError(
            f"{where}: nothing is known of the column `{column}`.{hint} --keep={column} stores it,"
            f" --drop={column} leaves it out, --group={column} keeps images that share a value of"
            f" it together. Known are path, split, group, {', '.join(KEYS)}."
        )
    if {*row} != first:
        differ = ", ".join(sorted({*row} ^ first))
        raise InputError(f"{where}: all rows must have the columns of the first one: {differ}.")


def _make_features(
    where: str,
    row: dict[str, Any],
    numbers: dict[str, dict[str, int] | None],
    columns: Columns,
    kept: dict[str, type],
) -> dict[str, Any]:
    """Returns the features of a row, but for its image and mask."""
    features: dict[str, Any] = {}
    if "label" in row:
        if (names := numbers["label"]) is not None:
            text = str(row["label"])
            features |= {KEYS["label"]: names[text], "image/class/text": text}
        else:
            features[KEYS["label"]] = _as_integer(row["label"])
    if "labels" in row:
        parts = _split_labels(row["labels"])
        if (names := numbers["labels"]) is not None:
            features[KEYS["labels"]] = [names[str(part)] for part in parts]
        else:
            features[KEYS["labels"]] = [_as_integer(part) for part in parts]
    if "values" in row:
        given = row["values"]
        parts = given.split() if isinstance(given, str) else given
        features[KEYS["values"]] = [_as_float32(where, part, given) for part in _as_list(parts)]
    if columns.group in row:
        if row[columns.group] in (None, ""):
            raise InputError(f"{where}: `{columns.group}` is empty: each image needs its group.")
        features[GROUP_KEY] = str(row[columns.group])
        _digest(where, columns.group, features[GROUP_KEY])
    for column in columns.keep:
        if column in row:
            value = row[column]
            if value is None or value == "":
                raise InputError(f"{where}: `{column}` is empty.")
            features[column] = kept[column](value)
    return features


def _find_types(table: str, columns: Sequence[str]) -> dict[str, type]:
    """Returns how columns are stored: int, float if any number of the column is one, or str.

    Raises:
      InputError: some values of a column are numbers and others text, or one exceeds 64 bits.
    """
    for column in columns:
        if column.startswith("image/"):
            raise InputError(f"{table}: `{column}` would be a key of images: rename it.")
    found: dict[str, tuple[type, int]] = {}
    for number, row in _read_rows(table) if columns else ():
        for column in columns:
            value: Any = row.get(column)
            if isinstance(value, list | dict):
                where = f"{table}: row {number}"
                raise InputError(f"{where}: `{column}` is no number and no text, got {value!r}.")
            if isinstance(value, str):
                _digest(f"{table}: row {number}", column, value)
            own = int if isinstance(value, bool) else type(value)
            own = own if own in (int, float) else str
            if own is int and not -(2**63) <= value < 2**63:
                raise InputError(f"{table}: row {number}: `{column}` exceeds 64 bits, got {value}.")
            kind, first = found.setdefault(column, (own, number))
            if (kind is str) != (own is str):
                raise InputError(
                    f"{table}: `{column}` is a number in some rows and text in others, as in rows"
                    f" {first} and {number}: write all as numbers, or all as text."
                )
            if own is float:
                found[column] = (float, first)
    return {column: kind for column, (kind, _) in found.items()}


def _find_names(table: str, column: str) -> dict[str, int] | None:
    """Returns the names in a column of labels, and the first row of each; None if all are integers.

    Raises:
      InputError: some are names and others integers, or names look alike.
    """
    names, first_number = dict[str, int](), None
    for number, row in _read_rows(table):
        if column not in row:
            continue
        parts = [row[column]] if column == "label" else _split_labels(row[column])
        for part in parts:
            if _as_integer(part) is None:
                names.setdefault(str(part), number)
                if isinstance(part, list | dict) or (
                    column == "labels" and not isinstance(part, str)
                ):
                    hint = " Several labels: `labels`." if isinstance(part, list) else ""
                    raise InputError(
                        f"{table}: row {number}: `{column}` must be whole numbers, or names, got"
                        f" {row[column]!r}.{hint}"
                    )
            elif first_number is None:
                first_number = (number, part)
        if names and first_number:
            name, first = next(iter(names.items()))
            found = f"{first_number[1]!r} in row {first_number[0]} and {name!r} in row {first}"
            raise InputError(
                f"{table}: `{column}` must be a number in all rows, or a name in all, found"
                f" {found}. To use numbers as names, add a letter to all."
            )
    if not names:
        return None
    if all(_NUMBER.fullmatch(name) for name in names):
        name, first = next(iter(names.items()))
        raise InputError(
            f"{table}: `{column}` {name!r} in row {first} is neither an integer of 64 bits, written"
            " as 12 or 12.0, nor a name: write integers, or add a letter to all."
        )
    for name, first in names.items():
        check_class_name(name, f"{table}: row {first}")
    check_names_differ(((name, f"row {first}") for name, first in names.items()), table)
    return names


def _number(
    table: str, names: dict[str, int] | None, labels: Sequence[str] | None, *, grow: bool
) -> list[str] | None:
    """Returns the names of the classes in their order; None if labels are integers."""
    if names is None:
        return None
    if labels is None:
        return sorted(names)
    return extend_names(names, labels, table, grow=grow)


def _split_labels(value: Any) -> list[Any]:
    """Returns the labels of one image: of a text, its integers, or its names."""
    if not isinstance(value, str):
        return _as_list(value)
    parts = value.split()
    if "|" in value or any(_as_integer(part) is None for part in parts):
        return [part.strip() for part in value.split("|") if part.strip()]
    return [*parts]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_integer(label: Any) -> int | None:
    """Returns a label as an integer of 64 bits; None if it is none, and so a name."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    if isinstance(label, float):
        number = int(label) if label.is_integer() and abs(label) < 2**53 else None
    elif isinstance(label, str):
        number = int(label.partition(".")[0]) if _INTEGER.fullmatch(label) else None
    else:
        number = label
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _as_float32(where: str, number: Any, given: Any) -> float:
    """Returns a number that float32 holds."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number or (isinstance(number, str) and _NUMBER.fullmatch(number)):
        value = float(number)
        if abs(value) <= _MOST_FLOAT32:  # not of nan
            return value
    raise InputError(f"{where}: `values` must be finite numbers of float32, got {given!r}.")


def _read_rows(table: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows with their numbers, from 1; of a CSV without its header."""
    try:
        yield from _parse_rows(table)
    except UnicodeDecodeError as error:
        raise InputError(f"{table} is not UTF-8: {error}. Save it as UTF-8.") from error
    except csv.Error as error:
        raise InputError(f"{table} is no CSV: {error}.") from error


def _parse_rows(table: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(table, encoding="utf-8-sig", newline="") as stream:
        if table.lower().endswith((".csv", ".tsv")):
            header = stream.readline()
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=_find_delimiter(header))
            # A column's name counts in any case, as spreadsheets like capitals.
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            if "" in reader.fieldnames:
                raise InputError(
                    f"{table}: column {reader.fieldnames.index('') + 1} has no name. If it is the"
                    " index of a pandas table: table.to_csv(path, index=False)"
                )
            meant = {"path", "split", "group", *KEYS}
            reader.fieldnames = [
                name.lower() if name.lower() in meant else name for name in reader.fieldnames
            ]
            twice = [name for name, count in Counter(reader.fieldnames).items() if count > 1]
            if twice:
                raise InputError(f"{table}: more than one column is called `{twice[0]}`.")
            for number, row in enumerate(reader, 1):
                if None in row:
                    raise InputError(f"{table}: row {number} has more values than the header.")
                yield number, _check_row(table, number, row)
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{table}: row {number}: no JSON: {error}.") from error
            if not isinstance(row, dict):
                raise InputError(f"{table}: row {number}: expected an object, found {line[:40]!r}.")
            yield number, _check_row(table, number, row)


def _find_delimiter(header: str) -> str:
    """Returns what separates columns: the one of these that the header has most of."""
    return max(",;\t", key=header.count)


def _check_row(table: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row; raises InputError if a value is missing. A record may have no `labels`."""
    for column, value in row.items():
        is_known = column in ("path", "split", "group", *KEYS)
        if is_known and (value is None or (value == "" and column != "labels")):
            raise InputError(f"{table}: row {number}: `{column}` is empty.")
        if column in ("path", "mask") and not isinstance(value, str):
            raise InputError(f"{table}: row {number}: `{column}` must be a path, got {value!r}.")
    return row
