"""The preprocessing of published training recipes; docs/recipes.md has the rest of each."""

from typing import Any, Literal

from dali_tf_input.spec.augment import (
    ColorJitter,
    GaussianBlur,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    TrivialAugment,
)
from dali_tf_input.spec.colors import IMAGENET_MEAN
from dali_tf_input.spec.crops import RandomResizedCrop

Recipe = Literal["resnet-50", "torchvision-v2", "deit", "convnext", "simclr"]

# timm's "rand-m9-mstd0.5-inc1", and its erasing with "pixel" noise.
_TIMM = {
    "interpolation": "bicubic",
    "antialias": True,
    "augment": (
        RandAugment(dialect="tf", magnitude=9, magnitude_std=0.5, p=0.5, fill=124),
        RandomErasing(p=0.25, area_range=(0.02, 1 / 3)),
    ),
}
_FIELDS: dict[Recipe, dict[str, Any]] = {
    # He et al., 2015, as tensorflow/models trains it: an Inception crop and a mirror.
    "resnet-50": {},
    # "How to Train State-Of-The-Art Models Using TorchVision's Latest Primitives", 2021.
    "torchvision-v2": {
        "antialias": True,
        "augment": (
            TrivialAugment(interpolation="bilinear"),
            RandomErasing(p=0.1, fill=IMAGENET_MEAN),
        ),
    },
    # Touvron et al., 2020, arXiv 2012.12877, table 9.
    "deit": _TIMM,
    # Liu et al., 2022, arXiv 2201.03545, table 5.
    "convnext": _TIMM,
    # Chen et al., 2020, arXiv 2002.05709, appendix A.
    "simclr": {
        "antialias": True,
        "augment": (
            ColorJitter(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8),
            RandomGrayscale(p=0.2),
            GaussianBlur(p=0.5, sigma=(0.1, 2.0)),
        ),
    },
}


def find_fields(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields of `Preprocess` that a recipe sets."""
    return {"crop": RandomResizedCrop(), "mirror_probability": 0.5, **_FIELDS[recipe]}
