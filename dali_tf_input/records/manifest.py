"""The manifest beside the index files: the contents and the version of each indexed file.

It is a JSON file, ``index_manifest.json``, in the folder of the index files. It names files by
their base names, so that the folder can be moved as a whole. All code that reads records through an
index calls `read_entries` first, because DALI aborts the process on an index that it cannot use,
and reads garbage with a stale one.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import google_crc32c
import msgspec

from dali_tf_input.errors import InputError, Path
from dali_tf_input.records.contents import FileEntry, Summary, summarize
from dali_tf_input.records.paths import MANIFEST_NAME, index_command
from dali_tf_input.records.schema import Checks
from dali_tf_input.records.tfrecord import record_size
from dali_tf_input.storage.objects import Status, is_url
from dali_tf_input.storage.staging import locked


class _Document(msgspec.Struct):
    format: Literal["dali_tf_input index manifest"]
    version: Literal[3]
    files: dict[str, FileEntry]
    whole: Summary


class Manifest:
    """The entries of one folder of index files, by the base name of the TFRecord file."""

    def __init__(self, entries: dict[str, FileEntry]) -> None:
        self.entries = entries

    @classmethod
    def read(cls, folder: str) -> "Manifest":
        """Reads the manifest of `folder`; empty if there is none.

        Raises:
          InputError: it is damaged, cannot be read, or is of another version of this package.
        """
        path = os.path.join(folder, MANIFEST_NAME)
        try:
            with open(path, "rb") as stream:
                files = msgspec.json.decode(stream.read(), type=_Document).files
            for name, entry in files.items():
                # Raises if there are no such checks.
                Checks.from_json({"verify": entry.verified, **entry.checked_by})
                # Indexes of files that are gone are removed by these names.
                if name != os.path.basename(name) or name in ("", ".", ".."):
                    raise ValueError(f"{name!r} is not the name of a file in this folder")
            return cls(files)
        except (FileNotFoundError, NotADirectoryError):
            return cls({})
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OSError) as error:
            raise InputError(
                f"{path} is not an index manifest of this version of dali_tf_input: {error}."
            ) from error

    def write(self, path: str) -> None:
        """Writes the manifest to the new file `path`."""
        document = _Document(
            "dali_tf_input index manifest",
            3,
            {name: self.entries[name] for name in sorted(self.entries)},
            summarize(self.entries),
        )
        with open(path, "xb") as stream:
            stream.write(msgspec.json.encode(document))


def read_entries(
    files: Mapping[str, Status | None],
    index_files: Sequence[str],
    patterns: Path | Sequence[Path],
    index_dir: Path | None,
) -> list[FileEntry]:
    """Returns the entry of each file, after checking that the file and its index are unchanged.

    `files` maps each path or URL to the version of a stored object, or None for a local file.

    Raises:
      InputError: a file has no index or no entry, or the file or its index changed. The message
        includes the command that fixes it. If many files are affected, the command names them by
        `patterns`, as the user did.
    """
    folders = {os.path.dirname(index_file) or "." for index_file in index_files}
    for is_last in (False, True):
        manifests: dict[str, Manifest] = {}
        for folder in folders:
            try:
                manifests[folder] = Manifest.read(folder)
            except InputError as error:
                command = index_command(patterns, index_dir=index_dir)
                raise InputError(f"{error} Index again: {command}") from error
        entries, stale = [], []
        for (file, status), index_file in zip(files.items(), index_files, strict=True):
            folder = os.path.dirname(index_file) or "."
            entry = manifests[folder].entries.get(os.path.basename(file))
            if reason := find_staleness(file, index_file, entry, status):
                stale.append((file, index_file, reason, entry))
            elif entry:
                entries.append(entry)
        if stale and not is_last:  # an index run may be replacing indexes and their manifest
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
        skips = any(entry and entry.skipped for *_, entry in stale)
        command = index_command(
            [file for file, *_ in stale] if len(stale) <= 3 else patterns,
            index_dir=index_dir,
            arguments=["--on_bad=skip"] if skips else (),
        )
        verb = "Index them" if reason == _NO_INDEX else "Index again"
        raise InputError(f"{text} {verb}: {command}")
    return entries


def find_change(file: str, size: int, mtime_ns: int) -> str | None:
    """Returns how a file differs from when it was indexed; None if it does not."""
    try:
        status = os.stat(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
        return None
    sizes = f"then {size:,} bytes, now {status.st_size:,}"
    return f"{file} changed since it was indexed ({sizes})"


def find_change_of_object(url: str, now: Status | None, then: Status) -> str | None:
    """Returns how an object differs from when it was indexed; None if it does not."""
    if now == then:
        return None
    if now is None:
        return f"{url} cannot be read: no such object"
    return f"{url} changed since it was indexed (then {then.size:,} bytes, now {now.size:,})"


_NO_INDEX = "there is no index"
_EXTENT = re.compile(rb"(\d{1,18}) (\d{1,18})")


def find_staleness(
    file: str, index_file: str, entry: FileEntry | None, status: Status | None
) -> str | None:
    """Returns why `index_file` must not be used with the current `file`; None if it may be used.

    `status` is the current version of a stored object; None for a local file.
    """
    if entry is None:  # an index of another tool, or of a run that was killed
        known = os.path.exists(index_file)
        return "the manifest has no entry for this index" if known else _NO_INDEX
    if is_url(file):
        changed = find_change_of_object(file, status, Status(entry.size, entry.etag or ""))
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
