"""Turns images into TFRecords with TF-slim's keys, or TFRecords into better ones.

SOURCE is a folder, a table, or TFRecords. A folder, local or in a store, has one sub-folder of
images per class, or two folders of these, train and val, which are kept as splits. A table (.csv or
.jsonl) has the path of each image and any of label (an integer or a name), labels (integers,
separated by spaces or a JSON list), values (numbers) and mask (the path of a PNG). TFRecords are
named by a path or a pattern, and are indexed, or compressed (GZIP, ZLIB).

The command writes OUT/train-00000-of-00004, ..., OUT/validation-00000-of-00001 and OUT/labels.txt
(line i + 1 names label i; labels follow the sorted order of the sub-folders, from 0). Records are
shuffled over all files by --seed.

TFRecords keep their splits, by name: validation-*, or tfds' *-validation.tfrecord-*; all others are
training. Files of a test split among others are refused.

JPEGs in RGB or grayscale keep their bytes if the decoders of training accept them; --resize_shorter
shrinks larger ones. PNG, WebP, BMP, TIFF and GIF become JPEG, CMYK becomes RGB. What cannot be
decoded is skipped and listed in OUT/unreadable_images.jsonl. All other features of TFRecords are
kept.

usage: dali-tf-input convert [flags] SOURCE OUT

example: dali-tf-input convert --resize_shorter=320 photos/ records/
"""

import array
import contextlib
import functools
import json
import os
import random
import tempfile
from typing import get_args

from dali_tf_input import InputError, Records
from dali_tf_input.cli import command
from dali_tf_input.cli.convert import folders, records, table, writer
from dali_tf_input.cli.convert.images import Conversion
from dali_tf_input.cli.convert.inflate import inflate_files
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.records.checks import Decoder
from dali_tf_input.records.class_names import find_class_names
from dali_tf_input.records.paths import find_files
from dali_tf_input.storage.objects import is_url

FLAGS = command.Flags()
_VALIDATION_FRACTION = FLAGS.number(
    "validation_fraction", None, "Part of each class for validation; 0.1, or TFRecords' own splits."
)
_NUM_FILES = FLAGS.integer("num_files", None, "Files of the train split; else of about 150 MB.", 1)
_NUM_VALIDATION_FILES = FLAGS.integer("num_validation_files", None, "Of the validation split.", 1)
_SEED = FLAGS.integer("seed", 0, "Seed of the shuffle and of the choice for validation.")
_RESIZE_SHORTER = FLAGS.integer("resize_shorter", None, "Shrink the shorter side to this.", 1)
_QUALITY = FLAGS.integer("quality", 95, "JPEG quality of images that are re-encoded, in [1, 100].")
_STORE = FLAGS.choice(
    "store", "jpeg", ["jpeg", "pixels"], "pixels: decoded, larger, and read several times as fast."
)
_APPLY_ORIENTATION = FLAGS.boolean("apply_orientation", False, "Turn images upright by EXIF.")
_DECODER = FLAGS.choice(
    "decoder", "both", [*get_args(Decoder), "none"], "What must accept images whose bytes are kept."
)
_SKIP_UNREADABLE = FLAGS.boolean(
    "skip_unreadable", False, "Leave out class folders that hold no image, instead of stopping."
)
_NUM_PROCESSES = FLAGS.integer(
    "num_processes", None, "Processes; else one per core, and fewer for few images.", 1
)
_DASK = FLAGS.string("dask", None, "Address of a Dask scheduler, tcp://host:8786, to work there.")
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace OUT if it holds such a set already.")
_IMAGE_KEY = FLAGS.string("image_key", None, "Feature key of the image in TFRecords; else found.")
_INDEX_DIR = FLAGS.string("index_dir", None, "Folder of TFRecords' indexes; else beside each file.")


def main(arguments: list[str]) -> int:
    """Makes the set; returns the exit code."""
    if len(arguments) != 2:
        got = f"got {len(arguments)} arguments"
        raise InputError(f"Name the folder of images and the folder to write to, {got}.")
    fraction = _VALIDATION_FRACTION.value
    if not 0 <= (fraction or 0) < 1:
        raise InputError(f"`validation_fraction` must be in [0, 1), got {fraction}.")
    if not 1 <= _QUALITY.value <= 100:
        raise InputError(f"`quality` must be in [1, 100], got {_QUALITY.value}.")
    source, out = map(os.path.expanduser, arguments)
    if is_url(out):
        raise InputError(f"{out}: a set is written to a local folder, and copied from there.")
    writer.check_folder(os.path.abspath(out), overwrite=_OVERWRITE.value)
    flags = (_RESIZE_SHORTER, _QUALITY, _APPLY_ORIENTATION, _DECODER, _STORE)
    conversion = Conversion(*(flag.value for flag in flags))
    kept_validation = array.array("Q")  # records of a validation split that stays what it is
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        catalog = os.path.join(folder, "catalog")
        labels: list[str] | None
        if folders.is_folder(source):
            shared = {"skip_empty": _SKIP_UNREADABLE.value, "validation_fraction": fraction}
            labels, groups, kept_validation = folders.list_images(source, catalog, **shared)
            make_records = functools.partial(records.make_records_of_images, conversion, source)
            fraction = 0.1 if fraction is None and not kept_validation else fraction
        elif source.endswith(table.SUFFIXES):
            labels, rows = table.list_rows(source, catalog)
            groups = [rows]
            folder_of_table = os.path.dirname(os.path.abspath(source))
            convert_images = functools.partial(records.make_records_of_images, conversion)
            make_records = functools.partial(convert_images, folder_of_table)
            fraction = 0.1 if fraction is None else fraction
        else:
            keys = {flag.name: flag.value for flag in (_INDEX_DIR, _IMAGE_KEY)}
            # As large as what it replaces, so beside it.
            beside = os.path.dirname(os.path.abspath(out))
            os.makedirs(beside, exist_ok=True)
            inflated = tempfile.TemporaryDirectory(dir=beside, prefix=".inflated-")
            plain = inflate_files(source, stack.enter_context(inflated))
            dataset = Records.from_files(plain, **keys)
            names = find_class_names(os.path.dirname(find_files(source)[0]))
            labels = [*names] if names else None
            if os.path.realpath(out) in map(os.path.realpath, map(os.path.dirname, dataset.paths)):
                text = "holds the TFRecords to be read: name another folder to write to"
                raise InputError(f"{out} {text}.")
            train, validation = list_records(dataset, catalog)
            convert = records.make_records_of_records
            make_records = functools.partial(convert, conversion, dataset.image_key)
            groups = [train + validation]
            if fraction is None:  # also where all is for validation
                groups, kept_validation = [train] if train else [], validation
        train, validation = split_items(groups, kept_validation, fraction or 0.0, _SEED.value)
        numbers = {"train": _NUM_FILES.value, "validation": _NUM_VALIDATION_FILES.value}
        splits = [
            writer.Split(name=name, items=records.Catalog(catalog, starts), num_files=numbers[name])
            for name, starts in (("train", train), ("validation", validation))
            if starts
        ]
        shared = {"num_processes": _NUM_PROCESSES.value, "overwrite": _OVERWRITE.value}
        shared |= {"executor": stack.enter_context(connect_dask(_DASK.value)), "labels": labels}
        written = writer.write_splits(out, splits, make_records, **shared)
    writer.print_written(out, written, None if labels is None else len(labels))
    return 0


def list_records(dataset: Records, catalog: str) -> "tuple[array.array[int], array.array[int]]":
    """Writes a line [file, etag or None, offset, size] per record to the file `catalog`.

    Returns:
      Where the lines start: of the records of training and of validation, by the names of the
      files.

    Raises:
      InputError: files of a test split are among others, and would become training data.
    """
    splits = {file: writer.find_split(file) for file in dataset.paths}
    tests = [file for file, split in splits.items() if split == "test"]
    if tests and len(tests) < len(splits):
        others = f"{len(splits) - len(tests):,} of {len(splits):,} files are not"
        raise InputError(
            f"{tests[0]} is of a test split by its name, and {others}: its records would become"
            " training data. Name only the files of training and validation."
        )
    train, validation = array.array("Q"), array.array("Q")
    with open(catalog, "xb") as stream:
        for number, file in enumerate(dataset.files):
            starts = validation if splits[file.path] == "validation" else train
            for extent in dataset.index(number).tolist():
                starts.append(stream.tell())
                stream.write(json.dumps([file.path, file.etag, *extent]).encode() + b"\n")
    return train, validation


def split_items(
    groups: "list[array.array[int]]",
    kept_validation: "array.array[int]",
    validation_fraction: float,
    seed: int,
) -> "tuple[array.array[int], array.array[int]]":
    """Shuffles the items and divides them into a train split and a validation split.

    Validation gets `kept_validation` and, from each group, `validation_fraction` of its items,
    rounded, but never all of them.
    """
    generator = random.Random(seed)
    train, validation = array.array("Q"), kept_validation[:]
    for items in groups:
        generator.shuffle(items)
        count = min(round(len(items) * validation_fraction), len(items) - 1)
        validation += items[:count]
        train += items[count:]
    generator.shuffle(train)
    generator.shuffle(validation)
    return train, validation
