"""Writing sets of TFRecord files, in parallel, whole or not at all."""

import array
import collections
import functools
import glob
import io
import itertools
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from rich import filesize

from dali_tf_input import InputError, __version__
from dali_tf_input.cli import command
from dali_tf_input.cli.command import format_count, print_rows
from dali_tf_input.cli.convert.listing import LeftOut
from dali_tf_input.index.run import explain_executor
from dali_tf_input.processes import Child, ChildDiedError, call_apart
from dali_tf_input.records.card import METADATA_NAME, SplitFile, find_card_files, merge_metadata
from dali_tf_input.records.checks import PIXELS_KEY
from dali_tf_input.records.class_names import LABELS_NAME
from dali_tf_input.records.example import FeatureValue
from dali_tf_input.records.paths import BAD_RECORDS_NAME, MANIFEST_NAME, index_command
from dali_tf_input.records.tfrecord import frame_record
from dali_tf_input.storage.staging import Staging, replace

LEFT_OUT_NAME = "left_out.jsonl"
_OUR_FILE = re.compile(r"(train|validation|test)-\d{5}-of-\d{5}(\.idx)?")

# TF-slim: train-00000-of-00004; tfds: imagenet2012-train.tfrecord-00000-of-01024.
_SPLIT = re.compile(r"(?:^|[-_.])(train|val|test)(?:id|idation|ing)?[0-9]*(?=[-_.]|$)")

# Bytes per file if the number of files is not given: the middle of the 100 to 200 MB that
# TensorFlow's guide to TFRecords recommends.
_FILE_BYTES = 150_000_000
_SAMPLED_ITEMS = 128  # from which the mean size of a record is estimated
_CHUNK_ITEMS = 16  # handed to a process at a time
_LONGEST_CHUNK = 3600.0  # seconds
_FEW_ITEMS = 128  # so few are converted faster than another process imports TensorFlow


def find_split(file: str) -> str:
    """Returns the split in a file's name: "train" (the default), "validation" or "test"."""
    words = _SPLIT.findall(os.path.basename(file).lower())
    return {"val": "validation"}.get(words[-1], words[-1]) if words else "train"


@dataclass(frozen=True, kw_only=True)
class Split:
    """The items of one split; without `num_files` their size decides."""

    name: str
    items: Sequence[Any]
    num_files: int | None
    is_chosen: bool = False  # its items were held out here, not by the user


class Record(NamedTuple):
    """The data of an item's record, or None if it is left out; what was done, or why."""

    data: bytes | None
    source: str
    notes: tuple[str, ...] = ()
    label: Any = None  # of its class, if that is known
    digest: bytes = bytes(8)  # of the source of its image


MakeRecords = Callable[[list[Any]], list[Record]]
Result = Callable[[], list[Record]]  # waits for it


@dataclass(kw_only=True)
class Written:
    """What `write_splits` did."""

    num_files: int = 0
    size: int = 0
    shards: dict[str, list[SplitFile]] = field(default_factory=dict)
    first: bytes = b""  # a record
    records: dict[str, int] = field(default_factory=dict)
    notes: collections.Counter[str] = field(default_factory=collections.Counter)
    digests: "dict[str, array.array[int]]" = field(default_factory=dict)  # of each split's items
    common: list[str] = field(default_factory=list)  # what splits have in common, in words


def image_features(
    image: bytes, size: tuple[int, int], *, key: str, filename: str
) -> dict[str, FeatureValue]:
    """Returns one image's features under TF-slim's keys; `size` is its height and width."""
    return {
        key: image,
        "image/format": "RGB" if key == PIXELS_KEY else "JPEG",
        "image/height": size[0],
        "image/width": size[1],
        "image/filename": filename,
    }


def write_splits(
    folder: str,
    splits: Sequence[Split],
    make_records: MakeRecords,
    *,
    labels: Sequence[str] | None,
    make_card: Callable[[Written], Mapping[str, bytes]] | None = None,
    left_out: LeftOut | None = None,
    max_left_out: float = 1.0,
    num_processes: int | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
) -> Written:
    """Writes the files of every split and the label names, and renames the folder at the end.

    Items are converted in several processes and written by this one in order. So the files do not
    depend on the number of processes, and only a few chunks of items are in memory.

    Args:
      folder: a new or an empty folder; with `overwrite` also one that holds such a set.
      splits: what to write.
      make_records: returns the records of a list of items; it is pickled to run in other processes.
      labels: the name of each label, for ``labels.txt``; None writes no such file.
      make_card: returns further files that say what the set means, by their names.
      left_out: lists what is left out, and has what was left out before.
      max_left_out: the largest part of the images that may be left out.
      num_processes: the number of processes; None means one per core of this machine, at most one
        per 128 items.
      executor: runs the work instead, perhaps on other machines; None starts processes here.
      overwrite: whether to replace an earlier set.

    Raises:
      InputError: a split has fewer items than files, too many images are left out, or all of a
        split or of a class in it, or `folder` must not be written to.
    """
    folder = os.path.abspath(os.path.expanduser(folder))
    for split in splits:
        count, num_files = len(split.items), split.num_files
        if num_files is not None and not 1 <= num_files <= count:
            text = f"{count} {split.name} images cannot fill {num_files} files"
            raise InputError(f"{text}: ask for 1 to {count}.")
    check_folder(folder, overwrite=overwrite)
    with Staging(os.path.dirname(folder), "Name another folder.") as staging:
        staged = staging.path("set")
        os.mkdir(staged)
        num_items = sum(len(split.items) for split in splits)
        most = len(os.sched_getaffinity(0))
        if not executor:
            most = min(most, 1 + num_items // _FEW_ITEMS)
        num_workers = min(num_processes or most, -(-num_items // _CHUNK_ITEMS))
        written = Written()
        left_out = left_out or LeftOut(io.BytesIO())
        with Workers(make_records, num_workers, executor) as workers:
            make = functools.partial(_in_order, workers.submit, 4 * num_workers)
            for split in splits:
                _write_split(make, staged, split, written, left_out)
        written.common = _find_common(splits, written.digests)
        _check_left_out(left_out, sum(written.records.values()), max_left_out)
        files = dict(make_card(written)) if make_card else {}
        if METADATA_NAME in files:  # an earlier set's may hold keys of a user's own
            files[METADATA_NAME] = merge_metadata(folder, files[METADATA_NAME])
        if labels is not None:
            files[LABELS_NAME] = "".join(f"{name}\n" for name in labels).encode()
        for name, data in files.items():
            with open(os.path.join(staged, name), "xb") as stream:
                stream.write(data)
        if left_out.reasons:
            with open(os.path.join(staged, LEFT_OUT_NAME), "xb") as stream:
                left_out.copy_to(stream)
        _put_in_place(staging, folder)
    return written


class Workers:
    """Child processes that make records, or an executor's (a context manager).

    A chunk of items that ends a process is done again item by item, so an item that crashes a
    decoder is left out, and costs no other one.
    """

    def __init__(
        self, make_records: MakeRecords, num_workers: int, executor: Executor | None
    ) -> None:
        self._make_records, self._executor = make_records, executor
        self._local, self._children = threading.local(), list[Child]()
        self._pool = ThreadPoolExecutor(4 * num_workers if executor else num_workers)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def submit(self, items: list[Any]) -> Result:
        """Begins to make the records of items; returns the function that waits for them."""
        return self._pool.submit(self._make, items).result

    def _make(self, items: list[Any]) -> list[Record]:
        try:
            records: list[Record] = self._call(items)
            return records
        except ChildDiedError as error:
            if error.cause == "end":
                raise InputError(
                    f"A process that reads images died ({error}): there may be too little memory."
                ) from error
            if len(items) == 1:
                reason = f"decoding it failed: {error}"
                return [Record(None, name_item(items[0]), (reason,), label_of(items[0]))]
        return [record for item in items for record in self._make([item])]

    def _call(self, items: list[Any]) -> Any:
        if self._executor:
            call = functools.partial(call_apart, __version__, self._make_records, items)
            try:
                return self._executor.submit(call).result()
            except (InputError, ChildDiedError):
                raise
            except (Exception, CancelledError) as error:  # of the executor's own kinds
                raise explain_executor(error, name_item(items[0])) from error
        if not hasattr(self._local, "child"):
            self._local.child = Child()
            self._children.append(self._local.child)
        return self._local.child.call(self._make_records, items, seconds=_LONGEST_CHUNK)


def name_item(item: Any) -> str:
    """Returns the name of an item of a catalog: an image file, or a record of a file."""
    return str(item[1]) if isinstance(item[0], dict) else f"{item[0]} at byte {item[2]}"


def label_of(item: Any) -> Any:
    """Returns the class of an item, its name if it has one; None if it is not known."""
    features = item[0] if isinstance(item[0], dict) else {}
    return features.get("image/class/text", features.get("image/class/label"))


def _check_left_out(left_out: LeftOut, num_records: int, most: float) -> None:
    """Raises InputError if more than a part of the images is left out."""
    count, total = left_out.num_images, left_out.num_images + num_records
    if count > most * total:
        raise InputError(
            f"{count:,} of {total:,} images are left out, more than {most:.2%}, such as"
            f" {left_out.first}. Nothing was written. Repair them, or leave them out:"
            f" --max_left_out={math.ceil(1000 * count / total) / 1000:g}"
        )


def _write_split(
    make: Callable[[Sequence[Any]], Iterator[Record]],
    folder: str,
    split: Split,
    written: Written,
    left_out: LeftOut,
) -> None:
    """Writes the files of one split and adds to `written`. Empty files are dropped."""
    num_files = split.num_files or _choose_num_files(make, split.items)
    count, kept, lost = len(split.items), set[Any](), dict[Any, Record]()
    records = command.progress(make(split.items), what=f"writing {split.name}", total=count)
    paths, written.records[split.name] = [], 0
    shards = written.shards[split.name] = list[SplitFile]()
    digests = written.digests[split.name] = array.array("Q")
    for file_id in range(num_files):
        path, before = os.path.join(folder, f"{split.name}-{file_id}"), written.records[split.name]
        with open(path, "xb") as stream:
            for _ in range(count * file_id // num_files, count * (file_id + 1) // num_files):
                record = next(records)
                digests.frombytes(record.digest)
                if record.data is None:
                    reason = " ".join(record.notes)
                    left_out.add(record.source, reason, is_image=True, kind="unreadable")
                    lost.setdefault(record.label, record)
                else:
                    stream.write(frame_record(record.data))
                    written.first = written.first or record.data
                    written.notes.update(record.notes)
                    written.records[split.name] += 1
                    kept.add(record.label)
        if num_bytes := os.path.getsize(path):
            paths.append(path)
            shards.append(SplitFile(written.records[split.name] - before, num_bytes))
        else:
            os.unlink(path)
    if not paths:
        last = f"the last is {record.source}: {record.notes[0]}"
        raise InputError(f"Not one of the {count:,} {split.name} images can be read; {last}.")
    for label in lost.keys() - kept:
        bad = lost[label]
        problem = (
            f"not one of the {split.name} images of class {label} can be read; the first is"
            f" {bad.source}: {bad.notes[0]}"
        )
        if not (split.is_chosen and split.name == "validation"):
            raise InputError(f"{problem[0].upper()}{problem[1:]}.")
        print(f"warning: {problem}")
    for number, path in enumerate(paths):
        written.size += os.path.getsize(path)
        name = f"{split.name}-{number:05d}-of-{len(paths):05d}"
        os.replace(path, os.path.join(folder, name))
    written.num_files += len(paths)


def _find_common(splits: Sequence[Split], digests: "dict[str, array.array[int]]") -> list[str]:
    """Says how many images of a split are in another one, too: equal bytes, not looks."""
    found = []
    for one, other in itertools.combinations(splits, 2):
        mine, theirs = (np.array(digests[split.name], np.uint64) for split in (one, other))
        common = np.intersect1d(mine, theirs)
        places = np.flatnonzero(np.isin(theirs, common[common != 0]))  # 0: it cannot be read
        if len(places):
            (first,) = other.items[places[0] : places[0] + 1]
            count = f"{format_count(len(places), 'image')} of {other.name}"
            found.append(f"{count} in {one.name}, too, the first {name_item(first)}")
    return found


def check_folder(folder: str, *, overwrite: bool) -> None:
    """Checks that `folder` is new, empty, or holds nothing but an earlier set to be replaced.

    Raises:
      InputError: it is not.
    """
    if not os.path.lexists(folder):
        return
    if os.path.ismount(folder) or os.path.realpath(folder) == os.path.realpath("."):
        raise InputError(f"{folder} cannot be replaced by a folder: name a new one inside it.")
    if not os.path.isdir(folder) or os.path.islink(folder):
        raise InputError(f"{folder} is no folder: name another one.")
    names = os.listdir(folder)
    ours = {LEFT_OUT_NAME, MANIFEST_NAME, BAD_RECORDS_NAME, *find_card_files(folder)}
    for name in names:
        is_ours = name in ours or _OUR_FILE.fullmatch(name)
        if not is_ours or not os.path.isfile(os.path.join(folder, name)):
            text = f"{folder} holds {name}, which is no part of such a set"
            raise InputError(f"{text}: name a new folder.")
    if names and not overwrite:
        text = "name a new folder, or replace it with --overwrite"
        raise InputError(f"{folder} holds a set already: {text}.")


def print_written(
    folder: str, written: Written, num_classes: int | None, left_out: LeftOut | None = None
) -> None:
    """Says what was written and what to do with it."""
    rows = [(split, f"{format_count(count, 'image')}") for split, count in written.records.items()]
    if num_classes is not None:
        rows.append(("classes", f"{num_classes:,}"))
    rows.append(("files", f"{written.num_files:,}, {filesize.decimal(written.size)}, in {folder}"))
    rows += [(note, format_count(count, "image")) for note, count in written.notes.most_common()]
    rows += [("shared", words) for words in written.common]
    if left_out and left_out.reasons:
        reasons = ", ".join(f"{count:,} {why}" for why, count in left_out.reasons.most_common())
        count = left_out.reasons.total()
        where = f"listed in {os.path.join(folder, LEFT_OUT_NAME)}"
        rows.append(("left out", f"{format_count(count, 'file')} ({reasons}), {where}"))
    print_rows(rows)
    print(f"next: {index_command(os.path.join(folder, '*-of-*'))}")


def _in_order(
    submit: Callable[[list[Any]], Result], max_ahead: int, items: Sequence[Any]
) -> Iterator[Record]:
    """Yields the record of each item, in order, working `max_ahead` chunks ahead."""
    ahead: collections.deque[Result] = collections.deque()
    for start in range(0, len(items), _CHUNK_ITEMS):
        ahead.append(submit([*items[start : start + _CHUNK_ITEMS]]))
        if len(ahead) >= max_ahead:
            yield from ahead.popleft()()
    while ahead:
        yield from ahead.popleft()()


def _choose_num_files(
    make: Callable[[Sequence[Any]], Iterator[Record]], items: Sequence[Any]
) -> int:
    """Returns the number of files of 100 to 200 MB, by the records of sampled items."""
    step = max(1, len(items) // _SAMPLED_ITEMS)
    sizes = [len(record.data or b"") for record in make(items[::step])]
    mean = sum(sizes) / len(sizes)
    return max(1, min(len(items), round(mean * len(items) / _FILE_BYTES)))


def _put_in_place(staging: Staging, folder: str) -> None:
    """Renames the finished set to `folder`. An earlier set is first renamed aside."""
    if os.path.isdir(folder) and os.listdir(folder):
        aside = f"{folder}.replaced-{secrets.token_hex(4)}"
        try:
            replace({folder: aside, staging.path("set"): folder})  # both are on the disk before
        except OSError:
            if os.path.exists(aside) and not os.path.exists(folder):
                os.replace(aside, folder)
            raise
    else:
        staging.commit("set", folder)
    # That of this run, and of runs that were killed here.
    for path in glob.glob(glob.escape(folder) + ".replaced-*"):
        if re.fullmatch(r".*\.replaced-[0-9a-f]{8}", path, re.DOTALL):
            os.replace(path, staging.path(os.path.basename(path)))  # removed with it, unseen
