"""Describes the JPEGs of TFRecord files by what costs time: sizes, bytes, grayscale, decode speed of one core.

usage: describe_images.py --files=GLOB [--files=GLOB...] [--num_images=500] [--repeats=5]

Each --files is a row of its own. Decoding is by libjpeg-turbo (through Pillow), to RGB; the sets take turns.
"""

import io
import time

from absl import flags
from PIL import Image

import console
import input_flags
from dali_tf_input import InputError, Spread
from dali_tf_input.example import decode_example
from dali_tf_input.manifest import read_index
from dali_tf_input.tfrecord import read_record

_NUM_IMAGES = flags.DEFINE_integer("num_images", 500, "How many images of each set are looked at, at most.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each set is decoded.")


def main(arguments: list[str]) -> int:
    if arguments or not input_flags.FILES.value:
        raise InputError("Name the sets: --files='path/train-*', once for each.")
    for flag in (_NUM_IMAGES, _REPEATS):
        if flag.value < 1:
            raise InputError(f"`{flag.name}` must be at least 1, got {flag.value}.")
    sets = {pattern: read_images(pattern) for pattern in input_flags.FILES.value}
    speeds: dict[str, list[float]] = {pattern: [] for pattern in sets}
    for _ in range(_REPEATS.value):
        for pattern, images in sets.items():
            speeds[pattern].append(decode_speed(images))
    columns = ("files", "images", "height", "width", "KB", "bytes/pixel", "grayscale", "Mpixel/s", "min", "max")
    console.print_table(columns, [describe(pattern, images, speeds[pattern]) for pattern, images in sets.items()])
    return 0


def read_images(pattern: str) -> list[bytes]:
    """Returns the encoded images of the first records of a set's files, in turn from each file."""
    dataset = input_flags.dataset_spec([pattern])
    per_file = -(-_NUM_IMAGES.value // len(dataset.files))
    images = []
    for file, index_file in zip(dataset.files, dataset.index_files, strict=True):
        for offset, _ in read_index(index_file)[:per_file]:  # not of those that the index leaves out
            images.append(decode_example(read_record(file, offset))[dataset.image_key][1][0])
    return images


def decode_speed(images: list[bytes]) -> float:
    """Decodes all images once; returns millions of pixels per second of CPU time."""
    pixels, start = 0, time.process_time()
    for encoded in images:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        pixels += image.width * image.height
    return pixels / 1e6 / (time.process_time() - start)


def describe(pattern: str, images: list[bytes], speeds: list[float]) -> tuple[str, ...]:
    """Returns one row of the table; sizes are means."""
    opened = [Image.open(io.BytesIO(encoded)) for encoded in images]
    pixels = sum(image.width * image.height for image in opened)
    size = sum(map(len, images))
    speed = Spread.of(speeds)
    return (
        pattern,
        f"{len(images):,}",
        f"{sum(image.height for image in opened) / len(images):.0f}",
        f"{sum(image.width for image in opened) / len(images):.0f}",
        f"{size / len(images) / 1e3:.1f}",
        f"{size / pixels:.3f}",
        f"{sum(image.mode == 'L' for image in opened) / len(images):.1%}",
        f"{speed.median:.0f}",
        f"{speed.minimum:.0f}",
        f"{speed.maximum:.0f}",
    )


if __name__ == "__main__":
    console.run(main)
