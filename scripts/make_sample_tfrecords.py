"""Makes sample data for trials and benchmarks: TFRecords of photo-like JPEGs.

The images resemble ImageNet's in everything that costs time: size (mean 401 x 468 pixels), bytes
(110 KB on average) and JPEG coding (mostly quality 95 without chroma subsampling; 2% grayscale).
Each shows a shape in the color of its class on a textured background, so that a small network can
learn to tell the classes apart. The same seed makes the same images.

usage: make_sample_tfrecords.py [flags] OUT

example: python scripts/make_sample_tfrecords.py --num_images=256 data/small
"""

import os
import sys

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.convert.writer import Split, print_written, write_splits
from support.samples import CLASS_NAMES, make_records

FLAGS = command.Flags()
_NUM_IMAGES = FLAGS.integer("num_images", 1024, "Images in the train split.", 1)
_NUM_VALIDATION_IMAGES = FLAGS.integer("num_validation_images", 256, "In the validation split.", 0)
_NUM_FILES = FLAGS.integer("num_files", 4, "Files of the train split; validation is one file.", 1)
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace OUT if it holds such a set already.")
_SEED = FLAGS.integer("seed", 0, "Random seed.", 0)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise InputError(f"Name one folder to write to, got {len(arguments)}.")
    (out,), num_train = arguments, _NUM_IMAGES.value
    numbers = [(_SEED.value, number) for number in range(num_train + _NUM_VALIDATION_IMAGES.value)]
    splits = [Split(name="train", items=numbers[:num_train], num_files=_NUM_FILES.value)]
    if numbers[num_train:]:
        splits.append(Split(name="validation", items=numbers[num_train:], num_files=1))
    shared = {"labels": CLASS_NAMES, "overwrite": _OVERWRITE.value}
    written = write_splits(out, splits, make_records, **shared)
    print_written(out, written, len(CLASS_NAMES))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(command.run(main, FLAGS))
