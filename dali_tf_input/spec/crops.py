"""The crops: one class for each way to choose the part of an image that the model sees.

Each crop plans its region in one implementation for both backends: `plan` uses only the operations
of `Ops`, which each backend provides. To add a crop, see docs/design.md.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from dali_tf_input.errors import InputError, Pixels, Within, check, checked
from dali_tf_input.records.checks import MAX_PIXELS

Sampling = Literal["resize_then_crop", "crop_then_resize", "crop_and_pad", "resize_and_pad"]


class Ops(Protocol):
    """The operations available to `Crop.plan`, on a backend's one-dimensional float64 arrays.

    `where` takes `values` where `condition` holds, else `others`. `max` and `sum` (of whole
    numbers) return arrays of shape (1,); `concat` joins two arrays.
    """

    def constant(self, values: Collection[float]) -> Any: ...
    def floor(self, values: Any) -> Any: ...
    def exp(self, values: Any) -> Any: ...
    def sqrt(self, values: Any) -> Any: ...
    def minimum(self, values: Any, others: Any) -> Any: ...
    def maximum(self, values: Any, others: Any) -> Any: ...
    def where(self, condition: Any, values: Any, others: Any) -> Any: ...
    def max(self, values: Any) -> Any: ...
    def sum(self, values: Any) -> Any: ...
    def concat(self, first: Any, second: Any) -> Any: ...


class Uniforms(NamedTuple):
    """The random numbers in [0, 1) for one image, named by what they decide.

    Attributes:
      mirror: (1,), whether the image is mirrored.
      position: (2,), where a region lies, as (y, x).
      attempts: (2 * attempts,), the area and the aspect ratio of each attempt of
        `RandomResizedCrop`.
    """

    mirror: Any
    position: Any
    attempts: Any

    @classmethod
    def split(cls, uniforms: Any) -> "Uniforms":
        """Names the parts of an array of `Preprocess.num_uniforms` numbers."""
        return cls(uniforms[0:1], uniforms[1:3], uniforms[3:])


class Region(NamedTuple):
    """The region of an image that becomes the output; each field is a float64 array (y, x).

    Cropping a resized image equals resizing a region of the original, so `start` and `extent` need
    not be whole numbers.

    Attributes:
      start: the top left corner, in pixels of the image.
      extent: height and width, in pixels of the image.
      resized: the size that the image is resized to before the crop.
      corner: where the crop starts in the resized image, in whole pixels.
    """

    start: Any
    extent: Any
    resized: Any
    corner: Any

    @classmethod
    def of_resized(cls, size: Any, resized: Any, corner: Any, out: Any) -> "Region":
        """Returns the region of an image of `size` that a crop of the resized image shows."""
        return cls(corner * size / resized, out * size / resized, resized, corner)


@checked
@dataclass(frozen=True, kw_only=True)
class Crop:
    """How the part of the image that the model sees is chosen. Base class of all crops.

    Attributes:
      sampling: how the region becomes the output. "resize_then_crop": pixels next to the region
        affect the result, as if the whole image had been resized. "crop_then_resize": the region
        consists of whole pixels, and pixels outside it have no effect. "crop_and_pad": pixels are
        copied, with zeros outside the image. "resize_and_pad": the whole image is resized, and the
        rest of the output is filled.
      is_random: whether the region depends on random numbers.
    """

    sampling: ClassVar[Sampling] = "resize_then_crop"
    is_random: ClassVar[bool] = False

    @property
    def num_attempt_uniforms(self) -> int:
        """How many random numbers `plan` needs in addition to the position's."""
        return 0

    def check(self, image_size: tuple[int, int]) -> None:
        """Raises InputError if the crop cannot make images of `image_size`."""

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        """Returns the region of one image.

        Args:
          size: float64 (2,), height and width of the image in pixels.
          out: float64 (2,), height and width of the output in pixels.
          uniforms: float64; see `Uniforms`.
          ops: the backend's operations.
        """
        return Region.of_resized(size, out, out * 0.0, out)


@checked
@dataclass(frozen=True, kw_only=True)
class ResizeRandomCrop(Crop):
    """Resizes the whole image to a fixed size, then crops at a random position.

    Each of the (H - h + 1) * (W - w + 1) positions of an h x w crop in the H x W image is equally
    likely.

    Examples:
      >>> preprocess = Preprocess.for_training(224, crop=ResizeRandomCrop(resize=(256, 256)))

    Attributes:
      resize: (height, width) in pixels that every image is resized to; at least the image size.
    """

    is_random: ClassVar[bool] = True
    resize: tuple[Pixels, Pixels]

    def check(self, image_size: tuple[int, int]) -> None:
        """Raises InputError if `resize` is below `image_size`, or too large."""
        check_num_pixels("resize", self.resize)
        _check_not_below("resize", self.resize, image_size)

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        resized = ops.constant(self.resize)
        corner = ops.floor(uniforms.position * (resized - out + 1.0))
        return Region.of_resized(size, resized, corner, out)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Crop):
    """Crops a random area and aspect ratio and resizes it, as in Inception and ResNet training.

    Each attempt draws the area, as a part of the image's area, uniformly from `area_range` and the
    aspect ratio (width / height) log-uniformly from `aspect_ratio_range`, and rounds both sides to
    whole pixels. The first attempt that fits into the image is used, at a uniformly distributed
    position. If none fits, the region is the largest centered one whose aspect ratio is in range.
    Pixels outside the region do not affect the resize. Source: torchvision's `RandomResizedCrop`,
    including the defaults.

    Examples:
      >>> crop = RandomResizedCrop(area_range=(0.25, 1.0))
      >>> preprocess = Preprocess.for_training(224, crop=crop)

    Attributes:
      area_range: smallest and largest part of the image's area, in (0, 1].
      aspect_ratio_range: smallest and largest width / height, in [0.001, 1000].
      num_attempts: how many attempts are drawn, in [1, 100].
    """

    sampling: ClassVar[Sampling] = "crop_then_resize"
    is_random: ClassVar[bool] = True
    area_range: tuple[float, float] = (0.08, 1.0)
    aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3)
    num_attempts: Annotated[int, Within(1, 100)] = 10

    def __post_init__(self) -> None:
        low, high = self.area_range
        rule = "(smallest, largest), both in (0, 1]"
        check(0 < low <= high <= 1, "area_range", rule, self.area_range)
        low, high = self.aspect_ratio_range
        rule = "(smallest, largest), both in [0.001, 1000]"
        check(0.001 <= low <= high <= 1000, "aspect_ratio_range", rule, self.aspect_ratio_range)

    @property
    def num_attempt_uniforms(self) -> int:
        return 2 * self.num_attempts

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        height, width = size[0:1], size[1:2]
        (low_area, high_area), (low_ratio, high_ratio) = self.area_range, self.aspect_ratio_range
        attempts, count = uniforms.attempts, self.num_attempts
        areas, ratios = attempts[:count], attempts[count:]
        area = (low_area + areas * (high_area - low_area)) * height * width
        low, high = math.log(low_ratio), math.log(high_ratio)
        ratio = ops.exp(low + ratios * (high - low))
        heights = ops.maximum(ops.floor(ops.sqrt(area / ratio) + 0.5), 1.0)
        widths = ops.maximum(ops.floor(ops.sqrt(area * ratio) + 0.5), 1.0)
        # The first attempt that fits has the highest score. Scores differ, so at most one is
        # chosen.
        scores = ops.constant([float(count - number) for number in range(count)])
        scores = ops.where(heights <= height, ops.where(widths <= width, scores, 0.0), 0.0)
        best = ops.max(scores)
        chosen = ops.where(scores == best, 1.0, 0.0)
        fits = best > 0.0
        center_height = ops.minimum(height, ops.floor(width / low_ratio + 0.5))
        center_width = ops.minimum(width, ops.floor(height * high_ratio + 0.5))
        extent = ops.concat(
            ops.where(fits, ops.sum(heights * chosen), center_height),
            ops.where(fits, ops.sum(widths * chosen), center_width),
        )
        drawn = ops.floor(uniforms.position * (size - extent + 1.0))
        start = ops.where(fits, drawn, ops.floor((size - extent) / 2.0))
        return Region(start, extent, out, out * 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomCrop(Crop):
    """Crops a region of the image size at a random position, at the original scale.

    Each position is equally likely. An image that is smaller, in height or width or both, is
    centered and padded with zeros (before normalization).

    Examples:
      >>> preprocess = Preprocess.for_training(224, crop=RandomCrop())
    """

    sampling: ClassVar[Sampling] = "crop_and_pad"
    is_random: ClassVar[bool] = True

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        drawn = ops.floor(uniforms.position * (size - out + 1.0))
        start = ops.where(size >= out, drawn, ops.floor((size - out) / 2.0))
        return Region(start, out + size * 0.0, size, start)


@checked
@dataclass(frozen=True, kw_only=True)
class CenterCrop(Crop):
    """Resizes the image so that its shorter side has a given length, then crops the center.

    The aspect ratio is kept. The longer side is rounded to whole pixels (half up). If the margin is
    odd, the extra pixel is cut off at the bottom or right.

    Examples:
      >>> preprocess = Preprocess.for_evaluation(224, crop=CenterCrop(resize_shorter=256))

    Attributes:
      resize_shorter: length of the shorter side in pixels; at least the image size.
    """

    resize_shorter: Annotated[int, Within(1, 65_535, " pixel")]

    def check(self, image_size: tuple[int, int]) -> None:
        """Raises InputError if `resize_shorter` is below `image_size`."""
        _check_not_below("resize_shorter", (self.resize_shorter, self.resize_shorter), image_size)

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        shorter = ops.minimum(size[0:1], size[1:2])
        resized = ops.floor(size * (float(self.resize_shorter) / shorter) + 0.5)
        corner = ops.floor((resized - out) / 2.0)
        return Region.of_resized(size, resized, corner, out)


@checked
@dataclass(frozen=True, kw_only=True)
class CoverCrop(Crop):
    """Resizes the image so that it just covers a given size, then crops.

    The aspect ratio is kept: the scale is the smallest one at which neither side is shorter than
    that of `cover`. Both sides are rounded to whole pixels (half up). Of a square `cover` its side
    becomes the image's shorter side. It is the default of training, at a random position, and of
    evaluation, in the center.

    Examples:
      >>> preprocess = Preprocess.for_training(224, crop=CoverCrop(cover=(240, 240)))

    Attributes:
      cover: (height, width) in pixels; at least the image size. None is 8/7 of the image size,
        rounded. Source: VGG (Simonyan and Zisserman, 2014, arXiv 1409.1556, section 3) trains on
        random crops of 224 of images whose shorter side is 256.
      position: "random": each of the positions of the output in the resized image is equally
        likely; "center": if the margin is odd, the extra pixel is cut off at the bottom or right.
    """

    cover: tuple[Pixels, Pixels] | None = None
    position: Literal["random", "center"] = "random"

    @property
    def is_random(self) -> bool:  # type: ignore[override]  # of this crop an instance's
        return self.position == "random"

    def check(self, image_size: tuple[int, int]) -> None:
        """Raises InputError if `cover` is below `image_size`."""
        _check_not_below("cover", self.cover_of(image_size), image_size)

    def cover_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Returns (height, width) that images of `image_size` are cropped from."""
        height, width = image_size
        return self.cover or (round(height * 256 / 224), round(width * 256 / 224))

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        cover = ops.constant(self.cover) if self.cover else ops.floor(out * (256 / 224) + 0.5)
        scales = cover / size
        resized = ops.floor(size * ops.maximum(scales[0:1], scales[1:2]) + 0.5)
        place = uniforms.position * (resized - out + 1.0)
        corner = ops.floor(place if self.is_random else (resized - out) / 2.0)
        return Region.of_resized(size, resized, corner, out)


@checked
@dataclass(frozen=True, kw_only=True)
class Letterbox(Crop):
    """Resizes the whole image to fit into the image size, and pads the rest.

    The aspect ratio is kept. Both sides are rounded to whole pixels (half up). The image is
    centered; if the margin is odd, the extra pixel is at the bottom or right.

    Examples:
      >>> preprocess = Preprocess.for_training(640, crop=Letterbox(fill=114))

    Attributes:
      fill: the value of the margin in all channels, in 0..255, before normalization. Source of the
        default: YOLO's.
    """

    sampling: ClassVar[Sampling] = "resize_and_pad"
    fill: Annotated[float, Within(0, 255)] = 114.0

    def plan(self, size: Any, out: Any, uniforms: Uniforms, ops: Ops) -> Region:
        """Returns the region of one image, which is larger than the image."""
        scale = ops.minimum(out[0:1] / size[0:1], out[1:2] / size[1:2])
        resized = ops.minimum(ops.maximum(ops.floor(size * scale + 0.5), 1.0), out)
        corner = ops.floor((out - resized) / 2.0) * -1.0
        return Region.of_resized(size, resized, corner, out)


@checked
@dataclass(frozen=True, kw_only=True)
class NoCrop(Crop):
    """Resizes the whole image to the image size, ignoring its aspect ratio.

    It is the default of `Preprocess`.

    >>> Preprocess.for_training(224, crop=NoCrop()).crop
    NoCrop()
    """


def check_num_pixels(name: str, size: tuple[int, int]) -> None:
    """Raises InputError if an image of a size is larger than the largest that is read."""
    height, width = size
    rule = f"of at most {MAX_PIXELS:,} pixels"
    check(height * width <= MAX_PIXELS, name, rule, size)


def _check_not_below(name: str, resize: tuple[int, int], image_size: tuple[int, int]) -> None:
    if resize[0] < image_size[0] or resize[1] < image_size[1]:
        text = f"`{name}` must not be below `image_size` {image_size}, got {resize}"
        raise InputError(f"{text}: resize to more or crop less.")
