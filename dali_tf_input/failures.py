"""When a record stops training: which one it was, in which file, and the command that leaves it out.

TensorFlow's error names an operation and DALI's at best a byte offset. But a planned order is arithmetic: from the step that
failed follow its records, which are looked at here one by one, and after them, or without a plan, all; for a minute at most.
"""

import glob
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from dali_tf_input.checks import MAX_PIXELS, BadImage, Checks
from dali_tf_input.decoders import make_decode, read_header
from dali_tf_input.example import decode_example
from dali_tf_input.files import find_files, index_command, index_dir_of
from dali_tf_input.manifest import Manifest, read_index
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.order import Steps, shuffle
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.summary import KEY_PRESETS, FileEntry
from dali_tf_input.tfrecord import Fault, InputError, find_records, read_record

_logger = logging.getLogger("dali_tf_input")

_LONGEST_SEARCH = 60.0  # seconds
_STEPS_AHEAD = 12  # that pipelines may have read when they fail: their queues, and `steps_per_execution`
_END_OF_JPEG = b"\xff\xd9"
# What errors of reading, parsing and decoding say, and those of a model do not. Keras adds the Python stack, whose paths may
# hold any word: its lines are left out first.
_STACK = re.compile(r'^ *File ".*\n(?: {4,}.*\n)?', re.MULTILINE)
_OF_INPUT = re.compile(
    r"DALI_ERROR|nvidia\.dali\.fn|nvImageCodec|daliPipeline|Jpeg|JPEG|DecodePng|Parse\w*Example|(corrupted|truncated) record"
    r"|Error in user-defined function passed to|Input dataset was expected to contain \d+ element"
)
_NO_WORDS = re.compile(
    r"^\s*(\[\[.*|<stack traces.*|Detected at node.*|Graph execution error:|Current pipeline object.*|while executing.*|in /.*"
    r"|C\+\+ context.*|Critical error.*|encountered:|\[Op:.*|which was used in .*|Error DALI_ERROR.*|)\s*$"
)
_DALI_PLACE = re.compile(r"(?:Failed to decode sample #\d+ :|Error while parsing TFRecord file:) (.+?) at index (\d+)\b")


class Stopped(NamedTuple):
    """An input that may have stopped.

    Attributes:
      spec: what comes out of it.
      options: of its backend, whose decoder is asked.
      step: the step of training that failed, if it is known.
      global_batch_size: images in a step.
    """

    spec: InputSpec
    options: DaliOptions | TfDataOptions
    step: int | None
    global_batch_size: int


class BadRecordError(InputError):
    """A record stopped the input.

    Attributes:
      file: the TFRecord file it is in.
      fault: what is wrong with it, and where it is; its `record` counts from 0, with those that the index leaves out.
    """

    def __init__(self, file: str, fault: Fault, command: str) -> None:
        super().__init__(
            f"{file}: record {fault.record:,}, byte {fault.offset:,}: {fault.reason}: {fault.detail} It stopped the input. "
            f"Leave out what is bad: {command}"
        )
        self.file = file
        self.fault = fault


def explain(error: tf.errors.OpError, inputs: Sequence[Stopped], *, longest_search: float = _LONGEST_SEARCH) -> InputError | None:
    """Finds the record that stopped a pipeline.

    Args:
      error: what TensorFlow raised.
      inputs: the inputs of which one may have stopped: that of training, that of validation.
      longest_search: seconds after which the search ends, for each input.

    Returns:
      A `BadRecordError`; an InputError that holds the commands where the error is of the input but no record was found; None
      where the error is not of the input.
    """
    message = _STACK.sub("", str(error.message or ""))
    if isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.CancelledError):
        return None
    if not _OF_INPUT.search(message) and not any(file in message for stopped in inputs for file in stopped.spec.dataset.files):
        return None
    _logger.warning("The input stopped: looking for the record that did it (%.0f s at most).", longest_search * len(inputs))
    words = next((line.strip() for line in reversed(message.splitlines()) if not _NO_WORDS.match(line)), "no word")
    commands = [_command(stopped.spec.dataset, stopped.options) for stopped in inputs]
    searches = [_Search(stopped, longest_search) for stopped in inputs]
    # What the plans of all lead to comes before all records of any. The step may be another one than the optimizer counts: it
    # counts updates, not batches, and an evaluation has steps of its own.
    looks = (lambda search: search.look_at_place(message), _Search.look_at_likely, _Search.look_at_all)
    try:
        for look, (search, command) in itertools.product(looks, zip(searches, commands, strict=True)):
            found = look(search)
            if found:
                file, fault = found
                return BadRecordError(file, fault, command)
    except (OSError, InputError) as problem:
        return InputError(
            f"The input stopped ({words}), and its files cannot be looked at: {problem} Put back what is missing, or index what "
            "there is: " + "; ".join(commands)
        )
    looked_at = sum(search.looked_at for search in searches)
    return InputError(
        f"The input stopped ({words}), and none of {looked_at:,} records that were looked at is bad. Check them all: "
        + "; ".join(commands)
    )


def _command(dataset: DatasetSpec, options: DaliOptions | TfDataOptions) -> str:
    """Returns the command that leaves out all of a dataset that is bad for the backend of `options`."""
    arguments = ["--verify=decode", "--on_bad=skip"]
    if (dataset.image_key, dataset.label_key) not in KEY_PRESETS.values():
        arguments += [f"--image_key={dataset.image_key}", f"--label_key={dataset.label_key}"]
    if dataset.label_offset:
        arguments.append(f"--label_offset={dataset.label_offset}")
    entries = _entries(dataset)
    for name, default in (("num_classes", None), ("decoder", "both"), ("max_pixels", MAX_PIXELS)):  # as they were checked by
        values = {entry.checked_by.get(name, default) for entry in entries} - {default}
        values -= {"dali", "tf_data"} - {_decoder(options)}  # the other one was content with what stopped this one
        arguments += [f"--{name}={value}" for value in values if len(values) == 1]
    if any(entry.verified == "decode" for entry in entries):
        arguments.append("--force")  # else a file whose bytes rotted, and not its time, counts as unchanged
    index_dir = index_dir_of(dataset.files[0], dataset.index_files[0])
    return index_command(_pattern_of(dataset.files), index_dir=index_dir, arguments=arguments)


def _decoder(options: DaliOptions | TfDataOptions) -> Literal["dali", "tf_data"]:
    return "dali" if isinstance(options, DaliOptions) else "tf_data"


def _entries(dataset: DatasetSpec) -> list[FileEntry]:
    """Returns what the manifests say of the files of a dataset; nothing where they cannot be read."""
    folders = [os.path.dirname(index_file) for index_file in dataset.index_files]
    try:
        manifests = {folder: Manifest.read(folder).entries for folder in set(folders)}
    except InputError:
        return []
    found = (manifests[folder].get(os.path.basename(file)) for folder, file in zip(folders, dataset.files, strict=True))
    return [entry for entry in found if entry]


def _pattern_of(files: tuple[str, ...]) -> str | tuple[str, ...]:
    """Returns a pattern of exactly these files, where a common start makes one: more than 1% bad of all is less of one file."""
    start = os.path.commonprefix(files)  # noqa: RUF071 (of characters, as meant)
    pattern = glob.escape(start) + "*"
    if len(files) == 1 or os.path.dirname(start) != os.path.dirname(files[0]) or not os.path.basename(start):
        return files
    try:
        return pattern if set(find_files(pattern)) <= set(files) else files  # one may be gone
    except (InputError, OSError):  # said of the files themselves, as they are looked at
        return files


def _likely(stopped: Stopped) -> list[int]:
    """Returns the records of the step that failed and of those around it, the likeliest first; none where nothing is planned."""
    spec, _, step, global_batch_size = stopped
    if not spec.planned or step is None:
        return []
    num_records = spec.dataset.num_records
    steps = Steps(num_records=num_records, batch_size=global_batch_size, num_shards=1, padded=not spec.repeat)
    # The optimizer counts its step beside the wait for the batch, so one that failed may be counted or not.
    near = [step, step - 1, *(step + ahead for ahead in range(1, _STEPS_AHEAD + 1)), step - 2]
    first_of_files = np.cumsum([0, *spec.dataset.records_per_file[:-1]])
    orders: dict[int, np.ndarray] = {}  # by epoch
    records: list[int] = []
    for number in near:
        epoch, within = divmod(number, steps.per_epoch)
        if number < 0 or (epoch and not spec.repeat):
            continue
        places = np.arange(within * global_batch_size, min((within + 1) * global_batch_size, num_records))
        if spec.order != "global":
            records += places.tolist()
            continue
        if epoch not in orders:
            orders[epoch] = shuffle(
                num_records, seed=spec.seed, epoch=epoch, fragment_size=spec.fragment_size, first_of_files=first_of_files
            )
        records += orders[epoch][places].tolist()
    return records


class _Search:
    """Looks at records, each as deep as it takes to refuse or accept it, until time is out."""

    def __init__(self, stopped: Stopped, seconds: float) -> None:
        self._stopped = stopped
        self._dataset = dataset = stopped.spec.dataset
        largest = [entry.checked_by.get("max_pixels", MAX_PIXELS) for entry in _entries(dataset)]
        max_pixels = max(largest, default=MAX_PIXELS)
        self._decode = make_decode(Checks(verify="decode", decoder=_decoder(stopped.options), max_pixels=max_pixels))
        self._left = seconds
        self._first_of_files = np.cumsum([0, *dataset.records_per_file])
        self._indexes: dict[int, list[tuple[int, int]]] = {}
        self._seen: set[int] = set()

    @property
    def looked_at(self) -> int:
        """How many records were looked at."""
        return len(self._seen)

    def look_at_place(self, message: str) -> tuple[str, Fault] | None:
        """Looks at the record that DALI's message names by file and byte."""
        place = _DALI_PLACE.search(message)
        if not place or place[1] not in self._dataset.files:
            return None
        number = self._dataset.files.index(place[1])
        offsets = [offset for offset, _ in self._index(number)]
        row = int(np.searchsorted(offsets, int(place[2]), side="right")) - 1
        fault = self._find_fault(int(self._first_of_files[number]) + row)
        if fault is None and row >= 0:  # DALI refused what its decoder takes here: believe it
            offset, size = self._index(number)[row]
            fault = Fault(record=None, offset=offset, size=size, reason="damaged image", detail="DALI refused to decode it.")
        return (place[1], self._number(place[1], fault)) if fault else None

    def look_at(self, records: Iterable[int]) -> tuple[str, Fault] | None:
        """Looks at records by their numbers among all; returns the file and the fault of the first bad one."""
        start = time.monotonic()
        try:
            for record in records:
                if time.monotonic() > start + self._left:
                    return None
                fault = None if record in self._seen else self._find_fault(record)
                if fault:
                    file = self._dataset.files[self._file_of(record)]
                    return file, self._number(file, fault)
            return None
        finally:
            self._left -= time.monotonic() - start

    def look_at_likely(self) -> tuple[str, Fault] | None:
        """Looks at the records that the plan leads to."""
        return self.look_at(_likely(self._stopped))

    def look_at_all(self) -> tuple[str, Fault] | None:
        """Looks at all records: first at their headers and ends, which is fast, then by decoding them."""
        total, half = self._dataset.num_records, self._left / 2
        self._left -= half
        found = self.look_at(self._suspects(total, time.monotonic() + half))
        self._left += half
        return found or self.look_at(range(total))

    def _suspects(self, total: int, end: float) -> Iterator[int]:
        """Yields the records whose look from outside is not that of a sound image, until time is out."""
        for record in range(total):
            if time.monotonic() > end:
                return
            if record not in self._seen and self._looks_wrong(record):
                yield record

    def _looks_wrong(self, record: int) -> bool:
        try:
            features = decode_example(self._read(record))
            encoded = features[self._dataset.image_key][1][0]
            kind, _, _ = read_header(encoded)
            return self._dataset.label_key not in features or (kind.endswith("JPEG") and _END_OF_JPEG not in encoded[-64:])
        except (InputError, BadImage, KeyError, IndexError, TypeError, OSError):
            return True

    def _find_fault(self, record: int) -> Fault | None:
        """Looks at one record; the fault's record number is not known yet."""
        self._seen.add(record)
        file = self._file_of(record)
        offset, size = self._index(file)[record - int(self._first_of_files[file])]

        def fault(reason: str, detail: str) -> Fault:
            return Fault(record=None, offset=offset, size=size, reason=reason, detail=detail)

        try:
            features = decode_example(self._read(record))
        except (InputError, OSError) as error:
            return fault("unreadable", str(error))
        for what, key, kind in (
            ("image", self._dataset.image_key, "bytes_list"),
            ("label", self._dataset.label_key, "int64_list"),
        ):
            found, values = features.get(key, (None, []))
            if found != kind or len(values) != 1:
                count = f"{found} of {len(values):,}" if found else "none"
                return fault(f"{what} missing", f"`{what}_key` '{key}' must be {kind} of 1 value, found {count}.")
        encoded = features[self._dataset.image_key][1][0]
        if not encoded:
            return fault("empty image", f"`image_key` '{self._dataset.image_key}' holds 0 bytes.")
        try:
            self._decode(encoded)
        except BadImage as bad:
            return fault(bad.reason, bad.detail)
        return None

    def _read(self, record: int) -> bytes:
        file = self._file_of(record)
        offset, _ = self._index(file)[record - int(self._first_of_files[file])]
        return read_record(self._dataset.files[file], offset)

    def _file_of(self, record: int) -> int:
        return int(np.searchsorted(self._first_of_files, record, side="right")) - 1

    def _index(self, file: int) -> list[tuple[int, int]]:
        if file not in self._indexes:
            if len(self._indexes) > 64:
                self._indexes.clear()  # of thousands of files not all at once
            self._indexes[file] = read_index(self._dataset.index_files[file])
        return self._indexes[file]

    def _number(self, file: str, fault: Fault) -> Fault:
        """Returns the fault with the number of its record in the file, counted as the index step counts."""
        number = 0
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
        try:
            for found in find_records(file, descriptor):
                if isinstance(found, Fault):
                    if found.offset + max(1, found.size) > fault.offset:
                        break  # it is this one
                    number += 1
                    continue
                before = list(itertools.takewhile(lambda place: place[0] < fault.offset, found))
                number += len(before)
                if len(before) < len(found):
                    break
        finally:
            os.close(descriptor)
        return Fault(record=number, offset=fault.offset, size=fault.size, reason=fault.reason, detail=fault.detail)
