"""Shows what the model sees: images after preprocessing by both backends, the originals, and what the backends differ in.

usage: preview.py --files=GLOB --out=sheet.png [--num_images=8] [--evaluation] [--crop=resize_random_crop] [--image_size=224]
                  [--image_width=224] [--interpolation=bilinear] [--antialias] [--dtype=float32] [--layout=HWC] [--mean=R,G,B]
                  [--std=R,G,B] [--auto_augment=trivial] [--seed=0] [--amplify=32]

Each row: the original with the region that was taken and its label, tf.data's image, DALI's image, and their difference,
amplified. The images are the first of an epoch of order "global": the same records, crops and mirrors for both. Normalised
values are brought back to 0..255; what is not in 0..255 then is cut off, as it would be on any screen.
"""

import dataclasses
import io
import os

import numpy as np
from absl import flags
from PIL import Image, ImageDraw, ImageFont

import backends
import console
from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, Shard, TfDataOptions
from dali_tf_input.example import decode_example
from dali_tf_input.manifest import read_index
from dali_tf_input.order import Places, Plan, Steps
from dali_tf_input.tfrecord import read_record
from label_names import read_names

_OUT = flags.DEFINE_string("out", "sheet.png", "File for the contact sheet, a PNG.")
_NUM_IMAGES = flags.DEFINE_integer("num_images", 8, "How many images are shown, at most.")
_EVALUATION = flags.DEFINE_boolean("evaluation", False, "Show the preprocessing of evaluation: the centre, not mirrored.")
_LAYOUT = flags.DEFINE_enum("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_AUTO_AUGMENT = flags.DEFINE_enum("auto_augment", None, ["trivial", "rand"], "Augmentation; the backends draw it apart.")
_IMAGE_WIDTH = flags.DEFINE_integer("image_width", None, "Width of the output in pixels; by default --image_size.")
_INTERPOLATION = flags.DEFINE_enum("interpolation", "bilinear", ["bilinear", "bicubic", "nearest"], "How pixels are resized.")
_MEAN = flags.DEFINE_list("mean", None, "Of R, G and B, in 0..255 units; by default ImageNet's.")
_STD = flags.DEFINE_list("std", None, "Of R, G and B, in 0..255 units; by default ImageNet's.")
_SEED = flags.DEFINE_integer("seed", 0, "Which images are shown, and their crops and mirrors.")
_AMPLIFY = flags.DEFINE_float("amplify", 32.0, "By what the difference is multiplied, above 0.")

_TILE = (96, 256)  # smallest and largest height of a tile in pixels
_GAP, _TEXT = 8, 17  # between tiles, and the height of a line of text
_INK, _PALE, _FRAME = "#222222", "#666666", "#ff3b30"


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    if _NUM_IMAGES.value < 1:
        raise InputError(f"`num_images` must be at least 1, got {_NUM_IMAGES.value}.")
    if _AMPLIFY.value <= 0:
        raise InputError(f"`amplify` must be above 0, got {_AMPLIFY.value}.")
    console.check_writable(_OUT.value, flag="out", suffix=".png")
    spec = make_spec()
    num_images = min(_NUM_IMAGES.value, spec.dataset.num_records)
    images, labels = make_images(spec, num_images)
    if (labels["tf.data"] != labels["DALI"]).any():
        raise InputError(f"The backends serve other records: {labels['tf.data']} and {labels['DALI']}. Please report this.")
    originals = [open_original(encoded, spec, place) for place, encoded in enumerate(read_originals(spec, num_images))]
    sheet = draw(originals, images, name_labels(labels["DALI"], spec), spec)
    sheet.save(_OUT.value)
    difference = np.abs(images["tf.data"] - images["DALI"])
    print(f"images      {num_images} of {spec.dataset.num_records:,}, {describe(spec.preprocess)}")
    print(f"difference  {difference.mean():.4f} of 255 on average, {difference.max():.2f} at most, between the backends")
    if spec.preprocess.auto_augment:
        print("            each backend draws its own augmentation, so these images differ")
    print(f"sheet       in {_OUT.value}")
    return 0


def make_images(spec: InputSpec, num_images: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns images in 0..255, and labels, of each backend."""
    tf = console.import_tensorflow()  # here, as what is wrong with flags and files is to be said at once
    from dali_tf_input.dataset import denormalise, make_dataset
    from dali_tf_input.failures import Stopped, explain

    made = {
        "tf.data": TfDataOptions(fuse=backends.FUSE.value),
        "DALI": DaliOptions(device="cpu", fuse="auto" if backends.FUSE.value == "scaled" else backends.FUSE.value),
    }
    images, labels = {}, {}
    for name, options in made.items():
        try:
            with tf.device("CPU:0"):  # else TensorFlow puts DALI's dataset on a GPU where there is one
                batch, batch_labels = next(iter(make_dataset(spec, options, batch_size=num_images)))
        except tf.errors.OpError as error:
            raise explain(error, [Stopped(spec, options, 0, num_images)]) or error from error
        images[name] = denormalise(batch.numpy(), spec.preprocess)
        labels[name] = batch_labels.numpy()
    return images, labels


def make_spec() -> InputSpec:
    """Returns what is shown, by the flags."""
    spec = backends.training_spec()
    preprocess = spec.preprocess
    if _EVALUATION.value:
        if backends.CROP.present:
            raise InputError("--evaluation takes the centre: leave out --crop.")
        evaluation = Preprocess.for_evaluation(preprocess.image_size[0], antialias=preprocess.antialias)
        preprocess = dataclasses.replace(evaluation, dtype=preprocess.dtype)
    height = preprocess.image_size[0]
    changes = {
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
                raise InputError(f"`{flag.name}` must be three numbers like 123,117,104, got {','.join(flag.value)}.") from error
    preprocess = dataclasses.replace(preprocess, **changes)
    return InputSpec(dataset=spec.dataset, preprocess=preprocess, order="global", seed=_SEED.value)


def read_originals(spec: InputSpec, num_images: int) -> list[bytes]:
    """Returns the encoded images that come first in an epoch."""
    dataset = spec.dataset
    indexes = [np.array(read_index(file), np.int64).reshape(-1, 2) for file in dataset.index_files]
    steps = Steps(num_records=dataset.num_records, batch_size=num_images, num_shards=1, padded=False)
    plan = Plan(Places.of(indexes), steps=steps, shard=Shard(0, 1), seed=spec.seed)
    first_of_files = np.cumsum([0, *dataset.records_per_file])
    encoded = []
    for record in plan.records(0)[:num_images]:
        file = int(np.searchsorted(first_of_files, record, side="right")) - 1
        offset = int(indexes[file][record - first_of_files[file]][0])
        encoded.append(decode_example(read_record(dataset.files[file], offset))[dataset.image_key][1][0])
    return encoded


def open_original(encoded: bytes, spec: InputSpec, place: int) -> tuple[Image.Image, tuple[float, ...], bool]:
    """Returns an original, the region of it that is taken (left, top, right, bottom), and whether it is mirrored."""
    tf = console.import_tensorflow()
    from dali_tf_input.record_stream import random_numbers
    from dali_tf_input.tf_images import find_region

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    numbers, _ = random_numbers(spec, tf.constant(0, tf.int64), tf.constant(place, tf.int64))
    region = find_region(tf.constant([image.height, image.width]), numbers, spec.preprocess)
    top, left = region.start.numpy()
    height, width = region.extent.numpy()
    mirrored = bool(numbers[0] < spec.preprocess.mirror_probability)
    return image, (left, top, left + width, top + height), mirrored


def name_labels(labels: np.ndarray, spec: InputSpec) -> list[str]:
    """Returns the labels as text, with the names of labels.txt beside the files where there is one."""
    path = os.path.join(os.path.dirname(spec.dataset.files[0]), "labels.txt")
    names = read_names(path) if os.path.exists(path) else []
    return [f"{label} {names[label]}" if 0 <= label < len(names) else str(label) for label in labels.tolist()]


def describe(preprocess: Preprocess) -> str:
    """Returns the preprocessing in a line."""
    size = "x".join(map(str, preprocess.image_size))
    parts = [type(preprocess.crop).__name__, size, preprocess.interpolation]
    parts += ["antialias"] if preprocess.antialias else []
    parts += [f"{preprocess.auto_augment} augment"] if preprocess.auto_augment else []
    return ", ".join([*parts, preprocess.dtype, preprocess.layout])


def draw(originals: list, images: dict[str, np.ndarray], labels: list[str], spec: InputSpec) -> Image.Image:
    """Draws the contact sheet."""
    font, bold = ImageFont.load_default(13), ImageFont.load_default(17)
    height = min(max(spec.preprocess.image_size[0], _TILE[0]), _TILE[1])
    width = max(1, round(height * spec.preprocess.image_size[1] / spec.preprocess.image_size[0]))
    original_width = round(1.34 * height)
    amplify = f"difference x {_AMPLIFY.value:g}"
    columns = {"original, and what is taken": original_width, "tf.data": width, "DALI": width, amplify: width}
    wanted = max(font.getlength(title) for title in columns)
    columns = {title: max(tile, round(wanted) + _GAP) for title, tile in columns.items()}
    group = sum(columns.values()) + _GAP * len(columns)
    across = 1 if len(originals) <= 4 else 2
    down = -(-len(originals) // across)
    top = 4 * _GAP + 3 * _TEXT
    row_height = height + 2 * _TEXT + _GAP
    sheet = Image.new("RGB", (_GAP + across * (group + 2 * _GAP), top + down * row_height + _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((2 * _GAP, _GAP), "What the model sees", fill=_INK, font=bold)
    pen.text((2 * _GAP, _GAP + _TEXT + 6), describe(spec.preprocess), fill=_PALE, font=font)
    for column in range(across):
        left = 2 * _GAP + column * (group + 2 * _GAP)
        for title, tile in columns.items():
            pen.text((left, top - _TEXT - 2), title, fill=_PALE, font=font)
            left += tile + _GAP
    for number, (image, box, mirrored) in enumerate(originals):
        left, upper = 2 * _GAP + number % across * (group + 2 * _GAP), top + number // across * row_height
        by_tf_data, by_dali = (images[name][number] for name in ("tf.data", "DALI"))
        difference = np.abs(by_tf_data - by_dali)
        tiles = [frame(image, box, (original_width, height)), *(to_image(pixels) for pixels in (by_tf_data, by_dali))]
        tiles.append(to_image(difference * _AMPLIFY.value))
        texts = [
            f"{labels[number]}\n{image.width}x{image.height}{', mirrored' if mirrored else ''}",
            "",
            "",
            f"mean {difference.mean():.4f} of 255\nmost {difference.max():.2f}",
        ]
        for tile, text, space in zip(tiles, texts, columns.values(), strict=True):
            if tile.height != height and tile is not tiles[0]:
                enlarged = Image.Resampling.NEAREST if tile.height < height else Image.Resampling.LANCZOS
                tile = tile.resize((width, height), enlarged)
            sheet.paste(tile, (left, upper))
            for line, words in enumerate(text.split("\n")):
                pen.text((left, upper + height + 2 + line * _TEXT), shorten(words, font, space), fill=_INK, font=font)
            left += space + _GAP
    return sheet


def frame(image: Image.Image, box: tuple[float, ...], space: tuple[int, int]) -> Image.Image:
    """Returns an original, shrunk into `space`, with a frame around the region that is taken."""
    scale = min(space[0] / image.width, space[1] / image.height)
    shown = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.LANCZOS)
    left, top, right, bottom = (position * scale for position in box)
    corners = (max(0, left), max(0, top), min(shown.width - 1, right - 1), min(shown.height - 1, bottom - 1))
    if corners[0] <= corners[2] and corners[1] <= corners[3]:
        ImageDraw.Draw(shown).rectangle(corners, outline=_FRAME, width=2)
    return shown


def to_image(pixels: np.ndarray) -> Image.Image:
    """Returns values in 0..255, rounded and cut off, as a picture."""
    return Image.fromarray(np.clip(np.floor(pixels + 0.5), 0, 255).astype(np.uint8))


def shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Returns text that fits into `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


if __name__ == "__main__":
    console.run(main)
