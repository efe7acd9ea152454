"""Random augmentation by Keras's layers: TrivialAugment and RandAugment, one image at a time."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from dali_tf_input.spec.preprocess import (
    RAND_AUGMENT_BINS,
    RAND_AUGMENT_MAGNITUDE,
    RAND_AUGMENT_OPS,
    Preprocess,
)

Operation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def make_augmentation(preprocess: Preprocess) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Makes the function that does `preprocess.auto_augment`.

    The operations are those of DALI's `auto_aug`, at the same strengths, as far as Keras has them.
    They differ in this: Keras's brightness adds where DALI's multiplies; Keras draws a strength
    evenly from a range where DALI takes one of 31 steps of it, in TrivialAugment and in the
    contrast of both; in TrivialAugment Keras posterizes to 2..8 bits uniformly, DALI by its
    steps.

    Returns:
      A function of an image, uint8 (*preprocess.image_size, 3), and a seed, int64 (2,), to an image
      of the same type and shape: the same for the same seed.
    """
    is_trivial = preprocess.auto_augment == "trivial"
    operations = (_trivial if is_trivial else _rand)(preprocess.image_size)
    num_ops = 1 if is_trivial else RAND_AUGMENT_OPS
    shape = (*preprocess.image_size, 3)

    def augment(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        image = tf.cast(image, tf.float32)
        seeds = tf.random.experimental.stateless_split(seed, 2 * num_ops)
        for number in range(num_ops):
            chosen = tf.random.stateless_uniform(
                (), seeds[2 * number], maxval=len(operations), dtype=tf.int32
            )
            image = tf.switch_case(
                chosen, [_bind(operation, image, seeds[2 * number + 1]) for operation in operations]
            )
            image = tf.ensure_shape(tf.clip_by_value(tf.round(image), 0, 255), shape)
        return tf.cast(image, tf.uint8)

    return augment


class _Seeds(keras.random.SeedGenerator):
    """A generator of seeds that follow from a given one, without a state that calls share."""

    def __init__(self, seed: tf.Tensor) -> None:
        seeds = tf.random.experimental.stateless_split(seed, 4)
        self._seeds = tf.unstack(tf.cast(seeds, tf.uint32))

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self._seeds.pop()


def _bind(operation: Operation, image: tf.Tensor, seed: tf.Tensor) -> Callable[[], tf.Tensor]:
    return lambda: operation(image, seed)


def _layer(layer: layers.Layer) -> Operation:
    def operate(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        batch = image[None]
        transformation = layer.get_random_transformation(batch, training=True, seed=_Seeds(seed))
        return layer.transform_images(batch, transformation, training=True)[0]

    layer.backend.set_backend("tensorflow")  # whatever trains the model
    layer.dtype_policy = "float32"  # whatever Keras's global policy is
    return operate


def _either(*layers: layers.Layer) -> Operation:
    """Returns an operation that applies a random one of `layers`."""
    operations = [_layer(layer) for layer in layers]

    def operate(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        seeds = tf.random.experimental.stateless_split(seed, 2)
        chosen = tf.random.stateless_uniform((), seeds[0], maxval=len(operations), dtype=tf.int32)
        return tf.switch_case(
            chosen, [_bind(operation, image, seeds[1]) for operation in operations]
        )

    return operate


def _with_margin(operation: Operation) -> Operation:
    """Returns an operation that sees repeated pixels, not zeros, beyond the image's edges."""

    def operate(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return operation(tf.pad(image, [[1, 1], [1, 1], [0, 0]], "SYMMETRIC"), seed)[1:-1, 1:-1]

    return operate


def _same(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return image


def _trivial(size: tuple[int, int]) -> list[Operation]:
    """TrivialAugment's wide set, with random strengths; the ranges are the paper's and DALI's."""
    height, width = size
    warp: dict[str, Any] = {"fill_mode": "constant", "fill_value": 128.0}
    rows, columns = min(1.0, 32 / height), min(1.0, 32 / width)  # 32 pixels, as parts of the image
    return [
        _layer(
            layers.RandomTranslation(height_factor=0.0, width_factor=(-columns, columns), **warp)
        ),
        _layer(layers.RandomTranslation(height_factor=(-rows, rows), width_factor=0.0, **warp)),
        _layer(layers.RandomShear(x_factor=(0.0, 0.99), **warp)),  # either way
        _layer(layers.RandomShear(y_factor=(0.0, 0.99), **warp)),
        _layer(layers.RandomRotation((-135 / 360, 135 / 360), **warp)),
        _layer(layers.RandomBrightness((-0.99, 0.99))),
        _layer(layers.RandomContrast((0.99, 0.99))),
        _layer(layers.RandomSaturation((_saturation(0.01), _saturation(1.99)), value_range=(0, 1))),
        _with_margin(_layer(layers.RandomSharpness((0.01 / 2, 1.99 / 2)))),
        _either(*(layers.RandomPosterization((bits, bits)) for bits in range(2, 9))),
        _layer(layers.Solarization(threshold_factor=1.0)),
        _layer(layers.Equalization()),
        _layer(layers.AutoContrast()),
        _same,
    ]


def _rand(size: tuple[int, int]) -> list[Operation]:
    """RandAugment's set at one strength; the largest strengths are the paper's and DALI's."""
    strength = RAND_AUGMENT_MAGNITUDE / (RAND_AUGMENT_BINS - 1)
    warp: dict[str, Any] = {"fill_mode": "constant", "fill_value": 128.0}
    shift, shear = 100 / 224 * strength, 0.3 * strength
    turn, enhance = 30 / 360 * strength, 0.9 * strength
    bits = round(8 - 4 * strength)
    threshold = 256 * (1 - strength)

    def both(layer: type[layers.Layer], value: float, **arguments: Any) -> Operation:
        return _either(*(layer((signed, signed), **arguments) for signed in (-value, value)))

    def enhanced(
        layer: type[layers.Layer], at: Callable[[float], float], **arguments: Any
    ) -> Operation:
        factors = (at(1 - enhance), at(1 + enhance))
        return _either(*(layer((factor, factor), **arguments) for factor in factors))

    return [
        _either(*(layers.RandomTranslation(0.0, (x, x), **warp) for x in (-shift, shift))),
        _either(*(layers.RandomTranslation((y, y), 0.0, **warp) for y in (-shift, shift))),
        _layer(layers.RandomShear(x_factor=(shear, shear), **warp)),  # either way
        _layer(layers.RandomShear(y_factor=(shear, shear), **warp)),
        both(layers.RandomRotation, turn, **warp),
        both(layers.RandomBrightness, enhance),
        _layer(layers.RandomContrast((enhance, enhance))),
        enhanced(layers.RandomSaturation, _saturation, value_range=(0, 1)),
        _with_margin(enhanced(layers.RandomSharpness, lambda factor: factor / 2)),
        _layer(layers.RandomPosterization((bits, bits))),
        # Not layers.Solarization: it draws from 0 on, whatever range it is given.
        lambda image, seed: tf.where(image < threshold, image, 255 - image),
        _layer(layers.Equalization()),
        _layer(layers.AutoContrast()),
        _same,
    ]


def _saturation(factor: float) -> float:
    """Returns what `RandomSaturation` calls a saturation times `factor`."""
    return factor / (1 + factor)
