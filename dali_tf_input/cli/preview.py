"""Shows what the model sees: a contact sheet of images after preprocessing, from both backends.

Each row shows the original with its label and the cropped region, then tf.data's image and DALI's,
both with their mask in colors (--mask_key). A fourth picture, their amplified difference, is shown
only if they differ visibly. Without DALI or its TensorFlow plugin only tf.data's images are shown;
--most and --device need both backends. The images are the first of an epoch of order "global": the
same records, crops and mirrors for both. --records chooses them by their ids, --blame by the losses
that `train.blame(folder)` stored. Values outside of 0..255 are clipped. With --most the exit code
is 1 if the backends differ by more. An empty --out= draws no sheet.

example: dali-tf-input preview --files='path/train-*' --crop=random_resized_crop --out=sheet.png
"""

import colorsys
import dataclasses
from typing import Any, get_args

import numpy as np
from PIL import Image

from dali_tf_input import (
    DaliOptions,
    InputError,
    InputSpec,
    Preprocess,
    Records,
    SegmentationMask,
    TfDataOptions,
)
from dali_tf_input.cli import command, pictures
from dali_tf_input.cli.flags import FileFlags, LabelFlags, WorkFlags, describe_work
from dali_tf_input.records.losses import find_hardest, read_losses
from dali_tf_input.records.paths import program
from dali_tf_input.spec.recipes import Recipe

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_LABELS = LabelFlags(FLAGS, _FILES)
_WORK = WorkFlags(FLAGS)
_MOST = FLAGS.number("most", None, "Largest mean difference that passes, of 255.")
_DEVICE = FLAGS.choice("device", "cpu", ["cpu", "gpu"], "Where DALI's images are made.")
_OUT = FLAGS.string("out", "sheet.png", "File for the contact sheet, a .png.")
_NUM_IMAGES = FLAGS.integer("num_images", 8, "How many images are shown, at most.", 1)
_RECORDS = FLAGS.list("records", None, "The ids of the records that are shown.")
_BLAME = FLAGS.string("blame", None, "Folder of `train.blame`: show the records of largest loss.")
_EVALUATION = FLAGS.boolean("evaluation", False, "Show the preprocessing of evaluation.")
_LAYOUT = FLAGS.choice("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_RECIPE = FLAGS.choice("recipe", None, get_args(Recipe), "A published recipe's preprocessing.")
_IMAGE_WIDTH = FLAGS.integer("image_width", None, "Width of the output; else --image_size.", 1)
_INTERPOLATION = FLAGS.choice(
    "interpolation", "bilinear", ["bilinear", "bicubic", "nearest"], "How pixels are resized."
)
_SEED = FLAGS.integer("seed", 0, "Decides which images are shown, and their crops and mirrors.", 0)

# Hues far from each other for neighboring classes.
_MASK_COLORS = 255 * np.array([colorsys.hsv_to_rgb(n * 0.618 % 1, 0.9, 1.0) for n in range(20)])
_AMPLIFY = 32  # the factor of the difference
_VISIBLE_MEAN = 0.02  # of 255: a smaller mean difference has no picture


def main(arguments: list[str]) -> int:
    """Draws the sheet; returns the exit code."""
    command.check_no_arguments(arguments)
    command.check_writable(_OUT, suffix=".png")
    spec = make_spec()
    num_images = spec.records.num_records
    if not _RECORDS.value:
        num_images = min(_NUM_IMAGES.value, num_images)
    command.import_tensorflow()
    decode = _WORK.decode.value
    other = None  # DALI first, because TensorFlow must not take the GPU's memory before it
    if _MOST.present or _DEVICE.present or has_dali():
        dali = DaliOptions(device=_DEVICE.value, decode="auto" if decode == "scaled" else decode)
        other = next(pictures.make_batches(spec, dali, num_images))
    batch = next(pictures.make_batches(spec, TfDataOptions(decode=decode), num_images))
    difference = subtract(batch, other) if other else None
    if _OUT.value:
        draw(spec, batch, other["image"] if other else None)
    work = describe_work(spec.preprocess)
    print(f"images      {num_images} of {spec.records.num_records:,}: {work}")
    if difference is None:
        print(f"backend     tf.data alone: DALI's plugin does not load, see {program()} doctor")
    else:
        print(f"difference  mean {difference.mean():.4f} of 255, largest {difference.max():.2f}")
    if _OUT.value:
        print(f"sheet       in {_OUT.value}")
    most = _MOST.value
    if difference is not None and most is not None and difference.mean() > most:
        raise InputError(
            f"The backends' images differ by {difference.mean():.6f}, --most is {most}."
        )
    return 0


def has_dali() -> bool:
    """Returns whether DALI and its TensorFlow plugin can be imported."""
    from dali_tf_input.backends.build import import_dali

    try:
        import_dali().import_plugin()
    except InputError:
        return False
    return True


def subtract(batch: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> np.ndarray:
    """Returns how far the images of two backends' batches differ, of 255, in each value."""
    if any((values != other[name]).any() for name, values in batch.items() if name != "image"):
        raise InputError(f"The backends serve other records: {batch}, {other}. Please report this.")
    difference: np.ndarray = np.abs(batch["image"] - other["image"])
    return difference


def make_spec() -> InputSpec:
    """Returns what is shown, by the flags."""
    preprocess, height = _WORK.preprocess(), _WORK.image_size.value
    if _EVALUATION.value:
        if _WORK.crop.present:
            raise InputError("--evaluation crops the center: leave out --crop.")
        evaluation = Preprocess.for_evaluation(height, antialias=_WORK.antialias.value)
        augment = preprocess.augment
        preprocess = dataclasses.replace(evaluation, dtype=_WORK.dtype.value, augment=augment)
    changes = {flag.name: flag.value for flag in (_INTERPOLATION, _LAYOUT)}
    changes["image_size"] = (height, _IMAGE_WIDTH.value or height)
    if _RECIPE.value:
        made = Preprocess.for_training(changes["image_size"], recipe=_RECIPE.value)
        of_recipe = ("crop", "interpolation", "antialias", "augment", "mirror_probability")
        changes |= {name: getattr(made, name) for name in of_recipe}
    preprocess = dataclasses.replace(preprocess, **changes)
    records = _FILES.dataset()
    ids = find_ids(records)
    return InputSpec(
        records=records.select(ids) if ids else records,
        preprocess=preprocess,
        order="sequential" if ids else "global",
        seed=_SEED.value,
        record_ids=True,
        label=_LABELS.make_label(),
        mask=SegmentationMask(key=_LABELS.mask_key.value) if _LABELS.mask_key.value else None,
    )


def find_ids(records: Records) -> list[int]:
    """Returns the records that the flags ask for, if they do."""
    if _BLAME.value:
        losses, _ = read_losses(_BLAME.value, records)
        hardest: list[int] = find_hardest(losses, records)[: _NUM_IMAGES.value].tolist()
        if not hardest:
            raise InputError(f"{_BLAME.value} has no losses: `train.blame` writes them each epoch.")
        return hardest
    try:
        return [*map(int, _RECORDS.value or ())]
    except ValueError:
        raise InputError(f"`records` must be ids, as 3,7, got {_RECORDS.value}.") from None


def find_crop(image: Image.Image, spec: InputSpec, slot: int) -> tuple[Any, bool]:
    """Returns the region (top, left, height, width) of an image, and whether it is mirrored."""
    import tensorflow as tf

    from dali_tf_input.backends.reading import Stream, draw_uniforms
    from dali_tf_input.backends.tf_images import find_region

    stream = Stream(spec=spec, batch_size=1)
    uniforms = draw_uniforms(stream, tf.constant(slot, tf.int64))
    region = find_region(tf.constant([image.height, image.width]), uniforms, spec.preprocess)
    mirrored = bool(uniforms[0] < spec.preprocess.mirror_probability)
    return (*region.start.numpy(), *region.extent.numpy()), mirrored


def lay_over(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns an image in 0..255 with its mask in colors; class 0 is left as it is."""
    colors = _MASK_COLORS[mask % len(_MASK_COLORS)]
    return np.where((mask > 0)[..., None], 0.5 * image + 0.5 * colors, image)


def draw(spec: InputSpec, batch: dict[str, np.ndarray], others: np.ndarray | None) -> None:
    """Draws the contact sheet of tf.data's batch and DALI's images, if any, and saves it."""
    names = [*(spec.records.class_names or ())]
    images, has_others = batch["image"], others is not None
    others = images if others is None else others
    difference = np.abs(images - others)
    if spec.mask:
        images, others = (
            np.stack([*map(lay_over, pixels, batch["mask"])]) for pixels in (images, others)
        )
    differs = [pixels.mean() >= _VISIBLE_MEAN for pixels in difference]
    losses = read_losses(_BLAME.value, spec.records)[0] if _BLAME.value else None
    tiles: list[pictures.Tile | None] = []
    for number, record in enumerate(batch["record_id"].tolist()):
        image = pictures.read_image(spec.records, record)
        label = pictures.name_label(batch["label"][number], names) if spec.label else ""
        box, mirrored = find_crop(image, spec, number)
        text = f"{label}\n{image.width}x{image.height}{', mirrored' if mirrored else ''}"
        if losses is not None:
            text += f"\nid {record}, loss {losses[record]:.3g}"
        elif _RECORDS.value:
            text += f"\nid {record}"
        tiles.append(pictures.Tile(text, image, box))
        tiles.append(pictures.Tile("tf.data", as_pixels(images[number])))
        if has_others:
            text = "DALI" if differs[number] else "DALI: the same"
            tiles.append(pictures.Tile(text, as_pixels(others[number])))
        if differs[number]:
            mean, largest = difference[number].mean(), difference[number].max()
            text = f"difference x {_AMPLIFY}\nmean {mean:.2f}, largest {largest:.0f} of 255"
            tiles.append(pictures.Tile(text, as_pixels(_AMPLIFY * difference[number])))
        elif any(differs):
            tiles.append(None)
    height, width = spec.preprocess.image_size
    across = (2 + has_others + any(differs)) * (1 if len(images) <= 4 else 2)
    title = f"What the model sees: {describe_work(spec.preprocess)}"
    pictures.draw_sheet(tiles, path=_OUT.value, title=title, across=across, aspect=width / height)


def as_pixels(image: np.ndarray) -> np.ndarray:
    """Returns an image in 0..255 as uint8."""
    return np.clip(np.floor(image + 0.5), 0, 255).astype(np.uint8)
