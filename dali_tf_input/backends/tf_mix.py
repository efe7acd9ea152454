"""Mixup and CutMix with TensorFlow: random choices for both backends, and mixing of batches."""

from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends.stream import Stream, index_in_batch, seeds_of
from dali_tf_input.backends.tf_images import to_uint8
from dali_tf_input.random import Purpose
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.mix import NUM_UNIFORMS
from dali_tf_input.spec.preprocess import Preprocess


def draw_mix(stream: Stream, key: tf.Tensor) -> tf.Tensor:
    """Draws how the batch of an image is mixed: the same for all images of the batch.

    Args:
      stream: a stream with `spec.mix`.
      key: the image's key, see `reading.read_records`. Batches begin at multiples of their size.

    Returns:
      float32 (6,): an image's weight outside the box that shows its partner; the box's top, left,
      bottom and right in pixels; and the weight of an image's own label.
    """
    mix = stream.spec.mix
    assert mix
    height, width = stream.spec.preprocess.image_size
    first = key - index_in_batch(stream, key)
    seeds = seeds_of(stream, Purpose.MIX, first)
    which, part, *center = tf.unstack(
        tf.raw_ops.StatelessRandomUniform(shape=[NUM_UNIFORMS], seed=seeds), NUM_UNIFORMS
    )
    quantiles = mix.quantiles()
    is_mixed, is_cut = which < mix.p, which < mix.p * mix.cutmix_share
    levels = quantiles.shape[1]
    level = tf.minimum(tf.cast(part * levels, tf.int32), levels - 1)
    rest = tf.gather(quantiles.ravel(), tf.where(is_cut, levels, 0) + level)
    size = np.array([height, width], np.float32)
    half = tf.floor(tf.sqrt(1 - rest) * size) / 2
    middle = tf.floor(tf.stack(center) * size)
    start = tf.clip_by_value(tf.math.ceil(middle - half), 0, size)
    end = tf.clip_by_value(tf.math.ceil(middle + half), 0, size)
    box = tf.where(is_cut, tf.concat([start, end], 0), 0.0)
    area = tf.reduce_prod(box[2:] - box[:2]) / (height * width)
    weight = tf.where(is_mixed & ~is_cut, rest, 1.0)
    return tf.concat([[weight], box, [weight * (1 - area)]], 0)


@tf.autograph.experimental.do_not_convert
def mix_batch(values: dict[str, tf.Tensor], *, spec: InputSpec) -> Any:
    """Mixes each image and label with its partner from the other end; returns the batch."""
    drawn = values["mix"][0]
    values["image"] = mix_images(values["image"], drawn, spec.preprocess)
    values["label"] = mix_labels(values["label"], drawn)
    return spec.arrange(values)


def mix_labels(labels: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
    """Returns the mixed labels of a batch, as its images; see `draw_mix`."""
    part = drawn[5]
    return part * labels + (1 - part) * tf.reverse(labels, [0])


def mix_images(images: tf.Tensor, drawn: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Returns the mixed images of a batch; see `draw_mix`."""
    height, width = preprocess.image_size
    weight, top, left, bottom, right, _ = tf.unstack(drawn)
    y, x = tf.range(0.0, height)[:, None], tf.range(0.0, width)[None, :]
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    inside = inside[..., None] if preprocess.layout == "HWC" else inside[None]
    values = tf.cast(images, tf.float32)
    partners = tf.reverse(values, [0])
    mixed = tf.where(inside, partners, weight * values + (1 - weight) * partners)
    return to_uint8(mixed) if preprocess.dtype == "uint8" else tf.cast(mixed, preprocess.dtype)
