"""Label names from labels.txt (line i + 1 names label i), or from tfds' label.labels.txt."""

import contextlib
import os

from dali_tf_input import InputError
from dali_tf_input.records.paths import read_file

LABELS_NAME = "labels.txt"
_OF_TFDS = "label.labels.txt"


def read_names(path: str) -> list[str]:
    """Returns the names of the labels; bytes that are not UTF-8 are replaced.

    Raises:
      InputError: the file cannot be read, or names nothing.
    """
    try:
        with open(path, "rb") as stream:
            return _parse(stream.read(), path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def find_names(file: str) -> list[str]:
    """Returns the label names beside a TFRecord file; an empty list if there is no such file."""
    text = find_label_file(file)
    return [] if text is None else _parse(text, LABELS_NAME)


def find_label_file(file: str) -> bytes | None:
    """Returns what labels.txt holds beside a TFRecord file, local or in a store."""
    for name in (LABELS_NAME, _OF_TFDS):
        with contextlib.suppress(FileNotFoundError):
            return read_file(os.path.join(os.path.dirname(file), name))
    return None


def _parse(text: bytes, path: str) -> list[str]:
    names = [line.strip() for line in text.decode(errors="replace").rstrip().splitlines()]
    if not names:
        raise InputError(
            f"{path} names no label: it needs one name per line. Write them, or remove it."
        )
    return names
