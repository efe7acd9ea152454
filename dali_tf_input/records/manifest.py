"""The manifest beside the index files: the contents and the version of each indexed file.

It is a JSON file, ``index_manifest.json``, in the folder of the index files. It names files by
their base names, so that the folder can be moved as a whole. All code that reads records through an
index calls `read_entries` first, because DALI aborts the process on an index that it cannot use,
and reads garbage with a stale one.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import google_crc32c
import msgspec

from dali_tf_input import __version__
from dali_tf_input.errors import InputError, Path
from dali_tf_input.records.checks import Checks
from dali_tf_input.records.contents import FileEntry, summarize
from dali_tf_input.records.paths import (
    BAD_RECORDS_NAME,
    MANIFEST_NAME,
    index_command,
    is_matched,
    is_numbered,
)
from dali_tf_input.records.tfrecord import record_size
from dali_tf_input.storage.objects import ObjectVersion, is_url
from dali_tf_input.storage.staging import locked
from dali_tf_input.storage.versions import refuse_newer

# The names of classes that folders in a store have, by folder and by the key of their label, "" for
# the main one; or why they cannot be read.
StoredNames = dict[str, dict[str, tuple[str, ...] | str]]


class _Document(msgspec.Struct):
    format: Literal["dali_tf_input index manifest"]
    version: Literal[3, 4]  # entries of version 3 count as outdated, see `find_staleness`
    files: dict[str, FileEntry]
    names: StoredNames = {}
    release: str = ""  # that wrote it


_VERSION: Final = 4


class DamagedManifestError(InputError):
    """A manifest can be read, but does not hold what it should."""


class Manifest:
    """The entries of a folder of index files, by base name of the TFRecord file; and names."""

    def __init__(self, entries: dict[str, FileEntry], names: StoredNames | None = None) -> None:
        self.entries, self.names = entries, names or {}

    @classmethod
    def read(cls, folder: str) -> "Manifest":
        """Reads the manifest of `folder`; empty if there is none.

        Raises:
          InputError: it cannot be read, is damaged, or of a newer release.
        """
        path = os.path.join(folder, MANIFEST_NAME)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return cls({})
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
        refuse_newer(path, data, _VERSION)
        try:
            document = msgspec.json.decode(data, type=_Document)
            for entry in document.files.values():
                # Raises if there are no such checks.
                Checks.from_json({"verify": entry.verified, **entry.checked_by})
            return cls(document.files, document.names)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise DamagedManifestError(
                f"{path} is not an index manifest of this version of dali_tf_input: {error}."
            ) from error

    def write(self, path: str) -> None:
        """Writes the manifest to the new file `path`."""
        document = _Document(
            "dali_tf_input index manifest",
            _VERSION,
            {name: self.entries[name] for name in sorted(self.entries)},
            self.names,
            __version__,
        )
        with open(path, "xb") as stream:
            stream.write(msgspec.json.encode(document))


def read_entries(
    files: Mapping[str, ObjectVersion | None],
    index_files: Sequence[str],
    patterns: Path | Sequence[Path],
    index_dir: Path | None,
) -> list[FileEntry]:
    """Returns the entry of each file, after checking that the file and its index are unchanged.

    `files` maps each path or URL to the version of a stored object, or None for a local file.

    Raises:
      InputError: a file has no index or no entry, the file or its index changed, or a file that was
        indexed and that `patterns` match is gone. The message includes the command that fixes it.
        If many files are affected, the command names them by `patterns`, as the user did.
    """
    folders = {os.path.dirname(index_file) or "." for index_file in index_files}
    for is_last in (False, True):
        manifests: dict[str, Manifest] = {}
        for folder in folders:
            try:
                manifests[folder] = Manifest.read(folder)
            except DamagedManifestError as error:
                # How deeply the files were checked is not known any more.
                arguments = ["--force", *_as_deep_as_before(folder)]
                command = index_command(patterns, index_dir=index_dir, arguments=arguments)
                raise InputError(f"{error} Index again: {command}") from error
        entries, stale = [], []
        for (file, version), index_file in zip(files.items(), index_files, strict=True):
            folder = os.path.dirname(index_file) or "."
            entry = manifests[folder].entries.get(os.path.basename(file))
            if reason := find_staleness(file, index_file, entry, version):
                stale.append((file, index_file, reason, entry))
            elif entry:
                entries.append(entry)
        if not stale:
            break
        if not is_last:  # an index run may be replacing indexes and their manifest
            for folder in filter(os.path.isdir, folders):
                with locked(folder):
                    pass
    if stale:
        file, index_file, reason, _ = stale[0]
        if reason == _NO_INDEX:
            where = "beside them (`index_dir` is None)" if index_dir is None else f"in {index_dir}"
            text = f"{len(stale)} of {len(files)} files have no index {where}, the first is {file}."
        else:
            more = f" {len(stale) - 1} more cannot be used." if len(stale) > 1 else ""
            text = f"{index_file}: {reason}.{more}"
        # The index step checks a file as deeply as its entry says, if there is one.
        arguments = _skip_as_before([entry for *_, entry in stale if entry])
        if not all(entry for *_, entry in stale):
            arguments = _as_deep_as_before(os.path.dirname(index_file)) or arguments
        command = index_command(
            [file for file, *_ in stale] if len(stale) <= 3 else patterns,
            index_dir=index_dir,
            arguments=arguments,
        )
        verb = "Index them" if reason == _NO_INDEX else "Index again"
        raise InputError(f"{text} {verb}: {command}")
    if gone := _find_gone(dict(zip(files, index_files, strict=True)), manifests, patterns):
        arguments = ["--allow_missing"] if is_numbered(gone[0]) else []
        command = index_command(patterns, index_dir=index_dir, arguments=arguments)
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise InputError(
            f"{gone[0]} was indexed and is gone{more}. Restore it, or go on without it: {command}"
        )
    return entries


def _find_gone(
    index_file_of: Mapping[str, str],
    manifests: Mapping[str, "Manifest"],
    patterns: Path | Sequence[Path],
) -> list[str]:
    """Returns files that manifests name and `patterns` match, but that are not among the files.

    A pattern matches what is there, so that a lost file would be left out without a word.

    Args:
      index_file_of: the index file of each file that is there.
      manifests: the manifest of each folder of index files.
      patterns: how the user named the files.
    """
    folders: dict[str, list[str]] = {}
    for file, index_file in index_file_of.items():
        folders.setdefault(os.path.dirname(index_file) or ".", []).append(file)
    gone = []
    for folder, files in folders.items():
        entries = manifests[folder].entries
        known = {os.path.basename(file): os.path.dirname(file) for file in files}
        # Of files beside it a manifest does not say where that is: the folder may be moved.
        own = next((known[name] for name in known if entries[name].folder is None), None)
        for name in entries.keys() - known.keys():
            path = os.path.join(entries[name].folder or own or "", name)
            if is_matched(path, patterns) and (is_url(path) or not os.path.exists(path)):
                gone.append(path)
    return sorted(gone)


def _skip_as_before(entries: Sequence[FileEntry]) -> list[str]:
    """Returns the flags that skip as many bad records as the entries do."""
    summary = summarize({str(number): entry for number, entry in enumerate(entries)})
    if not summary.skipped:
        return []
    num_bytes = sum(entry.skipped_bytes for entry in entries)
    num_files = sum(not entry.records for entry in entries)
    fraction = max(
        summary.skipped / (summary.skipped + summary.records),
        num_bytes / max(1, summary.size),
        num_files / summary.files,
    )
    limit = f"--max_bad_fraction={min(1, math.ceil(1000 * fraction) / 1000):g}"
    return ["--on_bad=skip", *([limit] if fraction > 0.01 else [])]


def _as_deep_as_before(folder: str) -> list[str]:
    """Returns the flags for files without an entry: deep, if bad records were skipped before."""
    was_skipped = os.path.exists(os.path.join(folder, BAD_RECORDS_NAME))
    return ["--verify=decode", "--on_bad=skip"] if was_skipped else []


def find_change(file: str, size: int, mtime_ns: int) -> str | None:
    """Returns how a file differs from when it was indexed; None if it does not."""
    try:
        status = os.stat(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
        return None
    how = "its time of modification differs: it was copied, or written"
    if status.st_size != size:
        how = f"then {size:,} bytes, now {status.st_size:,}"
    return f"{file} changed since it was indexed ({how})"


def find_change_of_object(url: str, now: ObjectVersion | None, then: ObjectVersion) -> str | None:
    """Returns how an object differs from when it was indexed; None if it does not."""
    if now == then:
        return None
    if now is None:
        return f"{url} cannot be read: no such object"
    return f"{url} changed since it was indexed (then {then.size:,} bytes, now {now.size:,})"


_NO_INDEX = "there is no index"
_EXTENT = re.compile(rb"(\d{1,18}) (\d{1,18})")


def find_staleness(
    file: str, index_file: str, entry: FileEntry | None, version: ObjectVersion | None
) -> str | None:
    """Returns why `index_file` must not be used with the current `file`; None if it may be used.

    `version` is the current version of a stored object; None for a local file.
    """
    if entry is None:  # an index of another tool, or of a run that was killed
        known = os.path.exists(index_file)
        return "the manifest has no entry for this index" if known else _NO_INDEX
    if entry.skipped_numbers is None:
        return "an earlier version of dali_tf_input made this index"
    if is_url(file):
        changed = find_change_of_object(file, version, ObjectVersion(entry.size, entry.etag or ""))
    else:
        changed = find_change(file, entry.size, entry.mtime_ns)
    if changed:
        return changed
    try:
        with open(index_file, "rb") as stream:
            text = stream.read()
    except FileNotFoundError:
        return _NO_INDEX
    if google_crc32c.value(text) != entry.index_crc or text.count(b"\n") != entry.records:
        return "this index is not the one that the manifest describes"
    if not entry.records or is_url(file):
        return None
    # Size and time may be those of another file, copied with its times: check two records.
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for line in (text[: text.index(b"\n")], text[text.rfind(b"\n", 0, -1) + 1 :]):
            extent = _EXTENT.fullmatch(line.strip())
            offset, size = map(int, extent.groups()) if extent else (0, -1)
            if record_size(descriptor, offset) != size:
                expected = f"a record of {size} bytes at byte {offset}"
                return f"this index is not that of {file}: expected {expected}"
    finally:
        os.close(descriptor)
    return None
