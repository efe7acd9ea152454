"""Comparing what two backends make."""

from typing import Any

import numpy as np

import dali_tf_input


def compare(spec: dali_tf_input.InputSpec, *options: Any) -> tuple[Any, bool]:
    """Compares first batches: the difference in 0..255, and whether labels agree."""
    batch_size = min(64, spec.dataset.num_records)
    made = [
        next(iter(dali_tf_input.distribute(spec, one, global_batch_size=batch_size).dataset))
        for one in options
    ]
    first, second = (
        dali_tf_input.denormalize(images.numpy(), spec.preprocess) for images, *_ in made
    )
    labels = [labels.numpy() for _, labels, *_ in made]
    return np.abs(first - second), bool((labels[0] == labels[1]).all())
