"""Turns a folder of JPEGs, one sub-folder for each class, into TFRecords with TF-slim's keys.

usage: make_tfrecords.py [--validation_fraction=0.1] [--num_files=4] [--num_validation_files=1] [--seed=0] IMAGE_ROOT OUT

Writes OUT/train-00000-of-00004, ..., OUT/validation-00000-of-00001 and OUT/labels.txt (line i + 1 names label i; labels follow
the sorted order of the sub-folders, from 0). The bytes of the JPEGs stay as they are. Every class gives the same fraction of
its images to validation; which ones, and the order within a split, follow from the seed.
"""

import os
import random
from collections.abc import Sequence

from absl import flags
from PIL import Image, UnidentifiedImageError

import console
from dali_tf_input import InputError
from dali_tf_input.tfrecord import FeatureValue
from tfrecord_files import Split, image_features, print_next_steps, write_labels, write_splits

_VALIDATION_FRACTION = flags.DEFINE_float("validation_fraction", 0.1, "Part of each class that is kept for validation.")
_NUM_FILES = flags.DEFINE_integer("num_files", 4, "Files of the train split.")
_NUM_VALIDATION_FILES = flags.DEFINE_integer("num_validation_files", 1, "Files of the validation split.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the shuffle and of the choice for validation.")

_SUFFIXES = (".jpg", ".jpeg")
_MOST_LISTED = 10  # unusable images that an error names


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise InputError(f"Name the folder of images and the folder to write to, got {len(arguments)} arguments.")
    if not 0 <= _VALIDATION_FRACTION.value < 1:
        raise InputError(f"`validation_fraction` must be in [0, 1), got {_VALIDATION_FRACTION.value}.")
    image_root, out = arguments
    images_by_class = find_images(image_root)
    check_images([image for images in images_by_class.values() for image in images])
    train, validation = split_images(images_by_class, validation_fraction=_VALIDATION_FRACTION.value, seed=_SEED.value)
    splits = [Split(name="train", items=train, num_files=_NUM_FILES.value)]
    if validation:
        splits.append(Split(name="validation", items=validation, num_files=_NUM_VALIDATION_FILES.value))
    paths = write_splits(out, splits, make_features)
    write_labels(out, list(images_by_class))
    print(f"{len(train)} train and {len(validation)} validation images of {len(images_by_class)} classes")
    print_next_steps(out, paths)
    return 0


def find_images(image_root: str) -> dict[str, list[str]]:
    """Returns the JPEGs of each class, both sorted; classes are the sub-folders, hidden ones left out."""
    if not os.path.isdir(image_root):
        raise InputError(f"{image_root} is no folder: name one with a sub-folder of JPEGs for each class.")
    class_names = sorted(entry.name for entry in os.scandir(image_root) if entry.is_dir() and not entry.name.startswith("."))
    if not class_names:
        raise InputError(f"{image_root} has no sub-folders: put the JPEGs of each class into one of its own.")
    images_by_class = {}
    for class_name in class_names:
        folder = os.path.join(image_root, class_name)
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(_SUFFIXES))
        if not names:
            raise InputError(f"{folder} holds no file that ends in {' or '.join(_SUFFIXES)}: remove it, or fill it.")
        images_by_class[class_name] = [os.path.join(folder, name) for name in names]
    return images_by_class


def check_images(images: Sequence[str]) -> None:
    """Checks that every file is a JPEG with a readable header, before anything is written; names those that are not."""
    bad = []
    for image in console.progress(images, what="checking images", total=len(images)):
        try:
            with Image.open(image) as opened:
                if opened.format != "JPEG":
                    bad.append(f"{image}: a {opened.format}, not a JPEG")
        except (UnidentifiedImageError, OSError) as error:
            bad.append(f"{image}: {error}")
    if bad:
        listed = "\n  ".join(bad[:_MOST_LISTED])
        more = f"\n  and {len(bad) - _MOST_LISTED} more" if len(bad) > _MOST_LISTED else ""
        raise InputError(f"{len(bad)} of {len(images)} images cannot be used; convert or remove them:\n  {listed}{more}")


def split_images(
    images_by_class: dict[str, list[str]], *, validation_fraction: float, seed: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Splits each class and shuffles; returns (path, label) of the train images and of the validation images.

    Validation gets the nearest whole number to `validation_fraction` of a class, but never the whole class.
    """
    generator = random.Random(seed)
    train, validation = [], []
    for label, images in enumerate(images_by_class.values()):
        shuffled = [(image, label) for image in images]
        generator.shuffle(shuffled)
        count = min(round(len(shuffled) * validation_fraction), len(shuffled) - 1)
        validation += shuffled[:count]
        train += shuffled[count:]
    generator.shuffle(train)
    generator.shuffle(validation)
    return train, validation


def make_features(image_and_label: tuple[str, int]) -> dict[str, FeatureValue]:
    """Reads one image; its class is the name of its folder."""
    path, label = image_and_label
    with open(path, "rb") as stream:
        encoded = stream.read()
    with Image.open(path) as image:
        width, height = image.size
    return image_features(
        encoded=encoded,
        label=label,
        text=os.path.basename(os.path.dirname(path)),
        height=height,
        width=width,
        filename=os.path.basename(path),
    )


if __name__ == "__main__":
    console.run(main)
