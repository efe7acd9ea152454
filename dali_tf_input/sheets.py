"""What a model sees: batches of a backend as images, and sheets of them beside their records."""

import colorsys
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from dali_tf_input.backends.stream import Stream, draw_uniforms
from dali_tf_input.backends.tf_images import find_region
from dali_tf_input.errors import Count, InputError, Path, checked
from dali_tf_input.pictures import Tile, draw_sheet, name_label, read_image
from dali_tf_input.serving import denormalize
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, TfDataOptions
from dali_tf_input.storage.objects import local_path
from dali_tf_input.training.load import load

# Hues far from each other for neighboring classes.
_MASK_COLORS = 255 * np.array([colorsys.hsv_to_rgb(n * 0.618 % 1, 0.9, 1.0) for n in range(20)])


@checked
def preview(
    spec: InputSpec,
    path: Path = "sheet.png",
    *,
    num_images: Count = 8,
    num_draws: Count = 1,
    options: DaliOptions | TfDataOptions | None = None,
) -> None:
    """Draws a contact sheet of what a model sees: records, and what is made of them.

    Examples:
      >>> preview(InputSpec.for_training("records/train-*", 224), "sheet.png", num_draws=3)

    Args:
      spec: what is shown, in its order.
      path: a .png file to write.
      num_images: how many records are shown, at most.
      num_draws: how often each is drawn, with other random numbers; of order "global" only.
      options: the backend's options; None selects tf.data.

    Raises:
      InputError: `spec` has several views; or several draws are asked for, and its order is fixed.
    """
    if spec.views:
        raise InputError("A sheet shows one view: pass a spec of one of `views`.")
    path = local_path("path", path)
    spec = dataclasses.replace(spec, record_ids=True, mix=None)
    batch = make_draws(spec, options or TfDataOptions(), num_images, num_draws)
    draw_batch(spec, batch, path)


def draw_crops(
    rows: Mapping[str, tuple[InputSpec, InputSpec]], path: str, options: Any, *, num_draws: int
) -> None:
    """Draws a row for each pair of specs of one record: the record, draws of training, evaluation.

    Args:
      rows: specs of training and of evaluation, by what is said of them.
      path: the file to write.
      options: the options of the backend.
      num_draws: how often training is drawn.
    """
    tiles = []
    for text, (training, evaluation) in rows.items():
        preprocess = training.preprocess
        (record,) = training.records.ids.tolist()
        image = read_image(training.records, record, upright=preprocess.apply_orientation)
        title, _, evaluated = text.partition("\n")
        drawn = make_draws(training, options, 1, num_draws)["image"]
        seen = make_draws(evaluation, options, 1, 1)["image"]
        tiles += [Tile(title, image), *(Tile("", as_pixels(one)) for one in drawn)]
        tiles.append(Tile(evaluated, as_pixels(seen[0])))
    height, width = preprocess.image_size
    draw_sheet(tiles, path=path, across=num_draws + 2, aspect=width / height)


def make_draws(spec: InputSpec, options: Any, num_images: int, num_draws: int) -> dict[str, Any]:
    """Returns the first images of an epoch by name, as `make_batches`, each drawn several times.

    The first draw is that of the epoch; each further one is of a later epoch of these images alone.
    """
    num_images = min(num_images, spec.records.num_records)
    if num_draws == 1:
        return next(make_batches(spec, options, num_images))
    if spec.order != "global":
        raise InputError(f"Several draws are of order 'global', got {spec.order!r}.")
    first = spec.ids_of_step(0, batch_size=num_images)
    spec = dataclasses.replace(spec, records=spec.records.select(first))
    batches = [*make_batches(spec, options, num_images, epochs=num_draws)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def draw_batch(
    spec: InputSpec, batch: dict[str, Any], path: str, notes: Sequence[str] = (), title: str = ""
) -> None:
    """Draws the first batch of `make_batches`: each record, and what was made of it.

    Args:
      spec: with `record_ids`.
      batch: the batch.
      path: the file to write.
      notes: what is said of each image of the batch, beside its label; none says nothing.
      title: the line above.
    """
    names, images = spec.class_names or (), batch["image"]
    if spec.mask:
        images = np.stack([*map(lay_over, images, batch["mask"])])
    upright, places = spec.preprocess.apply_orientation, dict[int, list[int]]()
    for place, record in enumerate(batch["record_id"].tolist()):
        places.setdefault(record, []).append(place)
    tiles = []
    for record, own in places.items():
        image = read_image(spec.records, record, upright=upright)
        label = name_label(batch["label"][own[0]], names) if spec.label else ""
        text, box = f"{label}\n{image.width}x{image.height}", None
        if len(own) == 1:  # else each has its own
            box, mirrored = find_crop(image, spec, own[0])
            text += ", mirrored" if mirrored else ""
        if notes:
            text += f"\n{notes[own[0]]}"
        tiles.append(Tile(text, image, box))
        tiles += [Tile("", as_pixels(images[place])) for place in own]
    height, width = spec.preprocess.image_size
    num_draws = len(next(iter(places.values())))
    across = (1 + num_draws) * (2 if num_draws == 1 and len(places) > 4 else 1)
    draw_sheet(tiles, path=path, title=title, across=across, aspect=width / height)


def find_crop(image: Image.Image, spec: InputSpec, slot: int) -> tuple[Any, bool]:
    """Returns the region (top, left, height, width) of an image, and whether it is mirrored."""
    stream = Stream(spec=spec, shard_batch_size=1)
    uniforms = draw_uniforms(stream, tf.constant(slot, tf.int64))
    region = find_region(tf.constant([image.height, image.width]), uniforms, spec.preprocess)
    mirrored = bool(uniforms[0] < spec.preprocess.mirror_probability)
    return (*region.start.numpy(), *region.extent.numpy()), mirrored


def lay_over(image: Any, mask: Any) -> Any:
    """Returns an image in 0..255 with its mask in colors; class 0 is left as it is."""
    colors = _MASK_COLORS[mask % len(_MASK_COLORS)]
    return np.where((mask > 0)[..., None], 0.5 * image + 0.5 * colors, image)


def as_pixels(image: Any) -> Any:
    """Returns an image in 0..255 as uint8."""
    return np.clip(np.floor(image + 0.5), 0, 255).astype(np.uint8)


def make_batches(
    spec: InputSpec, options: Any, batch_size: int, *, epochs: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """Yields a backend's batches of one epoch, or several, by name.

    "image" is (n, height, width, 3) in 0..255; "label", "mask" and "record_id" are as in `spec`.
    """
    source = load(spec, options, batch_size=batch_size)
    for x, *others in itertools.chain.from_iterable(source for _ in range(epochs)):
        tensors = dict(x) if isinstance(x, dict) else {"image": x}
        if others and (spec.label or spec.mask):
            y = others[0]
            tensors |= y if isinstance(y, dict) else {"label" if spec.label else "mask": y}
        batch = {name: value.numpy() for name, value in tensors.items()}
        yield batch | {"image": denormalize(batch["image"], spec.preprocess)}
