"""Images that a table names: a CSV or JSON-lines file with their labels, values and masks."""

import array
import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.records.class_names import check_class_name

# Columns beside "path", and the feature keys that hold them; that of masks is DeepLab's.
KEYS = {
    "label": "image/class/label",
    "labels": "image/class/labels",
    "values": "image/values",
    "mask": "image/segmentation/class/encoded",
}
SUFFIXES = (".csv", ".jsonl")


def list_rows(table: str, catalog: str) -> "tuple[list[str] | None, array.array[int]]":
    """Writes a line [features, path, path of the mask] per row to the file `catalog`.

    A row has a path, relative to the table's folder, and any of: "label", an integer or a name;
    "labels", integers; "values", numbers; "mask", the path of a PNG or of raw bytes. In a CSV
    several numbers are separated by spaces.

    Returns:
      The names of the classes, sorted, if labels are names; and where the lines start.

    Raises:
      InputError: a row has no path, or other columns than the first row; a value is empty or not a
        number; or labels are numbers in some rows and names in others.
    """
    folder, starts, columns = os.path.dirname(os.path.abspath(table)), array.array("Q"), None
    names = _find_names(table)
    with open(catalog, "xb") as stream:
        for number, row in _read_rows(table):
            columns = columns or set(row)
            if set(row) != columns or "path" not in row or not {*row} <= {"path", *KEYS}:
                got, known = ", ".join(map(str, row)), ", ".join(KEYS)
                text = f"expected path and, as in the first row, any of {known}, found {got}"
                raise InputError(f"{table}: row {number}: {text}.")
            features: dict[str, Any] = {}
            if "label" in row:
                if names:
                    text = str(row["label"])
                    features |= {KEYS["label"]: names.index(text), "image/class/text": text}
                else:
                    features[KEYS["label"]] = _as_integer(row["label"])
            for column, kind in (("labels", _as_whole), ("values", float)):
                if column in row:
                    features[KEYS[column]] = _numbers(f"{table}: row {number}", row, column, kind)
            mask = os.path.join(folder, row["mask"]) if "mask" in row else None
            starts.append(stream.tell())
            line = [features, os.path.join(folder, row["path"]), mask, None]
            stream.write(json.dumps(line).encode() + b"\n")
    if not starts:
        raise InputError(f"{table} has no rows.")
    return names, starts


def _find_names(table: str) -> list[str] | None:
    """Returns the names that labels are, sorted; None if they are integers."""
    names, first_number, first_name = set[str](), None, None
    for number, row in _read_rows(table):
        if "label" not in row:
            continue
        if _as_integer(row["label"]) is None:
            first_name = first_name or (number, row["label"])
            names.add(str(row["label"]))
        else:
            first_number = first_number or (number, row["label"])
        if first_name and first_number:
            rows = " and ".join(f"{label!r} in row {n}" for n, label in (first_number, first_name))
            text = f"{table}: `label` must be a number in all rows, or a name in all, found {rows}."
            raise InputError(f"{text} To use numbers as names, add a letter to all.")
    return sorted(names) or None


def _as_integer(label: Any) -> int | None:
    """Returns a label as an integer, also "1.0" as pandas writes it; None if it is a name."""
    try:
        value = float(label)
    except (TypeError, ValueError):
        return None
    if isinstance(label, str) and re.match(r"-?0\d", label):  # 007 is not 7
        return None
    return int(value) if value.is_integer() and not isinstance(label, bool) else None


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
        if table.endswith(".csv"):
            for number, row in enumerate(csv.DictReader(stream), 1):
                if None in row:
                    raise InputError(f"{table}: row {number} has more values than the header.")
                yield number, _check_row(table, number, row)
            return
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{table}: row {number}: no JSON: {error}.") from error
            if not isinstance(row, dict):
                raise InputError(f"{table}: row {number}: expected an object, found {line[:40]!r}.")
            yield number, _check_row(table, number, row)


def _check_row(table: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row; raises InputError if a value is missing. A record may have no `labels`."""
    for column, value in row.items():
        if value is None or (value == "" and column != "labels"):
            raise InputError(f"{table}: row {number}: `{column}` is empty.")
        if column in ("path", "mask") and not isinstance(value, str):
            raise InputError(f"{table}: row {number}: `{column}` must be a path, got {value!r}.")
    if isinstance(row.get("label"), str):
        check_class_name(row["label"], f"{table}: row {number}")
    return row


def _numbers(where: str, row: dict[str, Any], column: str, kind: Callable[[Any], Any]) -> list[Any]:
    value = row[column]
    try:
        return [kind(number) for number in (value.split() if isinstance(value, str) else value)]
    except (TypeError, ValueError) as error:
        what = "numbers" if kind is float else "whole numbers"
        raise InputError(f"{where}: `{column}` must be {what}, got {value!r}.") from error


def _as_whole(number: Any) -> int:
    """Returns an integer; raises ValueError if a part of it would be lost."""
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{number} is not whole")
    return int(number)
