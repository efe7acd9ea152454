"""Shows what the model sees: a contact sheet of images after preprocessing.

Each row shows the original with its label and the cropped region, and then the image that the model
gets, with its mask in colors (--mask_key). The images are the first of an epoch of order "global".
--records chooses them by their ids, --blame by the losses that `train.blame(folder)` stored. Values
outside of 0..255 are clipped. An empty --out= draws no sheet.

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
from dali_tf_input.spec.recipes import Recipe

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_LABELS = LabelFlags(FLAGS, _FILES)
_WORK = WorkFlags(FLAGS)
_BACKEND = FLAGS.choice(
    "backend", "tf_data", ["tf_data", "dali_cpu", "dali_gpu"], "What makes the images."
)
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


def main(arguments: list[str]) -> int:
    """Draws the sheet; returns the exit code."""
    command.check_no_arguments(arguments)
    command.check_writable(_OUT, suffix=".png")
    spec = make_spec()
    num_images = spec.records.num_records
    if not _RECORDS.value:
        num_images = min(_NUM_IMAGES.value, num_images)
    command.import_tensorflow()
    batch = next(pictures.make_batches(spec, make_options(), num_images))
    print(
        f"images      {num_images} of {spec.records.num_records:,}: "
        f"{describe_work(spec.preprocess)}"
    )
    if _OUT.value:
        draw(spec, batch)
        print(f"sheet       in {_OUT.value}")
    return 0


def make_options() -> DaliOptions | TfDataOptions:
    """Returns the options of the backend, by the flags."""
    decode, device = _WORK.decode.value, _BACKEND.value.removeprefix("dali_")
    if device == "tf_data":
        return TfDataOptions(decode=decode)
    return DaliOptions(device=device, decode="auto" if decode == "scaled" else decode)


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

    from dali_tf_input.backends.stream import Stream, draw_uniforms
    from dali_tf_input.backends.tf_images import find_region

    stream = Stream(spec=spec, shard_batch_size=1)
    uniforms = draw_uniforms(stream, tf.constant(slot, tf.int64))
    region = find_region(tf.constant([image.height, image.width]), uniforms, spec.preprocess)
    mirrored = bool(uniforms[0] < spec.preprocess.mirror_probability)
    return (*region.start.numpy(), *region.extent.numpy()), mirrored


def lay_over(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns an image in 0..255 with its mask in colors; class 0 is left as it is."""
    colors = _MASK_COLORS[mask % len(_MASK_COLORS)]
    return np.where((mask > 0)[..., None], 0.5 * image + 0.5 * colors, image)


def draw(spec: InputSpec, batch: dict[str, np.ndarray]) -> None:
    """Draws the contact sheet of a batch, and saves it."""
    names = spec.class_names or ()
    images = batch["image"]
    if spec.mask:
        images = np.stack([*map(lay_over, images, batch["mask"])])
    losses = read_losses(_BLAME.value, spec.records)[0] if _BLAME.value else None
    tiles = []
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
        tiles.append(pictures.Tile("", as_pixels(images[number])))
    height, width = spec.preprocess.image_size
    across = 2 if len(images) <= 4 else 4
    title = f"Records, and what the model sees of them: {describe_work(spec.preprocess)}"
    pictures.draw_sheet(tiles, path=_OUT.value, title=title, across=across, aspect=width / height)


def as_pixels(image: np.ndarray) -> np.ndarray:
    """Returns an image in 0..255 as uint8."""
    return np.clip(np.floor(image + 0.5), 0, 255).astype(np.uint8)
