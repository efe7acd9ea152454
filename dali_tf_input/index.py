"""The index of a TFRecord file: where each record starts and how long it is.

DALI's reader finds records by a text file of one line ``offset size`` per record, in bytes, which NVIDIA's ``tfrecord2idx``
writes too. An index is made once, offline, by `build_index` (``make index DATA=...``) and is checked by `read_index` before
anything reads the data by it: DALI itself ends the process on an index it cannot use, and reads garbage by one that is stale.
"""

import glob
import os
import secrets
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dali_tf_input.tfrecord import FRAME_SIZE, InputError, check_record, scan_records

INDEX_SUFFIX = ".idx"

Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class BuiltIndex:
    """What `build_index` did for one file: `num_records` found in it, and whether the index was `written` or stood already."""

    file: str
    index_file: str
    num_records: int
    written: bool


def find_files(files: Path | Sequence[Path]) -> tuple[str, ...]:
    """Expands paths and glob patterns to TFRecord files, sorted by path; index files are passed over.

    A file that is found twice, by whatever spelling or link of its path, counts once.

    Raises:
      InputError: a path does not exist or is a directory, or a pattern matches no file.
    """
    found: dict[str, str] = {}
    for pattern in _patterns(files):
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            raise InputError(f"{pattern} is a directory: name the files in it, for example '{os.path.join(pattern, '*-of-*')}'.")
        paths = [expanded] if os.path.exists(expanded) else glob.glob(expanded)
        matches = [path for path in paths if not path.endswith(INDEX_SUFFIX) and os.path.isfile(path)]
        if not matches:
            raise InputError(f"No file matches '{pattern}' (looked in {os.path.abspath(os.path.dirname(expanded) or '.')}).")
        for path in matches:
            found.setdefault(os.path.realpath(path), path)
    if not found:
        raise InputError("`files` must name at least one TFRecord file, got none.")
    return tuple(sorted(found.values()))


def index_files_of(files: Sequence[str], *, index_dir: Path | None = None) -> tuple[str, ...]:
    """Returns where the index of each file stands: ``<file>.idx``, or under the same name in `index_dir`.

    Raises:
      InputError: two files of different folders would share an index in `index_dir`.
    """
    if index_dir is None:
        return tuple(file + INDEX_SUFFIX for file in files)
    name, count = Counter(os.path.basename(file) for file in files).most_common(1)[0]
    if count > 1:
        raise InputError(f"`index_dir` {index_dir} cannot hold the index of {count} files that are all named {name}.")
    folder = os.path.expanduser(index_dir)
    return tuple(os.path.join(folder, os.path.basename(file) + INDEX_SUFFIX) for file in files)


def index_command(files: Path | Sequence[Path], *, index_dir: Path | None = None) -> str:
    """Returns the command that indexes `files`, as error messages show it: with absolute paths, as make runs elsewhere."""
    by_folder: dict[str, list[str]] = {}
    for pattern in _patterns(files):
        folder, name = os.path.split(_absolute(pattern))
        by_folder.setdefault(folder, []).append(name)
    suffix = f" INDEX_DIR={_quote(_absolute(os.fspath(index_dir)))}" if index_dir else ""
    commands = []
    for folder, names in by_folder.items():
        if len(names) > 3:  # a long list of files: a pattern of their common start
            names = [os.path.commonprefix(names) + "*"]  # noqa: RUF071 (of characters, as meant)
        commands += [f"make index DATA={_quote(os.path.join(folder, name))}{suffix}" for name in names]
    return " && ".join(commands)


def build_index(file: str, index_file: str, *, force: bool = False) -> BuiltIndex:
    """Writes the index of one TFRecord file, unless a valid one stands there already.

    Every record's length and its CRC are checked on the way. The index is written under a temporary name in the same folder
    and renamed when it is whole, so an `index_file` is never half-written; on an error nothing is left behind.

    Args:
      file: path of an uncompressed TFRecord file.
      index_file: path of the index to write; its folder is made where it is missing.
      force: write the index anew even where `read_index` accepts the one that is there.

    Raises:
      InputError: `file` is empty, compressed, cut short or no TFRecord file (see `tfrecord.scan_records`).
      OSError: `file` cannot be read or `index_file` not be written.
    """
    if not force and os.path.exists(index_file):
        try:
            return BuiltIndex(file=file, index_file=index_file, num_records=len(read_index(file, index_file)), written=False)
        except InputError:
            pass  # stale, damaged or of another file: what this call is there to mend
    records = list(scan_records(file))
    folder = os.path.dirname(index_file) or "."
    os.makedirs(folder, exist_ok=True)
    temporary_file = os.path.join(folder, f".{os.path.basename(index_file)}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary_file, "x", encoding="ascii") as stream:
            stream.writelines(f"{offset} {size}\n" for offset, size in records)
        os.replace(temporary_file, index_file)
    except BaseException:
        if os.path.exists(temporary_file):
            os.unlink(temporary_file)
        raise
    return BuiltIndex(file=file, index_file=index_file, num_records=len(records), written=True)


def read_index(file: str, index_file: str) -> list[int]:
    """Reads and checks the index of a TFRecord file.

    Checked: the index is not older than the file, each line is two numbers, the records (of 16 bytes at least) follow one
    another without a gap from byte 0 to the file's last byte, and the first and the last of them stand in the file as the
    index says.

    Returns:
      The offset of each record in bytes, in the order of the file.

    Raises:
      InputError: any of that is not so; the text holds the ``make index`` command that mends it.
      OSError: one of the two files cannot be read.
    """
    mend = f"Make it again: {index_command(file, index_dir=_index_dir(file, index_file))}"
    file_status = os.stat(file)
    with open(index_file, "rb") as stream:
        if os.fstat(stream.fileno()).st_mtime_ns < file_status.st_mtime_ns:
            raise InputError(f"{index_file}: this index is older than {file}, which changed since. {mend}")
        tokens = stream.read().split()
    try:
        numbers = list(map(int, tokens))
    except ValueError as error:
        raise InputError(f"{index_file}: expected lines of 'offset size', found something else: {error}. {mend}") from error
    offsets, sizes = numbers[0::2], numbers[1::2]
    if not numbers or len(offsets) != len(sizes):
        raise InputError(f"{index_file}: expected lines of 'offset size', found {len(numbers)} numbers. {mend}")
    expected_offset = 0
    for line, (offset, size) in enumerate(zip(offsets, sizes, strict=True), start=1):
        if offset != expected_offset:
            raise InputError(f"{index_file}: line {line}: expected offset {expected_offset}, found {offset}. {mend}")
        if size < FRAME_SIZE:
            raise InputError(f"{index_file}: line {line}: expected a size of at least {FRAME_SIZE}, found {size}. {mend}")
        expected_offset += size
    if expected_offset != file_status.st_size:
        raise InputError(
            f"{index_file}: this index ends at byte {expected_offset}, {file} at byte {file_status.st_size}: "
            f"it is another file's, or the file changed. {mend}"
        )
    for position in (0, -1):
        try:
            check_record(file, offsets[position], sizes[position])
        except InputError as error:
            raise InputError(f"{index_file}: this index is not that of {file}: {error} {mend}") from error
    return offsets


def _index_dir(file: str, index_file: str) -> str | None:
    return None if index_file == file + INDEX_SUFFIX else os.path.dirname(index_file) or "."


def _patterns(files: Path | Sequence[Path]) -> list[str]:
    return [os.fspath(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _quote(text: str) -> str:
    return text if text == shlex.quote(text) else f"'{text}'"
