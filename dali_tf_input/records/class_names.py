"""The names of classes: ``labels.txt``, whose line i + 1 names class i."""

import os

from dali_tf_input.errors import InputError
from dali_tf_input.records.paths import read_file

LABELS_NAME = "labels.txt"  # ours, and TF-slim's
_NAMES = (LABELS_NAME, "label.labels.txt")  # the second one is tfds'


def read_class_names(path: str) -> tuple[str, ...]:
    """Reads the names in a file, in their order, without white space around them.

    Raises:
      InputError: the file cannot be read, is not UTF-8, has no names, or has an empty line between
        names.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return _parse(data, path)


def find_class_names(folder: str) -> tuple[str, ...] | None:
    """Returns the names in a folder of TFRecords, local or in a store; None if it has none.

    Raises:
      InputError: as `read_class_names`.
    """
    for path in (os.path.join(folder, name) for name in _NAMES):
        try:
            return _parse(read_file(path), path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return None


def _parse(data: bytes, path: str) -> tuple[str, ...]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}. Save it as UTF-8.") from error
    # Not `splitlines`, which splits names at characters that other readers keep.
    names = tuple(line.strip() for line in text.rstrip().split("\n"))
    if names == ("",):
        raise InputError(
            f"{path} names no label: it needs one name per line. Write them, or remove it."
        )
    if "" in names:
        raise InputError(f"{path}: line {names.index('') + 1} is empty: each line names a class.")
    return names


def check_class_name(name: str, where: str) -> None:
    """Raises InputError unless a name can be a line of ``labels.txt``; `where` says whose it is."""
    if not name.isprintable() or name != name.strip() or not name:
        raise InputError(
            f"{where}: {name!r} cannot be the name of a class, a line of {LABELS_NAME} in UTF-8:"
            " rename it, without line breaks, other control characters and white space at its ends."
        )
