"""The manifest beside the index files: what each indexed TFRecord file holds, and by which state of the file that was found.

It is JSON, one ``index_manifest.json`` in the folder of the index files, and names the files by their base names, so that a
folder can be moved whole. `read_entries` is what everybody asks before records are read by an index: DALI itself ends the process
on an index that it cannot use, and reads garbage by one that is stale.
"""

import dataclasses
import json
import os
from collections.abc import Sequence

import google_crc32c

from dali_tf_input.files import MANIFEST_NAME, Path, index_command, index_dir_of
from dali_tf_input.summary import FileEntry, summarise
from dali_tf_input.tfrecord import InputError, record_size

VERSION = 1
_FORMAT = "dali_tf_input index manifest"


class Manifest:
    """The entries of one folder of index files, by the base name of the TFRecord file."""

    def __init__(self, entries: dict[str, FileEntry]) -> None:
        self.entries = entries

    @classmethod
    def read(cls, folder: str) -> "Manifest":
        """Reads the manifest of `folder`; empty where there is none.

        Raises:
          InputError: it is damaged, cannot be read, or is of another version of this package.
        """
        path = os.path.join(folder, MANIFEST_NAME)
        try:
            with open(path, encoding="utf-8") as stream:
                document = json.load(stream)
            if document["format"] != _FORMAT:
                raise ValueError(f"expected format {_FORMAT!r}, found {document['format']!r}")
            if document["version"] != VERSION:
                raise ValueError(f"expected version {VERSION}, found {document['version']}")
            return cls({name: FileEntry.from_json(values) for name, values in document["files"].items()})
        except (FileNotFoundError, NotADirectoryError):
            return cls({})
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
            raise InputError(f"{path}: this is no index manifest of this version of dali_tf_input: {error!r}.") from error

    def write(self, path: str) -> None:
        """Writes the manifest to `path`."""
        document = {
            "format": _FORMAT,
            "version": VERSION,
            "whole": dataclasses.asdict(summarise(self.entries)),
            "files": {name: dataclasses.asdict(self.entries[name]) for name in sorted(self.entries)},
        }
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(json.dumps(document))  # in one go: json.dump writes piece by piece, in Python


def read_entries(files: Sequence[str], index_files: Sequence[str], patterns: Path | Sequence[Path]) -> list[FileEntry]:
    """Returns what is known of each file, having checked that it and its index are still what was indexed.

    Args:
      files: paths of TFRecord files.
      index_files: path of the index of each.
      patterns: what the files were named by, for the command that mends many of them.

    Raises:
      InputError: a file has no index or no entry, changed since, or its index did. The text holds the command that mends it.
    """
    index_dir = index_dir_of(files[0], index_files[0])
    manifests: dict[str, Manifest] = {}
    entries, wrong = [], []
    for file, index_file in zip(files, index_files, strict=True):
        folder = os.path.dirname(index_file) or "."
        if folder not in manifests:
            try:
                manifests[folder] = Manifest.read(folder)
            except InputError as error:
                raise InputError(f"{error} Index again: {index_command(patterns, index_dir=index_dir)}") from error
        entry = manifests[folder].entries.get(os.path.basename(file))
        fault = find_staleness(file, index_file, entry)
        if fault:
            wrong.append((file, index_file, fault, entry))
        elif entry:
            entries.append(entry)
    if wrong:
        file, index_file, fault, _ = wrong[0]
        if fault == _NO_INDEX:
            text = f"{len(wrong)} of {len(files)} files have no index, the first is {file}."
        else:
            text = f"{index_file}: {fault}." + (f" So are {len(wrong) - 1} more." if len(wrong) > 1 else "")
        command = index_command(
            [file for file, *_ in wrong] if len(wrong) <= 3 else patterns,
            index_dir=index_dir,
            arguments=["--on_bad=skip"] if any(entry and entry.left_out for *_, entry in wrong) else (),
        )
        raise InputError(f"{text} Index {'them' if fault == _NO_INDEX else 'again'}: {command}")
    return entries


_NO_INDEX = "there is no index"


def find_staleness(file: str, index_file: str, entry: FileEntry | None) -> str | None:
    """Says why `index_file` must not be used for `file` as it now is; None if it may be."""
    if entry is None:
        # An index of another tool, or of a run that was killed: nobody vouches for it.
        return _NO_INDEX if not os.path.exists(index_file) else "no manifest vouches for this index"
    status = os.stat(file)
    if (status.st_size, status.st_mtime_ns) != (entry.size, entry.mtime_ns):
        return f"{file} changed since it was indexed (then {entry.size:,} bytes, now {status.st_size:,})"
    try:
        with open(index_file, "rb") as stream:
            text = stream.read()
    except FileNotFoundError:
        return _NO_INDEX
    if google_crc32c.value(text) != entry.index_crc or text.count(b"\n") != entry.records:
        return "this index is not the one that the manifest describes"
    if not entry.records:
        return None
    descriptor = os.open(file, os.O_RDONLY)  # size and time may be those of another file: copies that kept neither apart
    try:
        for line in (text[: text.index(b"\n")], text[text.rfind(b"\n", 0, -1) + 1 :]):
            offset, size = map(int, line.split())
            if record_size(descriptor, offset) != size:
                return f"this index is not that of {file}: expected a record of {size} bytes at byte {offset}"
    finally:
        os.close(descriptor)
    return None


def read_index(index_file: str) -> list[tuple[int, int]]:
    """Reads an index that `read_entries` has checked.

    Returns:
      (offset, size) of each record in bytes, in the order of the file, without those left out.
    """
    with open(index_file, "rb") as stream:
        numbers = list(map(int, stream.read().split()))
    return list(zip(numbers[0::2], numbers[1::2], strict=True))
