"""preview.py: the sheet, and what is on it."""

import io
import sys

import numpy as np
import pytest
from commands import fails, load, run
from conftest import cases, refused, write_indexed
from PIL import Image

import dali_tf_input as dti
from dali_tf_input import pictures, sheets
from dali_tf_input.records.losses import write_losses
from dali_tf_input.serving import denormalize
from dali_tf_input.spec.crops import NoCrop

FILES = "--files=data/sample/train-*"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--crop=random_resized_crop", "--antialias", "--dtype=float16", "--layout=CHW"],
        ["--evaluation", "--num_images=3", "--seed=4", "--backend=dali_cpu"],
        ["--image_width=90", "--interpolation=bicubic"],
    ],
)
def test_preview(sample_folder, tmp_path, arguments):
    process = run("preview", FILES, f"--out={tmp_path}/sheet.png", *arguments, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("images      ")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 300


@pytest.mark.parametrize("module", ["nvidia.dali.plugin.tf", "dali_tf_input.backends.dali"])
def test_without_dali(sample_folder, tmp_path, monkeypatch, module):
    """What tf.data makes is shown; DALI's images are refused."""
    monkeypatch.setitem(sys.modules, module, None)  # any import of it fails
    arguments = [FILES, f"--out={tmp_path}/sheet.png", "--num_images=2", "--image_size=32"]
    process = run("preview", *arguments, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 300
    refused = run("preview", *arguments, "--backend=dali_cpu", cwd=sample_folder)
    fails(refused, "DaliOptions needs ")


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


def test_the_records_that_are_asked_for(sample_folder, tmp_path):
    """By their ids, or by their losses."""
    records = dti.Records.from_files(str(sample_folder / "data/sample/train-*"))
    losses = np.linspace(0, 1, records.num_all, dtype=np.float32)
    losses[5], losses[7] = 9, np.nan
    write_losses(str(tmp_path / "blame"), records, losses, [])
    for flags, count in ((["--records=3,7,90"], 3), ([f"--blame={tmp_path}/blame"], 8)):
        process = run("preview", FILES, "--out=", *flags, cwd=sample_folder)
        assert process.stdout.startswith(f"images      {count} of {count}: "), process.stderr
    preview = load("preview")
    preview.FLAGS(["preview", FILES, f"--blame={tmp_path}/blame", "--num_images=3"])
    assert preview.find_ids(records) == [5, 95, 94]
    for flags, message in (
        (["--records=3,x"], "error: `records` must be ids, as 3,7, got ['3', 'x']."),
        (["--records=96"], "error: `ids` must be in [0, 96), ids of records, got 96."),
        ([f"--blame={tmp_path}/none"], "has no losses: `train.blame` writes them each epoch."),
    ):
        assert message in run("preview", FILES, *flags, cwd=sample_folder).stderr


@pytest.mark.parametrize(
    ("dtype", "layout"),
    cases(
        ["float32", "float16", "bfloat16", "uint8"],
        ["HWC", "CHW"],
        fast=[("float32", "HWC"), ("float16", "CHW"), ("bfloat16", "HWC"), ("uint8", "CHW")],
    ),
)
def test_denormalize(dataset, dtype, layout):
    """What any spec makes of an image comes back as what uint8 makes of it."""
    made = []
    for changes in ({"dtype": dtype, "layout": layout}, {"dtype": "uint8"}):
        preprocess = dti.Preprocess(
            image_size=(20, 30),
            crop=NoCrop(),
            mirror_probability=0,
            mean=(9.0, 20.0, 30.0),
            **changes,
        )
        spec = dti.InputSpec(records=dataset, preprocess=preprocess, order="sequential")
        images, _ = next(iter(dti.make_dataset(spec, dti.TfDataOptions(), batch_size=4)))
        made.append(denormalize(images.numpy(), preprocess))
    assert made[0].shape == made[1].shape == (4, 20, 30, 3)
    assert made[0].dtype == np.float32
    # Of rounding to whole numbers, and of values between 4 and 8 in the type, times the largest
    # `std`.
    bound = {
        "float32": 0.5001,
        "float16": 0.5 + 2**-9 * 58.4,
        "bfloat16": 0.5 + 2**-6 * 58.4,
        "uint8": 0,
    }[dtype]
    assert np.abs(made[0] - made[1]).max() <= bound


@pytest.mark.parametrize(
    "crop",
    [dti.ResizeRandomCrop(resize=(60, 60)), dti.RandomResizedCrop(), dti.RandomCrop()],
    ids=repr,
)
def test_preview_shows_the_originals_of_its_images(sample_folder, crop):
    """An original, cut at its frame, mirrored and resized by Pillow, is what is shown."""
    dataset = dti.Records.from_files(str(sample_folder / "data/sample/train-*"))
    preprocess = dti.Preprocess(
        image_size=(48, 48), crop=crop, mirror_probability=0.5, antialias=True
    )
    how = {"preprocess": preprocess, "order": "global", "seed": 3, "record_ids": True}
    spec = dti.InputSpec(records=dataset, **how)
    batch = next(sheets.make_batches(spec, dti.TfDataOptions(), 12))
    seen = batch["image"]
    mirrors = set()
    for place, record in enumerate(batch["record_id"].tolist()):
        original = pictures.read_image(dataset, record)
        box, mirrored = sheets.find_crop(original, spec, place)
        top, left, height, width = box
        box = (left, top, left + width, top + height)
        cut = original.resize((48, 48), Image.Resampling.BILINEAR, box=box)
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
def test_what_is_shown_is_what_is_trained(sample_folder, flags, made):
    """The flags make what `for_training` and `for_evaluation` make of the same fields."""
    preview = load("preview")
    files = f"--files={sample_folder}/data/sample/train-*"
    preview.FLAGS(["preview", files, *flags])
    assert preview.make_spec().preprocess == made


@pytest.mark.parametrize("flag", ["--crop=letterbox", "--augment=rand", "--recipe=deit"])
def test_evaluation_only_crops(sample_folder, flag):
    process = run("preview", FILES, "--evaluation", flag, cwd=sample_folder)
    fails(
        process, f"{flag.partition('=')[0]} does nothing with --evaluation, which crops the center"
    )


@pytest.mark.slow
def test_every_crop(sample_folder, tmp_path):
    """A row for each, of the image that is asked for."""
    arguments = [FILES, "--crop=all", "--records=5", "--image_size=32", "--image_width=64"]
    process = run("preview", *arguments, f"--out={tmp_path}/sheet.png", cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, height = sheet.size
        assert width == 16 + 5 * (480 + 16)
        assert height == 16 + 6 * (20 + 8 + 240 + 16)
        colors = [len(sheet.crop((16, y, width, y + 240)).getcolors(2**20)) for y in (44, 1464)]
    assert min(colors) > 1000  # of the first row and the last


@pytest.mark.parametrize("flag", ["--evaluation", "--recipe=deit", "--num_images=2"])
def test_every_crop_is_of_one_image(sample_folder, flag):
    process = run("preview", FILES, "--crop=all", flag, cwd=sample_folder)
    fails(process, f"{flag.partition('=')[0]} does nothing with --crop=all, which shows one image")


def test_several_draws_of_each_image(sample_folder, tmp_path):
    """Of the first images of an epoch, with other crops and mirrors."""
    dataset = dti.Records.from_files(str(sample_folder / "data/sample/train-*"))
    spec = dti.InputSpec.for_training(dataset, 32, record_ids=True)
    one, three = (sheets.make_draws(spec, dti.TfDataOptions(), 4, draws) for draws in (1, 3))
    assert three["image"].shape == (12, 32, 32, 3)
    assert sorted(three["record_id"]) == sorted(3 * one["record_id"].tolist())
    first = {}
    for record, image in zip(three["record_id"], three["image"], strict=True):
        assert not np.array_equal(first.setdefault(record, image + 1), image)
    sheets.preview(spec, tmp_path / "sheet.png", num_images=3, num_draws=2)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] == 16 + 3 * 256
    evaluation = dti.InputSpec.for_evaluation(dataset, 32)
    with refused("Several draws are of order 'global', got 'sequential'"):
        sheets.preview(evaluation, tmp_path / "sheet.png", num_draws=2)


def test_originals_are_shown_as_they_are_seen(tmp_path):
    """Upright, and 16 bits as shades, not white."""
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = io.BytesIO()
    Image.new("RGB", (30, 20)).save(stored, "JPEG", exif=exif)
    deep = io.BytesIO()
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(ramp).save(deep, "PNG")
    examples = [{"image": image.getvalue(), "label": 0} for image in (stored, deep)]
    records = write_indexed(tmp_path / "train-0", examples)
    assert pictures.read_image(records, 0).size == (20, 30)
    assert pictures.read_image(records, 0, upright=False).size == (30, 20)
    assert 120 < np.asarray(pictures.read_image(records, 1)).mean() < 135
