"""The primitives of augmentations, and published operations as rows of them.

A row is a primitive and its numbers; `Primitive` says which. Backends implement the primitives.
"""

import enum
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dali_tf_input.spec.colors import LUMA

Floats = npt.NDArray[np.float32]
Row = Sequence[float]

ROW_SIZE = 13  # a primitive and its numbers, at most 12
_TF_SIDE = 224  # the image size that the pixel counts of tensorflow/models are meant for


class Primitive(enum.IntEnum):
    """The operation of a row on a uint8 image; results are rounded half up and clipped to 0..255.

    The numbers of a row are given in brackets. Positions are in pixels: pixel p covers [p, p + 1),
    so the corners of pixels are at whole numbers.
    """

    NOTHING = 0
    COLOR = 1  # [3x4]: each channel is a weighted sum of red, green, blue and 1
    CONTRAST = 2  # [factor]: blends with the mean of the gray image
    SOLARIZE = 3  # [threshold]: inverts values from the threshold on
    POSTERIZE = 4  # [mask]: keeps the bits of a mask
    ADD = 5  # [amount]: to values below 128
    AUTOCONTRAST = 6  # stretches each channel to 0..255
    EQUALIZE = 7  # equalizes the histogram of each channel, like OpenCV's `equalizeHist`
    FILTER = 8  # [3x3]: convolves; the border is reflected without repeating the edge pixel
    BLUR = 9  # [sigma]: Gaussian, truncated at 3 sigma; the same border as FILTER
    # [xx, xy, x, yx, yy, y, fill, bilinear]: maps output positions to image positions.
    WARP = 10
    # [height, width, number of positions down, number across, top, left, 3 fill values, 3 standard
    # deviations]: fills a rectangle, randomly placed from (top, left) on, and adds normal noise.
    ERASE = 11


def make_table(rows: Iterable[Row]) -> Floats:
    """Returns rows, filled up with zeros: float32 (rows, ROW_SIZE)."""
    return np.array([(*row, *(0,) * (ROW_SIZE - len(row))) for row in rows], np.float32)


class Warp:
    """Makes rows of `Primitive.WARP` for images of a size."""

    def __init__(
        self, image_size: tuple[int, int], fill: float = 0.0, bilinear: bool = False
    ) -> None:
        self.height, self.width = image_size
        self._end = (fill, float(bilinear))

    def row(self, *matrix: float) -> tuple[float, ...]:
        """Returns the row of a 2x3 matrix."""
        return (Primitive.WARP, *matrix, *self._end)

    def shear(self, x: float, y: float) -> tuple[float, ...]:
        """Returns a shear, by pixels per pixel of the other axis."""
        return self.row(1, x, 0, y, 1, 0)

    def shift(self, x: float, y: float) -> tuple[float, ...]:
        """Returns a translation by pixels."""
        return self.row(1, 0, x, 0, 1, y)

    def turn(self, degrees: float) -> tuple[float, ...]:
        """Returns a rotation about the center."""
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        x, y = self.width / 2, self.height / 2
        return self.row(cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def torchvision_rows(part: float, warp: Warp, *, is_wide: bool = False) -> list[Row]:
    """Returns torchvision's 14 operations, once for each direction.

    Source: torchvision.transforms.autoaugment, `RandAugment` and `TrivialAugmentWide` (`is_wide`).

    Args:
      part: the magnitude, as a fraction of the largest one.
      warp: makes the warps.
      is_wide: whether to use the strengths of `TrivialAugmentWide`.
    """
    shear, turn, enhance = (0.99, 135, 0.99) if is_wide else (0.3, 30, 0.9)
    across, down = (32, 32) if is_wide else (warp.width * 150 / 331, warp.height * 150 / 331)
    bits = 8 - round(part * (6 if is_wide else 4))
    rows: list[Row] = []
    for sign in (-part, part):
        rows += [
            (Primitive.NOTHING,),
            warp.shear(sign * shear, 0),
            warp.shear(0, sign * shear),
            warp.shift(int(sign * across), 0),
            warp.shift(0, int(sign * down)),
            warp.turn(sign * turn),
            brightness(1 + sign * enhance),
            saturation(1 + sign * enhance),
            contrast(1 + sign * enhance),
            sharpness(1 + sign * enhance),
            posterize(bits),
            (Primitive.SOLARIZE, 255 * (1 - part)),
            (Primitive.AUTOCONTRAST,),
            (Primitive.EQUALIZE,),
        ]
    return rows


def tf_rows(magnitude: float, warp: Warp, increasing: bool) -> list[Row]:
    """Returns the operations of tensorflow/models, or timm's, once for each direction.

    Source: tensorflow/models, official/vision/ops/augment.py; with `increasing`, timm.data's
    `_RAND_INCREASING_TRANSFORMS`, which has no cutout.
    """
    part = magnitude / 10
    bits, threshold = min(int(part * 4), 8), int(part * 256)
    across, down = (part * 100 / _TF_SIDE * side for side in (warp.width, warp.height))
    half = int(part * 40 / _TF_SIDE * min(warp.width, warp.height))
    rows: list[Row] = []
    for sign in (-part, part):
        factor = max(0.1, 1 + 0.9 * sign) if increasing else 0.1 + 1.8 * part
        rows += [
            (Primitive.AUTOCONTRAST,),
            (Primitive.EQUALIZE,),
            (Primitive.SOLARIZE, 0),  # inverts
            warp.turn(sign * 30),
            posterize(max(4 - bits, 0) if increasing else bits),
            (Primitive.SOLARIZE, max(256 - threshold, 0) if increasing else threshold),
            (Primitive.ADD, min(128, int(part * 110)) if increasing else int(part * 110)),
            saturation(factor),
            contrast(factor),
            brightness(factor),
            sharpness(factor),
            warp.shear(sign * 0.3, 0),
            warp.shear(0, sign * 0.3),
            warp.shift(math.copysign(across, sign), 0),
            warp.shift(0, math.copysign(down, sign)),
        ]
        if not increasing:  # cutout: a square whose center is anywhere in the image
            place = (warp.height, warp.width, -half, -half)
            rows.append((Primitive.ERASE, 2 * half, 2 * half, *place, 128, 128, 128, 0, 0, 0))
    return rows


def brightness(factor: float) -> Row:
    """Returns the row that multiplies all values."""
    return color(factor * np.eye(3))


def saturation(factor: float) -> Row:
    """Returns the row that blends with the gray image."""
    return color(factor * np.eye(3) + (1 - factor) * np.tile(LUMA, (3, 1)))


def hue(turn: float) -> Row:
    """Returns the row that rotates hues in YIQ space by a fraction of the color circle."""
    to_yiq = np.array([LUMA, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)])
    cos, sin = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
    return color(np.linalg.inv(to_yiq) @ [[1, 0, 0], [0, cos, sin], [0, -sin, cos]] @ to_yiq)


def color(matrix: npt.NDArray[np.float64]) -> Row:
    """Returns the row that multiplies (red, green, blue) by a 3x3 matrix."""
    return (Primitive.COLOR, *np.hstack([matrix, np.zeros((3, 1))]).ravel())


def contrast(factor: float) -> Row:
    """Returns the row that blends with the mean of the gray image."""
    return (Primitive.CONTRAST, factor)


def sharpness(factor: float) -> Row:
    """Returns the row that blends with a smoothed image. Source: Pillow's `ImageFilter.SMOOTH`."""
    kernel = np.full((3, 3), (1 - factor) / 13)
    kernel[1, 1] = (1 - factor) * 5 / 13 + factor
    return (Primitive.FILTER, *kernel.ravel())


def posterize(bits: int) -> Row:
    """Returns the row that keeps the highest bits of each value."""
    return (Primitive.POSTERIZE, 256 - (1 << (8 - bits)))
