"""Writes the card of a set: what its files hold and what their labels mean, as tfds reads it.

FILES are indexed TFRecords of one folder, of all splits; --verify=schema has read all of them. The
command writes dataset_info.json, features.json, names of classes and metadata.json beside them, or
to --index_dir. Sets that convert made have a card.

usage: dali-tf-input card [flags] FILES

example: dali-tf-input card 'records/*-of-*'
"""

import os
import re
from collections.abc import Mapping, Sequence

from dali_tf_input import InputError, Records
from dali_tf_input.cli import command
from dali_tf_input.cli.convert.listing import SPLITS
from dali_tf_input.records.card import (
    METADATA_NAME,
    Described,
    SplitFile,
    make_card,
    merge_metadata,
)
from dali_tf_input.records.class_names import LABELS_NAME, names_file, read_class_names
from dali_tf_input.records.contents import FeatureStats
from dali_tf_input.storage.objects import is_url
from dali_tf_input.storage.staging import Staging

FLAGS = command.Flags()
_LABELS = FLAGS.string("labels", None, "File of the class names (default: labels.txt).")
_INDEX_DIR = FLAGS.string("index_dir", None, "Folder of the indexes (default: beside each file).")
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace an existing card.")

_KINDS = {"bytes_list": "text", "int64_list": "integer", "float_list": "float"}


def main(patterns: list[str]) -> int:
    """Writes the card; returns the exit code."""
    if not patterns:
        raise InputError("Name the TFRecord files: dali-tf-input card 'records/*-of-*'")
    records = Records.from_files(patterns, index_dir=_INDEX_DIR.value)
    folders = {os.path.dirname(path) for path in records.paths}
    if len(folders) > 1 and not _INDEX_DIR.value:
        raise InputError("A card is of the files of one folder: name those of one.")
    folder = os.path.abspath(os.path.expanduser(_INDEX_DIR.value or folders.pop()))
    if is_url(_INDEX_DIR.value or records.paths[0]):
        raise InputError("A card is written to a local folder: write it where the set is made.")
    files = describe(records, folder)
    metadata = merge_metadata(folder, files[METADATA_NAME])
    files[METADATA_NAME] = metadata
    # metadata.json keeps what else is in it.
    differ = [name for name in {*files} - {METADATA_NAME} if _differs(folder, name, files[name])]
    if differ and not _OVERWRITE.value:
        raise InputError(
            f"{folder} holds another {min(differ)}: look at it, and replace it with --overwrite."
        )
    with Staging(folder, "Name another folder with --index_dir.") as staging:
        for name, data in files.items():
            with open(staging.path(name), "wb") as stream:
                stream.write(data)
            staging.commit(name, os.path.join(folder, name))
    print(f"wrote {', '.join(sorted(files))} in {folder}")
    return 0


def describe(records: Records, folder: str) -> dict[str, bytes]:
    """Returns the files of a set's card by their names."""
    splits: dict[str, list[SplitFile]] = {}
    for file in records.files:
        if file.num_skipped:
            raise InputError(
                f"The index of {file.path} skips bad records, which tfds would read: write the set"
                " without them, dali-tf-input convert."
            )
        splits.setdefault(_split_of(file.path)[0], []).append(
            SplitFile(file.num_records, file.size)
        )
    features = {
        key: one
        for key, feature in records.features.items()
        if (one := describe_feature(records, key, feature))
    }
    label = records.label_key or next(
        (key for key in ("image/class/label", "label") if key in features), None
    )
    names = {}
    given = read_class_names(os.path.expanduser(_LABELS.value)) if _LABELS.value else None
    for key, one in features.items():
        if one.kind != "integer":
            continue
        own = given if key == label and given else records.find_names(key)
        highest = (records.features[key].range or (0, -1))[1]
        if own and key == label and highest >= len(own):
            raise InputError(
                f"There are {len(own)} names, and labels go up to {highest:g}: names count from 0."
                " Labels that count from 1 need a first name for 0, such as background."
            )
        if own and highest < len(own):
            names[key] = own
            features[key] = one._replace(kind="label", num_classes=len(own))
    supervised = (records.image_key, label) if label in features else None
    made = make_card(
        folder,
        splits,
        features,
        names,
        template=_find_template(records.paths, splits),
        supervised=supervised if supervised and records.image_key in features else None,
    )
    if label in names and LABELS_NAME not in made:
        made[LABELS_NAME] = made[names_file(label)]
    return made


def describe_feature(records: Records, key: str, feature: FeatureStats) -> Described | None:
    """Returns what all records have at a key; None if some lack it, or it is not of one kind.

    What a sample has, others may lack.
    """
    kinds = {*feature.kinds} - {""}  # that of a list without values
    if feature.records != records.num_records or len(kinds) != 1 or not kinds <= {*_KINDS}:
        return None
    shortest, longest = feature.lengths
    length = None if shortest == longest == 1 else shortest if shortest == longest else -1
    if key == records.image_key and not records.stores_pixels:
        return Described("image", length)
    return Described(_KINDS[kinds.pop()], length)


def _split_of(path: str) -> tuple[str, str, int]:
    """Returns the split of a file, as its name has it, the template, and the number of files."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})", os.path.basename(path))
    if match:
        for word in reversed([*re.finditer(r"[A-Za-z]+", match[1])]):
            if word[0].lower() in SPLITS:
                before, after = match[1][: word.start()], match[1][word.end() :]
                template = f"{before}{{SPLIT}}{after}-{{SHARD_X_OF_Y}}"
                return word[0], template, int(match[2])
    raise InputError(
        f"tfds cannot name {path}: its files have a split and a number, as train-00000-of-00004."
        " dali-tf-input convert writes such ones."
    )


def _find_template(paths: tuple[str, ...], splits: Mapping[str, Sequence[SplitFile]]) -> str:
    """Returns how the files are named, in tfds' words."""
    named = {path: _split_of(path) for path in paths}
    templates = {template for _, template, _ in named.values()}
    if len(templates) > 1:
        raise InputError(
            f"tfds cannot name these files, which are named in several ways: {min(templates)},"
            f" {max(templates)}. Name those of one."
        )
    for path, (split, _, count) in named.items():
        if count != len(splits[split]):
            raise InputError(
                f"{path} is of {count:,} files, and {len(splits[split]):,} of that split are named:"
                " a card is of whole splits. Name all files."
            )
    return templates.pop()


def _differs(folder: str, name: str, data: bytes) -> bool:
    """Whether there is a file of that name with other data."""
    try:
        with open(os.path.join(folder, name), "rb") as stream:
            return stream.read() != data
    except FileNotFoundError:
        return False
