"""Augmentations: random changes to an image after its crop, identical on both backends.

Each augmentation returns `Choices`: tables of equally likely rows, from which random numbers pick
one row for each operation. A row names a `Primitive` and its numbers, so the backends implement
only the primitives. To add an augmentation, see docs/design.md.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_tf_input.errors import Fraction, InputError, Within, check, checked
from dali_tf_input.spec.colors import IMAGENET_MEAN, IMAGENET_STD
from dali_tf_input.spec.primitives import (
    Floats,
    Primitive,
    Warp,
    brightness,
    contrast,
    hue,
    make_table,
    saturation,
    tf_rows,
    torchvision_rows,
)

Int32s = npt.NDArray[np.int32]
Dialect = Literal["torchvision", "tf"]
Byte = Annotated[float, Within(0, 255)]
WarpInterpolation = Literal["nearest", "bilinear"]

_LEVELS = 256  # discrete values of a strength drawn from a range
_NORMAL_LEVELS = 64  # discrete values of a magnitude drawn from a normal distribution
_RECTANGLES = 2048


class Choices(NamedTuple):
    """The random choices of an augmentation.

    Attributes:
      tables: float32 (rows, ROW_SIZE) each; an operation picks one row of its table.
      orders: tuples with the index of a table for each operation; one tuple is picked.
      p: probability that the augmentation is applied at all.
      op_p: probability of each operation if the augmentation is applied.
    """

    tables: tuple[Floats, ...]
    orders: tuple[tuple[int, ...], ...] = ((0,),)
    p: float = 1.0
    op_p: float = 1.0


@checked
@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A random change of an image. Base class of all augmentations.

    Where it moves pixels, those of the image's mask move with them.
    """

    def plan(self, image_size: tuple[int, int]) -> Choices:
        """Returns the random choices for images of `image_size`, (height, width).

        Raises:
          InputError: the augmentation does not fit the size.
        """
        raise NotImplementedError


@checked
@dataclass(frozen=True, kw_only=True)
class RandAugment(Augmentation):
    """Applies random operations at one magnitude (Cubuk et al., 2019, arXiv 1909.13719).

    Operations are drawn uniformly with replacement. Directional ones get a random direction.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.RandAugment(magnitude=15),))
      >>> as_timm = augment.RandAugment(dialect="tf", magnitude=9, magnitude_std=0.5, p=0.5)

    Attributes:
      num_ops: how many operations are applied, in [1, 10].
      magnitude: their strength, in [0, 30]. The scale of "torchvision" ends at 30; that of "tf"
        nominally at 10, but larger values are in use, such as EfficientNet's 15.
      magnitude_std: standard deviation of the magnitude. If it is above 0, each operation draws its
        magnitude from a normal distribution, clipped to [0, 30] for "torchvision" and to
        [0, max(10, `magnitude`)] for "tf".
      increasing: whether all operations get stronger with the magnitude. False, for "tf" only, is
        the original version: solarize and posterize get weaker, and 5.0 leaves colors unchanged.
      dialect: which operations and strengths are used: the 14 of torchvision's `RandAugment`, or
        the 16 of tensorflow/models (with `increasing`, the 15 of timm).
      p: probability of each operation, in [0, 1]; timm uses 0.5.
      fill: the value of pixels that a warp leaves empty, in 0..255; None is the dialect's default,
        0 for "torchvision" and 128 for "tf".
      interpolation: how warps sample pixels.
    """

    num_ops: Annotated[int, Within(1, 10)] = 2
    magnitude: Annotated[float, Within(0, 30)] = 9.0
    magnitude_std: Annotated[float, Within(0, 100)] = 0.0
    increasing: bool = True
    dialect: Dialect = "torchvision"
    p: Fraction = 1.0
    fill: Byte | None = None
    interpolation: WarpInterpolation = "nearest"

    def __post_init__(self) -> None:
        if not self.increasing and self.dialect == "torchvision":
            raise InputError("`increasing` False is for `dialect` 'tf' only, got 'torchvision'.")

    def plan(self, image_size: tuple[int, int]) -> Choices:
        magnitudes = [self.magnitude]
        if self.magnitude_std:
            normal = NormalDist(self.magnitude, self.magnitude_std)
            parts = ((level + 0.5) / _NORMAL_LEVELS for level in range(_NORMAL_LEVELS))
            most = 30.0 if self.dialect == "torchvision" else max(10.0, self.magnitude)
            magnitudes = [min(max(normal.inv_cdf(part), 0.0), most) for part in parts]
        is_tf = self.dialect == "tf"
        fill = (128.0 if is_tf else 0.0) if self.fill is None else self.fill
        warp = Warp(image_size, fill, self.interpolation == "bilinear")
        if is_tf:
            rows = [
                row for magnitude in magnitudes for row in tf_rows(magnitude, warp, self.increasing)
            ]
        else:
            rows = [
                row for magnitude in magnitudes for row in torchvision_rows(magnitude / 30, warp)
            ]
        return Choices((make_table(rows),), ((0,) * self.num_ops,), op_p=self.p)


@checked
@dataclass(frozen=True, kw_only=True)
class TrivialAugment(Augmentation):
    """Applies one random operation at a random magnitude (Müller et al., 2021, arXiv 2103.10158).

    The operations and strengths are the paper's "wide" ones, as torchvision's
    `TrivialAugmentWide`: each of 14 operations and each of 31 magnitudes is equally likely.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.TrivialAugment(),))

    Attributes:
      fill: the value of pixels that a warp leaves empty, in 0..255.
      interpolation: how warps sample pixels.
    """

    fill: Byte = 0.0
    interpolation: WarpInterpolation = "nearest"

    def plan(self, image_size: tuple[int, int]) -> Choices:
        warp = Warp(image_size, self.fill, self.interpolation == "bilinear")
        rows = [
            row for level in range(31) for row in torchvision_rows(level / 30, warp, is_wide=True)
        ]
        return Choices((make_table(rows),))


@checked
@dataclass(frozen=True, kw_only=True)
class ColorJitter(Augmentation):
    """Changes brightness, contrast, saturation and hue, in random order, like torchvision's.

    For a strength x, the factor is drawn uniformly from [max(0, 1 - x), 1 + x].

    Examples:
      >>> simclr = augment.ColorJitter(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8)

    Attributes:
      brightness: strength of the factor that scales all values, at least 0.
      contrast: strength of the factor that scales differences from the mean of the gray image.
      saturation: strength of the factor that scales differences from the gray image.
      hue: the largest rotation of the hue, as a fraction of the color circle, in [0, 0.5]. Hue is
        rotated in YIQ space, as in DALI; torchvision uses HSV.
      p: how likely an image is changed, in [0, 1].
    """

    brightness: Annotated[float, Within(0, 100)] = 0.0
    contrast: Annotated[float, Within(0, 100)] = 0.0
    saturation: Annotated[float, Within(0, 100)] = 0.0
    hue: Annotated[float, Within(0, 0.5)] = 0.0
    p: Fraction = 1.0

    def plan(self, image_size: tuple[int, int]) -> Choices:

        def table(strength: float, make: Callable[[float], Sequence[float]]) -> Floats:
            return make_table(map(make, _even(max(0.0, 1 - strength), 1 + strength)))

        tables = []
        if self.brightness:
            tables.append(table(self.brightness, brightness))
        if self.contrast:
            tables.append(table(self.contrast, contrast))
        if self.saturation:
            tables.append(table(self.saturation, saturation))
        if self.hue:
            tables.append(make_table(map(hue, _even(-self.hue, self.hue))))
        return Choices(tuple(tables), _permutations(len(tables)), p=self.p)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomGrayscale(Augmentation):
    """Converts some images to gray; they keep three channels, which are equal.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.RandomGrayscale(p=0.2),))

    Attributes:
      p: how likely an image becomes gray, in [0, 1]. Source: torchvision's default.
    """

    p: Fraction = 0.1

    def plan(self, image_size: tuple[int, int]) -> Choices:
        return Choices((make_table([saturation(0.0)]),), p=self.p)


@checked
@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Augmentation):
    """Blurs some images.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.GaussianBlur(p=0.5),))

    Attributes:
      p: how likely an image is blurred, in [0, 1].
      sigma: smallest and largest standard deviation of the filter, in pixels, in [0.001, 30]; drawn
        uniformly. Source: torchvision's default, which is SimCLR's.
    """

    p: Fraction = 1.0
    sigma: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        low, high = self.sigma
        rule = "(smallest, largest), both in [0.001, 30]"
        check(0.001 <= low <= high <= 30, "sigma", rule, self.sigma)

    def plan(self, image_size: tuple[int, int]) -> Choices:
        return Choices(
            (make_table((Primitive.BLUR, sigma) for sigma in _even(*self.sigma)),), p=self.p
        )


@checked
@dataclass(frozen=True, kw_only=True)
class Solarize(Augmentation):
    """Inverts the bright values of some images.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.Solarize(p=0.2),))

    Attributes:
      p: how likely an image is changed, in [0, 1].
      threshold: in [0, 255]; values at or above it are inverted.
    """

    p: Fraction = 1.0
    threshold: Byte = 128.0

    def plan(self, image_size: tuple[int, int]) -> Choices:
        return Choices((make_table([(Primitive.SOLARIZE, self.threshold)]),), p=self.p)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomErasing(Augmentation):
    """Fills a random rectangle of some images (Zhong et al., 2017, arXiv 1708.04896).

    The area is drawn uniformly and the aspect ratio log-uniformly, and both are drawn again if the
    rectangle is not smaller than the image. Every position is equally likely.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.RandomErasing(p=0.25),))

    Attributes:
      p: how likely an image is changed, in [0, 1].
      area_range: smallest and largest area, as a part of the image's, in (0, 1).
      aspect_ratio_range: smallest and largest height / width, in [0.001, 1000].
      fill: "noise" draws each pixel and channel from a normal distribution with the mean and the
        standard deviation of ImageNet's pixels; else one value, or (red, green, blue), in 0..255.
    """

    p: Fraction = 0.5
    area_range: tuple[float, float] = (0.02, 0.33)
    aspect_ratio_range: tuple[float, float] = (0.3, 3.3)
    fill: Literal["noise"] | Byte | tuple[Byte, Byte, Byte] = "noise"

    def __post_init__(self) -> None:
        low, high = self.area_range
        check(
            0 < low <= high < 1,
            "area_range",
            "(smallest, largest), both in (0, 1)",
            self.area_range,
        )
        low, high = self.aspect_ratio_range
        rule = "(smallest, largest), both in [0.001, 1000]"
        check(0.001 <= low <= high <= 1000, "aspect_ratio_range", rule, self.aspect_ratio_range)

    def plan(self, image_size: tuple[int, int]) -> Choices:
        # Points that fill the unit square evenly; source: M. Roberts, "The unreasonable
        # effectiveness of quasirandom sequences", the R2 sequence.
        points = (0.5 + np.arange(_RECTANGLES)[:, None] * (0.7548776662, 0.5698402910)) % 1
        height, width = image_size
        low, high = self.area_range
        areas = (low + points[:, 0] * (high - low)) * height * width
        low, high = map(math.log, self.aspect_ratio_range)
        ratios = np.exp(low + points[:, 1] * (high - low))
        heights, widths = np.floor(np.sqrt([areas * ratios, areas / ratios]) + 0.5)
        fits = (heights >= 1) & (widths >= 1) & (heights < height) & (widths < width)
        if not fits.any():
            raise InputError(
                f"`area_range` {self.area_range} and `aspect_ratio_range`"
                f" {self.aspect_ratio_range} give no rectangle that is smaller than the image,"
                f" {height}x{width}."
            )
        filling = (*IMAGENET_MEAN, *IMAGENET_STD)
        if not isinstance(self.fill, str):
            fill = self.fill if isinstance(self.fill, tuple) else (self.fill,) * 3
            filling = (*fill, 0.0, 0.0, 0.0)
        rows = [
            (Primitive.ERASE, tall, wide, height - tall + 1, width - wide + 1, 0, 0, *filling)
            for tall, wide in zip(heights[fits], widths[fits], strict=True)
        ]
        return Choices((make_table(rows),), p=self.p)


@checked
@dataclass(frozen=True, kw_only=True)
class VerticalMirror(Augmentation):
    """Mirrors some images top to bottom.

    Examples:
      >>> preprocess = Preprocess.for_training(224, augment=(augment.VerticalMirror(),))

    Attributes:
      p: how likely an image is mirrored, in [0, 1].
    """

    p: Fraction = 0.5

    def plan(self, image_size: tuple[int, int]) -> Choices:
        return Choices(
            (make_table([Warp(image_size).row(1, 0, 0, 0, -1, image_size[0])]),), p=self.p
        )


class Program:
    """The plans of consecutive augmentations as arrays; each choice takes one random number.

    Attributes:
      rows: float32 (rows, ROW_SIZE), the rows of all tables; the first one does nothing.
      first_rows: int32 (ops, orders), where an operation's table begins in `rows`, for each order.
      num_rows: int32 (ops, orders), the number of rows in that table.
      augmentation_of_op: int32 (ops,), the augmentation of each operation.
      num_orders: int32 (augmentations,).
      p: float32 (augmentations,).
      op_p: float32 (ops,).
    """

    def __init__(self, augmentations: Sequence[Augmentation], image_size: tuple[int, int]) -> None:
        plans = [augmentation.plan(image_size) for augmentation in augmentations]
        plans = [plan for plan in plans if plan.tables]
        most = max((len(plan.orders) for plan in plans), default=1)
        tables = [make_table([(Primitive.NOTHING,)])]
        first_rows: list[list[int]] = []
        num_rows: list[list[int]] = []
        end = 1
        for plan in plans:
            counts = [len(table) for table in plan.tables]
            firsts = [end + sum(counts[:number]) for number in range(len(counts))]
            end += sum(counts)
            tables += plan.tables
            for tables_of_op in zip(*plan.orders, strict=True):  # of each operation
                padded = [*tables_of_op, *tables_of_op[:1] * (most - len(tables_of_op))]
                first_rows.append([firsts[table] for table in padded])
                num_rows.append([counts[table] for table in padded])
        ops = [len(plan.orders[0]) for plan in plans]
        self.rows: Floats = np.concatenate(tables)
        shape = (len(first_rows), most)  # also if there are no operations, as of ColorJitter()
        self.first_rows, self.num_rows = (
            _integers(values).reshape(shape) for values in (first_rows, num_rows)
        )
        self.augmentation_of_op = _integers(np.repeat(np.arange(len(plans)), ops))
        self.num_orders = _integers([len(plan.orders) for plan in plans])
        self.p: Floats = np.array([plan.p for plan in plans], np.float32)
        self.op_p: Floats = np.repeat(np.array([plan.op_p for plan in plans], np.float32), ops)

    @property
    def num_ops(self) -> int:
        """How many rows an image gets."""
        return len(self.augmentation_of_op)

    @property
    def num_uniforms(self) -> int:
        """How many random numbers an image needs: for orders, rows and positions (y, x)."""
        return len(self.p) + 3 * self.num_ops

    def rows_of_op(self, op: int) -> Floats:
        """Returns the rows that an operation may get, beside the one that does nothing."""
        parts = {*zip(self.first_rows[op], self.num_rows[op], strict=True)}
        return np.concatenate([self.rows[first : first + count] for first, count in parts])


def _integers(values: Any) -> Int32s:
    return np.array(values, np.int32)


def _even(low: float, high: float) -> Any:
    """Returns the midpoints of `_LEVELS` equal intervals of a range."""
    return low + (np.arange(_LEVELS) + 0.5) / _LEVELS * (high - low)


def _permutations(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.permutations(range(count)))
