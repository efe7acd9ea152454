"""What a backend makes, as images that can be compared and shown; and images as they are stored."""

import io
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import dali_tf_input as dti
from dali_tf_input.records.schema import SIDE_KEYS


def make_batches(
    spec: dti.InputSpec, options: Any, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one epoch of a backend's batches by name.

    "image" is (n, height, width, 3) in 0..255; "label", "mask" and "record_id" are as in `spec`.
    """
    from dali_tf_input.serving import denormalize

    for x, *others in dti.load(spec, options, batch_size=batch_size):
        tensors = dict(x) if isinstance(x, dict) else {"image": x}
        if others and (spec.label or spec.mask):
            y = others[0]
            tensors |= y if isinstance(y, dict) else {"label" if spec.label else "mask": y}
        batch = {name: value.numpy() for name, value in tensors.items()}
        yield batch | {"image": denormalize(batch["image"], spec.preprocess)}


def read_image(dataset: dti.Records, record: int) -> Image.Image:
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
        texts = (names[index] if index < len(names) else str(index) for index in classes)
        return ", ".join(texts) or "none"
    return ", ".join(f"{value:.3g}" for value in label[:6])


class Tile(NamedTuple):
    """A picture of a sheet: uint8 (height, width, 3); box: (top, left, height, width) in it."""

    title: str
    pixels: Any
    box: Any = None


def draw_sheet(
    tiles: list[Tile | None], *, path: str, across: int = 4, aspect: float = 1.0, title: str = ""
) -> None:
    """Draws tiles, `across` in a row; None leaves a gap. `aspect` is the width over the height."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    down = max(1, -(-len(tiles) // across))
    size = (2.6 * across * min(2.0, max(0.5, aspect)), 2.9 * down + 0.4 * bool(title) + 0.5)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, tile in zip(axes.flat, tiles, strict=False):
        if tile:
            ax.imshow(tile.pixels)
            ax.set_title(tile.title, fontsize=9)
        if tile and tile.box:
            top, left, height, width = tile.box
            style = {"fill": False, "edgecolor": "#ff3b30", "linewidth": 2}
            ax.add_patch(plt.Rectangle((left - 0.5, top - 0.5), width, height, **style))
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, 30 * across)), fontsize=10)
    figure.savefig(path, dpi=90)
    plt.close(figure)
