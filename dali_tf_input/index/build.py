"""`build_index`, which checks TFRecord files once and notes the location of each valid record.

DALI's reader locates records by a text file with one line ``offset size`` per record, in bytes, as
NVIDIA's ``tfrecord2idx`` writes it too. The index is an ordered list of records: neither backend
reads a record that is not in it. The `manifest` stores all that later steps need to know.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal

from dali_tf_input import errors
from dali_tf_input.errors import Count, InputError, Path, checked
from dali_tf_input.index.decode import choose_decoder
from dali_tf_input.index.folder import IndexFolder
from dali_tf_input.index.run import Recognized, Unreadable, run_in_executor, run_jobs
from dali_tf_input.records import contents
from dali_tf_input.records.checks import (
    KEY_PRESETS,
    Checks,
    find_keys,
    missing_key_error,
    unknown_keys_error,
)
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.labels import COUNT_FROM_1, ClassLabel, MultiHot
from dali_tf_input.records.paths import (
    check_complete,
    find_records_lost,
    find_versions,
    index_files_of,
)
from dali_tf_input.records.tfrecord import BadRecord, find_records, read_data
from dali_tf_input.storage import objects
from dali_tf_input.storage.copies import check_room, resolve_cache_dir
from dali_tf_input.storage.objects import ByteRange, ObjectVersion

_logger = logging.getLogger("dali_tf_input")

OnBad = Literal["error", "skip"]

# Seconds between commits: a killed run loses at most this work. If commits are slow, the time
# between two is this many times the duration of one.
_COMMIT_SECONDS, _COMMIT_RATIO = 5, 20
_RECORDS_PER_CLASS = 3  # with so many, a class is missing by chance in 5% of balanced sets
# Prefixes of the reasons of records that may be valid, but do not fit the checks.
_MISFITS = ("label", "mask", "image missing", "image kind", "empty mask")
# Limits of the search for feature keys:
_MOST_KEY_FILES = 16
_MOST_KEY_RECORDS = 8
_MOST_KEY_BYTES = 1 << 26
_FIRST_BYTES = 1 << 20  # of a stored object


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of `build_index`: files and bytes done, and records found in them."""

    files: int
    num_files: int
    records: int
    bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What `build_index` did.

    Attributes:
      summary: what the indexed files hold, including those that were already indexed.
      written: how many files were indexed.
      unchanged: how many files were already indexed.
      removed: how many files of earlier runs no longer exist, and so left the manifest.
      reasons: how many bad records of each reason this run found, the most common first.
      bad_files: how many files have bad records.
    """

    summary: contents.Summary
    written: int
    unchanged: int
    removed: int
    reasons: dict[str, int] = field(default_factory=dict)
    bad_files: int = 0


class IndexFaultsError(InputError):
    """Raised by `build_index` for bad records that are not skipped.

    Attributes:
      report: what was done.
      mistake: the mistake in the checks that is more likely than bad records, which then must not
        be skipped; "" if there is none.
    """

    def __init__(self, text: str, report: IndexReport, mistake: str = "") -> None:
        super().__init__(text)
        self.report, self.mistake = report, mistake

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how to make it again: process pools pickle errors."""
        return type(self), (str(self), self.report, self.mistake)


@checked
def build_index(
    files: Path | Sequence[Path],
    checks: Checks | None = None,
    *,
    index_dir: Path | None = None,
    on_bad: OnBad = "error",
    max_bad_fraction: errors.Fraction = 0.01,
    force: bool = False,
    allow_missing: bool = False,
    num_processes: Count | None = None,
    executor: Executor | None = None,
    cache_dir: Path | None = None,
    on_bad_record: Callable[[str, BadRecord], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> IndexReport:
    """Indexes the TFRecord files that are new or changed, and writes the manifest.

    Files are checked by several processes or threads. Each index, and then the manifest, is renamed
    into place when it is complete: a run that is killed leaves old or new files, never partial
    ones, and the next run continues from there. Concurrent runs over one folder are safe.

    Examples:
      >>> report = build_index(["records/train-*", "records/validation-*"])
      >>> report = build_index("records/train-*", Checks(verify="decode"), on_bad="skip")

    Args:
      files: paths, URLs of objects, or patterns of either.
      checks: how deeply to check. An unchanged file that was checked as deeply before is not
        checked again. A file that changed is checked at least as deeply as before. One that was
        copied or touched is recognized by its framing and the CRCs that it stores, without reading
        its data.
      index_dir: the folder for indexes and manifest, which may be in a store; None is beside each
        file.
      on_bad: "error": files with bad records are not indexed; `IndexFaultsError` is raised. "skip":
        indexes skip bad records, and ``bad_records.jsonl`` beside the manifest lists them, one JSON
        object per line: file, record, offset, size, reason, detail.
      max_bad_fraction: with "skip", the largest acceptable fraction of bad records, of bad bytes,
        and of files without any valid record. Once it is exceeded, files with bad records are no
        longer indexed, and `IndexFaultsError` is raised at the end.
      force: check every file, even unchanged ones, again at least as deeply as before. A damaged
        manifest counts as empty.
      allow_missing: accept incomplete sets of numbered files (``train-00003-of-01024``), and files
        that hold fewer records than tfds' ``dataset_info.json`` says.
      num_processes: the number of processes; None means one per core, at most one per file
        and per 16 MiB. At level "framing", that many threads check objects instead, by default 8,
        using 48 MiB.
      executor: runs the work instead, one file per task, perhaps on other machines, such as Dask's
        `Client.get_executor()`. Those machines need this package and the same paths or URLs.
      cache_dir: a local folder for complete copies of the objects; None copies each one to a
        temporary file while it is checked.
      on_bad_record: called at the end with each path and bad record, in the order of the files;
        without it the error names the first.
      on_progress: called now and then, by any thread, one at a time.

    Returns:
      What was done.

    Raises:
      IndexFaultsError: see `on_bad` and `max_bad_fraction`. All other files are indexed
        nevertheless.
      InputError: no file matches, one of a set is missing, the index folder cannot be written or
        is full, the feature keys are not found, or a process failed.
    """
    objects.check_path("index_dir", index_dir)
    versions = find_versions(files)
    paths = [*versions]
    if not allow_missing:
        check_complete(paths)
    checks = _with_keys(choose_decoder(checks or Checks()), versions)
    index_files = index_files_of(paths, index_dir=index_dir)
    by_folder: dict[str, dict[str, str]] = {}  # index folder -> base name -> file
    for file, index_file in zip(paths, index_files, strict=True):
        folder = os.path.dirname(index_file) or "."
        by_folder.setdefault(folder, {})[os.path.basename(file)] = file
    copies = resolve_cache_dir(cache_dir)
    with contextlib.ExitStack() as stack:
        folders = [
            IndexFolder(
                folder,
                by_name,
                checks,
                force=force,
                versions=versions,
                cache_dir=copies,
                stack=stack,
            )
            for folder, by_name in by_folder.items()
        ]
        run = _Run(folders, on_bad, max_bad_fraction, allow_missing, checks)
        run.check_files(executor, num_processes, on_progress)
        return run.conclude(on_bad_record)


@dataclass
class _Run:
    """One run over some folders."""

    _folders: list[IndexFolder]
    _on_bad: OnBad
    _max_bad_fraction: float
    _allow_missing: bool
    _checks: Checks
    _is_above_last: bool = False  # whether a label is one more than `num_classes` allows

    def check_files(
        self,
        executor: Executor | None,
        num_processes: int | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        """Checks all files that need it, and commits every few seconds what is done."""
        owners = [(folder, name) for folder in self._folders for name in folder.jobs]
        jobs = [folder.jobs[name] for folder, name in owners]
        sizes = (job.version.size if job.version else os.path.getsize(job.file) for job in jobs)
        num_bytes = sum(sizes)
        objects_to_read = {job.file: job.version for job in jobs if job.version and job.cache_dir}
        if objects_to_read:
            check_room(objects_to_read, jobs[0].cache_dir or "")
        done = Progress(files=0, num_files=len(jobs), records=0, bytes=0, num_bytes=num_bytes)
        lock = threading.Lock()

        def advance(records: int, size: int, files: int = 0) -> None:
            nonlocal done
            with lock:
                done = dataclasses.replace(
                    done,
                    files=done.files + files,
                    records=done.records + records,
                    bytes=done.bytes + size,
                )
                if on_progress:
                    on_progress(done)

        next_commit = time.monotonic() + _COMMIT_SECONDS
        if executor:
            answers = run_in_executor(jobs, executor, advance)
        else:
            answers = run_jobs(jobs, num_processes, advance, num_bytes=num_bytes)
        with contextlib.closing(answers):  # what is under way ends with an error here
            for number, answer in answers:
                folder, name = owners[number]
                if isinstance(answer, Unreadable):
                    folder.unreadable[name] = answer
                elif isinstance(answer, Recognized):
                    folder.recognized[name] = answer.entry
                else:
                    (folder.faulty if answer.skipped else folder.valid)[name] = answer
                    if answer.skipped and not self._is_above_last:
                        bad_records = folder.bad_records_of(name)
                        self._is_above_last = any(COUNT_FROM_1 in bad.detail for bad in bad_records)
                advance(0, 0, files=1)
                if (start := time.monotonic()) > next_commit:
                    self._commit()
                    end = time.monotonic()
                    next_commit = end + max(_COMMIT_SECONDS, _COMMIT_RATIO * (end - start))
        for folder in self._folders:
            folder.find_names()
        self._commit(is_last=True)

    def _commit(self, *, is_last: bool = False) -> None:
        """Commits files without bad records; with "skip" also the others, unless too much is bad.

        If a label is one too high, the others wait for the last commit: labels may count from 1.
        """
        for folder in self._folders:
            folder.commit_valid()
        if self._is_above_last and not is_last:
            return
        if self._on_bad == "skip" and not (self._find_excess() or self._counts_from_1()):
            for folder in self._folders:
                folder.commit_faulty()

    def conclude(self, on_bad_record: Callable[[str, BadRecord], None] | None) -> IndexReport:
        """Passes the bad records on, then returns the report or raises; see `build_index`."""
        reasons, first, refusal = Counter[str](), "", ""
        bad_files = sorted(
            (folder.files[name], name, folder)
            for folder in self._folders
            for name in [*folder.faulty, *folder.unreadable]
        )
        for file, name, folder in bad_files:
            for bad in folder.bad_records_of(name):
                reasons[bad.reason] += 1
                first = first or bad.describe(file)
                if on_bad_record:
                    on_bad_record(file, bad)
        num_files, num_bad = sum(len(folder.files) for folder in self._folders), reasons.total()
        if self._on_bad == "error" and bad_files:
            records = f"{num_bad:,} bad record{'' if num_bad == 1 else 's'}"
            refusal = f"{records} in {len(bad_files):,} of {num_files:,} files"
            if {*reasons} == {"unreadable"}:
                refusal = f"{num_bad:,} of {num_files:,} files cannot be read"
        elif reasons["unreadable"]:
            refusal = f"{reasons['unreadable']:,} of {num_files:,} files cannot be read"
        elif self._on_bad == "skip":
            refusal = self._find_excess()
            if not refusal and self._counts_from_1():
                refusal = f"{num_bad:,} records have labels that only seem to be out of range"
        entries: dict[str, contents.FileEntry] = {}
        for folder in self._folders:
            entries |= {folder.files[name]: entry for name, entry in folder.entries.items()}
        record_counts = {file: entry.records + entry.skipped for file, entry in entries.items()}
        report = IndexReport(
            summary=contents.summarize(entries),
            written=sum(len(folder.entries) - folder.unchanged for folder in self._folders),
            unchanged=sum(folder.unchanged for folder in self._folders),
            removed=sum(folder.removed for folder in self._folders),
            reasons=dict(reasons.most_common()),
            bad_files=len(bad_files),
        )
        mistake = self._find_mistake(reasons) if refusal else ""
        if refusal and first and not on_bad_record:  # nobody was told
            way = ", or pass on_bad='skip'" if self._on_bad == "error" else ""
            refusal += f"; the first: {first.rstrip('.')}. {mistake or f'Fix the file{way}.'}"
        if refusal:
            raise IndexFaultsError(refusal, report, mistake)
        self._check_keys(report.summary)
        lost = None if self._allow_missing else find_records_lost(record_counts)
        if lost:
            raise InputError(lost)
        return report

    def _check_keys(self, summary: contents.Summary) -> None:
        """Raises InputError for a key that no record has; warns if no record of a sample has it."""
        label = self._checks.label
        for name, key in (
            ("image_key", self._checks.image_key),
            ("label.key", label.key if label else None),
            ("mask_key", self._checks.mask_key),
        ):
            if not key or not summary.features or key in summary.features:
                continue
            problem = missing_key_error(name, key, summary.features)
            if summary.parsed == summary.records:
                raise problem
            _logger.warning("Of a sample of %d records: %s", summary.parsed, problem)

    def _find_mistake(self, reasons: Mapping[str, int]) -> str:
        """Returns the mistake in the checks that makes valid records fail; "" if there is none."""
        if self._counts_from_1():
            return "Labels count from 1: pass ClassLabel(offset=1) (--label_offset=1)."
        misfits = sum(n for reason, n in reasons.items() if reason.startswith(_MISFITS))
        entries = [entry for folder in self._folders for entry in folder.all_entries.values()]
        num_records = sum(entry.records + entry.skipped for entry in entries)
        if not misfits or misfits <= self._max_bad_fraction * num_records:
            return ""
        return (
            f"{misfits:,} of {num_records:,} records do not hold what the checks name. Name what"
            " they hold: --image_key, --mask_key, --label (class, multi_hot, values or none),"
            " --label_key, --label_offset, --num_classes, --vocabulary (in Python, Checks(...))."
        )

    def _counts_from_1(self) -> bool:
        """Whether labels are in 1 to `num_classes` where 0 to `num_classes` - 1 is expected.

        Only where there are so many records that class 0 is hardly missing by chance.
        """
        label = self._checks.label
        if not self._is_above_last or not isinstance(label, ClassLabel | MultiHot):
            return False
        entries = [entry for folder in self._folders for entry in folder.all_entries.values()]
        features = [entry.features.get(label.key or "") for entry in entries]
        num_records = sum(entry.records + entry.skipped for entry in entries)
        has_many = num_records >= _RECORDS_PER_CLASS * (label.num_classes or 0)
        return has_many and all(
            not feature or not feature.range or feature.range[0] > 0 for feature in features
        )

    def _find_excess(self) -> str:
        """Returns how the bad part exceeds `max_bad_fraction`; "" if it does not."""
        # A bad record may be half a file, and a file of another kind has no records to count.
        entries = [entry for folder in self._folders for entry in folder.all_entries.values()]
        bad = sum(entry.skipped for entry in entries)
        skipped_bytes = sum(entry.skipped_bytes for entry in entries)
        counts = {
            "records": (bad, bad + sum(entry.records for entry in entries)),
            "bytes": (skipped_bytes, sum(entry.size for entry in entries)),
            "files": (sum(not entry.records for entry in entries), len(entries)),
        }
        for what, (part, whole) in counts.items():
            if part > self._max_bad_fraction * whole:
                limit = f"`max_bad_fraction` {self._max_bad_fraction:.2%}"
                return f"{part:,} of {whole:,} {what} are bad, {part / whole:.2%}, over {limit}"
        return ""


def _with_keys(checks: Checks, versions: Mapping[str, ObjectVersion | None]) -> Checks:
    """Completes the feature keys, if the level needs them, from the first records."""
    if checks.verify in ("framing", "crc"):
        return checks
    feature_keys: set[str] = set()
    keys = {"image_key": checks.image_key, "label_key": checks.label.key if checks.label else None}
    for file, version in itertools.islice(versions.items(), _MOST_KEY_FILES):
        for features in _first_features(file, version):
            image_key, label_key = find_keys(features, **keys)
            if image_key and (label_key or checks.label is None):
                return checks.with_keys(image_key, label_key)
            feature_keys.update(features)
    if feature_keys:
        raise unknown_keys_error(feature_keys)
    # No record can be read: the run will say what is wrong.
    image_key, label_key = next(iter(KEY_PRESETS.values()))
    return checks.with_keys(keys["image_key"] or image_key, keys["label_key"] or label_key)


def _first_features(
    file: str, version: ObjectVersion | None
) -> Iterator[dict[str, tuple[str, Sequence[Any]]]]:
    """Yields the features of the first valid records of a file."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if version:
            start = [ByteRange(file, version.etag, 0, min(version.size, _FIRST_BYTES))]
            stream: Any = stack.enter_context(tempfile.TemporaryFile())
            stream.write(objects.read_parts(start)[0])
            stream.flush()
        else:
            stream = stack.enter_context(open(file, "rb"))
        for batch in find_records(file, stream.fileno()):
            for extent in [] if isinstance(batch, BadRecord) else batch[:_MOST_KEY_RECORDS]:
                data = read_data(stream.fileno(), *extent) if extent[1] < _MOST_KEY_BYTES else None
                with contextlib.suppress(InputError):
                    if data is not None:
                        yield decode_example(data)
            if not isinstance(batch, BadRecord) and batch:
                return
