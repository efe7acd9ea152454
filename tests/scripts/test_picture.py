"""Converted images are upright, and masks lie on them, without loss."""

import io
import json

import numpy as np
import pytest
from commands import fails, rows, run, succeeds
from conftest import BACKENDS, encode, exif, refused, write_tfrecord
from conversions import convert, read
from PIL import Image
from records.test_exif import SIX, THREE, with_segments

import dali_tf_input as dti
from dali_tf_input.cli.convert.images import (
    Conversion,
    UnreadableImage,
    check_positions,
    convert_image,
    convert_mask,
)

pytestmark = pytest.mark.usefixtures("checked_here")

QUARTERS = np.zeros((200, 300), np.uint8)  # a mask of an upright image
QUARTERS[:100, :150], QUARTERS[:100, 150:], QUARTERS[100:, :150], QUARTERS[100:, 150:] = 1, 2, 3, 4
COLORS = np.array([(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)], np.uint8)
SIDEWAYS = Image.Transpose.ROTATE_90  # orientation 6 shows it upright


def save(image, form="JPEG", **how):
    return encode(image, form, **how)


def photo(form="JPEG", *, size=300, **how):
    """Returns a photo of four colors, held sideways."""
    image = Image.fromarray(COLORS[QUARTERS]).resize((size, size * 2 // 3))
    return save(image.transpose(SIDEWAYS), form, exif=exif(6), **how)


def classes_of(pixels):
    """Returns the class of the middle of each quarter, of a mask or of an image."""
    height, width = pixels.shape[:2]
    places = [(y, x) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    if pixels.ndim == 2:
        return [int(pixels[place]) for place in places]
    return [int(np.abs(COLORS - pixels[place].astype(int)).sum(1).argmin()) for place in places]


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)))


MASK = Image.fromarray(QUARTERS)


@pytest.mark.parametrize("flag", [[], ["--keep_orientation"], ["--resize_shorter=100"]])
def test_masks_of_sideways_photos(tmp_path, flag):
    """Their size tells how they lie; they end in the frame of their image, and of its size."""
    (tmp_path / "1.jpg").write_bytes(photo())
    (tmp_path / "shown.png").write_bytes(save(MASK, "PNG"))
    (tmp_path / "stored.png").write_bytes(save(MASK.transpose(SIDEWAYS), "PNG"))
    (tmp_path / "2.jpg").write_bytes(photo() + b"another")
    table = "path,label,mask\n1.jpg,0,shown.png\n2.jpg,0,stored.png\n"
    (tmp_path / "t.csv").write_text(table)
    succeeds(convert("--validation_fraction=0", *flag, tmp_path / "t.csv", tmp_path / "out"))
    records = read(tmp_path / "out")
    assert len(records) == 2
    for record in records:
        image = opened(record["image/encoded"])
        mask = opened(record["image/segmentation/class/encoded"])
        assert image.shape[:2] == mask.shape
        assert classes_of(image) == classes_of(mask)
        if flag == ["--keep_orientation"]:
            assert record["image/encoded"] in (photo(), photo() + b"another")
            continue
        assert classes_of(mask) == [1, 2, 3, 4]
        assert Image.open(io.BytesIO(record["image/encoded"])).getexif().get(0x0112, 1) == 1


def test_masks_whose_size_does_not_tell():
    """Square ones are as annotation tools show them; raw bytes are as their image is stored."""
    square = (
        Image.fromarray(COLORS[QUARTERS[:, ::2][:, :150]]).resize((200, 200)).transpose(SIDEWAYS)
    )
    image = convert_image(save(square, exif=exif(6)), Conversion(decoder="none"))
    upright = Image.fromarray(QUARTERS).resize((200, 200), Image.Resampling.NEAREST)
    stored = upright.transpose(SIDEWAYS)
    for mask, frame in ((upright, None), (upright, "shown"), (stored, "stored")):
        made = convert_mask(save(mask, "PNG"), image, frame)
        assert classes_of(opened(made)) == [1, 2, 3, 4]
    for mask, frame in ((stored, None), (upright, "shown")):
        made = convert_mask(mask.tobytes(), image, frame)
        assert classes_of(np.frombuffer(made, np.uint8).reshape(200, 200)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (save(MASK, "JPEG"), "its mask is a JPEG, which may change classes: save it as PNG"),
        (save(MASK, "WEBP", lossless=True), "of mode RGB"),
        (save(MASK.resize((1000, 10)), "PNG"), "1000x10 pixels, and the image 200x300"),
    ],
    ids=["jpeg", "webp", "size"],
)
def test_masks_that_do_not_fit(mask, said):
    image = convert_image(photo(), Conversion(decoder="none"))
    with pytest.raises(UnreadableImage, match=said):
        convert_mask(mask, image)


def test_all_formats_become_upright(tmp_path):
    """No set has photos of both kinds."""
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    forms = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tif": "TIFF"}
    for suffix, form in forms.items():
        (folder / f"1.{suffix}").write_bytes(photo(form))
    (folder / "progressive.jpg").write_bytes(photo(progressive=True))
    flags = ["--validation_fraction=0"]
    for number, flag in enumerate([[], ["--store=pixels"], ["--resize_shorter=120"]]):
        out = tmp_path / f"out{number}"
        process = convert(*flags, *flag, tmp_path / "photos", out)
        assert rows(process.stdout)["turned upright"] == "5 images"
        for record in read(out):
            sides = record["image/height"], record["image/width"]
            assert sides[0] < sides[1]
            pixels = record.get("image/pixels")
            image = np.frombuffer(pixels, "u1").reshape(*sides, 3) if pixels else None
            image = opened(record["image/encoded"]) if image is None else image
            assert classes_of(image) == [1, 2, 3, 4]
    process = convert(*flags, "--keep_orientation", tmp_path / "photos", tmp_path / "kept")
    assert rows(process.stdout)["EXIF orientation kept"] == "4 images"  # Pillow turns TIFF
    tags = [
        Image.open(io.BytesIO(record["image/encoded"])).getexif().get(0x0112, 1)
        for record in read(tmp_path / "kept")
    ]
    assert sorted(tags) == [1, 6, 6, 6, 6]


def test_records_with_masks_and_boxes(tmp_path):
    """Masks follow; boxes cannot: such records are left out, or kept by name."""
    mask = save(MASK.transpose(SIDEWAYS), "PNG")
    example = {"image/encoded": photo(), "image/class/label": 0}
    example |= {"image/height": 300, "image/width": 200}
    boxed = {**example, "image/object/bbox/xmin": [0.1, 0.5]}
    key = "image/segmentation/class/encoded"
    write_tfrecord(tmp_path / "train-0", [{**example, key: mask}])
    write_tfrecord(tmp_path / "boxed-0", [boxed])
    run("index", tmp_path / "train-0", tmp_path / "boxed-0")
    for number, flag in enumerate([[], ["--resize_shorter=100"], ["--store=pixels"]]):
        out = tmp_path / f"out{number}"
        succeeds(convert(*flag, tmp_path / "train-0", out))
        (record,) = read(out)
        pixels = opened(record[key])
        assert pixels.shape == (record["image/height"], record["image/width"])
        assert classes_of(pixels) == [1, 2, 3, 4]
    process = convert(tmp_path / "boxed-0", tmp_path / "boxes")
    name = "image/object/bbox/xmin"
    fails(process, f"`{name}` may be positions in its image", f"--keep_features={name}")
    flags = [f"--keep_features={name}"]
    assert convert(*flags, tmp_path / "boxed-0", tmp_path / "boxes").returncode == 0
    smaller = convert_image(photo(), Conversion(decoder="none", keep_orientation=True))
    check_positions({name: ("float_list", [5.0])}, smaller, ())
    shrunk = smaller._replace(width=20, height=30)
    check_positions({name: ("float_list", [0.5])}, shrunk, ())
    with pytest.raises(UnreadableImage, match="would be resized"):
        check_positions({name: ("float_list", [5.0])}, shrunk, ())


@pytest.mark.slow
def test_images_of_more_than_8_bits(tmp_path):
    """What is lost is said, and so are 12 bits in 16."""
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    ramp = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    (folder / "deep.png").write_bytes(save(Image.fromarray(ramp * 16), "PNG"))
    (folder / "dark.png").write_bytes(save(Image.fromarray(ramp), "PNG"))
    flags = ["--validation_fraction=0"]
    process = convert(*flags, tmp_path / "photos", tmp_path / "out")
    said = rows(process.stdout)
    assert said["16 bits made 8"] == "2 images"
    assert said["12 bits in 16, almost black"] == "1 image"
    assert json.loads((tmp_path / "out" / "features.json").read_text())
    deep = [{"image": file.read_bytes(), "label": 0} for file in sorted(folder.iterdir())]
    write_tfrecord(tmp_path / "deep-0", deep)
    process = run("index", "--verify=decode", tmp_path / "deep-0")
    images = rows(process.stdout)["images"]
    assert images.startswith("16-bit PNG of 12 bits, almost black 1, 16-bit PNG 1;")


@pytest.mark.slow
def test_values_of_masks(tmp_path):
    """Counted at level "decode", and compared with the classes that are meant."""
    key, ink = "mask", np.where(QUARTERS > 2, 255, 0).astype(np.uint8)
    for name, mask in (("raw", ink.tobytes()), ("png", save(Image.fromarray(ink), "PNG"))):
        image = save(Image.fromarray(COLORS[QUARTERS]))
        write_tfrecord(tmp_path / f"{name}-0", [{"image/encoded": image, key: mask}])
    files = [str(tmp_path / "raw-0"), str(tmp_path / "png-0")]
    dti.build_index(files, dti.Checks(verify="decode", mask_key=key, label=None))
    records = dti.Records.from_files(files)
    assert records.features[key].counts == ((0, 60_000), (255, 60_000))

    def make(**fields):
        mask = dti.SegmentationMask(key=key, **fields)
        return dti.InputSpec.for_evaluation(records, 32, label=None, mask=mask)

    with refused("values 0, 255, of which 255 is `ignore`.*values={0: 0, 255: 1}"):
        make()
    with refused("`mask.num_classes` must be above .*: 255 is 3, and the masks"):
        make(values={255: 3}, num_classes=2)
    with refused("`values` must be a dict of numbers in"):
        make(values={0: 256})
    make(values={255: 255})
    spec = make(values={0: 0, 255: 1}, num_classes=2)
    for options in BACKENDS.values():
        _, masks = next(iter(dti.load(spec, options, batch_size=2).dataset))
        assert set(np.unique(masks)) == {0, 1}


@pytest.mark.slow
def test_two_exif_orientations(tmp_path):
    """DALI turns one half of such an image by each; the first one counts elsewhere."""
    image = with_segments(SIX, THREE)
    write_tfrecord(tmp_path / "train-0", [{"image/encoded": image, "image/class/label": 0}])
    files = str(tmp_path / "train-0")
    fails(
        run("index", "--verify=decode", files),
        "EXIF data of several orientations",
        bad_records=True,
    )
    process = succeeds(run("index", "--verify=decode", "--decoder=tf_data", files))
    assert rows(process.stdout)["EXIF"] == "1 image to be turned upright, as training does"


def test_explore_counts_what_is_turned(tmp_path):
    """Its sizes are those that are shown."""
    write_tfrecord(tmp_path / "train-0", [{"image/encoded": photo(), "image/class/label": 0}] * 3)
    run("index", "--verify=schema", tmp_path / "train-0")
    process = run("explore", f"--files={tmp_path}/train-0", f"--out={tmp_path}/page.html")
    said = rows(process.stdout)
    assert said["turned by EXIF"] == "3"
    assert said["height"] == "200 (200 to 200)"
