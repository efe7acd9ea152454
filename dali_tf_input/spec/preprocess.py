"""The preprocessing between an encoded image and the model's input."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from dali_tf_input.errors import Fraction, InputError, Pixels, check, check_keywords, checked
from dali_tf_input.spec.augment import Augmentation, Program
from dali_tf_input.spec.colors import IMAGENET_MEAN, IMAGENET_STD, LUMA
from dali_tf_input.spec.crops import CoverCrop, Crop, NoCrop, check_num_pixels
from dali_tf_input.spec.recipes import Recipe, find_fields

Layout = Literal["HWC", "CHW"]
Channels = Literal[1, 3]
Interpolation = Literal["bilinear", "bicubic", "nearest"]
DType = Literal["float32", "float16", "bfloat16", "uint8"]

# How pixels are normalized: by ImageNet's statistics, or to a range, given as (mean, std) below.
Normalization = Literal["imagenet", "0..1", "-1..1"]
_NORMALIZATIONS: dict[Normalization | None, tuple[float, float]] = {
    "0..1": (0.0, 255.0),
    "-1..1": (127.5, 127.5),
    None: (0.0, 1.0),
}

_WHOLE = NoCrop()


@checked
@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Everything between an encoded image and what the model sees.

    The steps, in order: decode to RGB, `crop`, `augment`, convert to gray if `channels` is 1,
    mirror, normalize by (x - `mean`) / `std`.

    Examples:
      >>> Preprocess(image_size=(224, 224), crop=RandomCrop(), layout="CHW").image_shape
      (3, 224, 224)

    Attributes:
      image_size: (height, width) of the output in pixels.
      crop: how the region is chosen, and resized to `image_size`.
      mirror_probability: probability of mirroring an image left to right, in [0, 1]; 0 means never
        and 1 always.
      mean: the value subtracted from each channel, in 0..255 units; unused if `dtype` is "uint8".
      std: the value that each channel is divided by, in 0..255 units, above 0; unused if `dtype` is
        "uint8".
      layout: axes of one output image, "HWC" (TensorFlow's usual) or "CHW".
      interpolation: how pixels are resized. "bicubic" is Keys's kernel with a = -0.5.
      antialias: whether the resize filter is widened when downscaling. `for_training` and
        `for_evaluation` set it. False is the default of `tf.image.resize`, was used by TF-slim, and
        costs less. Must be False for "nearest".
      channels: 3 for RGB; 1 for gray, 0.299 R + 0.587 G + 0.114 B.
      apply_orientation: whether images are turned upright by their EXIF orientation, in which
        cameras and phones note how they were held; masks are turned with them. False leaves images
        as they are stored, as TensorFlow's own operations do.
      dtype: type of the output. "uint8" is not normalized but rounded to whole numbers in 0..255;
        `serving.make_normalization` returns the layer that normalizes in the model. "bfloat16" is
        for tf.data only: DALI does not support it.
      augment: random changes to the image after the crop, applied in this order, such as
        ``(augment.RandAugment(), augment.RandomErasing(p=0.25))``. The image is first rounded to
        uint8. The changes are a function of `seed` and the record's place in the order, the same on
        both backends.
    """

    image_size: tuple[Pixels, Pixels] = (224, 224)
    crop: Crop = _WHOLE
    mirror_probability: Fraction = 0.0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    layout: Layout = "HWC"
    interpolation: Interpolation = "bilinear"
    antialias: bool = False
    channels: Channels = 3
    apply_orientation: bool = True
    dtype: DType = "float32"
    augment: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        rule = f"one number for each of `channels`={self.channels}"
        check(len(self.mean) == self.channels, "mean", rule, self.mean)
        check(len(self.std) == self.channels, "std", rule, self.std)
        check(min(self.std) > 0, "std", "above 0 in every channel", self.std)
        if self.dtype != "uint8" and min(self.std) < 1:
            raise InputError(
                f"`std` is in 0..255 units, got {self.std}: multiply values meant for 0..1 by 255."
            )
        most = 65_504 if self.dtype == "float16" else 3.4e38
        for name, values in (("mean", self.mean), ("std", self.std)):
            rule = f"in [{-most:,.3g}, {most:,.3g}], as `dtype` is {self.dtype}"
            check(max(map(abs, values)) <= most, name, rule, values)
        check_num_pixels("image_size", self.image_size)
        if self.antialias and self.interpolation == "nearest":
            text = "`antialias` has no meaning for interpolation 'nearest'"
            raise InputError(f"{text}: set it to False.")
        self.crop.check(self.image_size)
        self.make_program()  # raises if an augmentation does not fit the image

    def make_program(self) -> Program:
        """Returns what `augment` draws for each image."""
        return Program(self.augment, self.image_size)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one output image, in the order of `layout`."""
        height, width = self.image_size
        channels = self.channels
        return (height, width, channels) if self.layout == "HWC" else (channels, height, width)

    @property
    def resizes_plainly(self) -> bool:
        """Whether the image is resized bilinearly without antialias and then cropped."""
        plain = self.interpolation == "bilinear" and not self.antialias
        return plain and self.crop.sampling == "resize_then_crop"

    @property
    def copies_pixels(self) -> bool:
        """Whether pixels are copied, not interpolated."""
        return self.crop.sampling == "crop_and_pad" or self.interpolation == "nearest"

    @property
    def num_uniforms(self) -> int:
        """How many random numbers in [0, 1) one image needs; see `Uniforms`."""
        return 3 + self.crop.num_attempt_uniforms

    def check_supported(self, backend: str, *, dtypes: Collection[str]) -> None:
        """Raises InputError for the first value that a backend does not support."""
        if self.dtype not in dtypes:
            raise InputError(
                f"{backend} does not support `dtype` {self.dtype!r}: use"
                f" {', '.join(map(repr, dtypes))}, or the other backend."
            )

    @classmethod
    @checked
    def for_training(
        cls,
        image_size: Pixels | tuple[Pixels, Pixels] = 224,
        *,
        normalization: Normalization | None = "imagenet",
        recipe: Recipe | None = None,
        **fields: Any,
    ) -> "Preprocess":
        """Resizes to cover 8/7 of `image_size`, crops at random, mirrors half, normalizes.

        So for 224 the shorter side becomes 256, and 224x224 pixels of it are seen. The aspect ratio
        is kept. These sizes and the mirroring are those of AlexNet (Krizhevsky et al., 2012,
        section 4.1) and of VGG's single-scale training (Simonyan and Zisserman, 2014, section 3.1).
        The resize is antialiased, as that of Pillow and torchvision.

        Examples:
          >>> preprocess = Preprocess.for_training(224)
          >>> squeezed = Preprocess.for_training(224, crop=ResizeRandomCrop(resize=(256, 256)))
          >>> preprocess = Preprocess.for_training((224, 320), crop=RandomResizedCrop(), channels=1)
          >>> preprocess = Preprocess.for_training(224, recipe="deit")

        Args:
          image_size: height and width of the output in pixels, or (height, width).
          normalization: "imagenet" normalizes by the mean and standard deviation of ImageNet,
            "0..1" and "-1..1" scale to that range, and None keeps 0..255, for models with their own
            preprocessing.
          recipe: a published training recipe whose preprocessing replaces this resize and crop; see
            docs/recipes.md.
          **fields: further fields of `Preprocess`. `mean` and `std` override `normalization`, and
            every field overrides `recipe`.
        """
        usual = _usual_fields("random", fields) | {"mirror_probability": 0.5}
        fields = {**(find_fields(recipe) if recipe else usual), **fields}
        return cls._make("for_training", image_size, normalization, fields)

    @classmethod
    @checked
    def for_evaluation(
        cls,
        image_size: Pixels | tuple[Pixels, Pixels] = 224,
        *,
        normalization: Normalization | None = "imagenet",
        **fields: Any,
    ) -> "Preprocess":
        """Resizes to cover 8/7 of `image_size`, crops the center, normalizes.

        Objects have the size that they have in `for_training`.

        Examples:
          >>> preprocess = Preprocess.for_evaluation(224)
          >>> preprocess = Preprocess.for_evaluation(224, normalization="-1..1", layout="CHW")

        Args:
          image_size: height and width of the output in pixels, or (height, width).
          normalization: see `for_training`.
          **fields: see `for_training`.
        """
        fields = {**_usual_fields("center", fields), **fields}
        return cls._make("for_evaluation", image_size, normalization, fields)

    @classmethod
    def _make(
        cls,
        name: str,
        image_size: int | tuple[int, int],
        normalization: Normalization | None,
        fields: dict[str, Any],
    ) -> "Preprocess":
        known = ["normalization", "recipe", *(field.name for field in dataclasses.fields(cls))]
        check_keywords(f"Preprocess.{name}", fields, known)
        statistics = _statistics_of(normalization, fields.get("channels", 3))
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        return cls(image_size=size, **{**statistics, **fields})

    def with_fields(self, **fields: Any) -> "Preprocess":
        """Returns a copy with some fields replaced; `normalization` sets `mean` and `std`."""
        if "normalization" in fields:
            channels = fields.get("channels", self.channels)
            fields = {**_statistics_of(fields.pop("normalization"), channels), **fields}
        return dataclasses.replace(self, **fields)


@checked
def _statistics_of(normalization: Normalization | None, channels: Channels) -> dict[str, Any]:
    if channels == 1 and normalization == "imagenet":
        gray = sum(weight * mean for weight, mean in zip(LUMA, IMAGENET_MEAN, strict=True))
        return {"mean": (gray,), "std": (sum(IMAGENET_STD) / 3,)}
    if normalization == "imagenet":
        return {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = _NORMALIZATIONS[normalization]
    count = 1 if channels == 1 else 3
    return {"mean": (mean,) * count, "std": (std,) * count}


def _usual_fields(position: Literal["random", "center"], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns how images are resized and cropped by default, where `fields` are given."""
    interpolation = fields.get("interpolation")  # anything yet
    is_nearest = isinstance(interpolation, str) and interpolation == "nearest"
    return {"crop": CoverCrop(position=position), "antialias": not is_nearest}
