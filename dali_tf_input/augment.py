"""The augmentations: random changes of images after the crop, for ``Preprocess(augment=...)``.

>>> preprocess = Preprocess.for_training(224, augment=(augment.RandAugment(),))
"""

from dali_tf_input.spec.augment import (
    ColorJitter,
    GaussianBlur,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    Solarize,
    TrivialAugment,
    VerticalMirror,
)

__all__ = [
    "ColorJitter",
    "GaussianBlur",
    "RandAugment",
    "RandomErasing",
    "RandomGrayscale",
    "Solarize",
    "TrivialAugment",
    "VerticalMirror",
]
