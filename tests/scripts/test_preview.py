"""preview: the sheet, and what is on it."""

import sys

import ml_dtypes
import numpy as np
import pytest
from commands import fails, load, run, succeeds
from conftest import TF_DATA, at_night, encode, exif, refused, write_indexed
from PIL import Image

import dali_tf_input as dti
from dali_tf_input import pictures, sheets
from dali_tf_input.records.losses import write_losses
from dali_tf_input.serving import denormalize

CROPS = [dti.RandomResizedCrop(), dti.ResizeRandomCrop(resize=(30, 30)), dti.RandomCrop()]
SMALL = ["--image_size=16", "--num_images=2"]


def check_sheet(path):
    """Checks that a sheet is no blank one."""
    with Image.open(path) as sheet:
        assert min(sheet.size) > 300
        assert len(sheet.getcolors(2**20)) > 200


@pytest.mark.slow
def test_by_dali(files, tmp_path):
    arguments = [f"--out={tmp_path}/sheet.png", *SMALL, "--evaluation", "--seed=4"]
    process = succeeds(run("preview", files, *arguments, "--backend=dali_cpu"))
    assert process.stdout.startswith("images      2 of 24: ")
    check_sheet(tmp_path / "sheet.png")


def test_without_dali(files, tmp_path, monkeypatch):
    """What tf.data makes is shown; DALI's images are refused."""
    for module in ("nvidia.dali.plugin.tf", "dali_tf_input.backends.dali"):
        monkeypatch.setitem(sys.modules, module, None)  # any import of it fails
    arguments = [files, f"--out={tmp_path}/sheet.png", *SMALL, "--image_width=24"]
    arguments += ["--crop=random_resized_crop", "--antialias", "--interpolation=bicubic"]
    arguments += ["--dtype=float16", "--layout=CHW"]
    process = succeeds(run("preview", *arguments))
    assert process.stdout.startswith("images      2 of 24: ")
    check_sheet(tmp_path / "sheet.png")
    fails(run("preview", *arguments, "--backend=dali_cpu"), "DaliOptions needs ")


def test_the_sheet_shows_each_tile_in_its_place(tmp_path):
    """Row by row, as large as it fits, its aspect ratio kept, with its box."""
    colors = {"wide": (200, 0, 0), "high": (0, 150, 0), "even": (0, 0, 250), "boxed": (250, 250, 0)}
    sizes = {"wide": (20, 40), "high": (40, 20), "even": (30, 30), "boxed": (400, 400)}
    wide, high, even, boxed = (
        pictures.Tile(name, np.full((*sizes[name], 3), color, np.uint8))
        for name, color in colors.items()
    )
    boxed = boxed._replace(box=(100, 100, 200, 200))
    path = str(tmp_path / "sheet.png")
    pictures.draw_sheet([wide, high, even, boxed], path=path, across=2, title="Four places")
    sheet = np.asarray(Image.open(path))
    first, last = {}, {}  # (y, x) of the corners of what is shown
    for name, color in colors.items():
        places = np.argwhere((sheet == color).all(-1))
        first[name], last[name] = places.min(0), places.max(0) + 1
        height, width = last[name] - first[name]
        assert abs(width / height - sizes[name][1] / sizes[name][0]) < 0.02
    side = last["boxed"][0] - first["boxed"][0]
    assert side == last["wide"][1] - first["wide"][1] == last["high"][0] - first["high"][0]
    y, x = (np.array([first[name][axis] for name in colors]) for axis in (0, 1))
    assert y[0] == y[1] < y[2] == y[3]
    assert x[0] == x[2] < x[1] == x[3]
    box = np.argwhere((sheet == (255, 59, 48)).all(-1)) - first["boxed"]
    np.testing.assert_allclose(box.min(0), side / 4, atol=3)
    np.testing.assert_allclose(box.max(0), side * 3 / 4, atol=3)
    # What a crop takes beyond the image is not in the frame.
    pictures.draw_sheet([wide, boxed._replace(box=(-90, 40, 580, 500))], path=path, across=2)
    frame = (np.asarray(Image.open(path)) == (255, 59, 48)).all(-1)
    tile = np.argwhere(frame | (np.asarray(Image.open(path)) == colors["boxed"]).all(-1))
    framed = np.argwhere(frame)
    np.testing.assert_allclose(framed.max(0), tile.max(0), atol=2)
    np.testing.assert_allclose(framed.min(0) - tile.min(0), (0, side / 10), atol=3)


def test_the_records_that_are_asked_for(dataset, files, tmp_path):
    """By their ids, or by their losses."""
    losses = np.linspace(0, 1, dataset.num_all, dtype=np.float32)
    losses[5], losses[7] = 9, np.nan
    write_losses(str(tmp_path / "blame"), dataset, losses, [])
    process = run("preview", files, "--out=", "--image_size=16", "--records=3,7,20")
    assert process.stdout.startswith("images      3 of 3: "), process.stderr
    preview = load("preview")
    preview.FLAGS(["preview", files, f"--blame={tmp_path}/blame", "--num_images=3"])
    assert preview.find_ids(dataset) == [5, 23, 22]
    for flags, message in (
        (["--records=3,x"], "error: `records` must be ids, as 3,7, got ['3', 'x']."),
        (["--records=24"], "error: `ids` must be in [0, 24), ids of records, got 24."),
        ([f"--blame={tmp_path}/none"], "has no losses: `train.blame` writes them each epoch."),
    ):
        assert message in run("preview", files, *flags).stderr


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_denormalize(dtype, layout):
    """What normalizing makes of pixels comes back, but for the rounding to the type."""
    preprocess = dti.Preprocess(
        image_size=(20, 30), crop=dti.NoCrop(), mean=(9.0, 20.0, 30.0), dtype=dtype, layout=layout
    )
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3)).astype(np.float32)
    images = pixels if dtype == "uint8" else (pixels - preprocess.mean) / preprocess.std
    images = images.transpose(0, 3, 1, 2) if layout == "CHW" else images
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shown = denormalize(images.astype(kind), preprocess)
    assert (shown.shape, shown.dtype) == (pixels.shape, np.float32)
    # Of values between 4 and 8 in the type, times the largest `std`.
    step = {"float32": 1e-6, "float16": 2**-9, "bfloat16": 2**-6, "uint8": 0}[dtype]
    assert np.abs(shown - pixels).max() <= step * 58.4


@pytest.mark.slow
@pytest.mark.parametrize("crop", at_night(CROPS[:1], CROPS), ids=repr)
def test_preview_shows_the_originals_of_its_images(dataset, crop):
    """An original, cut at its frame, mirrored and resized by Pillow, is what is shown."""
    preprocess = dti.Preprocess(
        image_size=(24, 24), crop=crop, mirror_probability=0.5, antialias=True
    )
    how = {"preprocess": preprocess, "order": "global", "seed": 3, "record_ids": True}
    spec = dti.InputSpec(records=dataset, **how)
    batch = next(sheets.make_batches(spec, TF_DATA, 12))
    seen = batch["image"]
    mirrors = set()
    for place, record in enumerate(batch["record_id"].tolist()):
        original = pictures.read_image(dataset, record)
        box, mirrored = sheets.find_crop(original, spec, place)
        top, left, height, width = box
        box = (left, top, left + width, top + height)
        cut = original.resize((24, 24), Image.Resampling.BILINEAR, box=box)
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut
        assert np.abs(np.asarray(cut, np.float32) - seen[place]).mean() < 2
        mirrors.add(mirrored)
    assert mirrors == {False, True}


@pytest.mark.parametrize(
    ("flags", "made"),
    [
        ([], dti.Preprocess.for_training(224)),
        (["--image_size=64", "--image_width=256"], dti.Preprocess.for_training((64, 256))),
        (
            ["--evaluation", "--image_width=250", "--dtype=uint8"],
            dti.Preprocess.for_evaluation((224, 250), dtype="uint8"),
        ),
        (
            ["--recipe=deit", "--image_size=64", "--noantialias"],
            dti.Preprocess.for_training(64, recipe="deit", antialias=False),
        ),
        (
            ["--crop=resize_random_crop", "--image_size=112", "--interpolation=nearest"],
            dti.Preprocess.for_training(
                112, crop=dti.ResizeRandomCrop(resize=(128, 128)), interpolation="nearest"
            ),
        ),
    ],
)
def test_what_is_shown_is_what_is_trained(files, flags, made):
    """The flags make what `for_training` and `for_evaluation` make of the same fields."""
    preview = load("preview")
    preview.FLAGS(["preview", files, *flags])
    assert preview.make_spec().preprocess == made


@pytest.mark.slow
@pytest.mark.parametrize("shown", at_night([slice(0, None, 5)], [slice(None)]))
def test_every_crop(files, tmp_path, monkeypatch, shown):
    """A row for each, of the image that is asked for; all rows are drawn at night."""
    draw, asked = sheets.draw_crops, {}

    def draw_some(rows, path, options, *, num_draws):
        asked.update(rows)
        draw(dict([*rows.items()][shown]), path, options, num_draws=num_draws)

    monkeypatch.setattr(sheets, "draw_crops", draw_some)
    arguments = [files, "--crop=all", "--records=5", "--image_size=16", "--image_width=32"]
    succeeds(run("preview", *arguments, f"--out={tmp_path}/sheet.png"))
    assert len({repr(training.preprocess.crop) for training, _ in asked.values()}) == 6
    assert all(spec.records.ids.tolist() == [5] for pair in asked.values() for spec in pair)
    num_rows = len([*asked][shown])
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, _ = sheet.size
        tops = [44, 44 + (num_rows - 1) * 284]  # of the first row and the last
        colors = [len(sheet.crop((16, y, width, y + 240)).getcolors(2**20)) for y in tops]
    assert min(colors) > 1000


@pytest.mark.slow
def test_several_draws_of_each_image(dataset, tmp_path):
    """Of the first images of an epoch, with other crops and mirrors."""
    spec = dti.InputSpec.for_training(dataset, 16, record_ids=True)
    batch = sheets.make_draws(spec, TF_DATA, 4, 3)
    assert batch["image"].shape == (12, 16, 16, 3)
    assert sorted(batch["record_id"]) == sorted(3 * [*spec.ids_of_step(0, batch_size=4)])
    first = {}
    for record, image in zip(batch["record_id"], batch["image"], strict=True):
        assert not np.array_equal(first.setdefault(record, image + 1), image)
    sheets.draw_batch(spec, batch, str(tmp_path / "sheet.png"))
    check_sheet(tmp_path / "sheet.png")
    evaluation = dti.InputSpec.for_evaluation(dataset, 16)
    with refused("Several draws are of order 'global', got 'sequential'"):
        sheets.preview(evaluation, tmp_path / "sheet.png", num_draws=2)


def test_originals_are_shown_as_they_are_seen(tmp_path):
    """Upright, and 16 bits as shades, not white."""
    stored = encode(Image.new("RGB", (30, 20)), "JPEG", exif=exif(6))
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    examples = [{"image": image, "label": 0} for image in (stored, encode(Image.fromarray(ramp)))]
    records = write_indexed(tmp_path / "train-0", examples)
    assert pictures.read_image(records, 0).size == (20, 30)
    assert pictures.read_image(records, 0, upright=False).size == (30, 20)
    assert 120 < np.asarray(pictures.read_image(records, 1)).mean() < 135
