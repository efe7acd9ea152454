"""Preprocessing of one image with TensorFlow: the same pixels as `dali_images` makes."""

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

import tensorflow as tf

from dali_tf_input.backends.tf_augment import apply_rows, warp_mask
from dali_tf_input.backends.tf_formats import is_accepted, is_deep_png
from dali_tf_input.backends.tf_orientation import find_orientation, find_stored, swap_axes, turn
from dali_tf_input.records.checks import DCT_METHOD
from dali_tf_input.spec.colors import LUMA
from dali_tf_input.spec.crops import Letterbox, Region, Uniforms
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.preprocess import Preprocess

_KERNELS = {"bilinear": "triangle", "bicubic": "keyscubic"}

Decode = Literal["full", "region", "scaled"]
Ratio = Literal[1, 2, 4, 8]

_MOST_LARGER = 4  # pixels of a resized whole image, for each that is there


def check_supported(preprocess: Preprocess) -> None:
    """Raises InputError for a `preprocess` that this backend does not support."""
    dtypes = ("float32", "float16", "bfloat16", "uint8")
    preprocess.check_supported("tf.data", dtypes=dtypes)


def prepare_image(
    encoded: tf.Tensor,
    uniforms: tf.Tensor,
    preprocess: Preprocess,
    *,
    decode: Decode = "full",
    rows: tf.Tensor | None = None,
    transform: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Preprocesses one encoded image for the model.

    Args:
      encoded: a scalar string, the bytes of an image file; or pixels, see `parse_record`.
      uniforms: float32 (preprocess.num_uniforms,) in [0, 1): they decide what is random.
      preprocess: what to do.
      decode: how much of a JPEG is decoded; see `TfDataOptions`.
      rows: what `preprocess.augment` does, see `tf_augment`.
      transform: changes the image, uint8 (*preprocess.image_size, 3), after `rows`.

    Returns:
      `preprocess.dtype` of shape `preprocess.image_shape`.
    """
    if isinstance(preprocess.crop, Letterbox):
        decode = "full"  # all of the image is seen
    image = resample_image(encoded, uniforms, preprocess, decode=decode)
    if rows is not None or transform is not None:
        image = to_uint8(image)
    if rows is not None:
        image = apply_rows(image, rows, preprocess.make_program())
    if transform is not None:
        image = transform(image)
    return normalize_image(image, uniforms, preprocess)


def prepare_mask(
    mask: tf.Tensor, uniforms: tf.Tensor, rows: tf.Tensor | None, spec: InputSpec
) -> tf.Tensor:
    """Crops, resizes, warps and mirrors a mask like its image: int32 (*spec.preprocess.image_size).

    Args:
      mask: uint8 (height, width, 1), of the image's size, turned like it.
      uniforms: the image's random numbers.
      rows: what `preprocess.augment` does to the image, see `tf_augment`; None without it.
      spec: gives the image's preprocessing and the mask's value outside the image.
    """
    plain = dataclasses.replace(spec.preprocess, interpolation="nearest", antialias=False)
    if isinstance(plain.crop, Letterbox):
        plain = dataclasses.replace(plain, crop=Letterbox(fill=0))
    ignore = spec.mask.ignore if spec.mask else 0
    if spec.mask and spec.mask.values:
        values = tf.constant(spec.mask.map_values(range(256)), tf.uint8)
        mask = tf.gather(values, tf.cast(mask, tf.int32))
    region = find_region(tf.shape(mask)[:2], uniforms, plain)
    # Shifted, as what is outside is filled with 0.
    shifted = tf.cast(mask, tf.float32) - ignore
    mask = resize_region(shifted, region, plain, whole=True) + ignore
    mask = tf.cast(tf.ensure_shape(mask, (*plain.image_size, 1)), tf.int32)
    if rows is not None:
        mask = warp_mask(mask[..., 0], rows, plain.make_program(), ignore)[..., None]
    mask = mirror_image(mask, uniforms, plain)
    return tf.ensure_shape(mask[..., 0], plain.image_size)


def resample_image(
    encoded: tf.Tensor, uniforms: tf.Tensor, preprocess: Preprocess, *, decode: Decode
) -> tf.Tensor:
    """Decodes an image and resizes its region: float32 (*preprocess.image_size, 3) in 0..255."""
    turns = preprocess.apply_orientation and encoded.dtype != tf.uint8
    orientation = find_orientation(encoded) if turns else None

    def resample_whole(decode_whole: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        image = decode_whole(encoded)
        image = image if orientation is None else turn(image, orientation)
        region = find_region(tf.shape(image)[:2], uniforms, preprocess)
        return resize_region(image, region, preprocess, whole=True)

    def resample_part(ratio: Ratio = 1) -> tf.Tensor:
        image, region = decode_region(encoded, uniforms, preprocess, orientation, ratio=ratio)
        return resize_region(image, region, preprocess, whole=False, ratio=ratio)

    def resample_scaled() -> tf.Tensor:
        size = tf.io.extract_jpeg_shape(encoded)[:2]
        size = size if orientation is None else swap_axes(size, orientation)
        region = find_region(size, uniforms, preprocess)
        excess = region.extent / tf.constant(preprocess.image_size, tf.float64)
        excess = tf.reduce_min(excess)
        whole = partial(resample_whole, decode_jpeg)
        unscaled = whole if preprocess.resizes_plainly else resample_part
        branches = [unscaled, *(partial(resample_part, ratio) for ratio in (2, 4, 8))]
        reached = excess >= tf.constant([2, 4, 8], tf.float64)
        return tf.switch_case(tf.reduce_sum(tf.cast(reached, tf.int32)), branches)

    if encoded.dtype == tf.uint8:
        decode = "full"
    elif decode == "scaled" and preprocess.copies_pixels:
        decode = "region"  # pixels are taken as they are: there is nothing to scale
    if decode == "full":
        image = resample_whole(partial(decode_image, upright=False))  # it is turned above
    else:
        jpeg = resample_scaled if decode == "scaled" else resample_part
        other = partial(resample_whole, _decode_accepted)
        image = tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    return tf.ensure_shape(image, (*preprocess.image_size, 3))


def decode_image(encoded: tf.Tensor, *, upright: bool) -> tf.Tensor:
    """Decodes a JPEG, PNG, BMP or WebP, a scalar string, to uint8 RGB (height, width, 3).

    With `upright` it is turned by its EXIF orientation.
    """
    if encoded.dtype == tf.uint8:
        return encoded
    image = tf.cond(
        tf.io.is_jpeg(encoded), lambda: decode_jpeg(encoded), lambda: _decode_accepted(encoded)
    )
    return turn(image, find_orientation(encoded)) if upright else image


def decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes a JPEG as it is stored: uint8 (height, width, 3)."""
    return tf.io.decode_jpeg(encoded, channels=3, dct_method=DCT_METHOD)


def decode_deep_png(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes a PNG of 16 bits a channel as it is stored: uint8 (height, width, 3)."""
    # Rounded, as DALI does it; TensorFlow itself would cut off the lower 8 bits.
    pixels = tf.cast(tf.io.decode_png(encoded, channels=3, dtype=tf.uint16), tf.int32)
    return tf.cast((pixels + 128) // 257, tf.uint8)


def decode_other(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes another PNG, a BMP or a WebP as it is stored: uint8 (height, width, 3)."""
    # It takes no `dct_method`.
    image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
    return tf.ensure_shape(image, (None, None, 3))


def _decode_accepted(encoded: tf.Tensor) -> tf.Tensor:
    problem = "corrupted record: no JPEG, PNG, BMP or WebP that both backends decode"
    with tf.control_dependencies([tf.Assert(is_accepted(encoded), [problem])]):
        encoded = tf.identity(encoded)
    return tf.cond(
        is_deep_png(encoded), lambda: decode_deep_png(encoded), lambda: decode_other(encoded)
    )


def decode_region(
    encoded: tf.Tensor,
    uniforms: tf.Tensor,
    preprocess: Preprocess,
    orientation: tf.Tensor | None,
    *,
    ratio: Ratio = 1,
) -> tf.Tensor:
    """Decodes the part of a JPEG that the output needs, at 1 / `ratio` of its size.

    Lines below the region are not decoded; in the other lines only the region's columns are
    converted to RGB.

    Args:
      encoded: a JPEG, a scalar string.
      uniforms: as for `prepare_image`.
      preprocess: gives the crop.
      orientation: how the image is to be turned; None if it is not.
      ratio: see above.

    Returns:
      uint8 (height, width, 3), turned, and the region in its coordinates.
    """
    stored = tf.io.extract_jpeg_shape(encoded)[:2]
    size = stored if orientation is None else swap_axes(stored, orientation)
    region = find_region(size, uniforms, preprocess)
    region = region._replace(start=region.start / ratio, extent=region.extent / ratio)
    size = (size + ratio - 1) // ratio  # the last pixel of a side may stand for fewer
    first, last = source_window(size, region, preprocess)
    # Two more pixels each way: libjpeg interpolates colors from fewer samples at the edges it
    # decodes.
    first, last = tf.maximum(first - 2, 0), tf.minimum(last + 2, size - 1)
    start, end = first, last
    if orientation is not None:
        start, end = find_stored(first, last, swap_axes(size, orientation), orientation)
    window = tf.concat([start, end - start + 1], 0)
    image = tf.io.decode_and_crop_jpeg(
        encoded, window, channels=3, ratio=ratio, dct_method=DCT_METHOD
    )
    image = image if orientation is None else turn(image, orientation)
    return image, region._replace(start=region.start - tf.cast(first, tf.float64))


class TensorFlowOps:
    """`crops.Ops` on tensors."""

    floor = staticmethod(tf.floor)
    exp = staticmethod(tf.exp)
    sqrt = staticmethod(tf.sqrt)
    minimum = staticmethod(tf.minimum)
    maximum = staticmethod(tf.maximum)

    def constant(self, values: Collection[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    def where(self, condition: tf.Tensor, values: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        return tf.where(condition, tf.cast(values, tf.float64), tf.cast(others, tf.float64))

    def max(self, values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(values, keepdims=True)

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, keepdims=True)

    def concat(self, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        return tf.concat([first, second], 0)


def split(uniforms: tf.Tensor) -> Uniforms:
    """Does the same as `Uniforms.split`, by one operation."""
    return Uniforms(*tf.split(uniforms, [1, 2, -1]))


def is_mirrored(uniforms: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Returns whether an image's random numbers mirror it, a scalar."""
    return tf.squeeze(split(uniforms).mirror < preprocess.mirror_probability)


def find_region(size: tf.Tensor, uniforms: tf.Tensor, preprocess: Preprocess) -> Region:
    """Returns where the output lies in an image of `size`, int32 (2,): height and width."""
    out = tf.constant(preprocess.image_size, tf.float64)
    named = split(tf.cast(uniforms, tf.float64))
    return preprocess.crop.plan(tf.cast(size, tf.float64), out, named, TensorFlowOps())


def source_window(
    size: tf.Tensor, region: Region, preprocess: Preprocess
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first and last pixel, int32 (2,) each, that a region is resampled from."""
    if preprocess.crop.sampling != "resize_then_crop":
        first = tf.cast(tf.floor(region.start), tf.int32)
        last = tf.cast(tf.math.ceil(region.start + region.extent), tf.int32) - 1
        return tf.maximum(first, 0), tf.minimum(last, size - 1)
    step = region.extent / tf.constant(preprocess.image_size, tf.float64)
    radius = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    reach = radius * tf.maximum(step, 1) if preprocess.antialias else radius  # of the filter
    first = tf.cast(tf.floor(region.start + 0.5 * step - 0.5 - reach), tf.int32)
    end = region.start + region.extent - 0.5 * step - 0.5 + reach
    last = tf.cast(tf.math.ceil(end), tf.int32)
    return tf.maximum(first, 0), tf.minimum(last, size - 1)


def resize_region(
    image: tf.Tensor, region: Region, preprocess: Preprocess, *, whole: bool, ratio: Ratio = 1
) -> tf.Tensor:
    """Resizes a region of an image (height, width, 3) to `preprocess.image_size`; returns float32.

    The image is uint8, decoded at 1 / `ratio`; if not `whole`, it is only the part that is needed.
    """
    size, interpolation = preprocess.image_size, preprocess.interpolation
    plain = interpolation == "bilinear" and not preprocess.antialias
    if ratio > 1:
        return scale_and_translate(image, region, preprocess)
    if preprocess.crop.sampling == "crop_then_resize":
        image = crop_to(image, region.start, tf.cast(region.extent, tf.int32))
        if interpolation == "nearest":
            return gather_nearest(image, tf.zeros_like(region.start), region.extent, size)
        return tf.image.resize(image, size, method=interpolation, antialias=preprocess.antialias)
    if isinstance(preprocess.crop, Letterbox):
        return resize_and_pad(image, region, preprocess, preprocess.crop.fill)
    if preprocess.crop.sampling == "crop_and_pad":
        first, last = source_window(tf.shape(image)[:2], region, preprocess)
        before = tf.maximum(-tf.cast(region.start, tf.int32), 0)
        after = tf.constant(size) - before - (last - first + 1)
        padding = tf.concat([tf.stack([before, after], 1), [[0, 0]]], 0)
        return tf.cast(tf.pad(crop_to(image, first, last - first + 1), padding), tf.float32)
    if interpolation == "nearest":
        return gather_nearest(image, region.start, region.extent, size)
    if plain and whole:
        # So fast that resizing the whole image beats resizing a part with another operation.
        known = tf.get_static_value(region.resized)
        if known is not None:
            return crop_to(tf.image.resize(image, known.astype(int)), region.corner, size)
        # A thin image would become a very long one.
        is_larger = tf.reduce_prod(region.resized) > _MOST_LARGER * tf.cast(
            tf.maximum(tf.reduce_prod(tf.shape(image)[:2]), size[0] * size[1]), tf.float64
        )
        return tf.cond(
            is_larger,
            lambda: scale_and_translate(image, region, preprocess),
            lambda: crop_to(
                tf.image.resize(image, tf.cast(region.resized, tf.int32)), region.corner, size
            ),
        )
    return scale_and_translate(image, region, preprocess)


def resize_and_pad(
    image: tf.Tensor, region: Region, preprocess: Preprocess, fill: float
) -> tf.Tensor:
    """Resizes a whole image and pads it to `preprocess.image_size`; returns float32."""
    resized, before = tf.cast(region.resized, tf.int32), -tf.cast(region.corner, tf.int32)
    method, antialias = preprocess.interpolation, preprocess.antialias
    image = tf.cast(tf.image.resize(image, resized, method, antialias=antialias), tf.float32)
    after = tf.constant(preprocess.image_size) - resized - before
    padding = tf.concat([tf.stack([before, after], 1), [[0, 0]]], 0)
    return tf.pad(image, padding, constant_values=fill)


def crop_to(image: tf.Tensor, start: tf.Tensor, extent: tf.Tensor | tuple[int, int]) -> tf.Tensor:
    """Returns a region of whole pixels of an image (height, width, channels)."""
    begin = tf.concat([tf.cast(start, tf.int32), [0]], 0)
    return tf.slice(image, begin, tf.concat([extent, [-1]], 0))


def gather_nearest(
    image: tf.Tensor, start: tf.Tensor, extent: tf.Tensor, size: tuple[int, int]
) -> tf.Tensor:
    """Resizes a region by taking the nearest pixels; returns float32."""
    rows, columns = (
        start[axis] + (tf.range(size[axis], dtype=tf.float64) + 0.5) * extent[axis] / size[axis]
        for axis in (0, 1)
    )
    image = tf.gather(image, tf.cast(tf.floor(rows), tf.int32))
    return tf.cast(tf.gather(image, tf.cast(tf.floor(columns), tf.int32), axis=1), tf.float32)


def scale_and_translate(image: tf.Tensor, region: Region, preprocess: Preprocess) -> tf.Tensor:
    """Resizes a region that starts and ends between pixels; returns float32."""
    # Cropped first: positions are float32 below, and more exact where they are small.
    first, last = source_window(tf.shape(image)[:2], region, preprocess)
    image = crop_to(image, first, last - first + 1)
    step = region.extent / tf.constant(preprocess.image_size, tf.float64)
    start = region.start - tf.cast(first, tf.float64)
    return tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=preprocess.image_size,
        scale=tf.cast(1 / step, tf.float32),
        translation=tf.cast(-start / step, tf.float32),
        kernel_type=_KERNELS[preprocess.interpolation],
        antialias=preprocess.antialias,
    )[0]


def to_uint8(image: tf.Tensor) -> tf.Tensor:
    """Rounds an image in 0..255, half up."""
    return tf.cast(tf.clip_by_value(tf.floor(image + 0.5), 0, 255), tf.uint8)


def mirror_image(image: tf.Tensor, uniforms: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Mirrors an image (height, width, channels), or each of a batch, by its random numbers."""
    if preprocess.mirror_probability == 1:
        return tf.reverse(image, [-2])
    if preprocess.mirror_probability == 0:
        return image
    if uniforms.shape.rank == 2:
        mirrored = uniforms[:, 0] < preprocess.mirror_probability
        return tf.where(mirrored[:, None, None, None], tf.reverse(image, [-2]), image)
    mirrored = is_mirrored(uniforms, preprocess)
    return tf.cond(mirrored, lambda: tf.reverse(image, [-2]), lambda: image)


def normalize_image(image: tf.Tensor, uniforms: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Finishes an image (height, width, 3) in 0..255, or a batch of them.

    Makes it gray, mirrors, normalizes and casts it, and sets its layout.
    """
    is_batch = uniforms.shape.rank == 2
    image = tf.cast(image, tf.float32)
    if preprocess.channels == 1:
        red, green, blue = (
            image[..., channel : channel + 1] * LUMA[channel] for channel in range(3)
        )
        image = red + green + blue
    image = mirror_image(image, uniforms, preprocess)
    if preprocess.dtype == "uint8":
        image = to_uint8(image)
    else:
        # One constant per element: broadcasting three numbers over an image takes TensorFlow a
        # quarter of the time of everything else.
        shape = (*preprocess.image_size, preprocess.channels)
        mean = tf.broadcast_to(tf.constant(preprocess.mean, tf.float32), shape)
        scale = tf.broadcast_to(1 / tf.constant(preprocess.std, tf.float32), shape)
        image = tf.cast((image - mean) * scale, preprocess.dtype)
    if preprocess.layout == "CHW":
        image = tf.transpose(image, [0, 3, 1, 2] if is_batch else [2, 0, 1])
    return tf.ensure_shape(image, (None,) * is_batch + preprocess.image_shape)
