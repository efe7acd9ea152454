"""Makes the views of one image: TensorFlow decodes it, and the compiled operations do the rest.

It is for what `tf_native.make_batch` refuses: other formats than baseline JPEG, damaged files, and
large images that are decoded at a part of their size.
"""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from dali_tf_input.backends import tf_native
from dali_tf_input.backends.tf_images import decode_deep_png, decode_jpeg, decode_other
from dali_tf_input.records.checks import DCT_METHOD
from dali_tf_input.spec.preprocess import Preprocess

_STORED_PIXELS = [4, 1, 0, 0, 0, 0, 0, 0]  # as `tf_native.inspect` says it of another format


def make_plain(preprocess: Preprocess, *, changes: bool) -> Preprocess:
    """Returns the preprocessing of an image up to `normalize_image`.

    The image is uint8 if something `changes` it before that, else float32.
    """
    return dataclasses.replace(
        preprocess,
        mirror_probability=0.0,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        channels=3,
        layout="HWC",
        dtype="uint8" if changes else "float32",
        augment=preprocess.augment if changes else (),
    )


def make_views(
    image: tf.Tensor,
    uniforms: tf.Tensor,
    rows: tf.Tensor,
    views: Sequence[Preprocess],
    *,
    whole: bool,
    maximum: float,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Decodes an image and makes its views.

    Args:
      image: as `parsing.parse_record` returns it: a scalar string if encoded, else uint8 (height,
        width, 3).
      uniforms: its random numbers, those of all views side by side, float32 (u,).
      rows: its rows of augmentation, those of all views one after the other, float32 (r, ROW_SIZE).
      views: what is made of it, with crops that `tf_native.decodes`.
      whole: whether all of a JPEG must be valid, or only the part that is needed.
      maximum: if finite, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that leaves a pixel
        for each output pixel.

    Returns:
      What `tf_native.finish` returns.
    """
    described = tf_native.describe_views(views, whole=whole, maximum=maximum)
    if image.dtype == tf.uint8:
        plan = tf.constant(_STORED_PIXELS)
        return tf_native.finish(image, plan, uniforms, rows, views, described)
    scales = math.isfinite(maximum)
    is_cut = not whole and len(views) == 1  # several views are made of the whole image
    size = tf.zeros(2, tf.int32)
    if is_cut or scales:
        is_jpeg = tf.io.is_jpeg(image)
        size = tf.cond(is_jpeg, lambda: tf.io.extract_jpeg_shape(image)[:2], lambda: size)
    plan = tf_native.inspect(image, size, uniforms, described)

    def decode_part(ratio: int) -> tf.Tensor:
        return tf.io.decode_and_crop_jpeg(
            image, plan[4:], channels=3, ratio=ratio, dct_method=DCT_METHOD
        )

    jpeg = [(lambda: decode_part(1)) if is_cut else (lambda: decode_jpeg(image))]
    if scales:
        jpeg += [lambda: decode_part(2), lambda: decode_part(4), lambda: decode_part(8)]
    others = [lambda: decode_other(image), lambda: decode_deep_png(image)]
    decoder = plan[0] if scales else tf.maximum(plan[0] - 3, 0)
    decoded = tf.switch_case(decoder, [*jpeg, *others])
    return tf_native.finish(decoded, plan, uniforms, rows, views, described)
