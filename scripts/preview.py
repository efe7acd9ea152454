"""Shows what the model sees: a contact sheet of images after preprocessing, from both backends.

Each row: the original with the region that is taken and its label, tf.data's image and DALI's. A
fourth picture, their amplified difference, is shown only if they differ visibly. The images are the
first of an epoch of order "global": the same records, crops and mirrors for both. Values outside of
0..255 are clipped.

example: python scripts/preview.py --files='path/train-*' --crop=random_resized_crop --out=sheet.png
"""

import dataclasses
import io
import os
import sys
import textwrap
from typing import Any

import numpy as np
from PIL import Image

from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, Shard, TfDataOptions
from dali_tf_input.index.example import decode_example
from dali_tf_input.index.tfrecord import read_record
from dali_tf_input.order import EpochSteps, Extents, Plan, read_index
from support import cli
from support.flags import FileFlags, WorkFlags
from support.train.label_names import read_names

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_OUT = FLAGS.string("out", "sheet.png", "File for the contact sheet, a .png.")
_NUM_IMAGES = FLAGS.integer("num_images", 8, "How many images are shown, at most.", 1)
_EVALUATION = FLAGS.boolean("evaluation", False, "Show the preprocessing of evaluation.")
_LAYOUT = FLAGS.choice("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_AUTO_AUGMENT = FLAGS.choice("auto_augment", None, ["trivial", "rand"], "Augmentation.")
_IMAGE_WIDTH = FLAGS.integer("image_width", None, "Width of the output; else --image_size.", 1)
_INTERPOLATION = FLAGS.choice(
    "interpolation", "bilinear", ["bilinear", "bicubic", "nearest"], "How pixels are resized."
)
_MEAN = FLAGS.list("mean", None, "Of R, G and B, in 0..255 units; else ImageNet's.")
_STD = FLAGS.list("std", None, "Of R, G and B, in 0..255 units; else ImageNet's.")
_SEED = FLAGS.integer("seed", 0, "Decides which images are shown, and their crops and mirrors.", 0)
_AMPLIFY = FLAGS.number("amplify", 32.0, "Factor of the difference.", 0.001)

_VISIBLE = 1.0  # of 255: a smaller largest difference has no picture


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    cli.check_writable(_OUT.value, flag="out", suffix=".png")
    spec = make_spec()
    num_images = min(_NUM_IMAGES.value, spec.dataset.num_records)
    images, labels = make_images(spec, num_images)
    if (labels["tf.data"] != labels["DALI"]).any():
        raise InputError(f"The backends serve other records: {labels}. Please report this.")
    difference = np.abs(images["tf.data"] - images["DALI"])
    originals = [
        open_original(one, spec, slot) for slot, one in enumerate(read_encoded(spec, num_images))
    ]
    draw(originals, images, difference, name_labels(labels["DALI"], spec), spec)
    print(f"images      {num_images} of {spec.dataset.num_records:,}: {spec.preprocess.describe()}")
    print(f"difference  mean {difference.mean():.4f} of 255, largest {difference.max():.2f}")
    if spec.preprocess.auto_augment:
        print("            each backend draws its own augmentation, so these images differ")
    print(f"sheet       in {_OUT.value}")
    return 0


def make_spec() -> InputSpec:
    """Returns what is shown, by the flags."""
    preprocess = _WORK.preprocess()
    if _EVALUATION.value:
        if _WORK.crop.present:
            raise InputError("--evaluation crops the center: leave out --crop.")
        size, antialias = _WORK.image_size.value, _WORK.antialias.value
        evaluation = Preprocess.for_evaluation(size, antialias=antialias)
        preprocess = dataclasses.replace(evaluation, dtype=_WORK.dtype.value)
    height = _WORK.image_size.value
    changes: dict[str, Any] = {
        "image_size": (height, _IMAGE_WIDTH.value or height),
        "interpolation": _INTERPOLATION.value,
        "layout": _LAYOUT.value,
        "auto_augment": _AUTO_AUGMENT.value,
    }
    for flag in (_MEAN, _STD):
        if flag.value is not None:
            try:
                changes[flag.name] = tuple(map(float, flag.value))
            except ValueError as error:
                given = ",".join(flag.value)
                raise InputError(
                    f"`{flag.name}` must be numbers like 123,117,104, got {given}."
                ) from error
    preprocess = dataclasses.replace(preprocess, **changes)
    seed = _SEED.value
    return InputSpec(dataset=_FILES.dataset(), preprocess=preprocess, order="global", seed=seed)


def make_images(spec: InputSpec, num_images: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns images in 0..255, and labels, of each backend."""
    tf = cli.import_tensorflow()
    from dali_tf_input import denormalize, make_dataset
    from dali_tf_input.bad_record import FailedInput, explain

    decode = _WORK.decode.value
    made = {
        "tf.data": TfDataOptions(decode=decode),
        "DALI": DaliOptions(device="cpu", decode="auto" if decode == "scaled" else decode),
    }
    images, labels = {}, {}
    for name, options in made.items():
        try:
            with tf.device("CPU:0"):  # otherwise TensorFlow puts DALI's dataset on a GPU
                batch, numbers = next(iter(make_dataset(spec, options, batch_size=num_images)))
        except tf.errors.OpError as error:
            raise explain(error, [FailedInput(spec, options, 0, num_images)]) or error from error
        images[name] = denormalize(batch.numpy(), spec.preprocess)
        labels[name] = numbers.numpy()
    return images, labels


def read_encoded(spec: InputSpec, num_images: int) -> list[bytes]:
    """Returns the encoded images that come first in an epoch."""
    dataset = spec.dataset
    extents = Extents.of([read_index(file) for file in dataset.index_files])
    steps = EpochSteps(
        num_records=dataset.num_records, batch_size=num_images, num_shards=1, padded=False
    )
    plan = Plan(extents, steps=steps, shard=Shard(0, 1), seed=spec.seed)
    encoded = []
    for record in plan.records(0)[:num_images]:
        data = read_record(dataset.files[extents.files[record]], int(extents.offsets[record]))
        encoded.append(decode_example(data)[dataset.image_key][1][0])
    return encoded


def open_original(encoded: bytes, spec: InputSpec, slot: int) -> tuple[Image.Image, Any, bool]:
    """Returns an original, the region (top, left, height, width), and whether it is mirrored."""
    tf = cli.import_tensorflow()
    from dali_tf_input.backends.reading import draw_uniforms
    from dali_tf_input.backends.tf_images import find_region

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    uniforms, _ = draw_uniforms(spec, tf.constant(0, tf.int64), tf.constant(slot, tf.int64))
    region = find_region(tf.constant([image.height, image.width]), uniforms, spec.preprocess)
    mirrored = bool(uniforms[0] < spec.preprocess.mirror_probability)
    return image, (*region.start.numpy(), *region.extent.numpy()), mirrored


def name_labels(labels: Any, spec: InputSpec) -> list[str]:
    """Returns the labels as text, with their names if there is a labels.txt."""
    path = os.path.join(os.path.dirname(spec.dataset.files[0]), "labels.txt")
    names = read_names(path) if os.path.exists(path) else []
    return [
        f"{label} {names[label]}" if 0 <= label < len(names) else str(label)
        for label in labels.tolist()
    ]


def draw(
    originals: list, images: dict, difference: np.ndarray, labels: list[str], spec: InputSpec
) -> None:
    """Draws the contact sheet and saves it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    differs = [one.max() >= _VISIBLE for one in difference]
    columns = 3 + any(differs)
    across = 1 if len(originals) <= 4 else 2
    down = -(-len(originals) // across)
    height, width = spec.preprocess.image_size
    figure, all_axes = plt.subplots(
        down,
        across * columns,
        figsize=(2.6 * across * columns * min(2.0, max(0.5, width / height)), 2.9 * down + 0.9),
        squeeze=False,
        layout="constrained",
    )
    for axes in all_axes.flat:
        axes.set_axis_off()
    for number, (image, (top, left, high, wide), mirrored) in enumerate(originals):
        row, start = number // across, number % across * columns
        panes = all_axes[row, start : start + columns]
        shown = [np.asarray(image), images["tf.data"][number], images["DALI"][number]]
        shown += [_AMPLIFY.value * difference[number]] if differs[number] else []
        for axes, pixels in zip(panes, shown, strict=False):
            axes.imshow(np.clip(np.floor(pixels + 0.5), 0, 255).astype(np.uint8))
        box = Rectangle(
            (left - 0.5, top - 0.5), wide, high, fill=False, edgecolor="#ff3b30", linewidth=2
        )
        panes[0].add_patch(box)
        remark = ", mirrored" if mirrored else ""
        panes[0].set_title(f"{labels[number]}\n{image.width}x{image.height}{remark}", fontsize=9)
        panes[1].set_title("tf.data", fontsize=9)
        panes[2].set_title("DALI" if differs[number] else "DALI: the same", fontsize=9)
        if differs[number]:
            mean, most = difference[number].mean(), difference[number].max()
            text = f"difference x {_AMPLIFY.value:g}\nmean {mean:.2f}, largest {most:.0f} of 255"
            panes[3].set_title(text, fontsize=9)
    text = "\n".join(textwrap.wrap(spec.preprocess.describe(), 30 * columns * across))
    figure.suptitle(f"What the model sees\n{text}", fontsize=10)
    figure.savefig(_OUT.value, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
