"""Shows what records hold, and says what would hurt training.

It reports classes, image sizes, bytes, and duplicate images: within a set, and across two sets
(each --files names a set, such as training and validation). Bytes and labels come from the index
(with --verify=schema); for the rest each image is read, but not decoded. The file named by --json
has the ids of all reported records, for records.exclude(ids).

example: dali-tf-input explore --files='path/train-*' --files='path/validation-*' --out=page.html
"""

import concurrent.futures
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dali_tf_input import InputError, Records
from dali_tf_input.cli import command
from dali_tf_input.cli.explore.findings import Finding, Set, find_problems, summarize
from dali_tf_input.cli.explore.page import write_page
from dali_tf_input.cli.flags import FileFlags
from dali_tf_input.cli.label_names import find_names
from dali_tf_input.index.decoders import read_header
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.schema import BadImage, find_size

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_OUT = FLAGS.string("out", None, "File for a page with plots and thumbnails, a .html.")
_JSON = FLAGS.string("json", None, "File for the results, with the ids of records.")
_SAMPLE = FLAGS.integer("sample", None, "Look at so many random records of each set; else all.", 1)

_THREADS, _BATCH = 8, 1024


def main(arguments: list[str]) -> int:
    """Explores; returns the exit code."""
    command.check_no_arguments(arguments)
    command.check_writable(_OUT, suffix=".html")
    command.check_writable(_JSON, suffix=".json")
    if not _FILES.files.value:
        raise InputError("Name the TFRecord files: --files='path/train-*'")
    sets = [examine(pattern) for pattern in _FILES.files.value]
    names = [*(sets[0].records.class_names or find_names(sets[0].records.paths[0]))]
    command.print_table(["", *(one.name for one in sets)], summarize(sets, names))
    findings = [*find_problems(sets, names)]
    print()
    for finding in findings:
        print(f"- {finding.text}")
    if not findings:
        print("Nothing that would hurt training was found.")
    if _OUT.value:
        write_page(_OUT.value, sets, names, findings)
        print(f"\npage in {_OUT.value}")
    command.write_json(_JSON, make_report(sets, findings))
    return 0


def examine(pattern: str) -> Set:
    """Reads what is known of the records of a set."""
    records = _FILES.dataset([pattern])
    if _SAMPLE.value and _SAMPLE.value < records.num_records:
        records = records.take(_SAMPLE.value)
    try:
        labels = records.labels - _FILES.label_offset.value
    except InputError:
        labels = None
    extents = np.concatenate([records.index(number) for number in range(len(records.files))])
    looks = command.progress(_look_at_all(records), what=pattern, total=records.num_records)
    found = [*looks]
    return Set(
        name=pattern,
        records=records,
        labels=labels,
        sizes=np.array([size for size, _ in found], np.int64),
        sums=np.array([image_hash for _, image_hash in found], np.uint64),
        num_bytes=extents[:, 1],
    )


def _look_at_all(records: Records) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields height, width and hash of each image."""

    def look(record: int) -> tuple[tuple[int, int], int]:
        features = decode_example(records.read_data(record))
        data = features[records.image_key][1][0]
        size = find_size(features) if records.stores_pixels else None
        if size is None:
            try:
                _, height, width = read_header(data)
                size = (height, width)
            except BadImage:
                size = (0, 0)
        return size, int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, records.num_records, _BATCH):  # not all of a million at once
            yield from pool.map(look, records.ids[start : start + _BATCH].tolist())


def make_report(sets: list[Set], findings: list[Finding]) -> dict[str, Any]:
    """Returns the findings as JSON values, with the ids of their records by set."""
    report: dict[str, Any] = {"sets": {}, "findings": []}
    for one in sets:
        report["sets"][one.name] = {
            "records": one.records.num_records,
            "bytes": int(one.num_bytes.sum()),
            "median_size": np.median(one.sizes, 0).tolist(),
        }
        if one.labels is not None:
            classes, counts = np.unique(one.labels, return_counts=True)
            pairs = zip(classes.tolist(), counts.tolist(), strict=True)
            report["sets"][one.name]["classes"] = {str(label): count for label, count in pairs}
    for finding in findings:
        groups = [
            [{"set": one.name, "id": int(one.records.ids[place])} for one, place in group]
            for group in finding.groups
        ]
        report["findings"].append({"name": finding.name, "text": finding.text, "groups": groups})
    return report
