"""Indexes TFRecord files: locates valid records, and writes a manifest of what the files hold.

usage: dali-tf-input index [flags] FILE_OR_PATTERN...

Each index, with a line "offset size" in bytes per record, is written beside its file as FILE.idx,
or into --index_dir, together with index_manifest.json. Files that did not change since they were
indexed are not read again. With --on_bad=error, files with bad records are not indexed: up to 20
bad records of each kind are printed, and the exit code is 1. All other files are indexed. With
--on_bad=skip, the indexes skip bad records, and bad_records.jsonl lists them.

example: dali-tf-input index --verify=decode --on_bad=skip 'path/train-*-of-*'
"""

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.command import format_count
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.cli.flags import LabelFlags
from dali_tf_input.index.build import IndexFaultsError, IndexReport, OnBad, Progress, build_index
from dali_tf_input.records.checks import KEY_PRESETS, LEVELS, MAX_PIXELS, Checks, Decoder, find_keys
from dali_tf_input.records.class_names import find_class_names
from dali_tf_input.records.contents import Images, Summary
from dali_tf_input.records.paths import BAD_RECORDS_NAME, find_files, index_command
from dali_tf_input.records.tfrecord import BadRecord

FLAGS = command.Flags()
_INDEX_DIR = FLAGS.string("index_dir", None, "Folder for the indexes (default: beside each file).")
_VERIFY = FLAGS.choice("verify", "framing", LEVELS, "How thoroughly to check each record.")
_ON_BAD = FLAGS.choice("on_bad", "error", get_args(OnBad), "What to do with bad records.")
_MAX_BAD_FRACTION = FLAGS.number(
    "max_bad_fraction", 0.01, "With --on_bad=skip, the largest fraction of bad records to accept."
)
_FORCE = FLAGS.boolean(
    "force", False, "Check all files, including unchanged ones, as thoroughly as before."
)
_ALLOW_MISSING = FLAGS.boolean("allow_missing", False, "Continue if numbered files are missing.")
_IMAGE_KEY = FLAGS.string("image_key", None, "Feature key of the image (default: detected).")
_LABELS = LabelFlags(FLAGS)
_DECODER = FLAGS.choice("decoder", "both", get_args(Decoder), "Decoders that --verify=decode runs.")
_MAX_PIXELS = FLAGS.integer(
    "max_pixels", MAX_PIXELS, "Largest height x width of an image that is not bad."
)
_CACHE_DIR = FLAGS.string("cache_dir", None, "Local folder for copies of remote files.")
_DASK = FLAGS.string("dask", None, "Dask scheduler to run on, tcp://host:8786.")
_NUM_PROCESSES = FLAGS.integer(
    "num_processes", None, "Worker processes (default: one per core, fewer for little data)."
)

_CHECK_FLAGS = (_VERIFY, _IMAGE_KEY, _LABELS.mask_key, _DECODER, _MAX_PIXELS)  # of `Checks`
_MOST_NAMED = 20  # lines for each reason; a wrong flag makes all records bad
_SECONDS_BETWEEN_LINES = 10  # of progress, without a terminal


def main(patterns: list[str]) -> int:
    """Indexes the files that match `patterns`; returns the exit code."""
    level, labels = _VERIFY.value, _LABELS
    of_labels = (labels.label, labels.label_offset, labels.label_size, labels.num_classes)
    is_shallow = level in ("framing", "crc")
    command.refuse_useless(
        (
            (is_shallow, (*of_labels, labels.vocabulary), f"with --verify={level}"),
            (level != "decode", (_DECODER, _MAX_PIXELS), f"with --verify={level}"),
            (_ON_BAD.value != "skip", (_MAX_BAD_FRACTION,), "without --on_bad=skip"),
        )
    )
    label = _LABELS.make_label()
    checks = Checks(**{flag.name: flag.value for flag in _CHECK_FLAGS}, label=label)
    refusal: IndexFaultsError | None = None
    names_all = _ON_BAD.value == "error"
    with connect_dask(_DASK.value) as executor, IndexProgress(names_all=names_all) as progress:
        try:
            report = build_index(
                patterns,
                checks,
                index_dir=_INDEX_DIR.value,
                on_bad=_ON_BAD.value,
                max_bad_fraction=_MAX_BAD_FRACTION.value,
                force=_FORCE.value,
                allow_missing=_ALLOW_MISSING.value,
                num_processes=_NUM_PROCESSES.value,
                executor=executor,
                cache_dir=_CACHE_DIR.value,
                on_bad_record=progress.print_bad_record,
                on_progress=progress.update,
            )
        except IndexFaultsError as error:
            report, refusal = error.report, error
        except KeyboardInterrupt:
            print("What was done is kept: the same command goes on with the rest.", file=sys.stderr)
            raise
    print_report(report, _find_names(patterns))
    if refusal:
        remedy = _remedy(patterns, checks, refusal.mistake, has_records=progress.has_records)
        if {*report.reasons} == {"unreadable"}:
            remedy = "All others were indexed. Repair what is said above, and repeat."
        print(f"error: {refusal}. {remedy}", file=sys.stderr)
        return 1
    return 0


def _find_names(patterns: list[str]) -> tuple[str, ...] | None:
    """Returns the names of the classes beside the files; None if they are not known."""
    with contextlib.suppress(InputError, OSError):
        return find_class_names(os.path.dirname(find_files(patterns)[0]))
    return None


class IndexProgress:
    """Progress of an index run on stderr: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, *, names_all: bool) -> None:
        self._names_all = names_all
        self.has_records = False  # whether a bad file has records, some of them bad
        self._named = Counter[str]()
        self._console = Console(stderr=True)
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS_BETWEEN_LINES
        self._bar = Bar(
            TextColumn("indexing"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("indexing", total=None, text="")

    def __enter__(self) -> "IndexProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, state: Progress) -> None:
        """Shows the progress of a run."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        seconds_left = seconds * (state.num_bytes - state.bytes) / max(state.bytes, 1)
        text = (
            f"{state.files:,} of {state.num_files:,} files, {state.records:,} records, "
            f"{state.bytes / seconds / 1e6:,.0f} MB/s, {command.format_seconds(seconds_left)} left"
        )
        self._bar.update(self._task, total=state.num_bytes, completed=state.bytes, text=text)
        if not self._console.is_terminal and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(f"indexing: {text}", file=sys.stderr, flush=True)

    def print_bad_record(self, file: str, bad: BadRecord) -> None:
        """Prints a bad record as one line; with --on_bad=skip, only if its file is unreadable."""
        self.has_records |= bad.record is not None
        if not self._names_all and bad.reason != "unreadable":
            return
        self._named[bad.reason] += 1
        if self._named[bad.reason] <= _MOST_NAMED:
            self._console.print(bad.describe(file), highlight=False, markup=False, soft_wrap=True)
        elif self._named[bad.reason] == _MOST_NAMED + 1:
            self._console.print(f"more are counted below: {bad.reason}", highlight=False)


def print_report(report: IndexReport, names: Sequence[str] | None) -> None:
    """Prints what was done and what the files hold; `names` are those of their classes."""
    done = [f"{report.written:,} indexed"]
    done += [f"{report.unchanged:,} unchanged"] if report.unchanged else []
    done += [f"{report.removed:,} gone"] if report.removed else []
    done += [f"{report.bad_files:,} with bad records"] if report.bad_files else []
    rows = [("files", ", ".join(done))]
    if report.summary.files:
        rows += _describe(report.summary, names)
    command.print_rows(rows)
    if report.reasons:
        print()
        command.print_rows([("bad records", "how many")])
        command.print_rows([(reason, f"{count:,}") for reason, count in report.reasons.items()])


def _remedy(patterns: list[str], checks: Checks, mistake: str, *, has_records: bool) -> str:
    """Returns what to do about bad records."""
    if mistake:
        return f"Those files were not indexed. {mistake}"
    if _ON_BAD.value == "skip":
        return (
            f"{BAD_RECORDS_NAME} lists the bad records of indexed files; --on_bad=error names those"
            " of the others. Fix the files, or allow more with --max_bad_fraction."
        )
    if not has_records:
        return "Those files hold no records, and were not indexed. Replace them or leave them out."
    limits = [flag for flag in (_MAX_BAD_FRACTION, _ALLOW_MISSING) if flag.value != flag.default]
    arguments = checks.to_flags(vocabulary=_LABELS.vocabulary.value or "")
    arguments += [*(f"--{flag.name}={flag.value}" for flag in limits), "--on_bad=skip"]
    fix = index_command(patterns, index_dir=_INDEX_DIR.value, arguments=arguments)
    return f"Those files were not indexed. Fix them, or skip the bad records: {fix}"


def _describe(summary: Summary, names: Sequence[str] | None) -> list[tuple[str, str]]:
    """Returns the rows that say what the indexed files hold."""
    levels = [f"{level} {format_count(count, 'file')}" for level, count in summary.verified.items()]
    rows = [("records", f"{summary.records:,}"), ("size", filesize.decimal(summary.size))]
    rows.append(("verified", ", ".join(levels)))
    if summary.skipped:
        part = summary.skipped / (summary.skipped + summary.records)
        count = format_count(summary.skipped, "record")
        rows.append(("skipped", f"{count} ({part:.2%}), listed in {BAD_RECORDS_NAME}"))
    if summary.features:
        rows.append(("features", _describe_features(summary)))
    labels = _describe_labels(summary, names)
    if labels:
        rows.append(("labels", labels))
    masks = summary.features.get(_LABELS.mask_key.value or "")
    if masks and masks.counts is not None:
        values = ", ".join(f"{value} ({count:,})" for value, count in masks.counts[:12])
        more = f" and {len(masks.counts) - 12:,} more" if len(masks.counts) > 12 else ""
        rows.append(("masks", f"pixels of value {values}{more}"))
    if summary.turned:
        sample = f"in a sample of {summary.parsed:,}: "
        where = "" if summary.parsed == summary.records else sample
        count = format_count(summary.turned, "image")
        rows.append(("EXIF", f"{where}{count} to be turned upright, as training does"))
    if summary.images:
        rows.append(("images", _describe_images(summary.images)))
    return rows


def _describe_features(summary: Summary) -> str:
    """Names the feature keys, the writer that uses them, and those that not every record has."""
    presets = [name for name, keys in KEY_PRESETS.items() if set(keys) <= set(summary.features)]
    keys = list(summary.features)
    text = f"{presets[0]}: " if presets else ""
    text += ", ".join(keys[:12]) + (f" and {len(keys) - 12:,} more" if len(keys) > 12 else "")
    for key, (file, record) in list(summary.without.items())[:3]:
        first = f"record {record:,} of {os.path.basename(file)}"
        text += f"; {key} not in all, first missing in {first}"
    return text


def _describe_labels(summary: Summary, names: Sequence[str] | None) -> str:
    _, key = find_keys(
        summary.features, image_key=_IMAGE_KEY.value, label_key=_LABELS.label_key.value
    )
    feature = summary.features.get(key or "")
    if not feature or not feature.range:
        return ""
    first, last = feature.range
    are_all = feature.counts is not None or feature.records == summary.records
    if feature.counts is not None:
        details = f"{len(feature.counts):,} classes"
    else:
        part = "all" if are_all else "a sample of"
        details = f"in {part} {format_count(feature.records, 'record')}"
    longest = feature.lengths[1]
    details += f", up to {longest:,} in a record" if longest > 1 else ""
    counts_from_1 = first == 1 and not _LABELS.label_offset.value
    # With names for 0 to the highest label, class 0 has no record here.
    counts_from_1 = counts_from_1 and are_all and len(names or ()) <= last
    hint = "; none is 0: if classes count from 1, train with ClassLabel(offset=1)"
    hint = hint if counts_from_1 else ""
    return f"{first:,g} to {last:,g}, {details}{hint}"


def _describe_images(images: Images) -> str:
    height, width = images.largest_size
    formats = ", ".join(f"{name} {count:,}" for name, count in images.formats.items())
    return f"{formats}; largest height {height:,}, largest width {width:,}"
