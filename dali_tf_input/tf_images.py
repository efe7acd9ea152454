"""Preprocessing of one image by TensorFlow's operations: the same pixels as `dali_images` makes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import tensorflow as tf

from dali_tf_input.options import TfDataFuse
from dali_tf_input.preprocess import CenterCrop, NoCrop, Preprocess, RandomCrop, RandomResizedCrop, ResizeRandomCrop
from dali_tf_input.stages import Stage


class Region(NamedTuple):
    """Where the output lies in an image, (y, x) each. A crop of a resized image is a resized region of the image.

    Attributes:
      start: float64 (2,), in pixels of the image.
      extent: float64 (2,), in pixels of the image.
      resized: int32 (2,), the size that the image is resized to before the crop.
      corner: float64 (2,), whole numbers: where the crop starts in that.
    """

    start: tf.Tensor
    extent: tf.Tensor
    resized: tf.Tensor
    corner: tf.Tensor


def prepare_image(
    encoded: tf.Tensor,
    numbers: tf.Tensor,
    preprocess: Preprocess,
    *,
    fuse: TfDataFuse = "off",
    augment: Callable[[tf.Tensor], tf.Tensor] | None = None,
    until: Stage | None = None,
) -> tf.Tensor:
    """Makes of one encoded image what the model sees.

    Args:
      encoded: a scalar string, the bytes of a JPEG or PNG file.
      numbers: float32 (preprocess.num_random,) in [0, 1); they decide what is random.
      preprocess: what to do.
      fuse: which part of a JPEG is decoded, and how; as in `TfDataOptions`, but "auto".
      augment: done to uint8 (*preprocess.image_size, 3), which it returns again, before the mirror.
      until: "decode" or "resize" return what that stage makes.

    Returns:
      `preprocess.dtype` of shape `preprocess.image_shape`.
    """

    def resample_whole() -> tf.Tensor:
        image = decode_image(encoded)
        return (
            image
            if until == "decode"
            else _resample(image, find_region(tf.shape(image)[:2], numbers, preprocess), preprocess, whole=True)
        )

    def resample_part() -> tf.Tensor:
        size = tf.io.extract_jpeg_shape(encoded)[:2]
        return _resample_jpeg(encoded, size, find_region(size, numbers, preprocess), preprocess, until=until)

    def resample_scaled() -> tf.Tensor:
        size = tf.io.extract_jpeg_shape(encoded)[:2]
        region = find_region(size, numbers, preprocess)
        excess = region.extent / tf.constant(preprocess.image_size, tf.float64)
        # Enough pixels each way, and half as many again in all (1.25 each way): with fewer the result was seen to be worse than a
        # plain resize with antialias, as there is little left to resize by a better filter than the decoder's.
        excess = tf.minimum(tf.reduce_min(excess), tf.sqrt(tf.reduce_prod(excess)) / 1.25)
        branches = [resample_whole if preprocess.resizes_plainly else resample_part]  # as fuse="auto" does
        branches += [partial(_resample_jpeg, encoded, size, region, preprocess, ratio=ratio, until=until) for ratio in (2, 4, 8)]
        return tf.switch_case(tf.reduce_sum(tf.cast(excess >= tf.constant([2, 4, 8], tf.float64), tf.int32)), branches)

    if fuse == "scaled" and (isinstance(preprocess.crop, RandomCrop) or preprocess.interpolation == "nearest"):
        fuse = "decode"  # pixels are taken as they are: there is nothing to scale
    if fuse == "off":
        image = resample_whole()
    else:
        image = tf.cond(tf.io.is_jpeg(encoded), resample_scaled if fuse == "scaled" else resample_part, resample_whole)
    if until == "decode":
        return image
    image = tf.ensure_shape(image, (*preprocess.image_size, 3))
    if until == "resize":
        return image
    if augment:
        image = tf.cast(augment(_to_uint8(image)), tf.float32)
    if preprocess.mirror_probability == 1:
        image = tf.reverse(image, [1])
    elif preprocess.mirror_probability > 0:
        image = tf.cond(numbers[0] < preprocess.mirror_probability, lambda: tf.reverse(image, [1]), lambda: image)
    return tf.ensure_shape(_convert(image, preprocess), preprocess.image_shape)


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes a JPEG or PNG, a scalar string, to uint8 RGB (height, width, 3)."""
    # INTEGER_ACCURATE is the DCT that DALI's CPU decoder uses too: both backends decode to the same bits.
    return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


def find_region(size: tf.Tensor, numbers: tf.Tensor, preprocess: Preprocess) -> Region:
    """Returns where the output lies in an image.

    Args:
      size: int32 (2,), height and width of the image.
      numbers: see `prepare_image`.
      preprocess: `crop` and `image_size` count here.
    """
    out = tf.constant(preprocess.image_size, tf.float64)
    full = tf.cast(size, tf.float64)
    position = tf.cast(numbers[1:3], tf.float64)
    match preprocess.crop:
        case ResizeRandomCrop(resize=resize):
            resized = tf.constant(resize, tf.float64)
            corner = tf.floor(position * (resized - out + 1))
        case RandomCrop():
            corner = tf.where(full >= out, tf.floor(position * (full - out + 1)), tf.floor((full - out) / 2))
            return Region(corner, out, size, corner)
        case CenterCrop(resize_shorter=resize_shorter):
            resized = tf.floor(full * (resize_shorter / tf.reduce_min(full)) + 0.5)
            corner = tf.floor((resized - out) / 2)
        case RandomResizedCrop():
            extent = _draw_extent(full, tf.cast(numbers[3:], tf.float64), preprocess.crop)
            return Region(
                tf.floor(position * (full - extent + 1)), extent, tf.constant(preprocess.image_size), tf.zeros_like(out)
            )
        case NoCrop():
            resized, corner = out, tf.zeros_like(out)
    return Region(corner * full / resized, out * full / resized, tf.cast(resized, tf.int32), corner)


def _resample_jpeg(
    encoded: tf.Tensor,
    size: tf.Tensor,
    region: Region,
    preprocess: Preprocess,
    *,
    ratio: Literal[1, 2, 4, 8] = 1,
    until: Stage | None = None,
) -> tf.Tensor:
    """Decodes the part of a JPEG that the output is made of, at 1 / `ratio`, and resizes it; see `_resample`.

    A JPEG's lines below the region are not decoded, and of its other lines only the region's columns are turned to colours. With
    `until` "decode" that is all.
    """
    region = region._replace(start=region.start / ratio, extent=region.extent / ratio)
    size = (size + ratio - 1) // ratio  # the last pixel of a side may stand for fewer
    first, last = _needed(size, region, preprocess)
    # Two more pixels each way: at the edges of what it decodes libjpeg interpolates the colours from fewer samples.
    first, last = tf.maximum(first - 2, 0), tf.minimum(last + 2, size - 1)
    window = tf.concat([first, last - first + 1], 0)
    image = tf.io.decode_and_crop_jpeg(encoded, window, channels=3, ratio=ratio, dct_method="INTEGER_ACCURATE")
    if until == "decode":
        return image
    region = region._replace(start=region.start - tf.cast(first, tf.float64))
    if ratio == 1:
        return _resample(image, region, preprocess, whole=False)
    if preprocess.interpolation == "bilinear" and not preprocess.antialias and min(preprocess.image_size) > 1:
        return _pick_between(image, region, preprocess.image_size)
    return _translate(image, region, preprocess, ratio=ratio)


def _needed(size: tf.Tensor, region: Region, preprocess: Preprocess) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first and the last pixel, int32 (2,) each, that a region of an image of `size` is resampled from."""
    if isinstance(preprocess.crop, RandomResizedCrop | RandomCrop):
        first = tf.cast(tf.floor(region.start), tf.int32)
        last = tf.cast(tf.math.ceil(region.start + region.extent), tf.int32) - 1
        return tf.maximum(first, 0), tf.minimum(last, size - 1)
    step = region.extent / tf.constant(preprocess.image_size, tf.float64)
    radius = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    reach = radius * tf.maximum(step, 1) if preprocess.antialias else radius  # of the filter, from the outermost positions on
    first = tf.cast(tf.floor(region.start + 0.5 * step - 0.5 - reach), tf.int32)
    last = tf.cast(tf.math.ceil(region.start + region.extent - 0.5 * step - 0.5 + reach), tf.int32)
    return tf.maximum(first, 0), tf.minimum(last, size - 1)


def _resample(image: tf.Tensor, region: Region, preprocess: Preprocess, *, whole: bool) -> tf.Tensor:
    """Resizes a region of an image (height, width, 3) to `preprocess.image_size`; returns float32.

    Args:
      image: uint8, the whole image or the part that is needed.
      region: in its coordinates.
      preprocess: `image_size`, `crop`, `interpolation` and `antialias` count here.
      whole: whether it is the whole image.
    """
    size = preprocess.image_size
    plain = preprocess.interpolation == "bilinear" and not preprocess.antialias
    match preprocess.crop:
        case RandomResizedCrop():  # the region is whole pixels, and what lies outside of it does not count, as in torchvision
            image = _cut(image, region.start, tf.cast(region.extent, tf.int32))
            if preprocess.interpolation == "nearest":
                return _pick(image, tf.zeros_like(region.start), region.extent, size)
            return tf.image.resize(image, size, method=preprocess.interpolation, antialias=preprocess.antialias)
        case RandomCrop():  # the pixels as they are, and black where there are none
            first, last = _needed(tf.shape(image)[:2], region, preprocess)
            before = tf.maximum(-tf.cast(region.start, tf.int32), 0)
            after = tf.constant(size) - before - (last - first + 1)
            padding = tf.concat([tf.stack([before, after], 1), [[0, 0]]], 0)
            return tf.cast(tf.pad(_cut(image, first, last - first + 1), padding), tf.float32)
    if preprocess.interpolation == "nearest":
        return _pick(image, region.start, region.extent, size)
    if plain and whole:
        # Of TensorFlow's resizes this one is fast enough that doing all of it beats doing the needed part by another.
        fixed = {ResizeRandomCrop: getattr(preprocess.crop, "resize", None), NoCrop: size}  # known before there is an image
        return _cut(tf.image.resize(image, fixed.get(type(preprocess.crop), region.resized)), region.corner, size)
    return _translate(image, region, preprocess)


def _cut(image: tf.Tensor, start: tf.Tensor, extent: tf.Tensor | tuple[int, int]) -> tf.Tensor:
    return tf.slice(image, tf.concat([tf.cast(start, tf.int32), [0]], 0), tf.concat([extent, [3]], 0))


def _pick(image: tf.Tensor, start: tf.Tensor, extent: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Resizes a region by taking the nearest pixels; returns float32."""
    rows, columns = (
        tf.cast(tf.floor(start[axis] + (tf.range(size[axis], dtype=tf.float64) + 0.5) * extent[axis] / size[axis]), tf.int32)
        for axis in (0, 1)
    )
    return tf.cast(tf.gather(tf.gather(image, rows), columns, axis=1), tf.float32)


def _pick_between(image: tf.Tensor, region: Region, size: tuple[int, int]) -> tf.Tensor:
    """Shrinks a region by plain bilinear interpolation, faster than `_translate`; returns float32."""
    step = region.extent / tf.constant(size, tf.float64)
    first = region.start + 0.5 * step - 0.5  # positions of the outermost pixels; never outside of the image when it shrinks
    last = first + step * (tf.constant(size, tf.float64) - 1)
    box = tf.concat([first, last], 0) / tf.cast(tf.tile(tf.shape(image)[:2] - 1, [2]), tf.float64)
    return tf.image.crop_and_resize(image[None], tf.cast(box, tf.float32)[None], [0], size)[0]


def _translate(image: tf.Tensor, region: Region, preprocess: Preprocess, *, ratio: int = 1) -> tf.Tensor:
    """Resizes a region that starts and ends between pixels, of an image decoded at 1 / `ratio`; returns float32."""
    first, last = _needed(tf.shape(image)[:2], region, preprocess)
    image = _cut(image, first, last - first + 1)  # positions are float32 below, and exact to more places where they are small
    step = region.extent / tf.constant(preprocess.image_size, tf.float64)
    start = region.start - tf.cast(first, tf.float64)
    kernel = {"bilinear": "triangle", "bicubic": "keyscubic"}[preprocess.interpolation]
    if ratio > 1 and preprocess.antialias:
        kernel = (
            "lanczos3"  # the decoder has smoothed once: a second triangle on top was 2 dB below a single one, this 2 dB above
        )
    image = tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=preprocess.image_size,
        scale=tf.cast(1 / step, tf.float32),
        translation=tf.cast(-start / step, tf.float32),
        kernel_type=kernel,
        antialias=preprocess.antialias,
    )[0]
    return tf.clip_by_value(image, 0, 255) if kernel == "lanczos3" else image


def _draw_extent(full: tf.Tensor, numbers: tf.Tensor, crop: RandomResizedCrop) -> tf.Tensor:
    """Returns height and width of a region of random area and aspect; see `RandomResizedCrop`."""
    (low_area, high_area), (low_ratio, high_ratio) = crop.area_range, crop.aspect_ratio_range
    numbers = tf.reshape(numbers, (crop.num_attempts, 2))
    area = (low_area + numbers[:, 0] * (high_area - low_area)) * full[0] * full[1]
    low, high = math.log(low_ratio), math.log(high_ratio)
    ratio = tf.exp(low + numbers[:, 1] * (high - low))
    extents = tf.maximum(tf.constant(1, tf.float64), tf.floor(tf.sqrt(tf.stack([area / ratio, area * ratio], 1)) + 0.5))
    fits = tf.reduce_all(extents <= full, 1)
    width = tf.minimum(full[1], tf.floor(full[0] * high_ratio + 0.5))
    height = tf.minimum(full[0], tf.floor(full[1] / low_ratio + 0.5))
    centre = tf.stack([height, width])
    return tf.where(tf.reduce_any(fits), extents[tf.argmax(fits)], centre)


def _to_uint8(image: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.clip_by_value(tf.floor(image + 0.5), 0, 255), tf.uint8)


def _convert(image: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Normalises a float32 image (height, width, 3) and brings it to layout and type."""
    if preprocess.dtype == "uint8":
        image = _to_uint8(image)
    else:
        # With a constant for each element: to broadcast three numbers over an image takes TensorFlow a quarter of all the work.
        shape = (*preprocess.image_size, 3)
        image = (image - tf.broadcast_to(tf.constant(preprocess.mean, tf.float32), shape)) * tf.broadcast_to(
            1 / tf.constant(preprocess.std, tf.float32), shape
        )
        image = tf.cast(image, preprocess.dtype)
    return tf.transpose(image, [2, 0, 1]) if preprocess.layout == "CHW" else image
