"""One folder of index files: which are up to date, and how new ones are committed."""

import contextlib
import dataclasses
import heapq
import json
import os
from collections.abc import Iterator

from dali_tf_input.errors import InputError
from dali_tf_input.index.checks import Checks
from dali_tf_input.index.contents import LEVELS, FileEntry
from dali_tf_input.index.files import BAD_RECORDS_NAME, INDEX_SUFFIX, MANIFEST_NAME, index_dir_of
from dali_tf_input.index.manifest import Manifest, find_staleness
from dali_tf_input.index.pool import Job
from dali_tf_input.index.tfrecord import BadRecord
from dali_tf_input.staging import Staging, locked


class IndexFolder:
    """What one folder of indexes holds, which files have to be checked, and what was found.

    Attributes:
      files: path of each TFRecord file of this run, by its base name.
      entries: by base name, what the manifest says: of unchanged files from the start, of others
        once they are committed.
      jobs: what has to be checked, by base name.
      unchanged: how many files were already indexed.
      removed: how many files of earlier runs no longer exist.
      valid: entries of checked files without bad records that are not committed yet.
      faulty: entries of checked files with bad records, committed or not.
      unreadable: files that could not be checked, and why.
    """

    def __init__(
        self,
        folder: str,
        files: dict[str, str],
        checks: Checks,
        *,
        force: bool,
        stack: contextlib.ExitStack,
    ) -> None:
        self.files = files
        self._folder = folder
        self._known = _read_manifest(folder).entries
        self.entries: dict[str, FileEntry] = {}
        to_check: dict[str, Checks] = {}
        for name, file in files.items():
            entry = self._known.get(name)
            self._check_folder_of(name, entry)
            satisfied = entry and not force and checks.satisfied_by(entry)
            if entry and satisfied and not find_staleness(file, self._index_file(name), entry):
                self.entries[name] = entry
            else:
                to_check[name] = _at_least_as_before(checks, None if force else entry)
        self._removed = {
            name
            for name, entry in self._known.items()
            if name not in files and self._is_gone(name, entry)
        }
        self.unchanged, self.removed = len(self.entries), len(self._removed)
        remedy = "Name another folder with `index_dir` (--index_dir)."
        self._staging = (
            stack.enter_context(Staging(folder, remedy)) if to_check or self._removed else None
        )
        self.jobs = {
            name: self._make_job(number, name, checks)
            for number, (name, checks) in enumerate(to_check.items())
        }
        self.valid: dict[str, FileEntry] = {}
        self.faulty: dict[str, FileEntry] = {}
        self.unreadable: dict[str, str] = {}

    def commit_valid(self) -> None:
        """Commits files without bad records; removes indexes of files that are gone."""
        self._commit(self.valid)
        self.valid = {}

    def commit_faulty(self) -> None:
        """Commits files with bad records: indexes that skip them, and the list of them."""
        self._commit(
            {name: entry for name, entry in self.faulty.items() if name not in self.entries}
        )

    def bad_records_of(self, name: str) -> Iterator[BadRecord]:
        """Yields the bad records of a file that was checked."""
        if name in self.unreadable:
            yield BadRecord(
                record=None, offset=0, size=0, reason="unreadable", detail=self.unreadable[name]
            )
            return
        for _, line in self._staged_bad_records(name):
            values = json.loads(line)
            del values["file"]
            yield BadRecord(**values)

    def _make_job(self, number: int, name: str, checks: Checks) -> Job:
        assert self._staging is not None
        index, bad_records, mark = (
            self._staging.path(f"{number}{suffix}") for suffix in (INDEX_SUFFIX, ".bad", ".mark")
        )
        return Job(
            file=self.files[name],
            index=index,
            bad_records=bad_records,
            mark=mark,
            checks=dataclasses.asdict(checks),
        )

    def _index_file(self, name: str) -> str:
        return os.path.join(self._folder, name + INDEX_SUFFIX)

    def _folder_of(self, name: str) -> str | None:
        """Returns where the entry says that the file is: None if beside the index."""
        file = self.files[name]
        beside = index_dir_of(file, self._index_file(name)) is None
        return None if beside else os.path.dirname(os.path.abspath(file))

    def _check_folder_of(self, name: str, entry: FileEntry | None) -> None:
        """Refuses to replace the index of another file of the same name."""
        if entry and entry.folder and entry.folder != self._folder_of(name):
            other = os.path.join(entry.folder, name)
            if os.path.exists(other) and not os.path.samefile(other, self.files[name]):
                raise InputError(
                    f"`index_dir` {self._folder} holds the index of {other}, which that of "
                    f"{self.files[name]} would replace: name another folder for one of them."
                )

    def _is_gone(self, name: str, entry: FileEntry) -> bool:
        """Whether a file was removed, and not its whole folder, which may be unmounted."""
        folder = entry.folder or self._folder
        return os.path.isdir(folder) and not os.path.exists(os.path.join(folder, name))

    def _commit(self, entries: dict[str, FileEntry]) -> None:
        """Renames the indexes of `entries` into place and then adds the entries to the manifest."""
        if self._staging is None or not (entries or self._removed):
            return
        with locked(self._folder):
            manifest = _read_manifest(self._folder)
            new: dict[str, FileEntry] = {}
            for name, entry in entries.items():
                other = manifest.entries.get(name)
                if other and other != self._known.get(name) and self._is_deeper(name, other, entry):
                    self.entries[name] = other  # another run checked it in the meantime
                else:
                    new[name] = dataclasses.replace(entry, folder=self._folder_of(name))
            relisted = {
                name
                for name in [*new, *self._removed]
                if name in manifest.entries and manifest.entries[name].skipped
            }
            for name in new:
                os.replace(self.jobs[name].index, self._index_file(name))
            manifest.entries |= new
            for name in self._removed:
                manifest.entries.pop(name, None)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._index_file(name))
            relisted |= {name for name, entry in new.items() if entry.skipped}
            if relisted:
                self._write_bad_records(new, relisted)
            manifest.write(self._staging.path(MANIFEST_NAME))
            self._staging.commit(MANIFEST_NAME)
        self.entries |= new
        self._removed = set()

    def _is_deeper(self, name: str, other: FileEntry, entry: FileEntry) -> bool:
        if LEVELS.index(other.verified) <= LEVELS.index(entry.verified):
            return False
        return find_staleness(self.files[name], self._index_file(name), other) is None

    def _write_bad_records(self, new: dict[str, FileEntry], relisted: set[str]) -> None:
        """Rewrites ``bad_records.jsonl`` with new lines for the files in `relisted`."""
        assert self._staging is not None
        path = os.path.join(self._folder, BAD_RECORDS_NAME)
        fresh = (
            line
            for name in sorted(relisted)
            if name in new and new[name].skipped
            for line in self._staged_bad_records(name)
        )
        with open(self._staging.path(BAD_RECORDS_NAME), "w", encoding="utf-8") as stream:
            old = _read_lines(path, without=relisted) if os.path.isfile(path) else iter(())
            merged = heapq.merge(old, fresh, key=lambda item: item[0])
            stream.writelines(line for _, line in merged)
            empty = stream.tell() == 0
        if not empty:
            self._staging.commit(BAD_RECORDS_NAME)
        elif os.path.exists(path):
            os.unlink(path)

    def _staged_bad_records(self, name: str) -> Iterator[tuple[str, str]]:
        return _read_lines(self.jobs[name].bad_records, without=set())


def _at_least_as_before(checks: Checks, entry: FileEntry | None) -> Checks:
    """Returns the checks for a file: those asked for, or the deeper ones of the run before.

    Otherwise a shallower run would re-admit bad records of a file that was merely touched.
    """
    if entry is None or LEVELS.index(entry.verified) <= LEVELS.index(checks.verify):
        return checks
    return Checks(**{"verify": entry.verified, **entry.checked_by, **checks.depends_on()})


def _read_lines(path: str, *, without: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (file, line) of a list of bad records, except for some files and for foreign lines."""
    with open(path, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                file = json.loads(line)["file"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(file, str) and file not in without:
                yield file, line


def _read_manifest(folder: str) -> Manifest:
    """Reads a manifest to continue from; if it cannot be read, every file is checked again."""
    try:
        return Manifest.read(folder)
    except InputError:
        return Manifest({})
