"""The search for the record that stopped an input, and the command that skips it.

TensorFlow's error names an operation, and DALI's at best a byte offset. But with a fixed order, the
records of the failed step can be computed, and are then checked one by one.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.index.decode import DecodingChild
from dali_tf_input.records.checks import MAX_PIXELS, Checks, Decoder, InvalidRecord, check_record
from dali_tf_input.records.contents import FileEntry
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.labels import COUNT_FROM_1, ClassLabel, Features, Values
from dali_tf_input.records.manifest import Manifest
from dali_tf_input.records.paths import index_command
from dali_tf_input.records.tfrecord import BadRecord
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options
from dali_tf_input.storage.copies import find_copy

# How TensorFlow's errors name the operation that fetches a batch, eagerly or in a graph.
_OF_INPUT = re.compile(
    r"__wrapped__(IteratorGetNext|MakeIterator)"
    r"|(at node |\[\[)(MultiDevice)?IteratorGetNext\w*( |\]\])"
)
_NO_COPY = (
    "The input failed: the copy of {} in {} was damaged or removed. Run again, it is then fetched."
)
_IDLE_SECONDS = 60.0  # that the process which decodes waits for the next search
_STEPS_AHEAD = 12  # how far pipelines may have read ahead: queues and `steps_per_execution`


class BadRecordError(InputError):
    """A record stopped the input.

    Examples:
      >>> try:
      ...     history = train.fit(model, verbose=0)
      ... except BadRecordError as error:
      ...     print(error.file, error.bad_record.record)

    Attributes:
      file: the TFRecord file.
      bad_record: what is wrong and where; its number counts from 0 and includes skipped records.
    """

    def __init__(self, file: str, bad_record: BadRecord, remedy: str) -> None:
        self.file, self.bad_record, self._remedy = file, bad_record, remedy
        bad = bad_record
        super().__init__(
            f"{file}: record {bad.record:,}, byte {bad.offset:,}: {bad.reason}: {bad.detail} It"
            f" stopped the input. {remedy}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how to make it again: process pools pickle errors."""
        return type(self), (self.file, self.bad_record, self._remedy)


def explain(
    error: tf.errors.OpError,
    spec: InputSpec,
    options: Options,
    *,
    batch_size: int,
    step: int,
    num_classes: int | None = None,
) -> InputError | None:
    """Finds the record that stopped an input.

    Args:
      error: the error that TensorFlow raised.
      spec: the batches to produce.
      options: the options of the backend, whose decoder checks the records.
      batch_size: images in a step of all replicas.
      step: number of steps done before the error.
      num_classes: number of classes of the model, if known; labels must be below it.

    Returns:
      A `BadRecordError`; another InputError if a file changed, or if no bad record is found and the
      error is the input's; else None.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.CancelledError):
        return None
    command = skip_command(spec, options)
    if change := spec.records.find_change():
        text = f"The input failed: {change}. Restore what is missing, or index again: {command}"
        return InputError(text)
    if url := _find_missing_copy(spec):
        return InputError(_NO_COPY.format(url, spec.records.cache_dir))
    of_input = bool(_OF_INPUT.search(str(error.message)))
    # A model's error is that of the batch that it was given, not of a later one.
    ahead = _STEPS_AHEAD if of_input else 0
    check = _RecordCheck(spec, options, num_classes)
    try:
        for record in _list_likely_records(spec, batch_size, step, ahead):
            if bad := check.find_problem(record):
                file, number, offset, size = spec.records.locate(record)
                why = {"reason": bad.reason, "detail": bad.detail}
                bad_record = BadRecord(record=number, offset=offset, size=size, **why)
                if spec.records.other_image_keys:
                    command = skip_command(spec, options, files=[file])
                return BadRecordError(file, bad_record, _remedy(bad, spec, command))
    except (OSError, InputError) as problem:
        return InputError(
            f"The input failed, and its files cannot be checked: {problem} Restore what is missing,"
            f" or index the remaining files: {command}"
        )
    if url := _find_missing_copy(spec):  # the check has removed a damaged one
        return InputError(_NO_COPY.format(url, spec.records.cache_dir))
    if not of_input:
        return None
    reason = "no bad record is near it" if spec.has_fixed_order else "order 'buffer' has no plan"
    return InputError(
        f"The input failed after step {step:,} ({type(error).__name__}), and {reason}. To check all"
        f" records: {skip_command(spec, options, on_bad='')}{_copies_remedy(spec)}"
    )


def _find_missing_copy(spec: InputSpec) -> str | None:
    """Returns the URL of an object whose copy in `cache_dir` is missing, or None."""
    records = spec.records
    if records.cache_dir:
        for file in records.files:
            if file.version and not find_copy(file.path, file.version, records.cache_dir):
                return file.path
    return None


def _copies_remedy(spec: InputSpec) -> str:
    if not spec.records.cache_dir:
        return ""
    return (
        f" If it finds none, a copy in {spec.records.cache_dir} is damaged: remove the folder"
        " dali_tf_input there, and run again."
    )


def _remedy(bad: InvalidRecord, spec: InputSpec, command: str) -> str:
    reason, counts = bad.reason, isinstance(spec.label, ClassLabel) and spec.label.is_integer
    if reason == "label type":
        return "Write all records with one type of values."
    if reason == "feature length":
        return "Where records may hold none or fewer, pass Stored(padding=...); more, more `size`."
    if reason == "label range" and counts:
        hint = "" if COUNT_FROM_1 in bad.detail else f"{COUNT_FROM_1} "
        return f"{hint}Otherwise the model needs more outputs, or the record another label."
    if reason.startswith(("label", "mask")):
        return f"If the spec is right and the record wrong, skip such records: {command}"
    return f"Skip bad records: {command}"


def skip_command(
    spec: InputSpec,
    options: Options,
    *,
    on_bad: str = "--on_bad=skip",
    files: Sequence[str] | None = None,
) -> str:
    """Returns the commands that find, and with `on_bad` skip, the bad records of files.

    They check as a backend decodes, and what the index step checked before.
    """
    records, entries = spec.records, _read_entries(spec)
    groups: dict[tuple[str, ...], list[str]] = {}  # by flags
    for file in files or records.paths:
        entry = entries.get(file)
        checks = _checks_of(spec, options, entry)
        flags = checks.to_flags(names_keys=bool(records.other_image_keys))
        flags += [on_bad] if on_bad else []
        if entry and entry.verified == "decode":  # a file whose bytes rotted counts as unchanged
            flags.append("--force")
        groups.setdefault((*flags,), []).append(file)
    return " && ".join(
        index_command(paths, index_dir=records.index_dir, arguments=flags)
        for flags, paths in groups.items()
    )


def _checks_of(spec: InputSpec, options: Options, entry: FileEntry | None) -> Checks:
    """Returns the checks that find what stops an input, of level "decode"."""
    records, label = spec.records, spec.label
    before = Checks()
    if entry:
        before = Checks.from_json({"verify": entry.verified, **entry.checked_by})
    decoder: Decoder = "dali" if isinstance(options, DaliOptions) else "tf_data"
    how: dict[str, Any] = {
        "verify": "decode",
        "decoder": decoder if before.decoder == decoder else "both",
        "mask_key": spec.mask.key if spec.mask else None,
    }
    if records.other_image_keys or records.relabeled:  # the files say what they hold
        return dataclasses.replace(before, **how)
    if isinstance(label, ClassLabel):
        num_classes = label.num_classes or getattr(before.label, "num_classes", None)
        label = _with_classes(label, num_classes)
    return dataclasses.replace(before, **how, image_key=records.image_key, label=label)


def _read_entries(spec: InputSpec) -> dict[str, FileEntry]:
    """Returns the manifest entries of the files, by path; none if a manifest cannot be read."""
    entries: dict[str, FileEntry] = {}
    manifests: dict[str, Manifest] = {}
    with contextlib.suppress(InputError):
        for file in spec.records.files:
            folder = os.path.dirname(file.index_file)
            if folder not in manifests:
                manifests[folder] = Manifest.read(folder)
            entry = manifests[folder].entries.get(os.path.basename(file.path))
            if entry:
                entries[file.path] = entry
    return entries


def _list_likely_records(spec: InputSpec, batch_size: int, step: int, ahead: int) -> Iterator[int]:
    """Yields the records of the step that failed and of those around it, the likeliest first."""
    if not spec.has_fixed_order:
        return
    num_steps = None if spec.repeat else spec.plan(batch_size).steps_per_epoch
    for number in [step, step - 1, *range(step + 1, step + ahead + 1)]:
        if number >= 0 and (num_steps is None or number < num_steps):
            yield from spec.ids_of_step(number, batch_size=batch_size).tolist()


class _RecordCheck:
    """Checks records as the index step does at level "decode".

    Images are decoded in a child process: a record that crashes a decoder must not end training.
    """

    def __init__(self, spec: InputSpec, options: Options, num_classes: int | None) -> None:
        self._spec, label = spec, spec.label
        if isinstance(label, ClassLabel) and num_classes and not label.num_classes:
            label = _with_classes(label, num_classes)
        pixels = [entry.checked_by.get("max_pixels", 0) for entry in _read_entries(spec).values()]
        self._checks = Checks(
            verify="decode",
            label=None if spec.records.relabeled else label,
            mask_key=spec.mask.key if spec.mask else None,
            decoder="dali" if isinstance(options, DaliOptions) else "tf_data",
            max_pixels=max(pixels, default=0) or MAX_PIXELS,
        )

    def find_problem(self, record: int) -> InvalidRecord | None:
        """Returns what is wrong with a record."""
        records = self._spec.records
        try:
            data = records.read_data(record)
        except (InputError, OSError) as error:
            return InvalidRecord("unreadable", str(error))
        try:
            keys = (key for key in records.image_keys if key in _features_of(data))
            checks = dataclasses.replace(self._checks, image_key=next(keys, records.image_key))
            features, _ = check_record(data, checks, None)
            self._check_types(features)
            check_record(data, checks, _decoding_child(checks.decoder, checks.max_pixels))
        except InvalidRecord as bad:
            return bad
        return None

    def _check_types(self, features: Features) -> None:
        """Raises InvalidRecord for values of which the index step does not know."""
        spec, records = self._spec, self._spec.records
        if isinstance(self._checks.label, Values):
            key = self._checks.label.key or ""
            due = "float_list" if records.dtype_of(key) == "float32" else "int64_list"
            if features[key][0] != due:
                detail = f"'{key}' must be {due}, as before, found {features[key][0]}."
                raise InvalidRecord("label type", detail)
        for key, stored in spec.features.items():
            kind, values = features.get(key, ("nothing", []))
            low, high = stored.lengths
            if not low <= len(values) <= high or (not kind and low):
                due = f"{low} to {high} values, found {len(values)}"
                raise InvalidRecord("feature length", f"`features` '{key}' must be {due}.")


@functools.lru_cache(2)  # the next search finds it still there, if it is soon
def _decoding_child(decoder: Decoder, max_pixels: int) -> DecodingChild:
    checks = Checks(decoder=decoder, max_pixels=max_pixels)
    return DecodingChild(checks, idle_seconds=_IDLE_SECONDS)


def _features_of(data: bytes) -> Features:
    """Returns the features of a record; none if it is not an Example, as `check_record` says."""
    with contextlib.suppress(InputError):
        return decode_example(data)
    return {}


def _with_classes(label: ClassLabel, num_classes: int | None) -> ClassLabel:
    return ClassLabel(
        key=label.key, num_classes=num_classes, offset=label.offset, vocabulary=label.vocabulary
    )
