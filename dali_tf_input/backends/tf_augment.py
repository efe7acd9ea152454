"""Augmentations with TensorFlow: drawing rows for both backends, and applying them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import tensorflow as tf

from dali_tf_input.spec.augment import Program
from dali_tf_input.spec.colors import LUMA
from dali_tf_input.spec.primitives import Floats, Primitive


def draw_rows(program: Program, seed: tf.Tensor) -> tf.Tensor:
    """Makes the rows of one image, see `make_rows`: a function of `seed`, int64 (2,)."""
    drawn = tf.raw_ops.StatelessRandomUniform(shape=[program.num_uniforms], seed=seed)
    return make_rows(program, drawn)


def make_rows(program: Program, uniforms: tf.Tensor) -> tf.Tensor:
    """Makes the augmentation rows of images.

    Args:
      program: what is drawn.
      uniforms: random numbers in [0, 1), float32 (program.num_uniforms,), or (k, ...) of k images.

    Returns:
      float32 (program.num_ops, ROW_SIZE), or (k, ...): the rows of `program`, except that those
      of `Primitive.ERASE` contain [top, left, bottom, right, noise seed, 0, fill, noise].
    """
    count, ops = len(program.p), program.num_ops
    of_order, of_row, places = tf.split(uniforms, [count, ops, 2 * ops], axis=-1)
    order = pick(of_order, program.p, program.num_orders)
    order = tf.gather(order, program.augmentation_of_op, axis=-1)
    # A row of each table for each operation: the tables' rows follow each other when flat.
    num_orders = program.first_rows.shape[1]
    at = tf.maximum(order, 0) + num_orders * tf.range(ops)
    first = tf.gather(program.first_rows.ravel(), at)
    number = pick(of_row, program.op_p, tf.gather(program.num_rows.ravel(), at))
    is_done = (order >= 0) & (number >= 0)
    rows = tf.gather(program.rows, tf.where(is_done, first + number, 0))
    if Primitive.ERASE not in program.rows[:, 0]:
        return rows
    places = tf.reshape(places, tf.concat([tf.shape(rows)[:-1], [2]], 0))
    corner = tf.floor(places * rows[..., 3:5]) + rows[..., 5:7]
    noise_seed = tf.floor(tf.reduce_sum(places, -1, keepdims=True) * (1 << 23))
    kind = rows[..., :1]
    drawn = [kind, corner, corner + rows[..., 1:3], noise_seed, kind * 0, rows[..., 7:]]
    return tf.where(kind == Primitive.ERASE, tf.concat(drawn, -1), rows)


def pick(uniforms: tf.Tensor, p: Floats, count: tf.Tensor) -> tf.Tensor:
    """Returns a number in [0, count) for each uniform with probability `p`, else -1."""
    part = tf.math.divide_no_nan(uniforms, p)
    number = tf.minimum(tf.cast(part * tf.cast(count, tf.float32), tf.int32), count - 1)
    return tf.where(uniforms < p, number, -1)


def apply_rows(image: tf.Tensor, rows: tf.Tensor, program: Program) -> tf.Tensor:
    """Applies drawn rows to an image, uint8 (height, width, 3), as native/augment.h does."""
    shape = image.shape
    for op in range(program.num_ops):
        row = rows[op]
        primitives = [Primitive.NOTHING, *sorted({*program.rows_of_op(op)[:, 0]} - {0})]
        numbers = np.searchsorted(primitives, np.arange(len(Primitive)))
        branches = [_bind(_PRIMITIVES[Primitive(int(kind))], image, row[1:]) for kind in primitives]
        chosen = tf.gather(np.int32(numbers), tf.cast(row[0], tf.int32))
        image = tf.ensure_shape(tf.switch_case(chosen, branches), shape)
    return image


def warp_mask(mask: tf.Tensor, rows: tf.Tensor, program: Program, outside: int) -> tf.Tensor:
    """Moves the pixels of a mask, int32 (height, width), as `apply_rows` moves those of its image.

    A value is never interpolated: each pixel gets the nearest one. `outside` is the value of pixels
    that come from outside the mask.
    """
    height, width = mask.shape
    for op in range(program.num_ops):
        if Primitive.WARP not in program.rows_of_op(op)[:, 0]:
            continue

        def warp(mask: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            x, y = _find_sources(numbers, height, width)
            places, is_inside = _find_places(tf.floor(x), tf.floor(y), height, width)
            return tf.where(is_inside, tf.gather(tf.reshape(mask, [-1]), places), outside)

        row = rows[op]
        moves = tf.equal(row[0], float(Primitive.WARP))
        mask = tf.cond(moves, partial(warp, mask, row[1:]), partial(tf.identity, mask))
    return mask


def _bind(
    operate: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], image: tf.Tensor, numbers: tf.Tensor
) -> Callable[[], tf.Tensor]:
    def branch() -> tf.Tensor:
        result = operate(image, numbers)
        if result.dtype == tf.uint8:
            return result
        return tf.cast(tf.clip_by_value(tf.floor(result + 0.5), 0, 255), tf.uint8)

    return branch


def _color(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    matrix = tf.reshape(numbers, (3, 4))
    return tf.tensordot(_float(image), matrix[:, :3], [[2], [1]]) + matrix[:, 3]


def _contrast(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    mean = tf.tensordot(tf.reduce_mean(_float(image), (0, 1)), tf.constant(LUMA), 1)
    return mean + numbers[0] * (_float(image) - mean)


def _solarize(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.where(_float(image) < numbers[0], image, 255 - image)


def _posterize(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(image, tf.cast(numbers[0], tf.uint8))


def _add(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.where(image < 128, _float(image) + numbers[0], _float(image))


def _autocontrast(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    values = _float(image)
    low, high = (reduce(values, (0, 1)) for reduce in (tf.reduce_min, tf.reduce_max))
    return tf.where(high > low, (values - low) * 255 / tf.maximum(high - low, 1), values)


def _equalize(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    channels = []
    for channel in tf.unstack(tf.cast(image, tf.int32), axis=2):
        sums = tf.cumsum(tf.math.bincount(tf.reshape(channel, [-1]), minlength=256, maxlength=256))
        lowest = tf.reduce_min(tf.where(sums > 0, sums, sums[-1]))
        rest = tf.cast(tf.maximum(sums[-1] - lowest, 1), tf.float32)
        table = tf.cast(sums - lowest, tf.float32) * 255 / rest
        table = tf.where(sums[-1] > lowest, table, tf.range(256.0))
        channels.append(tf.gather(table, channel))
    return tf.stack(channels, 2)


def _filter(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    kernel = tf.tile(tf.reshape(numbers[:9], (3, 3, 1, 1)), (1, 1, 3, 1))
    return tf.nn.depthwise_conv2d(_widen(image, 1)[None], kernel, (1, 1, 1, 1), "VALID")[0]


def _blur(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    sigma = numbers[0]
    radius = tf.cast(tf.math.ceil(3 * sigma), tf.int32)
    weights = tf.exp(-0.5 * (tf.cast(tf.range(-radius, radius + 1), tf.float32) / sigma) ** 2)
    weights = tf.tile((weights / tf.reduce_sum(weights))[:, None], (1, 3))
    down, across = weights[:, None, :, None], weights[None, :, :, None]
    image = _widen(image, radius)[None]
    for kernel in (down, across):
        image = tf.nn.depthwise_conv2d(image, kernel, (1, 1, 1, 1), "VALID")
    return image[0]


def _widen(image: tf.Tensor, margin: tf.Tensor | int) -> tf.Tensor:
    """Returns a float image with a reflected margin, which may be wider than the image."""

    def places(side: int) -> tf.Tensor:
        period = max(2 * (side - 1), 1)
        place = tf.math.floormod(tf.range(-margin, side + margin), period)
        return tf.minimum(place, period - place) if side > 1 else place * 0

    rows, columns = map(places, image.shape[:2])
    return _float(tf.gather(tf.gather(image, rows), columns, axis=1))


def _warp(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    height, width = image.shape[:2]
    from_x, from_y = _find_sources(numbers, height, width)

    def look_up(column: tf.Tensor, line: tf.Tensor) -> tf.Tensor:
        places, is_inside = _find_places(column, line, height, width)
        pixels = tf.gather(tf.reshape(image, (-1, 3)), places)
        return tf.where(is_inside[..., None], _float(pixels), numbers[6])

    def interpolate() -> tf.Tensor:
        left, top = tf.floor(from_x - 0.5), tf.floor(from_y - 0.5)
        right_part = (from_x - 0.5 - left)[..., None]
        bottom_part = (from_y - 0.5 - top)[..., None]
        above, below = (
            look_up(left, line) * (1 - right_part) + look_up(left + 1, line) * right_part
            for line in (top, top + 1)
        )
        return above * (1 - bottom_part) + below * bottom_part

    return tf.cond(
        numbers[7] != 0, interpolate, lambda: look_up(tf.floor(from_x), tf.floor(from_y))
    )


def _find_sources(numbers: tf.Tensor, height: int, width: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where each pixel of a warped image comes from: x and y, float32 (height, width)."""
    x, y = tf.range(0.5, width)[None, :], tf.range(0.5, height)[:, None]
    from_x = numbers[0] * x + (numbers[1] * y + numbers[2])
    from_y = numbers[3] * x + (numbers[4] * y + numbers[5])
    return from_x, from_y


def _find_places(
    column: tf.Tensor, line: tf.Tensor, height: int, width: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the numbers of pixels, counted by rows, int32, and whether they are in the image."""
    is_inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
    return tf.cast(tf.where(is_inside, line * width + column, 0), tf.int32), is_inside


def _erase(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    height, width = image.shape[:2]
    x, y = tf.range(0.0, width)[None, :], tf.range(0.0, height)[:, None]
    top, left, bottom, right = tf.unstack(numbers[:4])
    is_inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    hashed = tf.range(height * width * 3, dtype=tf.int64) + tf.cast(numbers[4], tf.int64)
    hashed = tf.cast(hashed, tf.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        shifted = tf.bitwise.right_shift(hashed, tf.constant(shift, tf.uint32))
        hashed = tf.bitwise.bitwise_xor(hashed, shifted) * tf.constant(factor, tf.uint32)
    total = tf.reduce_sum(tf.cast(tf.bitcast(hashed, tf.uint8), tf.float32), 1)
    noise = tf.reshape((total - 510) / 147.8, (height, width, 3))
    return tf.where(is_inside[..., None], numbers[6:9] + numbers[9:12] * noise, _float(image))


def _float(image: tf.Tensor) -> tf.Tensor:
    return tf.cast(image, tf.float32)


_PRIMITIVES: dict[Primitive, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    Primitive.NOTHING: lambda image, numbers: image,
    Primitive.COLOR: _color,
    Primitive.CONTRAST: _contrast,
    Primitive.SOLARIZE: _solarize,
    Primitive.POSTERIZE: _posterize,
    Primitive.ADD: _add,
    Primitive.AUTOCONTRAST: _autocontrast,
    Primitive.EQUALIZE: _equalize,
    Primitive.FILTER: _filter,
    Primitive.BLUR: _blur,
    Primitive.WARP: _warp,
    Primitive.ERASE: _erase,
}
