"""Summarizes a dataset and reports likely problems.

usage: dali-tf-input explore [flags] --files=FILE_OR_PATTERN...

It reports classes, image sizes, bytes, and duplicate images: within a set, and across two sets
(each --files names a set, such as training and validation). Bytes and labels come from the index
(with --verify=schema); for the rest each image is read, but not decoded. Duplicates are identical
files; --near_duplicates finds pictures that were saved again, resized, or slightly changed, too.
The file named by --json names all reported records by their file and their number in it, as
records.exclude takes them.

example: dali-tf-input explore --files='path/train-*' --files='path/validation-*' --out=page.html
"""

import concurrent.futures
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from dali_tf_input import InputError, Records
from dali_tf_input.cli import command
from dali_tf_input.cli.explore.findings import Finding, Set, find_problems, summarize
from dali_tf_input.cli.explore.near import check_installed, hash_picture
from dali_tf_input.cli.explore.page import write_page
from dali_tf_input.cli.flags import FileFlags
from dali_tf_input.index.decoders import read_header
from dali_tf_input.records.checks import Checks, InvalidRecord, check_record
from dali_tf_input.records.class_names import shift_names
from dali_tf_input.records.orientation import UPRIGHT, find_orientation, is_transposed

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_OUT = FLAGS.string("out", None, "File for a page with plots and thumbnails, a .html.")
_JSON = FLAGS.string("json", None, "File for the results, with the names of records.")
_SAMPLE = FLAGS.integer("sample", None, "Random records to read from each set (default: all).", 1)
_NEAR = FLAGS.boolean(
    "near_duplicates", False, "Also find near duplicates, decoding each image (needs imagehash)."
)

_THREADS, _BATCH = 8, 1024


def main(arguments: list[str]) -> int:
    """Explores; returns the exit code."""
    command.check_no_arguments(arguments)
    command.check_writable(_OUT, suffix=".html")
    command.check_writable(_JSON, suffix=".json")
    if not _FILES.files.value:
        raise InputError("Name the TFRecord files: --files='path/train-*'")
    if _NEAR.value:
        check_installed()
    sets = [examine(pattern) for pattern in _FILES.files.value]
    command.print_table(["", *(one.name for one in sets)], summarize(sets))
    findings = [*find_problems(sets)]
    print()
    for finding in findings:
        print(f"- {finding.text}")
    if not findings:
        print("Nothing that would hurt training was found.")
    if _OUT.value:
        write_page(_OUT.value, sets, findings)
        print(f"\npage in {_OUT.value}")
    command.write_json(_JSON, make_report(sets, findings))
    return 0


def examine(pattern: str) -> Set:
    """Reads what is known of the records of a set."""
    whole = records = _FILES.dataset([pattern])
    if _SAMPLE.value and _SAMPLE.value < records.num_records:
        records = records.sample(_SAMPLE.value)
    offset = _FILES.label_offset.value
    try:
        labels, all_labels = records.labels - offset, whole.labels - offset
    except InputError:
        labels = all_labels = None
    if all_labels is not None and len(all_labels) and all_labels.min() < 0:
        lowest = all_labels.min() + offset
        raise InputError(
            f"`label_offset` {offset} is above the lowest label of {pattern}, {lowest}."
        )
    names = shift_names(records.class_names, _FILES.label_offset.value)
    extents = np.concatenate([records.index(number) for number in range(len(records.files))])
    looks = command.progress(_look_at_all(records), what=pattern, total=records.num_records)
    sizes, turned, hashes, pictures, problems = zip(*looks, strict=True)
    return Set(
        name=pattern,
        records=records,
        num_all=whole.num_records,
        labels=labels,
        all_labels=all_labels,
        sizes=np.array(sizes, np.int64),
        num_turned=sum(turned),
        hashes=np.array(hashes, np.uint64),
        pictures=np.array(pictures, np.uint64) if _NEAR.value else None,
        problems=problems,
        num_bytes=extents[:, 1],
        names=names or (),
    )


Look = tuple[tuple[int, int], bool, int, int, str]


def _look_at_all(records: Records) -> Iterator[Look]:
    """Yields for each image height and width as shown, whether EXIF turns it, and its hash.

    Then comes the hash of the picture, if that was asked for, and why it cannot be used, or "".
    """
    checks = Checks(image_key=records.image_key, label=None)

    def look(record: int) -> Look:
        data, orientation, picture = b"", UPRIGHT, 0
        try:
            data = records.read_data(record)
            features, image = check_record(data, checks, read_header)
            data = features[records.image_key][1][0]
            size, problem = image[1:] if image else (0, 0), ""
            orientation = find_orientation(data)
            size = size[::-1] if is_transposed(orientation) else size
            if _NEAR.value:
                try:
                    picture = hash_picture(data)
                except Exception as error:  # Pillow's decoders raise nearly anything
                    problem = f"damaged: {error}"
        except InvalidRecord as bad:
            size, problem = (0, 0), bad.reason
        except (InputError, OSError) as error:
            size, problem = (0, 0), f"unreadable: {error}"
        digest = hashlib.blake2b(data or str(record).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        return size, orientation != UPRIGHT, number, picture, problem

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, records.num_records, _BATCH):  # not all of a million at once
            yield from pool.map(look, records.ids[start : start + _BATCH].tolist())


def make_report(sets: list[Set], findings: list[Finding]) -> dict[str, Any]:
    """Returns the findings as JSON values, with the ids of their records by set."""
    report: dict[str, Any] = {"sets": {}, "findings": []}
    for one in sets:
        report["sets"][one.name] = {
            "records": one.num_all,
            "sample": one.records.num_records,
            "bytes": int(one.num_bytes.sum()),
            "median_size": np.median(one.sizes, 0).tolist(),
        }
        if one.all_labels is not None:
            classes, counts = np.unique(one.all_labels, return_counts=True)
            pairs = zip(classes.tolist(), counts.tolist(), strict=True)
            report["sets"][one.name]["classes"] = {str(label): count for label, count in pairs}
    for finding in findings:
        groups = [[_name_record(one, place) for one, place in group] for group in finding.groups]
        report["findings"].append({"name": finding.name, "text": finding.text, "groups": groups})
    return report


def _name_record(one: Set, place: int) -> dict[str, Any]:
    """Returns what tells a record from all others: its set, its file and its number there."""
    file, number, _, _ = one.records.locate(int(one.records.ids[place]))
    return {"set": one.name, "file": os.path.basename(file), "record": number}
