"""Which files are meant, where their indexes stand, and the command that makes them."""

import glob
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Sequence

from dali_tf_input.tfrecord import InputError

INDEX_SUFFIX = ".idx"
MANIFEST_NAME = "index_manifest.json"  # beside the index files
BAD_RECORDS_NAME = "bad_records.jsonl"  # beside the manifest

Path = str | os.PathLike[str]

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_COPY_COMMANDS = {"gs": "gcloud storage cp", "s3": "aws s3 cp", "http": "curl -O", "https": "curl -O", "hdfs": "hdfs dfs -get"}


def find_files(files: Path | Sequence[Path]) -> tuple[str, ...]:
    """Expands paths and glob patterns to TFRecord files, sorted by path; what an index run wrote is passed over.

    A file that is found twice, by whatever spelling or link of its path, counts once.

    Raises:
      InputError: a path does not exist, is a directory or a URL, or a pattern matches no file.
    """
    found: dict[tuple[int, int], str] = {}  # by device and inode: one stat for each file
    patterns = _patterns(files)
    for pattern in patterns:
        _check_no_url(pattern)
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            raise InputError(f"{pattern} is a directory: name the files in it, for example '{os.path.join(pattern, '*-of-*')}'.")
        paths = (
            [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded), key=lambda path: (os.path.islink(path), path))
        )
        matches = 0
        for path in paths:
            if path.endswith(INDEX_SUFFIX) or os.path.basename(path) in (MANIFEST_NAME, BAD_RECORDS_NAME):
                matches += path == expanded and len(patterns) > 1  # a shell expands a pattern to these too
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError as error:
                raise InputError(f"{path} is a link to a file that is not there: remove it, or put the file there.") from error
            if stat.S_ISREG(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), path)
                matches += 1
        if not matches:
            raise InputError(f"No file matches '{pattern}' (looked in {os.path.abspath(os.path.dirname(expanded) or '.')}).")
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


def index_dir_of(file: str, index_file: str) -> str | None:
    """Returns the `index_dir` by which `index_files_of` made `index_file` of `file`."""
    return None if index_file == file + INDEX_SUFFIX else os.path.dirname(index_file) or "."


def index_command(files: Path | Sequence[Path], *, index_dir: Path | None = None, arguments: Sequence[str] = ()) -> str:
    """Returns the command that indexes `files`, as error messages show it: with absolute paths, as make runs elsewhere.

    Args:
      files: paths or patterns.
      index_dir: the folder of the index files, if they do not stand beside the files.
      arguments: flags of ``scripts/index_tfrecords.py``, such as "--on_bad=skip".
    """
    by_folder: dict[str, list[str]] = {}
    for pattern in _patterns(files):
        folder, name = os.path.split(absolute(pattern))
        by_folder.setdefault(folder, []).append(name)
    paths = [path for folder, names in by_folder.items() for path in _shorten(folder, names)]
    index_folder = absolute(os.fspath(index_dir)) if index_dir else ""
    through_make = not any(set(text) & set("'$\n") for text in [*paths, index_folder, *arguments])
    if through_make and all(argument == shlex.quote(argument) for argument in arguments):
        suffix = f" INDEX_DIR={_quote(index_folder)}" if index_folder else ""
        suffix += f" ARGS={_quote(' '.join(arguments))}" if arguments else ""
        return " && ".join(f"make index DATA={_quote(path)}{suffix}" for path in paths)
    arguments = [*arguments, f"--index_dir={index_folder}"] if index_folder else arguments  # what make would not hand on as it is
    return shlex.join([".venv/bin/python", "scripts/index_tfrecords.py", *arguments, *paths])


def _shorten(folder: str, names: list[str]) -> list[str]:
    """Returns paths, or a pattern for many names of one folder, where a common start makes one."""
    start = os.path.commonprefix(names)  # noqa: RUF071 (of characters, as meant)
    paths = [os.path.join(folder, name) for name in names]
    if len(names) <= 3 or not start:
        return paths
    start, rest = os.path.join(folder, start), len(start)
    if os.path.exists(paths[0]):  # names of files, and not patterns
        start = glob.escape(start)
    return [start + ("*-of-*" if all("-of-" in name[rest:] for name in names) else "*")]


def _patterns(files: Path | Sequence[Path]) -> list[str]:
    return [os.fspath(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)]


def _check_no_url(path: str) -> None:
    found = _URL.match(path)
    if found:
        copy = _COPY_COMMANDS.get(found[1].lower())
        raise InputError(
            f"{path} is a URL, and TFRecords are read from a file system here: copy the files to a local disk first"
            + (f" (`{copy}`)" if copy else "")
            + ", or mount the place as a folder."
        )


def absolute(path: str) -> str:
    """Returns an absolute path of the same file, "~" expanded; behind "..", a link leads elsewhere than its text says."""
    path = os.path.expanduser(path)
    return os.path.join(os.getcwd(), path) if ".." in path.split(os.sep) else os.path.abspath(path)


def _quote(text: str) -> str:
    return text if text == shlex.quote(text) else f"'{text}'"
