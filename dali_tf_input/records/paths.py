"""The paths of TFRecord files and of their indexes, and the command that makes the indexes."""

import errno
import fnmatch
import glob
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dali_tf_input.errors import InputError, Path
from dali_tf_input.storage import objects
from dali_tf_input.storage.objects import ObjectVersion, is_url

INDEX_SUFFIX = ".idx"
MANIFEST_NAME = "index_manifest.json"  # beside the index files
BAD_RECORDS_NAME = "bad_records.jsonl"  # beside the manifest

_MOST_MISSING = 100_000  # files of a set that are looked for
# TF-slim's and tfds' files are train-00003-of-01024; others write train_3_of_8, and folders so.
_NUMBERED = re.compile(
    r"(.*-)(\d{5,})(-of-)(\d{5,})(.*)|(.*[-_])(\d+)([-_]of[-_])(\d+)([^/]*)", re.DOTALL
)
_TFDS_FILE = re.compile(r"-(\w+)\.\w+-(\d{5,})-of-\d{5,}$")


def find_files(files: Path | Sequence[Path]) -> tuple[str, ...]:
    """Expands paths, URLs and patterns to TFRecord files, sorted by path; see `find_versions`."""
    return tuple(find_versions(files))


def find_versions(files: Path | Sequence[Path]) -> dict[str, ObjectVersion | None]:
    """Returns the TFRecord files that paths, URLs and patterns name, sorted by path.

    The values are the versions of stored objects; None for local files. Index files are ignored.

    A file that is found twice, by a link or under another spelling of its path, counts once.

    Raises:
      InputError: a path does not exist or is a directory, or a pattern matches no file.
    """
    local_files: dict[Any, str] = {}  # by device and inode: one stat for each file
    versions: dict[str, ObjectVersion | None] = {}
    patterns = _patterns(files)
    listings = iter(objects.find_all(filter(is_url, patterns)))
    for pattern in patterns:
        if is_url(pattern):
            remote_files = {
                url: version for url, version in next(listings).items() if not _is_ours(url)
            }
            if not remote_files:
                is_folder = pattern.endswith("/")
                hint = f": name those in it, such as '{pattern}*-of-*'" if is_folder else ""
                raise InputError(f"No object matches '{pattern}'{hint}.")
            versions |= remote_files
            continue
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            example = os.path.join(pattern, "*-of-*")
            text = f"{pattern} is a directory: name the files in it, such as"
            raise InputError(f"{text} '{example}'.")
        paths = [expanded]
        if not os.path.exists(expanded):  # links come after the files that they point to
            folder, name = os.path.split(expanded)
            if os.path.isdir(folder):  # also one whose name looks like a pattern
                expanded = os.path.join(glob.escape(folder), name)
            paths = sorted(glob.glob(expanded), key=lambda path: (os.path.islink(path), path))
        matches = 0
        for path in paths:
            if _is_ours(path):
                # A shell expands a pattern to these too.
                matches += path == expanded and len(patterns) > 1
                continue
            if not path.isprintable() and not _is_utf8(path):
                raise _explain_encoding(os.fsencode(path))
            try:
                status = os.stat(path)
            except FileNotFoundError as error:
                raise InputError(
                    f"{path} is a link to a file that does not exist: remove it, or restore the"
                    " file."
                ) from error
            if stat.S_ISREG(status.st_mode):
                local_files.setdefault((status.st_dev, status.st_ino), path)
                matches += 1
        if not matches:
            folder = os.path.abspath(os.path.dirname(os.path.expanduser(pattern)) or ".")
            raise InputError(f"No file matches '{pattern}' (looked in {folder}).")
    versions |= dict.fromkeys(local_files.values())
    if not versions:
        raise InputError("`files` must name at least one TFRecord file, got none.")
    return dict(sorted(versions.items()))


def check_complete(files: Sequence[str]) -> None:
    """Raises InputError if a set of numbered files (``train-00003-of-01024``) lacks one."""
    sets: dict[tuple[str, ...], dict[int, str]] = {}
    lengths: dict[tuple[str, ...], set[int]] = {}  # of the numbers as they are written
    for file in files:
        if name := _NUMBERED.fullmatch(file):
            start, number, of, count, end = filter(lambda part: part is not None, name.groups())
            sets.setdefault((start, of, count, end), {})[int(number)] = file
            lengths.setdefault((start, of, count, end), set()).add(len(number))
    for (start, of, count, end), shards in sets.items():
        widths = lengths[start, of, count, end]
        is_usual = of == "-of-" and len(count) > 4  # else numbers may count from 1
        first = 0 if is_usual or 0 in shards else 1
        width = len(count) if is_usual else min(widths) if len(widths) == 1 else 0
        others = (number for number in range(first, first + int(count)) if number not in shards)
        # A name may claim any number of files.
        numbers = itertools.islice(others, _MOST_MISSING)
        missing = [f"{start}{number:0{width}}{of}{count}{end}" for number in numbers]
        versions = objects.find_object_versions(missing)
        for path in missing:
            if path not in versions and not os.path.exists(path):
                raise InputError(
                    f"{path} is missing, of the set of {next(iter(shards.values()))}: restore it,"
                    " or go on without it by --allow_missing (in Python, allow_missing=True)."
                )


def find_records_lost(records: Mapping[str, int]) -> str | None:
    """Returns which file has fewer records than tfds' ``dataset_info.json`` says; None if none.

    `records` is the number of records in each file, including bad ones.
    """
    for folder in {os.path.dirname(file) for file in records if _TFDS_FILE.search(file)}:
        try:
            splits = json.loads(read_file(os.path.join(folder, "dataset_info.json")))["splits"]
            due = {
                split["name"]: [int(count) for count in split["shardLengths"]] for split in splits
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for file in sorted(path for path in records if os.path.dirname(path) == folder):
            name = _TFDS_FILE.search(file)
            counts = due.get(name[1], []) if name else []
            number = int(name[2]) if name else 0
            if number < len(counts) and records[file] < counts[number]:
                short = f"holds {records[file]:,} records, {counts[number]:,} by dataset_info.json"
                way = "--allow_missing (in Python, allow_missing=True)"
                return f"{file} {short}: restore it, or go on by {way}."
    return None


def index_files_of(files: Sequence[str], *, index_dir: Path | None = None) -> tuple[str, ...]:
    """Returns the index of each file: ``<file>.idx``, or that name in `index_dir`.

    Raises:
      InputError: two files of different folders would share an index in `index_dir`.
    """
    if index_dir is None:
        return tuple(file + INDEX_SUFFIX for file in files)
    name, count = Counter(os.path.basename(file) for file in files).most_common(1)[0]
    if count > 1:
        text = f"`index_dir` {index_dir} cannot hold the index of {count} files"
        raise InputError(f"{text} that are all named {name}.")
    folder = absolute(os.fspath(index_dir)) if is_url(index_dir) else os.path.expanduser(index_dir)
    return tuple(os.path.join(folder, os.path.basename(file) + INDEX_SUFFIX) for file in files)


def python_command() -> str:
    """Returns how a shell starts this Python: "python" if that finds it, else its path."""
    python = shutil.which("python")
    is_this = python and os.path.dirname(python) == os.path.dirname(sys.executable)
    return "python" if is_this else shlex.quote(sys.executable)


def program() -> str:
    """Returns how a shell starts this package's commands."""
    script = shutil.which("dali-tf-input")
    is_this = script and os.path.dirname(script) == os.path.dirname(sys.executable)
    return "dali-tf-input" if is_this else f"{python_command()} -m dali_tf_input"


def index_command(
    files: Path | Sequence[Path], *, index_dir: Path | None = None, arguments: Sequence[str] = ()
) -> str:
    """Returns the command that indexes `files`, as messages show it: with absolute paths.

    Args:
      files: paths or patterns.
      index_dir: the folder of the index files, if they are not beside the files.
      arguments: further flags, such as "--on_bad=skip".
    """
    by_folder: dict[str, list[str]] = {}
    for pattern in _patterns(files):
        folder, name = os.path.split(absolute(pattern))
        by_folder.setdefault(folder, []).append(name)
    paths = [path for folder, names in by_folder.items() for path in _shorten(folder, names)]
    if index_dir:
        arguments = [*arguments, f"--index_dir={absolute(os.fspath(index_dir))}"]
    return f"{program()} index {shlex.join([*arguments, *paths])}"


def absolute(path: str) -> str:
    """Returns an absolute path of the same file; keeps "..", which may follow a link."""
    if is_url(path):
        return path
    path = os.path.expanduser(path)
    if ".." in path.split(os.sep):
        return os.path.join(os.getcwd(), path)
    return os.path.abspath(path)


def read_file(path: str) -> bytes:
    """Returns what a file holds, or an object; raises FileNotFoundError if there is none."""
    if is_url(path):
        versions = objects.find_objects(path)
        if not versions:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return objects.read_whole(versions)[0]
    with open(path, "rb") as stream:
        return stream.read()


def _is_ours(path: str) -> bool:
    """Whether the index step made a file."""
    names = (MANIFEST_NAME, BAD_RECORDS_NAME)
    name = os.path.basename(path).removesuffix(".damaged")
    return path.endswith(INDEX_SUFFIX) or name in names


def _is_utf8(path: str) -> bool:
    try:
        return bool(path.encode())
    except UnicodeEncodeError:  # it has bytes that are not UTF-8
        return False


def _explain_encoding(path: bytes) -> InputError:
    """Returns the error for a name that Python cannot write in UTF-8."""
    try:
        path.decode()
    except UnicodeDecodeError:
        return InputError(
            f"{path!r} is not the name of a file in UTF-8, which DALI and TensorFlow need: rename"
            " it, or its folder."
        )
    encoding = sys.getfilesystemencoding()
    return InputError(f"{path!r} is in UTF-8, and Python reads names as {encoding}: PYTHONUTF8=1")


def _shorten(folder: str, names: list[str]) -> list[str]:
    """Returns paths, or one pattern for several names in a folder that start alike."""
    start = os.path.commonprefix(names)  # noqa: RUF071 (of characters, as intended)
    paths = [os.path.join(folder, name) for name in names]
    if len(names) == 1 or not start:
        return paths
    start, rest = os.path.join(folder, start), len(start)
    if not is_url(folder) and os.path.exists(paths[0]):  # names of files, not patterns
        start = glob.escape(start)
    return [start + ("*-of-*" if all("-of-" in name[rest:] for name in names) else "*")]


def is_matched(path: str, files: Path | Sequence[Path]) -> bool:
    """Whether a pattern of `files` matches an absolute path, be there such a file or not."""
    folder, name = os.path.split(path)
    for pattern in map(absolute, _patterns(files)):
        its_folder, its_name = os.path.split(pattern)
        # Folder by folder: a * stands for one.
        is_its_folder = folder == its_folder or pathlib.PurePosixPath(folder).match(its_folder)
        if is_its_folder and fnmatch.fnmatchcase(name, its_name) and not os.path.exists(pattern):
            return True
    return False


def is_numbered(path: str) -> bool:
    """Whether a file is one of a numbered set, such as ``train-00003-of-01024``."""
    return bool(_NUMBERED.fullmatch(path))


def _patterns(files: Path | Sequence[Path]) -> list[str]:
    files = [files] if isinstance(files, str | os.PathLike) else files
    return [os.fspath(file) for file in files]
