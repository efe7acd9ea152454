"""The search for the record that stopped an input, and the command that skips it.

TensorFlow's error names an operation, and DALI's at best a byte offset. But with a fixed order, the
records of the failed step can be computed, and are then checked one by one.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.index.decoders import make_trial_decode
from dali_tf_input.records.contents import FileEntry
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.labels import ClassLabel, MultiHot, Values
from dali_tf_input.records.manifest import Manifest
from dali_tf_input.records.paths import index_command
from dali_tf_input.records.schema import (
    KEY_PRESETS,
    MAX_PIXELS,
    BadImage,
    Checks,
    check_mask,
    find_schema_problem,
    find_size,
)
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
        self.file, self.bad_record = file, bad_record
        bad = bad_record
        super().__init__(
            f"{file}: record {bad.record:,}, byte {bad.offset:,}: {bad.reason}: {bad.detail} It"
            f" stopped the input. {remedy}"
        )


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
    check = _RecordCheck(spec, options, num_classes)
    of_input = bool(_OF_INPUT.search(str(error.message)))
    # A model's error is that of the batch that it was given, not of a later one.
    ahead = _STEPS_AHEAD if of_input else 0
    try:
        for record in _list_likely_records(spec, batch_size, step, ahead):
            problem = check.find_problem(record)
            if problem:
                file, number, offset, size = spec.records.locate(record)
                why = dict(zip(("reason", "detail"), problem, strict=True))
                bad_record = BadRecord(record=number, offset=offset, size=size, **why)
                if spec.records.other_image_keys:
                    command = _commands_by_keys([file], spec, "--on_bad=skip")
                return BadRecordError(file, bad_record, _remedy(problem[0], spec, command))
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
            if file.status and not find_copy(file.path, file.status, records.cache_dir):
                return file.path
    return None


def _copies_remedy(spec: InputSpec) -> str:
    if not spec.records.cache_dir:
        return ""
    return (
        f" If it finds none, a copy in {spec.records.cache_dir} is damaged: remove the folder"
        " dali_tf_input there, and run again."
    )


def _remedy(reason: str, spec: InputSpec, command: str) -> str:
    counts = isinstance(spec.label, ClassLabel) and spec.label.is_integer
    if reason == "label type":
        return "Write all records with one type of values."
    if reason == "feature length":
        return "Where records may hold fewer, pass Stored(padding=...), where more, more `size`."
    if reason == "label range" and counts:
        return (
            "Where labels count from 1, pass label=ClassLabel(offset=1) to the spec. Otherwise the"
            " model needs more outputs, or the record another label."
        )
    if reason.startswith(("label", "mask")):
        return f"If the spec is right and the record wrong, skip such records: {command}"
    return f"Skip bad records: {command}"


def skip_command(spec: InputSpec, options: Options, *, on_bad: str = "--on_bad=skip") -> str:
    """Returns the command that finds, and with `on_bad` skips, the bad records of a backend."""
    records, label = spec.records, spec.label
    if records.other_image_keys:
        return _commands_by_keys(records.paths, spec, on_bad)
    decoder = "dali" if isinstance(options, DaliOptions) else "tf_data"
    arguments = ["--verify=decode", *([on_bad] if on_bad else [])]
    key = label.key if label else None
    if (records.image_key, key) not in KEY_PRESETS.values():
        arguments.append(f"--image_key={records.image_key}")
        arguments += [f"--label_key={key}"] if key else []
    num_classes = None
    if isinstance(label, MultiHot):
        arguments.append("--label=multi_hot")
        num_classes = label.num_classes
    elif isinstance(label, Values):
        arguments += ["--label=values", f"--label_size={label.size}"]
    elif label is None:
        arguments.append("--label=none")
    elif label.vocabulary:
        arguments.append("--vocabulary=labels.txt")
    if spec.mask:
        arguments.append(f"--mask_key={spec.mask.key}")
    if label and not isinstance(label, Values) and label.offset:
        arguments.append(f"--label_offset={label.offset}")
    entries = _read_entries(spec)
    # Use the settings with which the files were checked before.
    for name, default in (("num_classes", None), ("decoder", "both"), ("max_pixels", MAX_PIXELS)):
        before = [
            {**entry.checked_by, **(entry.checked_by.get("label") or {})} for entry in entries
        ]
        values = {checks.get(name, default) for checks in before} - {default}
        values -= {"dali", "tf_data"} - {decoder}  # the other one accepted the record
        values = {num_classes} if num_classes and name == "num_classes" else values
        arguments += [f"--{name}={value}" for value in values if len(values) == 1]
    if any(entry.verified == "decode" for entry in entries):
        arguments.append("--force")  # a file whose bytes rotted counts as unchanged
    return index_command(records.paths, index_dir=records.index_dir, arguments=arguments)


def _commands_by_keys(files: Iterable[str], spec: InputSpec, on_bad: str) -> str:
    """Returns index commands for files with several sets of keys, each as it was run last."""
    records, groups = spec.records, dict[tuple[str, ...], list[str]]()
    for file in files:
        folder = os.path.dirname(records.files[records.paths.index(file)].index_file)
        flags: dict[str, Any] = {}
        with contextlib.suppress(InputError, KeyError):  # no manifest any more
            checks = Manifest.read(folder).entries[os.path.basename(file)].checked_by
            label = checks.get("label") or {}
            flags = {"image_key": checks.get("image_key"), "label_key": label.get("key")}
            flags |= {"label_offset": label.get("offset"), "num_classes": label.get("num_classes")}
            flags["vocabulary"] = "labels.txt" if label.get("vocabulary") else None
            flags["label"] = None if label else "none"
        given = (f"--{name}={value}" for name, value in flags.items() if value)
        groups.setdefault((*given,), []).append(file)
    start = ["--verify=decode", *([on_bad] if on_bad else []), "--force"]
    return " && ".join(
        index_command(paths, index_dir=records.index_dir, arguments=[*start, *given])
        for given, paths in groups.items()
    )


def _read_entries(spec: InputSpec) -> list[FileEntry]:
    """Returns the manifest entries of the files; empty if the manifests cannot be read."""
    records = spec.records
    folders = [os.path.dirname(file.index_file) for file in records.files]
    with contextlib.suppress(InputError):
        manifests = {folder: Manifest.read(folder).entries for folder in set(folders)}
        places = zip(folders, records.paths, strict=True)
        entries = (manifests[folder].get(os.path.basename(file)) for folder, file in places)
        return [entry for entry in entries if entry]
    return []


def _list_likely_records(spec: InputSpec, batch_size: int, step: int, ahead: int) -> Iterator[int]:
    """Yields the records of the step that failed and of those around it, the likeliest first."""
    if not spec.has_fixed_order:
        return
    num_steps = None if spec.repeat else spec.plan(batch_size).steps_per_epoch
    for number in [step, step - 1, *range(step + 1, step + ahead + 1)]:
        if number >= 0 and (num_steps is None or number < num_steps):
            yield from spec.ids_of_step(number, batch_size=batch_size).tolist()


class _RecordCheck:
    """Checks records as the index step does at level "decode"."""

    def __init__(self, spec: InputSpec, options: Options, num_classes: int | None) -> None:
        self._spec, self._label = spec, spec.label
        if isinstance(spec.label, ClassLabel) and num_classes and not spec.label.num_classes:
            self._label = _with_classes(spec.label, num_classes)
        largest = [entry.checked_by.get("max_pixels", MAX_PIXELS) for entry in _read_entries(spec)]
        self._decode = make_trial_decode(
            Checks(
                verify="decode",
                decoder="dali" if isinstance(options, DaliOptions) else "tf_data",
                max_pixels=max(largest, default=MAX_PIXELS),
            )
        )

    def find_problem(self, record: int) -> tuple[str, str] | None:
        """Returns what is wrong with a record, as (reason, detail)."""
        spec, records = self._spec, self._spec.records
        try:
            features = decode_example(records.read_data(record))
        except (InputError, OSError) as error:
            return "unreadable", str(error)
        image_key = next((key for key in records.image_keys if key in features), records.image_key)
        problem = find_schema_problem(
            features,
            image_key=image_key,
            label=None if records.relabeled else self._label,
            mask_key=spec.mask.key if spec.mask else None,
        )
        if problem:
            return problem
        if isinstance(self._label, Values):
            key = self._label.key or ""
            due = "float_list" if records.dtype_of(key) == "float32" else "int64_list"
            if features[key][0] != due:
                return "label type", f"'{key}' must be {due}, as before, found {features[key][0]}."
        for key, stored in spec.features.items():
            kind, values = features.get(key, ("nothing", []))
            low, high = stored.lengths
            if not low <= len(values) <= high or (not kind and low):
                due = f"{low} to {high} values, found {len(values)}"
                return "feature length", f"`features` '{key}' must be {due}."
        try:
            if records.stores_pixels:
                size = [*(find_size(features) or ())]
            else:
                _, *size = self._decode(features[image_key][1][0])
            if spec.mask:
                check_mask(features[spec.mask.key][1][0], size, self._decode)
        except BadImage as bad:
            return bad.reason, bad.detail
        return None


def _with_classes(label: ClassLabel, num_classes: int) -> ClassLabel:
    return ClassLabel(
        key=label.key, num_classes=num_classes, offset=label.offset, vocabulary=label.vocabulary
    )
