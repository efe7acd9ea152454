"""The index of TFRecord files: where each sound record starts and how long it is.

DALI's reader finds records by a text file of one line ``offset size`` per record, in bytes, which NVIDIA's ``tfrecord2idx``
writes too. The index is an ordered list of samples: a record that is not in it is not read. So this is the place where a set is
gone through once, its faults are named, and what every later step needs to know is written down (`manifest`).
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dali_tf_input.checks import Checks
from dali_tf_input.example import decode_example
from dali_tf_input.files import Path, find_files, index_files_of
from dali_tf_input.index_folder import IndexFolder
from dali_tf_input.options import check_choice
from dali_tf_input.summary import KEY_PRESETS, FileEntry, Summary, find_keys, summarise
from dali_tf_input.tfrecord import Fault, InputError, find_records, read_data
from dali_tf_input.worker_pool import run_jobs

OnBad = Literal["error", "skip"]

_COMMIT_SECONDS = 5  # how much work a killed run loses at most, and how often the manifest is written meanwhile
# For feature keys:
_MOST_LOOKED_AT_FILES = 16
_MOST_LOOKED_AT_RECORDS = 8
_MOST_LOOKED_AT_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far `build_index` is: files and bytes done of those that are gone through, and records found in them."""

    files: int
    num_files: int
    records: int
    bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What `build_index` did.

    Attributes:
      summary: what the files hold that are indexed now, those that were before included.
      written: how many files were indexed.
      unchanged: how many stood indexed already.
      removed: how many files of earlier runs are gone, and so out of the manifest.
      faults: how many faults of each name were found in this run, the commonest first.
      bad_files: how many files have faults.
    """

    summary: Summary
    written: int
    unchanged: int
    removed: int
    faults: dict[str, int] = field(default_factory=dict)
    bad_files: int = 0


class FaultsError(InputError):
    """Raised by `build_index` when faults were found and are not left out. `report` says what was done all the same."""

    def __init__(self, text: str, report: IndexReport) -> None:
        super().__init__(text)
        self.report = report


def build_index(
    files: Path | Sequence[Path],
    checks: Checks | None = None,
    *,
    index_dir: Path | None = None,
    on_bad: OnBad = "error",
    max_bad_fraction: float = 0.01,
    force: bool = False,
    num_processes: int | None = None,
    on_fault: Callable[[str, Fault], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> IndexReport:
    """Writes the index of TFRecord files and the manifest beside it, for those files that changed since they were indexed.

    Each file is gone through by one of several processes. Its index comes to its place when it is whole, by renaming, and the
    manifest after it: a run that is killed leaves old or new ones, never half ones, and the next run goes on from there. Several
    runs at once over one folder do no harm.

    Args:
      files: paths or patterns, see `files.find_files`.
      checks: how deep to look. A file that was looked at as deep before, and is unchanged, is not gone through again; one that
        changed is looked at as deep as it was before, at least.
      index_dir: the folder for indexes and manifest; None is beside each file.
      on_bad: "error": files with faults are not indexed, every fault is handed to `on_fault`, then `FaultsError` is raised.
        "skip": the indexes leave the faults out, and ``bad_records.jsonl`` beside the manifest lists them, one JSON object a
        line: file, record, offset, size, reason, detail.
      max_bad_fraction: with "skip", `FaultsError` is raised when faults are more than this part of all records, of all bytes, or,
        counting files without any sound record, of all files. Files with faults are not indexed from where this is exceeded on.
      force: go through every file, also those that stand indexed, and exactly as deep as `checks` says.
      num_processes: how many; None is one for each core, and no more than there are files.
      on_fault: called at the end with each path and fault, in the order of the files.
      on_progress: called now and then, by any thread, one at a time.

    Returns:
      What was done.

    Raises:
      FaultsError: see `on_bad` and `max_bad_fraction`. Files without faults are indexed all the same.
      InputError: no file matches, the index folder cannot be written to or is full, no key fits, or a process failed.
    """
    check_choice("on_bad", on_bad, get_args(OnBad))
    if not 0 <= max_bad_fraction <= 1:
        raise InputError(f"`max_bad_fraction` must be in [0, 1], got {max_bad_fraction}.")
    if num_processes is not None and num_processes < 1:
        raise InputError(f"`num_processes` must be at least 1 or None, got {num_processes}.")
    found = find_files(files)
    checks = _with_keys(checks or Checks(), found)
    index_files = index_files_of(found, index_dir=index_dir)
    by_folder: dict[str, dict[str, str]] = {}  # index folder -> base name -> file
    for file, index_file in zip(found, index_files, strict=True):
        by_folder.setdefault(os.path.dirname(index_file) or ".", {})[os.path.basename(file)] = file
    with contextlib.ExitStack() as stack:
        folders = [IndexFolder(folder, by_name, checks, force=force, stack=stack) for folder, by_name in by_folder.items()]
        _go_through(
            folders,
            on_bad=on_bad,
            max_bad_fraction=max_bad_fraction,
            num_processes=num_processes or len(os.sched_getaffinity(0)),
            on_progress=on_progress,
        )
        return _conclude(folders, on_bad=on_bad, max_bad_fraction=max_bad_fraction, on_fault=on_fault)


def _go_through(
    folders: list[IndexFolder],
    *,
    on_bad: OnBad,
    max_bad_fraction: float,
    num_processes: int,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    """Goes through all files that need it, committing every few seconds what is done."""
    owners = [(folder, name) for folder in folders for name in folder.jobs]
    jobs = [folder.jobs[name] for folder, name in owners]
    done = Progress(files=0, num_files=len(jobs), records=0, bytes=0, num_bytes=sum(os.path.getsize(job.file) for job in jobs))
    lock = threading.Lock()

    def advance(records: int, size: int, *, files: int = 0) -> None:
        nonlocal done
        with lock:
            done = dataclasses.replace(done, files=done.files + files, records=done.records + records, bytes=done.bytes + size)
            if on_progress:
                on_progress(done)

    next_commit = time.monotonic() + _COMMIT_SECONDS
    for number, answer in run_jobs(jobs, num_processes, advance):
        folder, name = owners[number]
        if "unreadable" in answer:
            folder.unreadable[name] = answer["unreadable"]
        else:
            entry = FileEntry.from_json(answer["entry"])
            (folder.faulty if entry.left_out else folder.sound)[name] = entry
        advance(0, 0, files=1)
        if time.monotonic() > next_commit:
            _commit(folders, on_bad=on_bad, max_bad_fraction=max_bad_fraction)
            next_commit = time.monotonic() + _COMMIT_SECONDS
    _commit(folders, on_bad=on_bad, max_bad_fraction=max_bad_fraction)


def _commit(folders: list[IndexFolder], *, on_bad: OnBad, max_bad_fraction: float) -> None:
    """Commits what is done so far: files without faults, and those with faults while they are not too many."""
    for folder in folders:
        folder.commit_sound()
    if on_bad == "skip" and not _too_many(folders, max_bad_fraction):
        for folder in folders:
            folder.commit_faulty()


def _conclude(
    folders: list[IndexFolder], *, on_bad: OnBad, max_bad_fraction: float, on_fault: Callable[[str, Fault], None] | None
) -> IndexReport:
    """Hands the faults on; then reports, or raises: see `build_index`."""
    reasons: Counter[str] = Counter()
    bad_files = sorted((folder.files[name], name, folder) for folder in folders for name in [*folder.faulty, *folder.unreadable])
    for file, name, folder in bad_files:
        for fault in folder.faults_of(name):
            reasons[fault.reason] += 1
            if on_fault:
                on_fault(file, fault)
    num_files, num_faults = sum(len(folder.files) for folder in folders), sum(reasons.values())
    refusal = None
    if on_bad == "error" and bad_files:
        refusal = f"{num_faults:,} fault{'' if num_faults == 1 else 's'} in {len(bad_files):,} of {num_files:,} files"
    elif reasons["unreadable"]:
        refusal = f"{reasons['unreadable']:,} of {num_files:,} files cannot be read"
    elif on_bad == "skip":
        refusal = _too_many(folders, max_bad_fraction)
    report = IndexReport(
        summary=summarise({folder.files[name]: entry for folder in folders for name, entry in folder.entries.items()}),
        written=sum(len(folder.entries) - folder.unchanged for folder in folders),
        unchanged=sum(folder.unchanged for folder in folders),
        removed=sum(folder.removed for folder in folders),
        faults=dict(reasons.most_common()),
        bad_files=len(bad_files),
    )
    if refusal:
        raise FaultsError(refusal, report)
    return report


def _too_many(folders: list[IndexFolder], max_bad_fraction: float) -> str | None:
    """Says by which count the faults are more than `max_bad_fraction`; None if by none.

    A fault may be one record or half a file, and a file that is something else altogether has no records to count: so records,
    bytes and whole files are counted, each by itself.
    """
    entries = [entry for folder in folders for entry in (folder.entries | folder.faulty).values()]
    bad = sum(entry.left_out for entry in entries)
    counts = {
        "records": (bad, bad + sum(entry.records for entry in entries)),
        "bytes": (sum(entry.left_out_bytes for entry in entries), sum(entry.size for entry in entries)),
        "files": (sum(not entry.records for entry in entries), len(entries)),
    }
    for what, (part, whole) in counts.items():
        if part > max_bad_fraction * whole:
            return f"{part:,} of {whole:,} {what} are bad, {part / whole:.2%}, over `max_bad_fraction` {max_bad_fraction:.2%}"
    return None


def _with_keys(checks: Checks, files: Sequence[str]) -> Checks:
    """Returns `checks` with both feature keys named, if the level needs them: found in the first records of some files."""
    if checks.verify in ("framing", "crc"):
        return checks
    held: set[str] = set()
    for file in files[:_MOST_LOOKED_AT_FILES]:
        for features in _first_features(file):
            image_key, label_key = find_keys(features, image_key=checks.image_key, label_key=checks.label_key)
            if image_key and label_key:
                return dataclasses.replace(checks, image_key=image_key, label_key=label_key)
            held.update(features)
    if held:
        raise InputError(
            f"The records hold {', '.join(f'{key!r}' for key in sorted(held)[:30])}, but not the keys of "
            f"{' or '.join(KEY_PRESETS)}: name the two with `image_key` and `label_key`."
        )
    image_key, label_key = next(iter(KEY_PRESETS.values()))  # no record can be read: the run will name what is wrong
    return dataclasses.replace(checks, image_key=checks.image_key or image_key, label_key=checks.label_key or label_key)


def _first_features(file: str) -> Iterator[dict[str, tuple[str, list[Any]]]]:
    """Yields the features of the first sound records of a file."""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        for found in find_records(file, stream.fileno()):
            for place in [] if isinstance(found, Fault) else found[:_MOST_LOOKED_AT_RECORDS]:
                data = read_data(stream.fileno(), *place) if place[1] < _MOST_LOOKED_AT_BYTES else None
                with contextlib.suppress(InputError):
                    if data is not None:
                        yield decode_example(data)
            if not isinstance(found, Fault) and found:
                return
