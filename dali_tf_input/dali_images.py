"""Preprocessing of images by DALI's operations: the same pixels as `tf_images` makes."""

import math as python_math
from typing import Any, Literal

from nvidia.dali import fn, math, types
from nvidia.dali.auto_aug import rand_augment, trivial_augment
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from dali_tf_input.preprocess import (
    RAND_AUGMENT_MAGNITUDE,
    RAND_AUGMENT_OPS,
    CenterCrop,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
)
from dali_tf_input.stages import Stage
from dali_tf_input.tfrecord import InputError

_INTERPOLATION = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC, "nearest": types.INTERP_NN}
_DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16}


def prepare_images(
    encoded: DataNode,
    numbers: DataNode,
    preprocess: Preprocess,
    *,
    fuse: Literal["off", "decode"],
    device: str,
    hints: dict[str, int | float],
    until: Stage | None = None,
) -> DataNode:
    """Makes of encoded images what the model sees: `resample_images`, `augment_images`, `finish_images`; see there.

    With `auto_augment` only within a pipeline definition that enables conditionals. `until` "decode" and "resize" return what
    that stage makes.
    """
    images = resample_images(encoded, numbers, preprocess, fuse=fuse, device=device, hints=hints, until=until)
    if until in ("decode", "resize"):
        return images
    if preprocess.auto_augment is not None:
        images = augment_images(images, preprocess)
    return finish_images(images, numbers, preprocess)


@do_not_convert  # type: ignore[untyped-decorator]  # DALI converts no `match`, and there is nothing to convert
def resample_images(
    encoded: DataNode,
    numbers: DataNode,
    preprocess: Preprocess,
    *,
    fuse: Literal["off", "decode"],
    device: str,
    hints: dict[str, int | float],
    until: Stage | None = None,
) -> DataNode:
    """Decodes images and takes of each the region that is seen, at its size.

    Args:
      encoded: uint8 (bytes,) for each image, the bytes of a JPEG or PNG file, on the CPU.
      numbers: float32 (preprocess.num_random,) in [0, 1) for each image, on the CPU; they decide what is random.
      preprocess: what to do.
      fuse: "decode" decodes only the region that is needed, "off" all.
      device: "cpu", or "mixed" to decode on the GPU and go on there.
      hints: further arguments of the decoder.
      until: "decode" returns the decoded images as they are.

    Returns:
      Images in 0..255, of shape (*preprocess.image_size, 3), float32; uint8 where nothing had to be resized.

    Raises:
      InputError: DALI has no such `dtype`.
    """
    if preprocess.dtype == "bfloat16":
        raise InputError(
            "DALI makes no `dtype` 'bfloat16': use 'float16' or 'float32', or the tf.data backend (TfDataOptions())."
        )
    orientation = preprocess.apply_orientation
    size = fn.cast(fn.peek_image_shape(encoded, adjust_orientation=orientation)[0:2], dtype=types.FLOAT64)
    start, extent = find_region(size, numbers, preprocess)
    decoding = {"device": device, "output_type": types.RGB, "adjust_orientation": orientation, **hints}
    # What lies outside of such a region does not count in its resize, as in torchvision.
    cut_first = isinstance(preprocess.crop, RandomResizedCrop)
    if fuse == "decode":
        origin, needed = (start, extent) if cut_first else _needed(size, start, extent, preprocess)
        images = fn.decoders.image_slice(encoded, **_window(origin, needed), **decoding)
        start = start - origin
    else:
        images = fn.decoders.image(encoded, **decoding)
    if until == "decode":
        return images
    if isinstance(preprocess.crop, RandomCrop):  # the pixels as they are, and black where there are none
        return fn.slice(images, **_window(start, extent), out_of_bounds_policy="pad", fill_values=[0.0])
    resizing = {
        "size": preprocess.image_size,
        "interp_type": _INTERPOLATION[preprocess.interpolation],
        "antialias": preprocess.antialias,
        "dtype": types.FLOAT,
    }
    if cut_first and fuse == "off":
        images = fn.slice(images, **_window(start, extent))
    if not cut_first:
        roi = (("roi_start", start), ("roi_end", start + extent))
        resizing |= {name: fn.cast(value, dtype=types.FLOAT) for name, value in roi}
    return fn.resize(images, **resizing)


def augment_images(images: DataNode, preprocess: Preprocess) -> DataNode:
    """Does `preprocess.auto_augment` to images (*preprocess.image_size, 3) in 0..255; returns uint8 of that shape."""
    images = _to_uint8(images)
    if preprocess.auto_augment == "trivial":
        return trivial_augment.trivial_augment_wide(images)
    return rand_augment.rand_augment(images, n=RAND_AUGMENT_OPS, m=RAND_AUGMENT_MAGNITUDE, shape=preprocess.image_size)


def finish_images(images: DataNode, numbers: DataNode, preprocess: Preprocess) -> DataNode:
    """Mirrors images (*preprocess.image_size, 3) in 0..255, normalises them and brings them to layout and type.

    Returns:
      Images of `preprocess.dtype` and shape `preprocess.image_shape`.
    """
    mirror = fn.cast(numbers[0:1] < preprocess.mirror_probability, dtype=types.INT32)
    mirror = fn.reshape(mirror, shape=[])
    if preprocess.dtype == "uint8":
        images = _to_uint8(fn.flip(images, horizontal=mirror))
        return fn.transpose(images, perm=[2, 0, 1]) if preprocess.layout == "CHW" else images
    return fn.crop_mirror_normalize(
        images,
        mirror=mirror,
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        output_layout=preprocess.layout,
        dtype=_DTYPES[preprocess.dtype],
    )


def _to_uint8(images: DataNode) -> DataNode:
    images = fn.cast(images, dtype=types.FLOAT)
    return fn.cast(math.clamp(math.floor(images + 0.5), 0.0, 255.0), dtype=types.UINT8)


def find_region(size: DataNode, numbers: DataNode, preprocess: Preprocess) -> tuple[DataNode, DataNode]:
    """Returns where each output lies in its image: (start, extent), each float64 (2,), (y, x) in pixels of the image.

    The same arithmetic as `tf_images.find_region`; `size` is float64 (2,), height and width of each image.
    """
    out = types.Constant(list(map(float, preprocess.image_size)), dtype=types.FLOAT)
    match preprocess.crop:
        case ResizeRandomCrop(resize=resize):
            resized = types.Constant(list(map(float, resize)), dtype=types.FLOAT)
        case RandomCrop():
            drawn = math.floor(fn.cast(numbers[1:3], dtype=types.FLOAT64) * (size - out + 1.0))
            fits = fn.cast(size >= out, dtype=types.FLOAT64)
            return drawn * fits + math.floor((size - out) / 2.0) * (1.0 - fits), out + size * 0.0
        case CenterCrop(resize_shorter=resize_shorter):
            resized = math.floor(size * (float(resize_shorter) / math.min(size[0:1], size[1:2])) + 0.5)
            return math.floor((resized - out) / 2.0) * size / resized, out * size / resized
        case RandomResizedCrop():
            extent = _draw_extent(size, numbers, preprocess.crop)
            return math.floor(fn.cast(numbers[1:3], dtype=types.FLOAT64) * (size - extent + 1.0)), extent
        case _:
            return size * 0.0, size
    start = math.floor(fn.cast(numbers[1:3], dtype=types.FLOAT64) * (resized - out + 1.0))
    return start * size / resized, out * size / resized


def _window(start: DataNode, extent: DataNode) -> dict[str, Any]:
    """Returns the arguments that cut out a region of whole pixels."""
    return {"start": fn.cast(start, dtype=types.INT32), "shape": fn.cast(extent, dtype=types.INT32), "axes": (0, 1)}


def _needed(size: DataNode, start: DataNode, extent: DataNode, preprocess: Preprocess) -> tuple[DataNode, DataNode]:
    """Returns the pixels that a region is resampled from: (origin, extent), each float64 (2,); see `tf_images`."""
    step = extent / types.Constant(list(map(float, preprocess.image_size)), dtype=types.FLOAT)
    if isinstance(preprocess.crop, RandomCrop):
        first = math.max(start, 0.0)
        return first, math.min(start + extent, size) - first
    reach = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    if preprocess.antialias:
        reach = math.max(step, 1.0) * reach
    first = math.max(math.floor(start + step * 0.5 - 0.5 - reach), 0.0)
    last = math.min(math.ceil(start + extent - step * 0.5 - 0.5 + reach), size - 1.0)
    return first, last - first + 1.0


def _draw_extent(size: DataNode, numbers: DataNode, crop: RandomResizedCrop) -> DataNode:
    """Returns height and width of regions of random area and aspect; see `RandomResizedCrop`."""
    (low_area, high_area), (low_ratio, high_ratio) = crop.area_range, crop.aspect_ratio_range
    height, width = size[0:1], size[1:2]
    drawn = fn.reshape(fn.cast(numbers[3:], dtype=types.FLOAT64), shape=[crop.num_attempts, 2])
    area = (low_area + drawn[:, 0] * (high_area - low_area)) * height * width
    low, high = python_math.log(low_ratio), python_math.log(high_ratio)
    ratio = math.exp(low + drawn[:, 1] * (high - low))
    heights = math.max(1.0, math.floor(math.sqrt(area / ratio) + 0.5))
    widths = math.max(1.0, math.floor(math.sqrt(area * ratio) + 0.5))
    # The first attempt that fits gets the highest score; scores differ, so one attempt at most is chosen.
    order = types.Constant([float(crop.num_attempts - number) for number in range(crop.num_attempts)], dtype=types.FLOAT)
    score = fn.cast((heights <= height) & (widths <= width), dtype=types.FLOAT) * order
    best = fn.reductions.max(score)
    chosen = fn.cast((score == best) & (score > 0.0), dtype=types.FLOAT)
    none = fn.cast(fn.reshape(best == 0.0, shape=[1]), dtype=types.FLOAT)
    centre_height = math.min(height, math.floor(width / low_ratio + 0.5))
    centre_width = math.min(width, math.floor(height * high_ratio + 0.5))
    return fn.cat(
        _sum(heights * chosen) + centre_height * none,
        _sum(widths * chosen) + centre_width * none,
    )


def _sum(values: DataNode) -> DataNode:
    """Returns the sum of whole numbers as (1,), exact; DALI reduces no float64."""
    return fn.reductions.sum(fn.cast(values, dtype=types.FLOAT), keep_dims=True)
