"""Indexes TFRecord files for DALI: one line `offset size`, in bytes, for each sound record, and a manifest of what they hold.

usage: index_tfrecords.py [--verify=framing|crc|schema|decode] [--on_bad=error|skip] [--max_bad_fraction=0.01] [--index_dir=DIR]
                          [--image_key=KEY] [--label_key=KEY] [--label_offset=0] [--num_classes=N] [--decoder=both]
                          [--max_pixels=N] [--num_processes=N] [--force] FILE_OR_GLOB...

Each index is written beside its file as <file>.idx, or under --index_dir, and the manifest, index_manifest.json, with them. Files
that stand indexed and have not changed are passed over. With --on_bad=error every fault is named, files with faults are not
indexed, the others are, and the exit code is 1. With --on_bad=skip the indexes leave bad records out and bad_records.jsonl lists
them.
"""

import os
import sys

from absl import flags
from rich import filesize

import console
from dali_tf_input import Checks, FaultsError, IndexReport, build_index
from dali_tf_input.checks import MAX_PIXELS
from dali_tf_input.files import BAD_RECORDS_NAME, index_command
from dali_tf_input.summary import KEY_PRESETS, LEVELS, Images, Labels, Summary

_INDEX_DIR = flags.DEFINE_string("index_dir", None, "Folder for the index files; beside each TFRecord file by default.")
_VERIFY = flags.DEFINE_enum("verify", "framing", list(LEVELS), "How deep each record is looked into.")
_ON_BAD = flags.DEFINE_enum("on_bad", "error", ["error", "skip"], "Whether bad records are an error or are left out.")
_MAX_BAD_FRACTION = flags.DEFINE_float("max_bad_fraction", 0.01, "With --on_bad=skip: the largest part that may be left out.")
_FORCE = flags.DEFINE_boolean("force", False, "Go through every file, also those that stand indexed.")
_IMAGE_KEY = flags.DEFINE_string("image_key", None, "Feature key of the encoded image; TF-slim's or tfds' by default.")
_LABEL_KEY = flags.DEFINE_string("label_key", None, "Feature key of the integer label; TF-slim's or tfds' by default.")
_LABEL_OFFSET = flags.DEFINE_integer("label_offset", 0, "Label of the first class as stored; 1 for TF-slim's ImageNet.")
_NUM_CLASSES = flags.DEFINE_integer("num_classes", None, "Number of classes, to check the labels against.")
_DECODER = flags.DEFINE_enum("decoder", "both", ["both", "dali", "tf_data"], "What decodes at --verify=decode.")
_MAX_PIXELS = flags.DEFINE_integer("max_pixels", MAX_PIXELS, "Height times width above which an image is bad.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes that go through files; one for each core by default.")

_CHECKS = (_VERIFY, _MAX_BAD_FRACTION, _IMAGE_KEY, _LABEL_KEY, _LABEL_OFFSET, _NUM_CLASSES, _DECODER, _MAX_PIXELS)


def main(patterns: list[str]) -> int:
    checks = Checks(
        verify=_VERIFY.value,
        image_key=_IMAGE_KEY.value,
        label_key=_LABEL_KEY.value,
        label_offset=_LABEL_OFFSET.value,
        num_classes=_NUM_CLASSES.value,
        decoder=_DECODER.value,
        max_pixels=_MAX_PIXELS.value,
    )
    with console.IndexProgress() as progress:
        try:
            report, refusal = (
                build_index(
                    patterns,
                    checks,
                    index_dir=_INDEX_DIR.value,
                    on_bad=_ON_BAD.value,
                    max_bad_fraction=_MAX_BAD_FRACTION.value,
                    force=_FORCE.value,
                    num_processes=_NUM_PROCESSES.value,
                    on_fault=progress.print_fault if _ON_BAD.value == "error" else progress.print_unreadable,
                    on_progress=progress.update,
                ),
                None,
            )
        except FaultsError as error:
            report, refusal = error.report, error
    print_report(report)
    if refusal:
        print(f"error: {refusal}. {remedy(patterns)}", file=sys.stderr)
        return 1
    return 0


def remedy(patterns: list[str]) -> str:
    """Says what to do about faults."""
    if _ON_BAD.value == "skip":
        return (
            f"The faults of files that are indexed stand in {BAD_RECORDS_NAME}; --on_bad=error names those of the others. "
            "Mend the files, or allow more with --max_bad_fraction."
        )
    flags_given = [flag for flag in _CHECKS if flag.value != flag.default]
    arguments = [*(f"--{flag.name}={flag.value}" for flag in flags_given), "--on_bad=skip"]
    command = index_command(patterns, index_dir=_INDEX_DIR.value, arguments=arguments)
    return f"Those files were not indexed. Mend them, or leave the bad records out: {command}"


def print_report(report: IndexReport) -> None:
    """Prints what was done and what the files hold."""
    done = [f"{report.written:,} indexed"]
    done += [f"{report.unchanged:,} unchanged"] if report.unchanged else []
    done += [f"{report.removed:,} gone"] if report.removed else []
    done += [f"{report.bad_files:,} with faults"] if report.bad_files else []
    rows = [("files", ", ".join(done))]
    if report.summary.files:
        rows += describe(report.summary)
    console.print_rows(rows)
    if report.faults:
        print()
        console.print_table(("fault", "how often"), [(reason, f"{count:,}") for reason, count in report.faults.items()])


def describe(summary: Summary) -> list[tuple[str, str]]:
    """Returns the rows that say what indexed files hold."""
    verified = [f"{level} {console.count(files, 'file')}" for level, files in summary.verified.items()]
    rows = [
        ("records", f"{summary.records:,}"),
        ("size", filesize.decimal(summary.size)),
        ("verified", ", ".join(verified)),
    ]
    if summary.left_out:
        part = summary.left_out / (summary.left_out + summary.records)
        rows.append(("left out", f"{console.count(summary.left_out, 'record')} ({part:.2%}), listed in {BAD_RECORDS_NAME}"))
    if summary.features:
        rows.append(("features", describe_features(summary)))
    if summary.labels:
        rows.append(("labels", describe_labels(summary.labels)))
    if summary.images:
        rows.append(("images", describe_images(summary.images)))
    return rows


def describe_features(summary: Summary) -> str:
    """Names the feature keys: by the writer whose they are, and those that not every record holds."""
    preset = next((name for name, keys in KEY_PRESETS.items() if all(key in summary.features for key in keys)), None)
    text = f"{preset}: " if preset else ""
    keys = list(summary.features)
    text += ", ".join(keys[:12]) + (f" and {len(keys) - 12:,} more" if len(keys) > 12 else "")
    for key, (file, record) in list(summary.without.items())[:3]:
        text += f"; {key} not in all, first missing in record {record:,} of {os.path.basename(file)}"
    return text


def describe_labels(labels: Labels) -> str:
    """Says which labels there are."""
    first, last = labels.range
    classes = f"{labels.num_classes:,} classes" if labels.num_classes else "more classes than are counted"
    hint = " (train with --label_offset=1)" if first == 1 and _LABEL_OFFSET.value == 0 else ""
    return f"{first:,} to {last:,}, {classes}{hint}"


def describe_images(images: Images) -> str:
    """Says how large images are, as height x width, and of which formats."""
    (median_height, median_width), (height, width) = images.median_size, images.largest_size
    formats = ", ".join(f"{name} {count:,}" for name, count in images.formats.items())
    return f"median {median_height}x{median_width}, largest height {height:,}, largest width {width:,}; {formats}"


if __name__ == "__main__":
    console.run(main)
