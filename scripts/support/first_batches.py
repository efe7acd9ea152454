"""What a backend makes, as images that can be compared and shown."""

from collections.abc import Iterator
from typing import Any

import numpy as np

import dali_tf_input


def make_batches(
    spec: dali_tf_input.InputSpec, options: Any, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the batches of a backend: images (n, height, width, 3) in 0..255, and their labels."""
    dataset = dali_tf_input.distribute(spec, options, global_batch_size=batch_size).dataset
    for images, labels, *_ in dataset:
        yield dali_tf_input.denormalize(images.numpy(), spec.preprocess), labels.numpy()
