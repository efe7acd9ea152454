"""Which record stopped the input: its file, its number, and the command that skips it.

TensorFlow's error names an operation, and DALI's at best a byte offset. But a fixed order is
arithmetic: the step that failed determines its records. Those are checked first, one by one, and
then all records, for a minute at most.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.index.decoders import make_trial_decode
from dali_tf_input.records.contents import FileEntry
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.index_file import Integers
from dali_tf_input.records.labels import ClassLabel, MultiHot, Values
from dali_tf_input.records.manifest import Manifest
from dali_tf_input.records.paths import index_command
from dali_tf_input.records.records import Records
from dali_tf_input.records.schema import (
    KEY_PRESETS,
    MAX_PIXELS,
    BadImage,
    Checks,
    Decoder,
    check_mask,
    find_schema_problem,
    find_size,
)
from dali_tf_input.records.tfrecord import BadRecord, find_records
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, TfDataOptions
from dali_tf_input.spec.order import EpochSteps, Shard, list_records
from dali_tf_input.storage.copies import local_copy

_logger = logging.getLogger("dali_tf_input")

_SEARCH_SECONDS = 60.0
_STEPS_AHEAD = 12  # that pipelines may have read when they fail: queues, and `steps_per_execution`
# Words of reading, parsing and decoding errors that model errors lack. Keras adds the
# Python stack, whose paths may hold any word: its lines are removed first.
_STACK = re.compile(r'^ *File ".*\n(?: {4,}.*\n)?', re.MULTILINE)
_OF_INPUT = re.compile(
    r"DALI_ERROR|nvidia\.dali\.fn|nvImageCodec|daliPipeline|Jpeg|JPEG|Decode(?:Png|Image)|Parse\w*Example"
    r"|(corrupted|truncated) record|Error in user-defined function passed to"
    r"|Input dataset was expected to contain \d+ element"
)
_NO_WORDS = re.compile(
    r"^\s*(\[\[.*|<stack traces.*|Detected at node.*|Graph execution error:|\[Op:.*|encountered:"
    r"|Current pipeline object.*|while executing.*|in /.*|C\+\+ context.*|Critical error.*"
    r"|which was used in .*|Error DALI_ERROR.*|)\s*$"
)
_CHANGED = "changed since it was indexed"
_LABEL = "label range"
_DALI_EXTENT = re.compile(
    r"(?:Failed to decode sample #\d+ :|Error while parsing TFRecord file:) (.+?) at index (\d+)\b"
)


class FailedInput(NamedTuple):
    """An input that may have failed; the decoder of its backend judges the records."""

    spec: InputSpec
    options: DaliOptions | TfDataOptions
    step: int | None  # of training, that failed, if known
    batch_size: int


class BadRecordError(InputError):
    """A record stopped the input.

    Attributes:
      file: the TFRecord file.
      bad_record: what is wrong and where; its number counts from 0 and includes skipped records.
    """

    def __init__(self, file: str, bad_record: BadRecord, command: str) -> None:
        self.file, self.bad_record = file, bad_record
        bad = bad_record
        super().__init__(
            f"{file}: record {bad.record:,}, byte {bad.offset:,}: {bad.reason}: {bad.detail} It"
            f" stopped the input. Skip bad records: {command}"
        )


def explain(
    error: tf.errors.OpError,
    inputs: Sequence[FailedInput],
    *,
    search_seconds: float = _SEARCH_SECONDS,
) -> InputError | None:
    """Finds the record that stopped a pipeline.

    Args:
      error: what TensorFlow raised.
      inputs: the inputs that may have failed: training, validation.
      search_seconds: how long to search each of them.

    Returns:
      A `BadRecordError`; an InputError with the commands to run if the error is of the input but no
      record was found; None if the error is not of the input.
    """
    message = _STACK.sub("", str(error.message or ""))
    if isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.CancelledError):
        return None
    named = (file in message for failed in inputs for file in failed.spec.records.files)
    if not _OF_INPUT.search(message) and not any(named):
        return None
    seconds = search_seconds * len(inputs)
    _logger.warning("The input failed: searching for the bad record (%.0f s at most).", seconds)
    lines = (line.strip() for line in reversed(message.splitlines()) if not _NO_WORDS.match(line))
    words = next(lines, "no message")
    commands = [skip_command(failed.spec, failed.options) for failed in inputs]
    searches = [_Search(failed, search_seconds) for failed in inputs]
    changes = (failed.spec.records.find_change() for failed in inputs)
    change = next(filter(None, changes), None)
    text = f"The input failed: {change}. Restore what is missing, or index again:"
    changed = InputError(f"{text} {'; '.join(commands)}")
    if change and _CHANGED in message:
        return changed
    # Search all records that the step determines before any full scan. The step may not be the one
    # that the optimizer counts: it counts updates, not batches, and an evaluation has steps of its
    # own.
    stages = (
        lambda search: search.check_extent_in(message),
        lambda search: search.check_first_bad(_likely_records(search.failed)),
        lambda search: search.check_first_bad(range(search.dataset.num_records)),
    )
    try:
        for stage, number in itertools.product(stages, range(len(inputs))):
            found = stage(searches[number])
            if found:
                file, bad_record = found
                if change and file in change:
                    detail = f"{bad_record.detail} {change}."
                    bad_record = dataclasses.replace(bad_record, detail=detail)
                return BadRecordError(file, bad_record, commands[number])
    except (OSError, InputError) as problem:
        return InputError(
            f"The input failed ({words}), and its files cannot be checked: {problem} Restore what"
            f" is missing, or index the remaining files: {'; '.join(commands)}"
        )
    if change:
        return changed
    checked = sum(len(search.checked) for search in searches)
    return InputError(
        f"The input failed ({words}), and none of the {checked:,} records that were checked is bad."
        f" Check them all: {'; '.join(commands)}"
    )


def find_label(inputs: Sequence[FailedInput], label: int) -> str | None:
    """Returns the file and number of a record that has this label in one of the inputs."""
    with contextlib.suppress(OSError, InputError):
        for failed in inputs:
            every = range(failed.spec.records.num_records)
            records = itertools.chain(_likely_records(failed), every)
            search = _Search(failed, _SEARCH_SECONDS, label=label)
            found = search.check_first_bad(records)
            if found and found[1].reason == _LABEL:
                return f"{found[0]}: record {found[1].record:,}, byte {found[1].offset:,},"
    return None


def skip_command(
    spec: InputSpec, options: DaliOptions | TfDataOptions, num_classes: int | None = None
) -> str:
    """Returns the command that skips everything in a dataset that is bad for a backend."""
    dataset, label = spec.records, spec.label
    decoder = "dali" if isinstance(options, DaliOptions) else "tf_data"
    arguments = ["--verify=decode", "--on_bad=skip"]
    key = label.key if label else dataset.label_key
    if (dataset.image_key, key) not in KEY_PRESETS.values():
        arguments.append(f"--image_key={dataset.image_key}")
        arguments += [f"--label_key={key}"] if key else []
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
    entries = _read_entries(dataset)
    # As the files were checked before:
    for name, default in (("num_classes", None), ("decoder", "both"), ("max_pixels", MAX_PIXELS)):
        values = {entry.checked_by.get(name, default) for entry in entries} - {default}
        values -= {"dali", "tf_data"} - {decoder}  # the other one accepted the record
        values = {num_classes} if num_classes and name == "num_classes" else values
        arguments += [f"--{name}={value}" for value in values if len(values) == 1]
    if any(entry.verified == "decode" for entry in entries):
        arguments.append("--force")  # a file whose bytes rotted counts as unchanged
    return index_command(dataset.files, index_dir=dataset.index_dir, arguments=arguments)


def _read_entries(dataset: Records) -> list[FileEntry]:
    """Returns what the manifests say of the files of a dataset; nothing if they cannot be read."""
    folders = [os.path.dirname(index_file) for index_file in dataset.index_files]
    try:
        manifests = {folder: Manifest.read(folder).entries for folder in set(folders)}
    except InputError:
        return []
    places = zip(folders, dataset.files, strict=True)
    found = (manifests[folder].get(os.path.basename(file)) for folder, file in places)
    return [entry for entry in found if entry]


def _likely_records(failed: FailedInput) -> list[int]:
    """Returns the records of the step that failed and of those around it, the likeliest first."""
    spec, _, step, batch_size = failed
    if not spec.has_fixed_order or step is None:
        return []
    shared = {"num_records": spec.records.num_records, "batch_size": batch_size}
    steps = EpochSteps(**shared, num_shards=1, padded=not spec.repeat)
    seed = spec.seed if spec.order == "global" else None
    orders: dict[int, Integers] = {}  # by epoch
    records: list[int] = []
    # The optimizer counts while the next batch is awaited: the failed step may be counted or not.
    ahead = (step + number for number in range(1, _STEPS_AHEAD + 1))
    for number in (step, step - 1, *ahead, step - 2):
        epoch, within = divmod(number, steps.per_epoch)
        if number < 0 or (epoch and not spec.repeat):
            continue
        if epoch not in orders:
            orders[epoch] = list_records(
                spec.records.records_per_file,
                steps=steps,
                shard=Shard(),
                seed=seed,
                shuffle_block_size=spec.shuffle_block_size,
                epoch=epoch,
            )
        records += orders[epoch][within * batch_size :][:batch_size].tolist()
    return records


class _Search:
    """Checks records as the index step does at level "decode", until the time is up.

    With `label` it looks for a record that has it instead, as it comes out.
    """

    def __init__(self, failed: FailedInput, seconds: float, *, label: int | None = None) -> None:
        self.failed, self.dataset = failed, failed.spec.records
        self._label, self._seconds = label, seconds
        self.checked: set[int] = set()
        entries = _read_entries(self.dataset)
        largest = [entry.checked_by.get("max_pixels", MAX_PIXELS) for entry in entries]
        decoder: Decoder = "dali" if isinstance(failed.options, DaliOptions) else "tf_data"
        max_pixels = max(largest, default=MAX_PIXELS)
        checks = Checks(verify="decode", decoder=decoder, max_pixels=max_pixels)
        self._decode = make_trial_decode(checks)

    def check_extent_in(self, message: str) -> tuple[str, BadRecord] | None:
        """Checks the record that DALI's message names by file and byte."""
        extent = _DALI_EXTENT.search(message)
        if not extent or extent[1] not in self.dataset.files:
            return None
        file = self.dataset.files.index(extent[1])
        offsets = self.dataset.index(file)[:, 0]
        row = int(np.searchsorted(offsets, int(extent[2]), side="right")) - 1
        if row < 0:
            return None
        record = sum(self.dataset.records_per_file[:file]) + row
        # If the decoder here accepts it, believe DALI.
        problem = self._check(record) or ("damaged image", "DALI refused to decode it.")
        return extent[1], self._locate(record, problem)

    def check_first_bad(self, records: Iterable[int]) -> tuple[str, BadRecord] | None:
        """Checks records by their numbers; returns the first bad one and its file."""
        start = time.monotonic()
        try:
            for record in records:
                if time.monotonic() > start + self._seconds:
                    return None
                problem = None if record in self.checked else self._check(record)
                if problem:
                    return self.dataset.locate(record).file, self._locate(record, problem)
            return None
        finally:
            self._seconds -= time.monotonic() - start

    def _check(self, record: int) -> tuple[str, str] | None:
        """Returns what is wrong with a record, as (reason, detail)."""
        self.checked.add(record)
        dataset = self.dataset
        try:
            features = decode_example(dataset.read_data(record))
        except (InputError, OSError) as error:
            return "unreadable", str(error)
        label, mask = self.failed.spec.label, self.failed.spec.mask
        problem = find_schema_problem(
            features,
            image_key=dataset.image_key,
            label=None if self._label is not None else label,
            mask_key=mask.key if mask else None,
        )
        if problem:
            return problem
        for key, stored in self.failed.spec.features.items():
            kind, values = features.get(key, ("nothing", []))
            low, high = stored.lengths
            if not low <= len(values) <= high or (not kind and low):
                due = f"{low} to {high} values, found {len(values)}"
                return "feature length", f"`features` '{key}' must be {due}."
        if self._label is not None and isinstance(label, ClassLabel) and not label.vocabulary:
            held = features[label.key or ""][1][0] - (label.offset or 0)
            return (_LABEL, "") if held == self._label else None
        try:
            if dataset.stores_pixels:
                size = [*(find_size(features) or ())]
            else:
                _, *size = self._decode(features[dataset.image_key][1][0])
            if mask:
                check_mask(features[mask.key][1][0], size, self._decode)
        except BadImage as bad:
            return bad.reason, bad.detail
        return None

    def _locate(self, record: int, problem: tuple[str, str]) -> BadRecord:
        """Returns a bad record with its number in the file, counted as the index step counts."""
        file, _, offset, size = self.dataset.locate(record)
        number = 0
        try:
            status = self.dataset.status(self.dataset.files.index(file))
            with (
                local_copy(file, status, self.dataset.cache_dir) as path,
                open(path, "rb") as stream,
            ):
                for found in find_records(file, stream.fileno()):
                    if isinstance(found, BadRecord):
                        found = [(found.offset, found.size)]
                    before = sum(start + max(1, length) <= offset for start, length in found)
                    number += before
                    if before < len(found):
                        break
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
        reason, detail = problem
        return BadRecord(record=number, offset=offset, size=size, reason=reason, detail=detail)
