"""Mixup and CutMix: images of a batch mixed in pairs, with their labels."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from dali_tf_input.errors import Fraction, InputError, Within, check, checked
from dali_tf_input.spec.primitives import Floats

Alpha = Annotated[float, Within(0, 100)]

NUM_UNIFORMS = 4  # for each batch: which mix, how much, and where (y, x)
_LEVELS = 1024  # discrete values of the fraction drawn from a Beta distribution


@checked
@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixes images of a batch in pairs: the first with the last, and so on toward the middle.

    Mixup (Zhang et al., 2017, arXiv 1710.09412) blends two images; CutMix (Yun et al., 2019, arXiv
    1905.04899) shows a rectangle of one in the other. Labels are mixed in the same proportions, so
    they must be one-hot: ``label=ClassLabel(one_hot=True, num_classes=n)``. All pairs of a batch
    are mixed alike, as a function of `seed` and the step. With several replicas, each mixes its own
    part of the batch.

    Examples:
      >>> label = ClassLabel(one_hot=True, num_classes=1000, smoothing=0.1)
      >>> mix = Mix(mixup=0.8, cutmix=1.0)  # as DeiT and ConvNeXt
      >>> spec = InputSpec.for_training("records/train-*", 224, label=label, mix=mix)

    Attributes:
      mixup: alpha of Mixup, in [0.001, 100]; 0 turns it off. The weight of the first image is
        drawn from Beta(alpha, alpha).
      cutmix: alpha of CutMix, in [0.001, 100]; 0 turns it off. The part of the first image that
        stays visible is drawn from Beta(alpha, alpha).
      p: probability of mixing a batch, in [0, 1].
      switch: probability of CutMix for a mixed batch if both are on, in [0, 1].
    """

    mixup: Alpha = 0.0
    cutmix: Alpha = 0.0
    p: Fraction = 1.0
    switch: Fraction = 0.5

    def __post_init__(self) -> None:
        if not self.mixup and not self.cutmix:
            raise InputError("Mix needs `mixup` or `cutmix` above 0, such as Mix(mixup=0.2).")
        for name in ("mixup", "cutmix"):  # below, Beta's density has no numbers
            alpha = getattr(self, name)
            check(alpha == 0 or alpha >= 0.001, name, "0, or in [0.001, 100]", alpha)

    @property
    def cutmix_share(self) -> float:
        """How likely a mixed batch is mixed by CutMix."""
        return self.switch if self.mixup and self.cutmix else float(self.cutmix > 0)

    def quantiles(self) -> Floats:
        """Returns equally likely parts of the first image: float32 (2, levels), Mixup's first."""
        return np.stack([_beta_quantiles(alpha or 1.0) for alpha in (self.mixup, self.cutmix)])


def _beta_quantiles(alpha: float) -> Floats:
    """Returns equally likely values of Beta(alpha, alpha), in ascending order.

    Substituting x = s ** (1 / power) keeps the density finite up to the middle; the rest follows
    by symmetry.
    """
    power = min(alpha, 1.0)
    places = np.linspace(0, 0.5**power, 1 << 14)
    density = places ** (alpha / power - 1) * (1 - places ** (1 / power)) ** (alpha - 1)
    sums = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    parts = (np.arange(_LEVELS // 2) + 0.5) / _LEVELS
    lower = np.interp(parts, 0.5 * sums / sums[-1], places) ** (1 / power)
    return np.concatenate([lower, 1 - lower[::-1]]).astype(np.float32)
