"""Turns images into TFRecords with TF-slim's keys, or TFRecords into better ones.

SOURCE is a folder, a table, or TFRecords. A folder, local or in a store, has one sub-folder of
images per class, of any depth, or folders of these for the splits: train, val and test. A table
(.csv, .tsv or .jsonl) has the path of each image and any of label (an integer or a name), labels
(integers separated by spaces, or names separated by "|", or a JSON list), values (numbers), mask
(the path of a PNG), split (train, val or test) and group. TFRecords are named by a path or a
pattern, and are indexed, or compressed (GZIP, ZLIB).

The command writes OUT/train-00000-of-00004, ..., OUT/validation-00000-of-00001 and OUT/labels.txt
(line i + 1 names label i; labels follow the sorted order of the names, from 0, or --labels).
Records are shuffled over all files by --seed.

Without splits of its own, a part of each class is held out for validation. The side of an image
depends on its bytes, or on its group, and on --seed: so it keeps its side when the set grows, and
neither copies of an image nor the images of a group are divided. A small class whose images all
fall on one side has one moved, which is said; --overwrite keeps it there, and --like keeps the
sides of any earlier set.
TFRecords keep their splits, by name: validation-*, or tfds' *-validation.tfrecord-*; test likewise;
all others are training.

JPEGs in RGB or grayscale keep their bytes if the decoders of training accept them; --resize_shorter
shrinks larger ones. PNG, WebP, BMP, TIFF and GIF become JPEG, CMYK becomes RGB, and all images are
turned upright by their EXIF orientation, with their masks. All other features of TFRecords are
kept. What is left out is counted, and listed in OUT/left_out.jsonl.

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
from collections.abc import Sequence
from typing import Any, get_args

from dali_tf_input import InputError, Records
from dali_tf_input.cli import command
from dali_tf_input.cli.card import describe_feature
from dali_tf_input.cli.convert import folders, records, table, writer
from dali_tf_input.cli.convert.images import Conversion
from dali_tf_input.cli.convert.inflate import inflate_files
from dali_tf_input.cli.convert.listing import LeftOut, Listed, check_numbered
from dali_tf_input.cli.convert.sides import Chosen, Digest, KnownSides, Sides, choose_sides
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.index.decode import choose_decoder
from dali_tf_input.records.card import METADATA_NAME, Described, make_card, read_facts
from dali_tf_input.records.checks import Checks, Decoder
from dali_tf_input.records.class_names import (
    LABELS_NAME,
    MAIN_KEYS,
    find_class_names,
    find_difference,
    read_class_names,
)
from dali_tf_input.records.example import decode_example
from dali_tf_input.storage.objects import is_url, local_path

FLAGS = command.Flags()
_VALIDATION_FRACTION = FLAGS.number(
    "validation_fraction",
    None,
    "Fraction held out for validation (default: the source's splits, or 0.1).",
)
_SPLIT = FLAGS.choice(
    "split", None, ["train", "validation", "test"], "Put all images into this split."
)
_LABELS = FLAGS.string("labels", None, "File of class names, whose order numbers the classes.")
_LABELS_GROW = FLAGS.boolean("labels_grow", False, "Number new classes after those of --labels.")
_CLASS_DEPTH = FLAGS.integer(
    "class_depth", None, "Folder levels that name a class: 1, or 2 for animals/dog.", 1
)
_KEEP = FLAGS.list("keep", None, "More columns of a table to store as features.")
_DROP = FLAGS.list("drop", None, "Columns of a table to leave out.")
_GROUP = FLAGS.string("group", "group", "Column of a table whose equal values stay together.")
_LIKE = FLAGS.string("like", None, "Pattern of an indexed set whose images keep their splits.")
_MAX_LEFT_OUT = FLAGS.number(
    "max_left_out", 0.01, "Largest fraction of images that may be left out, in [0, 1]."
)
_RENUMBER = FLAGS.boolean(
    "renumber", False, "With --overwrite: allow classes to get other numbers."
)
_NUM_FILES = FLAGS.integer("num_files", None, "Training files (default: about 150 MB each).", 1)
_NUM_VALIDATION_FILES = FLAGS.integer(
    "num_validation_files", None, "Validation files (default: about 150 MB each).", 1
)
_SEED = FLAGS.integer("seed", 0, "Random seed of the shuffle and of the split.")
_RESIZE_SHORTER = FLAGS.integer(
    "resize_shorter", None, "Shrink larger images to this shorter side, in pixels.", 1
)
_QUALITY = FLAGS.integer("quality", 95, "JPEG quality of images that are re-encoded, in [1, 100].")
_STORE = FLAGS.choice(
    "store",
    "jpeg",
    ["jpeg", "pixels"],
    "pixels: store decoded images, larger but much faster to read.",
)
_KEEP_ORIENTATION = FLAGS.boolean(
    "keep_orientation", False, "Do not turn images upright: they keep their EXIF orientation."
)
_MASK_FRAME = FLAGS.choice(
    "mask_frame", None, ["shown", "stored"], "Orientation of masks whose size does not tell it."
)
_MASK_KEY = FLAGS.string("mask_key", table.KEYS["mask"], "Feature key of the mask in TFRecords.")
_KEEP_FEATURES = FLAGS.list(
    "keep_features", None, "Features that hold positions in images, to keep unchanged."
)
_DECODER = FLAGS.choice(
    "decoder",
    "both",
    [*get_args(Decoder), "none"],
    "Decoders that an image must pass for its bytes to be kept.",
)
_SKIP_UNREADABLE = FLAGS.boolean(
    "skip_unreadable", False, "Accept class folders without images; they keep their numbers."
)
_NUM_PROCESSES = FLAGS.integer(
    "num_processes", None, "Worker processes (default: one per core, fewer for few images).", 1
)
_DASK = FLAGS.string("dask", None, "Dask scheduler to run on, tcp://host:8786.")
_OVERWRITE = FLAGS.boolean(
    "overwrite", False, "Replace OUT if it holds a set that this command made."
)
_IMAGE_KEY = FLAGS.string(
    "image_key", None, "Feature key of the image in TFRecords (default: detected)."
)
_INDEX_DIR = FLAGS.string(
    "index_dir", None, "Folder of the TFRecords' indexes (default: beside each file)."
)


_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".7z", ".rar")


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
    if not 0 <= _SEED.value < 2**31:
        raise InputError(f"`seed` must be in [0, 2**31), got {_SEED.value}.")
    if not 0 <= _MAX_LEFT_OUT.value <= 1:
        raise InputError(f"`max_left_out` must be in [0, 1], got {_MAX_LEFT_OUT.value}.")
    if _SPLIT.value and fraction:
        raise InputError("All is of --split: leave out --validation_fraction.")
    if _SPLIT.value and _LIKE.value:
        raise InputError("All is of --split, and nothing is divided: leave out --like.")
    source, out = map(os.path.expanduser, arguments)
    if is_url(out):
        raise InputError(f"{out}: a set is written to a local folder, and copied from there.")
    if os.path.realpath(out).startswith(os.path.join(os.path.realpath(source), "")):
        text = f"{out} is inside {source}, and would be a part of it: name another folder"
        raise InputError(f"{text} to write to.")
    if source.lower().endswith(_ARCHIVES) and os.path.isfile(source):
        raise InputError(f"{source} is an archive: unpack it, and name the folder.")
    writer.check_folder(os.path.abspath(out), overwrite=_OVERWRITE.value)
    flags = (_RESIZE_SHORTER, _QUALITY, _KEEP_ORIENTATION, _DECODER, _STORE, _MASK_FRAME, _MASK_KEY)
    values = {flag.name: flag.value for flag in flags}
    if _DECODER.value != "none" and _STORE.value == "jpeg":
        checks = choose_decoder(Checks(verify="decode", decoder=_DECODER.value))
        values["decoder"] = checks.decoder
    conversion = Conversion(**values, keep_features=tuple(_KEEP_FEATURES.value or ()))
    if table.is_table(source) and is_url(source):
        raise InputError(f"A table must be a local file, got {source}: copy it.")
    is_folder, is_table = folders.is_folder(source), table.is_table(source)
    refuse_flags(is_folder=is_folder, is_table=is_table)
    names = read_class_names(local_path("labels", _LABELS.value)) if _LABELS.value else None
    numbering = {"labels": names, "labels_grow": _LABELS_GROW.value}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        catalog = os.path.join(folder, "catalog")
        stream = stack.enter_context(open(os.path.join(folder, "left_out"), "w+b"))
        left_out, digest, root = LeftOut(stream), records.digest_images, source
        if is_folder:
            depth, skip = _CLASS_DEPTH.value, _SKIP_UNREADABLE.value
            shared: dict[str, Any] = {**numbering, "class_depth": depth, "skip_empty": skip}
            listed = folders.list_images(source, catalog, left_out, **shared)
            make_records = functools.partial(records.make_records_of_images, conversion, source)
        elif is_table:
            keep, drop = (tuple(flag.value or ()) for flag in (_KEEP, _DROP))
            columns = table.Columns(keep=keep, drop=drop, group=_GROUP.value)
            listed = table.list_rows(source, catalog, columns=columns, **numbering)
            folder_of_table = os.path.dirname(os.path.abspath(source))
            convert_images = functools.partial(records.make_records_of_images, conversion)
            make_records = functools.partial(convert_images, folder_of_table)
            root = folder_of_table
        else:
            dataset = _open_records(source, out, stack)
            listed = list_records(dataset, catalog, keeps_splits=fraction is None)
            digest = functools.partial(records.digest_records, dataset.image_key)
            convert = records.make_records_of_records
            make_records = functools.partial(convert, conversion, dataset.image_key)
            fraction = fraction or 0.0  # of what has no split of its own
        for some in (listed.labels, *listed.other_labels.values()):
            check_numbered(some)
        check_numbers(out, listed.labels, of_records=not (is_folder or is_table))
        fraction = find_fraction(listed, 0.1 if fraction is None else fraction)
        held_out = {"by": "image", "seed": _SEED.value, "fraction": fraction}
        chosen = find_chosen(out, held_out)
        splits, sides = divide(listed, catalog, digest, fraction, root, chosen)
        if sides.chosen:
            held_out["chosen"] = sides.chosen
        shared = {"num_processes": _NUM_PROCESSES.value, "overwrite": _OVERWRITE.value}
        shared |= {"executor": stack.enter_context(connect_dask(_DASK.value))}
        shared |= {"left_out": left_out, "max_left_out": _MAX_LEFT_OUT.value}
        card = functools.partial(describe, listed, os.path.abspath(out), held_out=held_out)
        shared |= {"labels": listed.labels, "make_card": card}
        written = writer.write_splits(out, splits, make_records, **shared)
    num_classes = None if listed.labels is None else len(listed.labels)
    writer.print_written(out, written, num_classes, left_out)
    return 0


def refuse_flags(*, is_folder: bool, is_table: bool) -> None:
    """Raises InputError for a flag that does nothing, as for this kind of the source."""
    what = f"for {'a folder' if is_folder else 'a table' if is_table else 'TFRecords'}"
    are_records, stores_pixels = not (is_folder or is_table), _STORE.value == "pixels"
    command.refuse_useless(
        (
            (not is_folder, (_CLASS_DEPTH, _SKIP_UNREADABLE), what),
            (not is_table, (_KEEP, _DROP, _GROUP), what),
            (not are_records, (_IMAGE_KEY, _INDEX_DIR, _MASK_KEY, _KEEP_FEATURES), what),
            (are_records, (_LABELS, _LABELS_GROW), f"{what}, which keep their labels"),
            (stores_pixels, (_QUALITY, _KEEP_ORIENTATION), "with --store=pixels"),
            (stores_pixels and _DECODER.value != "none", (_DECODER,), "with --store=pixels"),
            (not _OVERWRITE.value, (_RENUMBER,), "without --overwrite"),
        )
    )
    if _LABELS_GROW.value and not _LABELS.value:
        raise InputError("--labels_grow adds to the names of a file: name it with --labels.")


def find_fraction(listed: Listed, fraction: float) -> float:
    """Returns what part is held out of the images that have no split: none if others have one.

    If a part is asked for, and there are train and test only, the images of train have none.
    """
    has_validation = any(split == "validation" for split, _ in listed.starts)
    if has_validation and fraction and _VALIDATION_FRACTION.value is not None:
        raise InputError("There is a validation split: leave out --validation_fraction.")
    if _VALIDATION_FRACTION.value and not has_validation:
        for split, label in [*listed.starts]:
            if split == "train":  # asked for, so from what is for training
                own = listed.starts.pop((split, label))
                listed.starts.setdefault((None, label), array.array("Q")).extend(own)
    return 0.0 if has_validation or _SPLIT.value else fraction


def find_chosen(out: str, held_out: dict[str, Any]) -> Chosen:
    """Returns the sides that the set in OUT says were chosen, if it was divided alike."""
    earlier = read_facts(out).get("held_out")
    if not isinstance(earlier, dict) or any(earlier.get(key) != held_out[key] for key in held_out):
        return {}
    try:
        given = {side: [*digests] for side, digests in earlier.get("chosen", {}).items()}
        _ = [bytes.fromhex(digest) for digests in given.values() for digest in digests]
        return given
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{os.path.join(out, METADATA_NAME)}: `chosen` must list digests of images by side:"
            f" {error}. Repair it, or name a new folder."
        ) from error


def divide(
    listed: Listed, catalog: str, digest: Digest, fraction: float, source: str, chosen: Chosen
) -> tuple[list[writer.Split], Sides]:
    """Returns the splits that are written, shuffled, and how images were divided."""
    sides = Sides()
    starts = {split: array.array("Q") for split in ("train", "validation", "test")}
    fixed = _SPLIT.value
    for (split, _), own in listed.starts.items():
        if fixed or split:
            starts[fixed or split or ""] += own
    if not fixed:
        undecided = {label: own for (split, label), own in listed.starts.items() if not split}
        if _LIKE.value and not undecided:
            raise InputError("The source has splits, and nothing is divided: leave out --like.")
        known = KnownSides(Records.from_files(_LIKE.value), source) if _LIKE.value else None
        how: dict[str, Any] = {"fraction": fraction, "seed": _SEED.value}
        sides = choose_sides(catalog, undecided, digest, known=known, chosen=chosen, **how)
        if known and not sides.known:
            raise InputError(
                f"--like={_LIKE.value} has no image of the source, by bytes or by name, so no side"
                " would be kept: name the set that was made of these images, or leave out --like."
            )
        if known:
            print(f"like {_LIKE.value}: {command.format_count(sides.known, 'image')} of it")
        if sides.divided:
            count = command.format_count(sides.divided, "group")
            print(f"      {count} of images are on both sides there; all are for training now")
        starts["train"] += sides.train
        starts["validation"] += sides.validation
        if sides.copies:
            count = command.format_count(sides.copies, "image")
            more = f", {sides.conflicts:,} of them in another class" if sides.conflicts else ""
            print(f"copies: {count} of which there is another{more}; none is on the other side")
        if sides.joined:
            count = command.format_count(sides.joined, "group")
            print(f"joined: {count} with another, as they have an image in common")
        if moved := list_classes(sides.moved, listed.labels):
            print(f"moved: one image each of {moved}, as all were on one side; listed in the card")
            print("       when the set grows, --overwrite keeps them; in a new folder, --like does")
        if lacking := list_classes(sides.lacking, listed.labels):
            print(f"validation has no image of {lacking}")
    numbers = {"train": _NUM_FILES.value, "validation": _NUM_VALIDATION_FILES.value}
    generator, splits = random.Random(_SEED.value), []
    for name, own in starts.items():
        generator.shuffle(own)
        if own:
            items = records.Catalog(catalog, own)
            shared: dict[str, Any] = {"num_files": numbers.get(name), "is_chosen": fraction > 0}
            splits.append(writer.Split(name=name, items=items, **shared))
    return splits, sides


def list_classes(numbers: Sequence[int | None], labels: Sequence[str] | None) -> str:
    """Returns the names of classes for a line of text, the first ten of them; "" if there is none.

    Args:
      numbers: their numbers; None, the class of all images without one, is left out.
      labels: the names of all classes; None if they have only numbers.
    """
    names = [labels[n] if labels else f"class {n}" for n in numbers if n is not None]
    return ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")


def describe(
    listed: Listed, folder: str, written: writer.Written, *, held_out: dict[str, Any]
) -> dict[str, bytes]:
    """Returns the files that say what the set means, see records/card.py."""
    features = dict[str, Described]()
    names = dict(listed.other_labels)
    if listed.labels is not None:
        names[listed.label_key] = listed.labels
    known = listed.features or {}
    if known and not any(known.values()):
        print("card        not written: the index knows a sample of the records. For a card:")
        print("            dali-tf-input index --verify=schema SOURCE, and convert again")
        return {}
    for key, (kind, values) in decode_example(written.first).items():
        one = known.get(key, _describe_feature(key, kind, values, listed))
        if one and key in names:
            one = Described("label", one.length, num_classes=len(names[key]))
        if one:
            features[key] = one
    label = listed.label_key if listed.label_key in features else None
    images = [key for key, one in features.items() if one == Described("image")]  # not a mask
    image = images[0] if images else None
    metadata: dict[str, Any] = {"held_out": held_out, "source_key": "image/filename"}
    if table.GROUP_KEY in features:
        metadata["group_key"] = table.GROUP_KEY
    return make_card(
        folder,
        written.shards,
        features,
        {key: classes for key, classes in names.items() if key in features},
        supervised=(image, label) if image and label else None,
        metadata=metadata,
    )


def _describe_feature(key: str, kind: str, values: Any, listed: Listed) -> Described:
    """Returns what is known of a feature that all records have, from that of the first one."""
    if kind == "bytes_list":
        if key in ("image/encoded", "image"):
            return Described("image")
        is_mask = key == table.KEYS["mask"] and values[0].startswith(b"\x89PNG")
        return Described("image", encoding="png") if is_mask else Described("text")
    if key == table.KEYS["values"]:  # the first record's may be empty, and of no kind
        return Described("float", -1)
    if key == table.KEYS["labels"]:
        return Described("integer", -1)
    length = len(values) if len(values) != 1 else None
    if key == table.KEYS["label"]:
        labels = [label for _, label in listed.starts if label is not None]
        if labels and min(labels) >= 0:
            return Described("label", length, num_classes=max(labels) + 1)
    return Described("integer" if kind == "int64_list" else "float", length)


def check_numbers(out: str, labels: Sequence[str] | None, *, of_records: bool) -> None:
    """Raises InputError if classes of the set that OUT holds would get other numbers."""
    if _RENUMBER.value or not os.path.isdir(out):
        return
    old = find_class_names(os.path.abspath(out))
    number = find_difference(old, labels)
    if number is None and old and labels is not None and len(old) > len(labels):
        number = len(labels)
    if number is None or old is None or labels is None:
        return
    now = repr(labels[number]) if number < len(labels) else "missing"
    path = os.path.join(out, LABELS_NAME)
    keep = f"Keep the numbers: --labels={path} --labels_grow."
    keep = "Records keep their numbers: name a new folder." if of_records else keep
    raise InputError(
        f"{out} holds a set whose class {number} is {old[number]!r}; it would be {now}, and models"
        f" that were trained on it would be wrong. {keep} Or give other ones: --renumber"
    )


def _open_records(source: str, out: str, stack: contextlib.ExitStack) -> Records:
    """Returns the records of a source of TFRecords."""
    keys = {flag.name: flag.value for flag in (_INDEX_DIR, _IMAGE_KEY)}
    # As large as what it replaces, so beside it.
    beside = os.path.dirname(os.path.abspath(out))
    os.makedirs(beside, exist_ok=True)
    inflated = tempfile.TemporaryDirectory(dir=beside, prefix=".inflated-")
    dataset = Records.from_files(inflate_files(source, stack.enter_context(inflated)), **keys)
    if os.path.realpath(out) in map(os.path.realpath, map(os.path.dirname, dataset.paths)):
        text = "holds the TFRecords to be read: name another folder to write to"
        raise InputError(f"{out} {text}.")
    return dataset


def list_records(dataset: Records, catalog: str, *, keeps_splits: bool) -> Listed:
    """Writes a line [file, etag or None, offset, size] per record to the file `catalog`.

    Args:
      dataset: the records.
      catalog: a new file.
      keeps_splits: whether validation stays what it is; a test split always does.
    """
    names = dataset.class_names
    known = None if names is None or None in names else [str(name) for name in names]
    described = {key: describe_feature(dataset, key, one) for key, one in dataset.features.items()}
    listed = Listed(labels=known, features=described)
    listed.label_key = dataset.label_key or listed.label_key
    for key, feature in dataset.features.items():
        is_other = feature.kinds == ("int64_list",) and key not in MAIN_KEYS
        if is_other and (names_of_key := dataset.find_names(key)):
            listed.other_labels[key] = [*names_of_key]
    with open(catalog, "xb") as stream:
        for number, file in enumerate(dataset.files):
            split = writer.find_split(file.path)
            fixed = split if keeps_splits or split == "test" else None
            for extent in dataset.index(number).tolist():
                listed.add(fixed, None, stream.tell())
                stream.write(json.dumps([file.path, file.etag, *extent]).encode() + b"\n")
    return listed
