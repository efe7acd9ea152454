"""What a backend makes, as images that can be compared and shown; and images as they are stored."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

import dali_tf_input as dti
from dali_tf_input.index.contents import SIDE_KEYS


def make_batches(
    spec: dti.InputSpec, options: Any, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of a backend by name; "image" is (n, height, width, 3) in 0..255.

    Of `spec` "label", "mask", "record_id" as they come out, if they do.
    """
    fed = dti.distribute(spec, options, global_batch_size=batch_size)
    for x, *others in map(fed.unpack, fed.dataset):
        named = dict(x) if isinstance(x, dict) else {"image": x}
        if others and (spec.label or spec.mask):
            y = others[0]
            named |= y if isinstance(y, dict) else {"label" if spec.label else "mask": y}
        batch = {name: value.numpy() for name, value in named.items()}
        yield batch | {"image": dti.denormalize(batch["image"], spec.preprocess)}


def read_image(dataset: dti.DatasetSpec, record: int) -> Image.Image:
    """Returns the image of a record, as it is stored."""
    features = dataset.read(record)
    stored = features[dataset.image_key][0]
    if not dataset.stores_pixels:
        return Image.open(io.BytesIO(stored)).convert("RGB")
    height, width = (features[key][0] for key in SIDE_KEYS)
    return Image.frombytes("RGB", (width, height), stored)


def name_label(label: Any, names: list[str]) -> str:
    """Returns a label as text: a class and its name, several classes, or numbers."""
    if np.ndim(label) == 0:
        known = 0 <= label < len(names)
        return f"{label} {names[label]}" if known else str(label)
    if set(np.unique(label)) <= {0.0, 1.0}:
        classes = np.flatnonzero(label)[:6].tolist()
        return ", ".join(names[one] if one < len(names) else str(one) for one in classes) or "none"
    return ", ".join(f"{value:.3g}" for value in label[:6])


def draw_sheet(images: list[Image.Image], titles: list[str], *, path: str) -> None:
    """Draws images with their titles, four in a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    down = max(1, -(-len(images) // 4))
    figure, axes = plt.subplots(down, 4, figsize=(12, 3.3 * down), squeeze=False)
    for one in axes.flat:
        one.set_axis_off()
    for one, image, title in zip(axes.flat, images, titles, strict=False):
        one.imshow(image)
        one.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
