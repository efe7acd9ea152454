"""Draws a contact sheet of images after preprocessing, as the model sees them.

usage: dali-tf-input preview [flags] --files=FILE_OR_PATTERN

Each row shows the original with its label and the cropped region, and then the image that the model
gets, with its mask in colors (--mask_key). The images are the first of an epoch of order "global".
--records chooses them by their ids, --blame by the losses that `train.blame(folder)` stored. Values
outside of 0..255 are clipped. An empty --out= draws no sheet. --crop=all shows what each crop makes
of one image, in training and in the evaluation that fits it.

example: dali-tf-input preview --files='path/train-*' --crop=random_resized_crop --out=sheet.png
"""

from dataclasses import replace
from typing import Any, get_args

from dali_tf_input import (
    DaliOptions,
    InputError,
    InputSpec,
    Preprocess,
    Records,
    SegmentationMask,
    TfDataOptions,
)
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import (
    CROPS,
    FileFlags,
    LabelFlags,
    WorkFlags,
    describe_work,
    find_augmentations,
    make_crop,
)
from dali_tf_input.records.losses import find_hardest, read_losses
from dali_tf_input.spec.recipes import Recipe
from dali_tf_input.storage.objects import local_path

# The crop of an evaluation in which objects have the shape and about the size of training.
_EVALUATION_OF = {name: "center_crop" for name in CROPS if name != "center_crop"}
_EVALUATION_OF |= {"resize_random_crop": "no_crop", "no_crop": "no_crop", "letterbox": "letterbox"}

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_LABELS = LabelFlags(FLAGS, _FILES)
_WORK = WorkFlags(FLAGS, more_crops=("all",), is_compared=False)
_BACKEND = FLAGS.choice(
    "backend", "tf_data", ["tf_data", "dali_cpu", "dali_gpu"], "Backend that makes the images."
)
_OUT = FLAGS.string("out", "sheet.png", "File for the contact sheet, a .png.")
_NUM_IMAGES = FLAGS.integer("num_images", 8, "Largest number of images to show.", 1)
_DRAWS = FLAGS.integer("draws", 1, "How often to draw each image, each time with another crop.", 1)
_RECORDS = FLAGS.list("records", None, "Ids of the records to show.")
_BLAME = FLAGS.string(
    "blame", None, "Folder of `train.blame`: show the records with the largest losses."
)
_EVALUATION = FLAGS.boolean("evaluation", False, "Show the preprocessing of evaluation.")
_LAYOUT = FLAGS.choice("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_RECIPE = FLAGS.choice("recipe", None, get_args(Recipe), "Preprocessing of a published recipe.")
_IMAGE_WIDTH = FLAGS.integer("image_width", None, "Width of the output (default: --image_size).", 1)
_INTERPOLATION = FLAGS.choice(
    "interpolation", "bilinear", ["bilinear", "bicubic", "nearest"], "Interpolation for resizing."
)
_SEED = FLAGS.integer("seed", 0, "Random seed of the choice of images, their crops and mirrors.", 0)


def main(arguments: list[str]) -> int:
    """Draws the sheet; returns the exit code."""
    command.check_no_arguments(arguments)
    command.check_writable(_OUT, suffix=".png")
    if _BLAME.value:
        local_path("blame", _BLAME.value)  # raises for a URL, where nothing writes losses
    of_one = (_EVALUATION, _RECIPE, _BLAME, _NUM_IMAGES, _LABELS.mask_key)
    command.refuse_useless(
        (
            (_WORK.crop.value == "all", of_one, "with --crop=all, which shows one image"),
            (
                _EVALUATION.value,
                (_WORK.crop, _WORK.augment, _RECIPE),
                "with --evaluation, which crops the center and no more",
            ),
            (bool(_BLAME.value), (_RECORDS,), "with --blame"),
            (bool(_RECORDS.value), (_NUM_IMAGES,), "with --records"),
        )
    )
    if _WORK.crop.value == "all":
        return show_crops()
    spec = make_spec()
    num_images = spec.records.num_records
    if not _RECORDS.value:
        num_images = min(_NUM_IMAGES.value, num_images)
    command.import_tensorflow()
    from dali_tf_input import sheets

    batch = sheets.make_draws(spec, make_options(), num_images, _DRAWS.value)
    work = describe_work(spec.preprocess)
    print(f"images      {num_images} of {spec.records.num_records:,}: {work}")
    if _OUT.value:
        notes = describe(spec.records, batch["record_id"].tolist())
        title = f"Records, and what the model sees of them: {work}"
        sheets.draw_batch(spec, batch, _OUT.value, notes, title)
        print(f"sheet       in {_OUT.value}")
    return 0


def show_crops() -> int:
    """Draws what each crop makes of one image; returns the exit code."""
    ids, size = find_ids(_FILES.dataset()), image_size()
    command.import_tensorflow()
    from dali_tf_input import sheets

    rows = {}
    for training, evaluation in _EVALUATION_OF.items():
        spec = make_spec(training)
        record = ids[:1] or spec.ids_of_step(0, batch_size=1)
        spec = replace(spec, records=spec.records.select(record), order="global")
        fields = {**plain_fields(), "crop": make_crop(evaluation, size)}
        fitting = replace(spec, preprocess=Preprocess.for_evaluation(size, **fields))
        rows[f"{training}\nevaluation: {evaluation}"] = (spec, fitting)
    sheets.draw_crops(rows, _OUT.value, make_options(), num_draws=max(3, _DRAWS.value))
    print(f"sheet       in {_OUT.value}")
    return 0


def make_options() -> DaliOptions | TfDataOptions:
    """Returns the options of the backend, by the flags."""
    decode, device = _WORK.decode.value, _BACKEND.value.removeprefix("dali_")
    if device == "tf_data":
        return TfDataOptions(decode=decode)
    return DaliOptions(device=device, decode="auto" if decode == "scaled" else decode)


def image_size() -> tuple[int, int]:
    """Returns height and width of what is shown."""
    height = _WORK.image_size.value
    return height, _IMAGE_WIDTH.value or height


def plain_fields() -> dict[str, Any]:
    """Returns the fields of `Preprocess` that flags name as they are."""
    plain = (_INTERPOLATION, _LAYOUT, _WORK.antialias, _WORK.dtype)
    return {flag.name: flag.value for flag in plain if flag.present}


def make_spec(crop: str | None = None) -> InputSpec:
    """Returns what is shown, by the flags; without them, what the model sees by default."""
    records, size, fields = _FILES.dataset(), image_size(), plain_fields()
    if _EVALUATION.value:
        preprocess = Preprocess.for_evaluation(size, **fields)
    else:
        if crop or _WORK.crop.present:
            fields["crop"] = make_crop(crop or _WORK.crop.value, size)
        if _WORK.augment.present:
            fields["augment"] = find_augmentations(_WORK.augment.value)
        preprocess = Preprocess.for_training(size, recipe=_RECIPE.value, **fields)
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


def describe(records: Records, ids: list[int]) -> list[str]:
    """Returns what is said of each record that was asked for: its id, and its loss."""
    if _BLAME.value:
        losses, _ = read_losses(_BLAME.value, records)
        return [f"id {record}, loss {losses[record]:.3g}" for record in ids]
    return [f"id {record}" for record in ids] if _RECORDS.value else []
