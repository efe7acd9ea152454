"""One folder of index files: which of them hold, and how new ones come to their place together with the manifest."""

import contextlib
import dataclasses
import heapq
import json
import os
from collections.abc import Iterator

from dali_tf_input.checks import Checks
from dali_tf_input.files import BAD_RECORDS_NAME, INDEX_SUFFIX, MANIFEST_NAME, index_dir_of
from dali_tf_input.manifest import Manifest, find_staleness
from dali_tf_input.staging import Staging, locked
from dali_tf_input.summary import LEVELS, FileEntry
from dali_tf_input.tfrecord import Fault, InputError
from dali_tf_input.worker_pool import Job


class IndexFolder:
    """What stands in one folder of indexes, what has to be gone through, and what came out.

    Attributes:
      files: path of each TFRecord file of this run by its base name.
      entries: by base name, what holds now: of unchanged files from the start, of others once they are committed.
      jobs: what has to be gone through, by base name.
      unchanged: how many files stood indexed already.
      removed: how many files of earlier runs are gone.
      sound: entries of files gone through that have no fault and are not committed yet.
      faulty: entries of files gone through that have faults, committed or not.
      unreadable: files that could not be gone through, and why.
    """

    def __init__(self, folder: str, files: dict[str, str], checks: Checks, *, force: bool, stack: contextlib.ExitStack) -> None:
        self.files = files
        self._folder = folder
        self._known = _read_manifest(folder).entries
        self.entries: dict[str, FileEntry] = {}
        wanted: dict[str, Checks] = {}
        for name, file in files.items():
            entry = self._known.get(name)
            self._check_folder_of(name, entry)
            if entry and not force and checks.are_covered_by(entry) and not find_staleness(file, self._index_file(name), entry):
                self.entries[name] = entry
            else:
                wanted[name] = _as_deep_as_before(checks, None if force else entry)
        self._removed = {name for name, entry in self._known.items() if name not in files and self._is_gone(name, entry)}
        self.unchanged, self.removed = len(self.entries), len(self._removed)
        remedy = "Name another one with `index_dir` (--index_dir, or INDEX_DIR= for make)."
        self._staging = stack.enter_context(Staging(folder, remedy)) if wanted or self._removed else None
        self.jobs = {name: self._make_job(number, name, checks) for number, (name, checks) in enumerate(wanted.items())}
        self.sound: dict[str, FileEntry] = {}
        self.faulty: dict[str, FileEntry] = {}
        self.unreadable: dict[str, str] = {}

    def commit_sound(self) -> None:
        """Commits what has no fault, and forgets files that are gone."""
        self._commit(self.sound)
        self.sound = {}

    def commit_faulty(self) -> None:
        """Commits what has faults: indexes that leave them out, and the list of them."""
        self._commit({name: entry for name, entry in self.faulty.items() if name not in self.entries})

    def faults_of(self, name: str) -> Iterator[Fault]:
        """Yields the faults of a file that was gone through."""
        if name in self.unreadable:
            yield Fault(record=None, offset=0, size=0, reason="unreadable", detail=self.unreadable[name])
            return
        for _, line in self._staged_faults(name):
            values = json.loads(line)
            del values["file"]
            yield Fault(**values)

    def _make_job(self, number: int, name: str, checks: Checks) -> Job:
        assert self._staging is not None
        index, faults, mark = (self._staging.path(f"{number}{suffix}") for suffix in (INDEX_SUFFIX, ".faults", ".mark"))
        return Job(file=self.files[name], index=index, faults=faults, mark=mark, checks=dataclasses.asdict(checks))

    def _index_file(self, name: str) -> str:
        return os.path.join(self._folder, name + INDEX_SUFFIX)

    def _folder_of(self, name: str) -> str | None:
        """Returns what an entry keeps of where its file is: None if beside the index."""
        file = self.files[name]
        return None if index_dir_of(file, self._index_file(name)) is None else os.path.dirname(os.path.abspath(file))

    def _check_folder_of(self, name: str, entry: FileEntry | None) -> None:
        """Refuses to put the index of a file in the place of that of another file of its name."""
        if entry and entry.folder and entry.folder != self._folder_of(name):
            other = os.path.join(entry.folder, name)
            if os.path.exists(other) and not os.path.samefile(other, self.files[name]):
                raise InputError(
                    f"`index_dir` {self._folder} holds the index of {other}, which {self.files[name]} would take the place of: "
                    "name another folder for one of them."
                )

    def _is_gone(self, name: str, entry: FileEntry) -> bool:
        """Whether the file of an entry was removed, and not merely its whole folder, which may be mounted elsewhere."""
        folder = entry.folder or self._folder
        return os.path.isdir(folder) and not os.path.exists(os.path.join(folder, name))

    def _commit(self, entries: dict[str, FileEntry]) -> None:
        """Moves the indexes of `entries` to their place and then enters them in the manifest."""
        if self._staging is None or not (entries or self._removed):
            return
        with locked(self._folder):
            manifest = _read_manifest(self._folder)
            new: dict[str, FileEntry] = {}
            for name, entry in entries.items():
                standing = manifest.entries.get(name)
                if standing and standing != self._known.get(name) and self._looked_deeper(name, standing, entry):
                    self.entries[name] = standing  # another run did so meanwhile
                else:
                    new[name] = dataclasses.replace(entry, folder=self._folder_of(name))
            relisted = {name for name in [*new, *self._removed] if name in manifest.entries and manifest.entries[name].left_out}
            for name in new:
                os.replace(self.jobs[name].index, self._index_file(name))
            manifest.entries |= new
            for name in self._removed:
                manifest.entries.pop(name, None)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._index_file(name))
            relisted |= {name for name, entry in new.items() if entry.left_out}
            if relisted:
                self._write_bad_records(new, relisted)
            manifest.write(self._staging.path(MANIFEST_NAME))
            self._staging.place(MANIFEST_NAME)
        self.entries |= new
        self._removed = set()

    def _looked_deeper(self, name: str, standing: FileEntry, entry: FileEntry) -> bool:
        if LEVELS.index(standing.verified) <= LEVELS.index(entry.verified):
            return False
        return find_staleness(self.files[name], self._index_file(name), standing) is None

    def _write_bad_records(self, new: dict[str, FileEntry], relisted: set[str]) -> None:
        """Writes ``bad_records.jsonl`` anew, sorted by file: what it says of `relisted` files goes, what is new of them comes."""
        assert self._staging is not None
        path = os.path.join(self._folder, BAD_RECORDS_NAME)
        fresh = (line for name in sorted(relisted) if name in new and new[name].left_out for line in self._staged_faults(name))
        with open(self._staging.path(BAD_RECORDS_NAME), "w", encoding="utf-8") as stream:
            old = _read_lines(path, without=relisted) if os.path.isfile(path) else iter(())
            stream.writelines(line for _, line in heapq.merge(old, fresh, key=lambda item: item[0]))
            empty = stream.tell() == 0
        if not empty:
            self._staging.place(BAD_RECORDS_NAME)
        elif os.path.exists(path):
            os.unlink(path)

    def _staged_faults(self, name: str) -> Iterator[tuple[str, str]]:
        return _read_lines(self.jobs[name].faults, without=set())


def _as_deep_as_before(checks: Checks, entry: FileEntry | None) -> Checks:
    """Returns the checks for a file that has to be gone through: those asked for, or the deeper ones of the run before.

    Otherwise a file that was merely touched would get its bad records back from the next run that asks for less.
    """
    if entry is None or LEVELS.index(entry.verified) <= LEVELS.index(checks.verify):
        return checks
    return Checks(**{"verify": entry.verified, **entry.checked_by, **checks.depends_on()})


def _read_lines(path: str, *, without: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (file, line) of a list of bad records, passing over the files in `without` and lines that are none of ours."""
    with open(path, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                file = json.loads(line)["file"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(file, str) and file not in without:
                yield file, line


def _read_manifest(folder: str) -> Manifest:
    """Reads a manifest to go on from; one that cannot be read counts as none, and every file is gone through again."""
    try:
        return Manifest.read(folder)
    except InputError:
        return Manifest({})
