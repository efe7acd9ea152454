"""One folder of index files: which are up to date, and how new ones are committed."""

import contextlib
import dataclasses
import heapq
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping

from dali_tf_input.errors import InputError
from dali_tf_input.index.decode import choose_decoder
from dali_tf_input.index.run import Job
from dali_tf_input.records.checks import LEVELS, Checks
from dali_tf_input.records.class_names import MAIN_KEYS, find_class_names
from dali_tf_input.records.contents import FileEntry, summarize
from dali_tf_input.records.index_cache import local_folder, refresh, upload
from dali_tf_input.records.manifest import (
    DamagedManifestError,
    Manifest,
    StoredNames,
    find_staleness,
)
from dali_tf_input.records.paths import BAD_RECORDS_NAME, INDEX_SUFFIX, MANIFEST_NAME, absolute
from dali_tf_input.records.tfrecord import BadRecord
from dali_tf_input.storage import objects
from dali_tf_input.storage.objects import ObjectVersion, is_url
from dali_tf_input.storage.staging import Staging, locked, replace

_MOST_COMMITS = 16  # of one run to a store, while others write there


class IndexFolder:
    """One folder of indexes: its entries, the files to check, and the results of the checks.

    Attributes:
      files: path of each TFRecord file of this run, by its base name.
      entries: the manifest's entries, by base name: of unchanged files from the start, of others
        once they are committed.
      jobs: the files to check, by base name.
      unchanged: how many files were already indexed.
      removed: how many files of earlier runs no longer exist.
      valid: entries of checked files without bad records that are not committed yet.
      faulty: entries of checked files with bad records, committed or not.
      recognized: entries of files that were copied or touched, and hold what they held, that are
        not committed yet.
      unreadable: files that could not be checked, and why.
    """

    def __init__(
        self,
        place: str,
        files: dict[str, str],
        checks: Checks,
        *,
        force: bool,
        versions: Mapping[str, ObjectVersion | None],
        cache_dir: str | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.files = files
        self._versions, self._cache_dir = versions, cache_dir
        self._place, self._folder = place, local_folder(place)  # the second one is local
        refresh(place)
        self._force = force
        manifest = self._read_manifest()
        self._known, self._known_names = manifest.entries, manifest.names
        self._names: StoredNames = {}
        self.entries: dict[str, FileEntry] = {}
        to_check: dict[str, Checks] = {}
        self._perhaps_copied: dict[str, FileEntry] = {}
        # A file that joins others of its split is checked as they are: labels of all are known, or
        # of none. Those of another split may have no labels at all.
        shallowest: dict[str, FileEntry] = {}
        for name in files:
            if entry := self._known.get(name):
                other = shallowest.setdefault(_find_set(name), entry)
                if LEVELS.index(entry.verified) < LEVELS.index(other.verified):
                    shallowest[_find_set(name)] = entry
        for name in files:
            entry = self._known.get(name)
            self._check_folder_of(name, entry)
            if entry and not force and _satisfies(entry, checks):
                if not self._find_staleness(name, entry):
                    self.entries[name] = entry
                    continue
                if self._has_another_time(name, entry):
                    self._perhaps_copied[name] = entry
            before = entry or shallowest.get(_find_set(name))
            to_check[name] = _at_least_as_before(checks, before)
        self._removed = self._find_removed()
        self.unchanged, self.removed = len(self.entries), len(self._removed)
        self._stack, self._staging = stack, None
        if to_check or self._removed:
            self._staging = self._stage()
        numbered = enumerate(to_check.items())
        self.jobs = {
            name: self._make_job(number, name, file_checks)
            for number, (name, file_checks) in numbered
        }
        self.valid: dict[str, FileEntry] = {}
        self.faulty: dict[str, FileEntry] = {}
        self.recognized: dict[str, FileEntry] = {}
        self.unreadable: dict[str, str] = {}

    @property
    def all_entries(self) -> dict[str, FileEntry]:
        """What is known of each file, also of those that are not committed."""
        return self.entries | self.valid | self.faulty | self.recognized

    def commit_valid(self) -> None:
        """Commits files without bad records, or as before; removes indexes of lost files."""
        self._commit(self.valid)
        self.unchanged += len(self.recognized)
        self.valid, self.recognized = {}, {}

    def commit_faulty(self) -> None:
        """Commits files with bad records: indexes that skip them, and the list of them."""
        new = self.faulty.keys() - self.entries.keys()
        self._commit({name: self.faulty[name] for name in sorted(new)})

    def find_names(self) -> None:
        """Finds the names of classes in a store, for the next commit: training asks for none."""
        places = {os.path.dirname(absolute(file)) for file in self.files.values()} | {self._place}
        features = summarize(self.all_entries).features
        keys = [key for key, one in features.items() if one.kinds != ("float_list",)]
        found: StoredNames = {}
        for place in filter(is_url, places):
            own = found[place.rstrip("/")] = {}
            for key in ("", *(key for key in keys if key not in MAIN_KEYS)):
                try:
                    names = find_class_names(place, key or None)
                except InputError as error:  # training raises it
                    own[key] = str(error)
                else:
                    own |= {key: names} if names else {}
        if any(self._known_names.get(place) != own for place, own in found.items()):
            self._names = found
            self._staging = self._staging or self._stage()

    def _stage(self) -> Staging:
        remedy = "Name another folder with `index_dir` (--index_dir)."
        return self._stack.enter_context(Staging(self._folder, remedy))

    def bad_records_of(self, name: str) -> Iterator[BadRecord]:
        """Yields the bad records of a file that was checked."""
        if name in self.unreadable:
            why = {"reason": "unreadable", "detail": self.unreadable[name]}
            yield BadRecord(record=None, offset=0, size=0, **why)
            return
        for _, line in self._staged_bad_records(name):
            values = json.loads(line)
            del values["file"]
            yield BadRecord(**values)

    def _make_job(self, number: int, name: str, checks: Checks) -> Job:
        assert self._staging is not None
        index, bad_records = (
            self._staging.path(f"{number}{suffix}") for suffix in (INDEX_SUFFIX, ".bad")
        )
        return Job(
            file=self.files[name],
            index=index,
            bad_records=bad_records,
            checks=checks,
            version=self._versions.get(self.files[name]),
            cache_dir=self._cache_dir,
            before=self._perhaps_copied.get(name),
        )

    def _index_file(self, name: str) -> str:
        return os.path.join(self._folder, name + INDEX_SUFFIX)

    def _folder_of(self, name: str) -> str | None:
        """Returns where the entry says that the file is: None if beside the index."""
        folder = os.path.dirname(absolute(self.files[name]))
        return None if folder == absolute(self._place) else folder

    def _check_folder_of(self, name: str, entry: FileEntry | None) -> None:
        """Refuses to replace the index of another file of the same name."""
        if entry and entry.folder and entry.folder != self._folder_of(name):
            other_file = os.path.join(entry.folder, name)
            if _exists(other_file) and not _is_same(other_file, self.files[name]):
                raise InputError(
                    f"`index_dir` {self._place} holds the index of {other_file}, which that of "
                    f"{self.files[name]} would replace: name another folder for one of them."
                )

    def _read_manifest(self) -> Manifest:
        """Reads the manifest to continue from; one that is damaged counts as empty if forced.

        Raises:
          InputError: it cannot be read, or is damaged. What it knew, how deeply files were checked
            and what was skipped, would be lost.
        """
        try:
            return Manifest.read(self._folder)
        except DamagedManifestError as error:
            if self._force:  # what it says of other files may still be wanted
                path = os.path.join(self._folder, MANIFEST_NAME)
                shutil.copyfile(path, f"{path}.damaged")
                return Manifest({})
            raise InputError(
                f"{error} Restore it, or start a new one for all files of this folder: --force, and"
                " where bad records were skipped, --verify=decode --on_bad=skip."
            ) from error

    def _find_removed(self) -> set[str]:
        """Returns files that are gone, of folders where other files are still there.

        A folder without any of its files may be that of a disk that is not mounted.
        """
        others = self._known.keys() - self.files.keys()
        paths = {n: os.path.join(self._known[n].folder or self._place, n) for n in others}
        versions = objects.find_object_versions(paths.values())
        is_there = {path: path in versions or os.path.exists(path) for path in paths.values()}
        present = [*self.files.values(), *filter(is_there.get, is_there)]
        folders = {os.path.dirname(absolute(path)) for path in present}
        return {
            name
            for name, path in paths.items()
            if not is_there[path] and os.path.dirname(absolute(path)) in folders
        }

    def _find_staleness(self, name: str, entry: FileEntry) -> str | None:
        file = self.files[name]
        return find_staleness(file, self._index_file(name), entry, self._versions.get(file))

    def _has_another_time(self, name: str, entry: FileEntry) -> bool:
        """Whether only the time of a local file is not as its entry says: it may be a copy."""
        file = self.files[name]
        if self._versions.get(file) or entry.content_crc is None:
            return False
        as_now = dataclasses.replace(entry, mtime_ns=os.stat(file).st_mtime_ns)
        return self._find_staleness(name, as_now) is None

    def _commit(self, entries: dict[str, FileEntry]) -> None:
        """Renames the indexes of `entries` into place and then adds the entries to the manifest."""
        is_new = bool(entries or self._removed or self._names or self.recognized)
        if self._staging is None or not is_new:
            return
        for _ in range(_MOST_COMMITS):
            with locked(self._folder):
                new = self._commit_here(entries)
                indexes = (name + INDEX_SUFFIX for name in [*new, *self._removed])
                names = [*indexes, BAD_RECORDS_NAME, MANIFEST_NAME]
                if self._place == self._folder or upload(self._place, names):
                    break
            refresh(self._place)  # another run has written its manifest
        else:
            raise InputError(f"{self._place}: other runs keep replacing the manifest. Try again.")
        self.entries |= new
        self._removed, self._names = set(), {}

    def _commit_here(self, entries: dict[str, FileEntry]) -> dict[str, FileEntry]:
        """Commits to the local folder, which is locked; returns the entries that are new."""
        assert self._staging is not None
        manifest = self._read_manifest()
        new: dict[str, FileEntry] = {}
        for name, entry in entries.items():
            other = manifest.entries.get(name)
            if other and other != self._known.get(name) and self._is_deeper(name, other, entry):
                self.entries[name] = other  # another run checked it in the meantime
            else:
                new[name] = dataclasses.replace(entry, folder=self._folder_of(name))
        listed = {name for name, entry in manifest.entries.items() if entry.skipped}
        relisted = listed & {*new, *self._removed}
        indexes = {self.jobs[name].index: self._index_file(name) for name in new}
        if self._place == self._folder:
            replace(indexes)
        else:  # they may be needed again
            for staged, target in indexes.items():
                shutil.copyfile(staged, target)
        for name, entry in self.recognized.items():
            if manifest.entries.get(name) == self._known[name]:
                manifest.entries[name] = dataclasses.replace(entry, folder=self._folder_of(name))
            self.entries[name] = manifest.entries.get(name, entry)
        manifest.entries |= new
        manifest.names |= self._names
        for name in self._removed:
            manifest.entries.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._index_file(name))
        relisted |= {name for name, entry in new.items() if entry.skipped}
        if relisted:
            self._write_bad_records(new, relisted)
        manifest.write(self._staging.path(MANIFEST_NAME))
        self._staging.commit(MANIFEST_NAME)
        return new

    def _is_deeper(self, name: str, other: FileEntry, entry: FileEntry) -> bool:
        if LEVELS.index(other.verified) <= LEVELS.index(entry.verified):
            return False
        return self._find_staleness(name, other) is None

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


def _satisfies(entry: FileEntry, checks: Checks) -> bool:
    """Whether the run that made `entry` checked everything that `checks` ask for."""
    if LEVELS.index(entry.verified) < LEVELS.index(checks.verify):
        return False
    return all(
        entry.checked_by.get(name) == value
        or (name == "decoder" and entry.checked_by.get(name) == "both")
        for name, value in checks.depends_on().items()
    )


def _exists(path: str) -> bool:
    return os.path.exists(path) or bool(objects.find_object_versions([path]))


def _is_same(first: str, second: str) -> bool:
    return first == second if is_url(first) or is_url(second) else os.path.samefile(first, second)


def _find_set(name: str) -> str:
    """Returns what the names of a split's files have in common: "train" of train-00003-of-01024."""
    return re.sub(r"[-_.]?\d+(-of-\d+)?(?=\.|$)", "", name)


def _at_least_as_before(checks: Checks, entry: FileEntry | None) -> Checks:
    """Returns the checks for a file: those asked for, or the deeper ones of the run before.

    Otherwise a shallower run would re-admit bad records of a file that was merely touched.
    """
    if entry is None or LEVELS.index(entry.verified) <= LEVELS.index(checks.verify):
        return checks
    before = {"verify": entry.verified, **entry.checked_by}
    return choose_decoder(Checks.from_json({**before, **checks.depends_on()}))


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
