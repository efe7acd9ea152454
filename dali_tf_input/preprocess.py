"""What the model sees of an image: which part of it, at which size, and in which numbers. The same for both backends."""

from dataclasses import dataclass
from typing import Literal, get_args

from dali_tf_input.options import check_choice
from dali_tf_input.tfrecord import InputError

Layout = Literal["HWC", "CHW"]
Interpolation = Literal["bilinear", "bicubic", "nearest"]
DType = Literal["float32", "float16", "bfloat16", "uint8"]
AutoAugment = Literal["trivial", "rand"]

# Mean and standard deviation of ImageNet's training images per RGB channel, in 0..255 units. Source: (0.485, 0.456, 0.406)
# and (0.229, 0.224, 0.225) of the PyTorch and torchvision ImageNet examples, times 255.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

# RandAugment does two operations to an image, each at strength 9 of 0..30. Source: RandAugment (arXiv 1909.13719), ResNet-50 on
# ImageNet; the steps are torchvision's and DALI's.
RAND_AUGMENT_OPS, RAND_AUGMENT_MAGNITUDE, RAND_AUGMENT_BINS = 2, 9, 31


@dataclass(frozen=True, kw_only=True)
class ResizeRandomCrop:
    """Resizes the whole image to a fixed size, not keeping its aspect, then takes a region at a random position.

    Each of the (H - h + 1) * (W - w + 1) positions of an h x w crop in the H x W resized image is equally likely.

    Attributes:
      resize: (height, width) in pixels that every image is resized to; not below the image size.
    """

    resize: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.resize) < 1:
            raise InputError(f"`resize` must be at least 1 pixel each way, got {self.resize}.")


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """Takes a region of random area and aspect ratio at a random position and resizes it, as Inception and ResNet train.

    In each attempt the area, as a part of the image's, is uniform in `area_range`, the ratio of width to height log-uniform in
    `aspect_ratio_range`, and both sides are rounded to whole pixels; the first attempt that fits into the image is taken, each of
    its positions equally likely. If none fits it is the centre of the image, as much as `aspect_ratio_range` allows. What lies
    outside of the region does not count in the resize. Source: torchvision's `RandomResizedCrop`, with its defaults.

    Attributes:
      area_range: smallest and largest part of the image's area, in (0, 1].
      aspect_ratio_range: smallest and largest width / height, above 0.
      num_attempts: how many are drawn at most, in [1, 100].
    """

    area_range: tuple[float, float] = (0.08, 1.0)
    aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3)
    num_attempts: int = 10

    def __post_init__(self) -> None:
        low, high = self.area_range
        if not 0 < low <= high <= 1:
            raise InputError(f"`area_range` must be (smallest, largest), both in (0, 1], got {self.area_range}.")
        low, high = self.aspect_ratio_range
        if not 0 < low <= high < float("inf"):
            raise InputError(f"`aspect_ratio_range` must be (smallest, largest), both above 0, got {self.aspect_ratio_range}.")
        if not 1 <= self.num_attempts <= 100:
            raise InputError(f"`num_attempts` must be in [1, 100], got {self.num_attempts}.")


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """Takes a region of the image size at a random position, at the original scale; each position is equally likely.

    An image that is smaller, one way or both, stands in the middle of black (0 before normalising) that way.
    """


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """Resizes the image until its shorter side has a given length, keeping its aspect, then takes its centre.

    The longer side is rounded to whole pixels (half up); where the margin is odd, the larger part of it is cut below or right.

    Attributes:
      resize_shorter: length of the shorter side in pixels; not below the image size.
    """

    resize_shorter: int

    def __post_init__(self) -> None:
        if self.resize_shorter < 1:
            raise InputError(f"`resize_shorter` must be at least 1 pixel, got {self.resize_shorter}.")


@dataclass(frozen=True, kw_only=True)
class NoCrop:
    """Resizes the whole image to the image size, not keeping its aspect."""


Crop = ResizeRandomCrop | RandomResizedCrop | RandomCrop | CenterCrop | NoCrop


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """What happens between an encoded image and what the model sees: decode, `crop`, augment, mirror, (x - `mean`) / `std`.

    Attributes:
      image_size: (height, width) of the output in pixels.
      crop: how that region is chosen.
      mirror_probability: with which probability an image is mirrored left to right, in [0, 1]; 0 and 1 are exact.
      mean: subtracted from each RGB channel, in 0..255 units; not for `dtype` "uint8".
      std: each RGB channel is divided by it, in 0..255 units, above 0; not for `dtype` "uint8".
      layout: axes of one output image, "HWC" (TensorFlow's usual) or "CHW".
      interpolation: how pixels are resized. "bicubic" is Keys' with a = -0.5.
      antialias: whether the resize widens its filter when it shrinks. False, as in `tf.image.resize`, is what TF-slim trained
        with, and it costs less. Not for "nearest".
      apply_orientation: whether images are turned upright by their EXIF orientation. On DALI only: TensorFlow does not read it.
      dtype: type of the output. "uint8" is neither shifted nor scaled, but rounded to whole numbers in 0..255; see
        `dataset.make_normalization` for the layer that does it in the model. "bfloat16" is for tf.data only: DALI has none.
      auto_augment: None, or what is done to the uint8 image after the crop: "trivial" is TrivialAugment's wide set (arXiv
        2103.10158), one random operation at a random strength; "rand" is RandAugment (arXiv 1909.13719), two random operations
        at strength 9 of 30. The sets are DALI's `auto_aug` and Keras's layers; the README says how they differ.
    """

    image_size: tuple[int, int]
    crop: Crop
    mirror_probability: float
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    layout: Layout = "HWC"
    interpolation: Interpolation = "bilinear"
    antialias: bool = False
    apply_orientation: bool = False
    dtype: DType = "float32"
    auto_augment: AutoAugment | None = None

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise InputError(f"`image_size` must be at least 1 pixel each way, got {self.image_size}.")
        if not isinstance(self.crop, Crop):
            raise InputError(f"`crop` must be one of {', '.join(kind.__name__ for kind in get_args(Crop))}, got {self.crop!r}.")
        if not 0 <= self.mirror_probability <= 1:
            raise InputError(f"`mirror_probability` must be in [0, 1], got {self.mirror_probability}.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != 3:
                raise InputError(f"`{name}` must have one value for each of R, G and B, got {getattr(self, name)}.")
        if not min(self.std) > 0:
            raise InputError(f"`std` must be above 0 in every channel, got {self.std}.")
        if self.dtype != "uint8" and max(self.std) < 1:
            raise InputError(f"`std` is in 0..255 units, got {self.std}: multiply by 255 what is meant for 0..1.")
        check_choice("layout", self.layout, get_args(Layout))
        check_choice("interpolation", self.interpolation, get_args(Interpolation))
        check_choice("dtype", self.dtype, get_args(DType))
        if self.auto_augment is not None:
            check_choice("auto_augment", self.auto_augment, get_args(AutoAugment))
        if self.antialias and self.interpolation == "nearest":
            raise InputError("`antialias` has no meaning for interpolation 'nearest': set it to False.")
        match self.crop:
            case ResizeRandomCrop(resize=(height, width)):
                name = "resize"
            case CenterCrop(resize_shorter=height):
                name, width = "resize_shorter", height
            case _:
                return
        if height < self.image_size[0] or width < self.image_size[1]:
            raise InputError(
                f"`{name}` must not be below `image_size` {self.image_size}, got {(height, width)}: resize to more or crop less."
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one output image: (height, width, 3) for layout "HWC", (3, height, width) for "CHW"."""
        height, width = self.image_size
        return (height, width, 3) if self.layout == "HWC" else (3, height, width)

    @property
    def resizes_plainly(self) -> bool:
        """Whether the whole image is resized, by plain bilinear interpolation, and then cropped."""
        plain = self.interpolation == "bilinear" and not self.antialias
        return plain and not isinstance(self.crop, RandomResizedCrop | RandomCrop)

    @property
    def num_random(self) -> int:
        """How many random numbers in [0, 1) decide over one image: for the mirror, top, left, then two for each attempt."""
        return 3 + 2 * self.crop.num_attempts if isinstance(self.crop, RandomResizedCrop) else 3

    @classmethod
    def for_training(cls, image_size: int = 224, *, layout: Layout = "HWC", antialias: bool = False) -> "Preprocess":
        """Resize to 8/7 of `image_size` (256 for 224), random-position crop, mirror half of the images, normalise.

        The ratio 256 to 224 and the mirror rate are those of AlexNet's and VGG's training on ImageNet.

        Args:
          image_size: height and width of the output in pixels.
          layout: axes of one output image, "HWC" or "CHW".
          antialias: see `Preprocess`.
        """
        resize = _resize_for(image_size)
        return cls(
            image_size=(image_size, image_size),
            crop=ResizeRandomCrop(resize=(resize, resize)),
            mirror_probability=0.5,
            layout=layout,
            antialias=antialias,
        )

    @classmethod
    def for_evaluation(cls, image_size: int = 224, *, layout: Layout = "HWC", antialias: bool = False) -> "Preprocess":
        """Resize the shorter side to 8/7 of `image_size` (256 for 224), centre crop, no mirror, normalise.

        Args:
          image_size: height and width of the output in pixels.
          layout: axes of one output image, "HWC" or "CHW".
          antialias: see `Preprocess`.
        """
        return cls(
            image_size=(image_size, image_size),
            crop=CenterCrop(resize_shorter=_resize_for(image_size)),
            mirror_probability=0.0,
            layout=layout,
            antialias=antialias,
        )


def _resize_for(image_size: int) -> int:
    return round(image_size * 256 / 224)
