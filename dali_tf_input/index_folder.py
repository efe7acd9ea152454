"""One folder of index files: which of them hold, and how new ones come to their place together with the manifest."""

import contextlib
import heapq
import json
import os
from collections.abc import Iterator

from dali_tf_input.checks import Checks
from dali_tf_input.files import BAD_RECORDS_NAME, INDEX_SUFFIX, MANIFEST_NAME
from dali_tf_input.manifest import Manifest, find_staleness
from dali_tf_input.staging import Staging, locked
from dali_tf_input.summary import FileEntry
from dali_tf_input.tfrecord import Fault, InputError


class IndexFolder:
    """One folder of indexes: what stands there, what has to be gone through, and what came out."""

    def __init__(self, folder: str, files: dict[str, str], checks: Checks, *, force: bool, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.files = files
        known = _read_manifest(folder).entries
        self.entries: dict[str, FileEntry] = {}  # that hold: unchanged ones, and new ones once they are committed
        for name, file in files.items():
            entry = known.get(name)
            if (
                entry
                and not force
                and checks.are_covered_by(entry)
                and not find_staleness(file, _index_file(folder, name), entry)
            ):
                self.entries[name] = entry
        self.unchanged = len(self.entries)
        self._removed = {name for name in known if name not in files and self._is_gone(name)}
        self.removed_count = len(self._removed)
        self.jobs = [name for name in files if name not in self.entries]
        self.staging = stack.enter_context(Staging(folder)) if self.jobs or self._removed else None
        self.sound: dict[str, FileEntry] = {}  # gone through and without faults, not committed yet
        self.faulty: dict[str, FileEntry] = {}
        self.unreadable: dict[str, str] = {}

    def _is_gone(self, name: str) -> bool:
        """Whether the file of an entry was removed: known only for files beside their index."""
        beside = all((os.path.dirname(file) or ".") == self.folder for file in self.files.values())
        return beside and not os.path.exists(os.path.join(self.folder, name))

    def commit(self, entries: dict[str, FileEntry]) -> None:
        """Moves the indexes of `entries` to their place and then enters them in the manifest."""
        if self.staging is None or not (entries or self._removed):
            return
        with locked(self.folder):
            manifest = _read_manifest(self.folder)
            changed = {
                name for name in [*entries, *self._removed] if name in manifest.entries and manifest.entries[name].left_out
            }
            for name, entry in entries.items():
                self.staging.place(name + INDEX_SUFFIX)
                manifest.entries[name] = entry
            for name in self._removed:
                manifest.entries.pop(name, None)
                if os.path.exists(_index_file(self.folder, name)):
                    os.unlink(_index_file(self.folder, name))
            faulty = [name for name, entry in entries.items() if entry.left_out]
            if faulty or changed:
                self._write_bad_records(faulty, without=changed)
            manifest.write(self.staging.path(MANIFEST_NAME))
            self.staging.place(MANIFEST_NAME)
        self.entries |= entries
        self._removed = set()

    def bad_names(self) -> list[str]:
        """Returns the files that have faults, of those gone through."""
        return [*self.faulty, *self.unreadable]

    def faults_of(self, name: str) -> Iterator[Fault]:
        """Yields the faults of a file that was gone through."""
        if name in self.unreadable:
            yield Fault(record=None, offset=0, size=0, reason="unreadable", detail=self.unreadable[name])
            return
        for _, line in self._staged_lines(name):
            values = json.loads(line)
            del values["file"]
            yield Fault(**values)

    def _write_bad_records(self, names: list[str], *, without: set[str]) -> None:
        """Writes ``bad_records.jsonl`` anew, sorted by file: the old lines, without some files', and the new ones."""
        assert self.staging is not None
        path = os.path.join(self.folder, BAD_RECORDS_NAME)
        new = (line for name in sorted(names) for line in self._staged_lines(name))
        with open(self.staging.path(BAD_RECORDS_NAME), "x", encoding="utf-8") as stream:
            old = _read_lines(path, without=without.union(names)) if os.path.exists(path) else iter(())
            stream.writelines(line for _, line in heapq.merge(old, new, key=lambda item: item[0]))
            empty = stream.tell() == 0
        if not empty:
            self.staging.place(BAD_RECORDS_NAME)
        elif os.path.exists(path):
            os.unlink(path)

    def _staged_lines(self, name: str) -> Iterator[tuple[str, str]]:
        assert self.staging is not None
        return _read_lines(self.staging.path(name + ".faults"), without=set())


def _read_lines(path: str, *, without: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (file, line) of a list of bad records, passing over the files in `without` and lines that are none."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            try:
                file = json.loads(line)["file"]
            except (ValueError, KeyError, TypeError):
                continue  # not a line of ours: the file is written anew without it
            if file not in without:
                yield file, line


def _read_manifest(folder: str) -> Manifest:
    """Reads a manifest to go on from; one that cannot be read counts as none, and every file is gone through again."""
    try:
        return Manifest.read(folder)
    except InputError:
        return Manifest({})


def _index_file(folder: str, name: str) -> str:
    return os.path.join(folder, name + INDEX_SUFFIX)
