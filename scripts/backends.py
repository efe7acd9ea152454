"""The rows of the throughput comparison: what each is, and what all of them do."""

import dataclasses
from typing import NamedTuple

from absl import flags

import input_flags
from dali_tf_input import (
    CenterCrop,
    DaliOptions,
    InputError,
    InputSpec,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    TfDataOptions,
)

BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a batch.")
CROP = flags.DEFINE_enum(
    "crop",
    "resize_random_crop",
    ["resize_random_crop", "random_resized_crop", "random_crop", "center_crop"],
    "How the region is chosen; the first and the last resize to 8/7 of the image size.",
)
IMAGE_SIZE = flags.DEFINE_integer("image_size", 224, "Height and width of the output in pixels.")
ANTIALIAS = flags.DEFINE_boolean("antialias", False, "Whether the resize widens its filter when it shrinks.")
FUSE = flags.DEFINE_enum(
    "fuse", "auto", ["auto", "off", "decode", "scaled"], "What this package decodes of an image; scaled is for tf.data only."
)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "float16", "uint8"], "Type of the output; uint8 is not normalised.")
WORK_FLAGS = (BATCH_SIZE, CROP, IMAGE_SIZE, ANTIALIAS, FUSE, DTYPE)


class Row(NamedTuple):
    """One row: the package's options for it (None where it is not the package that feeds), what it is, and its order.

    Those of order "global" are measured only when asked for.
    """

    options: DaliOptions | TfDataOptions | None
    what: str
    order: str = "buffer"


ROWS = {
    # The 2018 example's baseline: one image after another, nothing made ahead.
    "tf_data_serial": Row(
        TfDataOptions(num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False),
        "tf.data, one image after another",
    ),
    "tf_data_by_hand": Row(None, "tf.data in parallel, written by hand"),
    "tf_data": Row(TfDataOptions(), "this package on tf.data"),
    "dali_cpu_by_hand": Row(None, "DALI on CPU, written by hand, bare"),
    "dali_cpu_bare": Row(DaliOptions(device="cpu"), "DALI on CPU, without TensorFlow"),
    "dali_cpu": Row(DaliOptions(device="cpu"), "this package on DALI, CPU"),
    "tf_data_global": Row(TfDataOptions(), "this package on tf.data, order global", "global"),
    "dali_cpu_global": Row(DaliOptions(device="cpu"), "this package on DALI, CPU, order global", "global"),
    "dali_gpu_bare": Row(DaliOptions(device="gpu"), "DALI on GPU, without TensorFlow"),
    "dali_gpu": Row(DaliOptions(device="gpu"), "this package on DALI, GPU"),
}


def training_spec(row: str | None = None) -> InputSpec:
    """Returns what is measured, in a row's order."""
    size = IMAGE_SIZE.value
    if size < 1:
        raise InputError(f"`image_size` must be at least 1, got {size}.")
    preprocess = Preprocess.for_training(size, antialias=ANTIALIAS.value)
    resize = preprocess.crop.resize
    crops = {
        "resize_random_crop": ResizeRandomCrop(resize=resize),
        "random_resized_crop": RandomResizedCrop(),
        "random_crop": RandomCrop(),
        "center_crop": CenterCrop(resize_shorter=resize[0]),
    }
    preprocess = dataclasses.replace(preprocess, crop=crops[CROP.value], dtype=DTYPE.value)
    return InputSpec(
        dataset=input_flags.dataset_spec(input_flags.FILES.value),
        preprocess=preprocess,
        order=ROWS[row].order if row else "buffer",
    )


def options_of(row: str) -> DaliOptions | TfDataOptions | None:
    """Returns the options of a row, with the plan that --fuse asks for."""
    options = ROWS[row].options
    if options is None or (FUSE.value == "scaled" and isinstance(options, DaliOptions)):
        return options
    return dataclasses.replace(options, fuse=FUSE.value)


def rates(result: dict) -> list[float]:
    """Returns images/s of each window."""
    return [window["measured_batches"] * window["batch_size"] / window["seconds"] for window in result["windows"]]


def ratios(result: dict, reference: dict) -> list[float]:
    """Returns, round by round, how many times the reference's images/s a row reached."""
    return [rate / reference_rate for rate, reference_rate in zip(rates(result), rates(reference), strict=True)]
