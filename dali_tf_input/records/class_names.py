"""The names of classes: ``labels.txt``, whose line i + 1 names class i, and how names compare."""

import os
import re
from collections.abc import Sequence

from dali_tf_input.errors import InputError
from dali_tf_input.records.paths import read_file

_MOST_NAMES = 1 << 20  # beyond which the numbers of classes are none that have names
Names = tuple[str | None, ...]  # of the classes in their order; None where it is not known

LABELS_NAME = "labels.txt"  # ours, and TF-slim's
MAIN_KEYS = ("image/class/label", "label")  # TF-slim's and tfds'
NUMBERED = re.compile(r"(\d+):(.+)")  # as TF-slim writes them


def read_class_names(path: str) -> tuple[str, ...]:
    """Reads the names in a file, in their order, without white space around them.

    Where all lines are "number:name", as TF-slim writes them, the numbers count. A name may occur
    twice: ImageNet has two cranes.

    Raises:
      InputError: the file cannot be read, is not UTF-8, has no names, or has an empty line between
        names; or the numbers are not 0, 1, ...
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return _parse(data, path)


def names_file(key: str) -> str:
    """Returns the name of the file of a label's names, as tfds calls it."""
    return f"{key.replace('/', '.')}.labels.txt"


def find_class_names(folder: str, key: str | None = None) -> tuple[str, ...] | None:
    """Returns the names in a folder of TFRecords, local or in a store; None if it has none.

    Args:
      folder: its path or URL.
      key: whose classes, a feature key: those in ``<key>.labels.txt``, with dots for slashes, as
        tfds writes them. None is the main label of the set, also in ``labels.txt``.

    Raises:
      InputError: as `read_class_names`; or two files differ.
    """
    keys = MAIN_KEYS if key is None or key in MAIN_KEYS else (key,)
    files = [*[LABELS_NAME][: len(keys) - 1], *map(names_file, keys)]
    found: dict[str, tuple[str, ...]] = {}
    for path in (os.path.join(folder, name) for name in files):
        try:
            found[path] = _parse(read_file(path), path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    paths = [*found]
    for path in paths[1:]:
        if found[path] != found[paths[0]]:
            raise InputError(
                f"{paths[0]} and {path} name classes differently: make them equal, or remove the"
                " one that is wrong."
            )
    return found[paths[0]] if found else None


def _parse(data: bytes, path: str) -> tuple[str, ...]:
    try:
        text = data.decode("utf-8-sig")
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
    matches = [NUMBERED.fullmatch(name) for name in names]
    if all(matches):
        numbered = {int(match[1]): match[2].strip() for match in matches if match}
        if sorted(numbered) != [*range(len(names))]:
            raise InputError(
                f"{path}: its lines are numbered, but not by 0 to {len(names) - 1}, each once."
            )
        names = tuple(numbered[number] for number in range(len(names)))
    return names


def check_class_name(name: str, where: str) -> None:
    """Raises InputError unless a name can be a line of ``labels.txt``; `where` says whose it is."""
    if not name.isprintable() or name != name.strip() or not name:
        raise InputError(
            f"{where}: {name!r} cannot be the name of a class, a line of {LABELS_NAME} in UTF-8:"
            " rename it, without line breaks, other control characters and white space at its ends."
        )


def find_difference(
    first: Sequence[str | None] | None, second: Sequence[str | None] | None
) -> int | None:
    """Returns the first class that two sets name differently; None if there is none.

    Names that one of them does not know are not compared.
    """
    for number, (name, other) in enumerate(zip(first or (), second or (), strict=False)):
        if name is not None and other is not None and name != other:
            return number
    return None


def join_names(first: Names | None, second: Names | None) -> Names | None:
    """Returns the names that two sets have together, which do not differ."""
    if first is None or second is None:
        return first if second is None else second
    count = max(len(first), len(second))
    padded = [(*names, *[None] * (count - len(names))) for names in (first, second)]
    return tuple(other if name is None else name for name, other in zip(*padded, strict=True))


def shift_names(names: Sequence[str | None] | None, offset: int) -> Names | None:
    """Returns the names of classes that count from `offset`."""
    if names is None:
        return None
    if -offset > _MOST_NAMES:
        return None
    return (*names[offset:],) if offset >= 0 else (*[None] * -offset, *names)


def move_names(names: Sequence[str | None], moved: dict[int, int], kept: set[int]) -> Names:
    """Returns the names of classes after some have moved to other numbers.

    A class that joins another one takes the name of that one, or, if it has none, "cat|lynx".
    Classes from a million on have no names.

    Args:
      names: the names before.
      moved: the new number of each class that moves.
      kept: the classes that stay what they are.
    """
    known = dict(enumerate(names))
    after = {number: known.get(number) for number in kept}
    joined: dict[int, list[str]] = {}
    for number, new in moved.items():
        if (name := known.get(number)) is not None and after.get(new) is None:
            joined.setdefault(new, []).append(name)
    after |= {number: "|".join(dict.fromkeys(parts)) for number, parts in joined.items()}
    named = (number for number, name in after.items() if name is not None)
    last = max(filter(lambda number: number < _MOST_NAMES, named), default=-1)
    return tuple(after.get(number) for number in range(last + 1))
