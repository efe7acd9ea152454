"""Images that are stored as pixels: the same work, order and errors as encoded ones."""

import dataclasses
import io

import numpy as np
import pytest
from commands import run
from conftest import (
    DALI,
    TF_DATA,
    at_night,
    encode,
    jpeg,
    spec_of,
    take,
    write_indexed,
    write_tfrecord,
)
from conversions import make
from PIL import Image
from test_parity import CROPS

import dali_tf_input as dti
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.index.build import IndexFaultsError

pytestmark = pytest.mark.usefixtures("checked_here")

SIZES = [(40, 60), (33, 33), (25, 90), (90, 25), (32, 32), (200, 150)]


def example(image, label, **changes):
    height, width = image.shape[:2]
    sides = {"image/height": height, "image/width": width}
    return {"image/pixels": image.tobytes(), "image/class/label": label, **sides, **changes}


def images():
    return [
        np.asarray(Image.open(io.BytesIO(jpeg(*size, seed=seed))).convert("RGB"))
        for seed, size in enumerate(SIZES * 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_the_images_of_pngs(tmp_path, options):
    """With two crops, at night with every one, and in another order, the same."""
    pixels = write_indexed(tmp_path / "a", [example(one, n) for n, one in enumerate(images())])
    pairs = enumerate(images())
    pngs = [{"image/encoded": encode(one), "image/class/label": number} for number, one in pairs]
    encoded = write_indexed(tmp_path / "b", pngs)
    assert (pixels.stores_pixels, encoded.stores_pixels) == (True, False)
    usual = ("random_resized_crop", "letterbox")
    runs = [("global", CROPS[name]) for name in at_night(usual, CROPS)]
    runs.append(("sequential" if options is TF_DATA else "buffer", dti.RandomResizedCrop()))
    for order, crop in runs:
        preprocess = dataclasses.replace(dti.Preprocess.for_training(24), crop=crop)
        made = [
            take(make_dataset(spec_of(one, order, preprocess), options, batch_size=4), 5)
            for one in (pixels, encoded)
        ]
        np.testing.assert_array_equal(made[0][1], made[1][1])
        np.testing.assert_allclose(made[0][0], made[1][0], atol=1e-5)


WRONG = [
    ({"image/height": 3}, r"'image/height' \[3\] and 'image/width' \[60\], found 7,200"),
    ({"image/pixels": b"123"}, "found 3"),
    ({"image/height": -40, "image/width": -60}, "found 7,200"),
    ({"image/width": "60"}, "found 7,200"),
]


@pytest.mark.parametrize(("changes", "found"), at_night(WRONG[:2], WRONG))
def test_sizes_that_do_not_fit(tmp_path, changes, found):
    """The index step names the record; without it, it stops training by name."""
    held = [example(one, n) for n, one in enumerate(images())]
    held[5] = example(images()[0], 5, **changes)
    dataset = write_indexed(tmp_path / "train", held)
    named = []
    for level in ("schema", "decode"):
        with pytest.raises(IndexFaultsError):
            checks = dti.Checks(verify=level)
            dti.build_index(
                tmp_path / "train", checks, on_bad_record=lambda _, bad: named.append(bad)
            )
    assert [(bad.record, bad.reason) for bad in named] == [(5, "pixels size")] * 2
    with pytest.raises(dti.BadRecordError, match=f"record 5, byte .* pixels size: .*{found}"):
        raise_first(dataset)
    dti.build_index(
        tmp_path / "train", dti.Checks(verify="decode"), on_bad="skip", max_bad_fraction=0.1
    )
    assert dti.Records.from_files(tmp_path / "train").num_records == len(held) - 1


def raise_first(dataset):
    train = dti.load(
        spec_of(dataset, "global", dti.Preprocess.for_training(24)), TF_DATA, batch_size=4
    )
    for _ in train:
        pass


@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_a_decode_of_all_levels(tmp_path, options):
    held = [example(one, n) for n, one in enumerate(images())]
    checks = dti.Checks(verify="decode", decoder="dali")
    dataset = write_indexed(tmp_path / "train", held, checks)
    spec = spec_of(dataset, "sequential", dti.Preprocess.for_evaluation(24), repeat=False)
    assert (dataset.largest_image, len(spec.class_counts)) == ((200, 150), 12)
    batches = list(make_dataset(spec, options, batch_size=4))
    assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(12))


@pytest.mark.slow
def test_convert_stores_pixels(tmp_path):
    """From images and from TFRecords: what Pillow decodes, resized where it is larger."""
    for number, size in enumerate([(40, 60), (30, 20)]):
        (tmp_path / "photos" / f"class {number}").mkdir(parents=True)
        for name in ("a.jpg", "b.jpg"):
            (tmp_path / "photos" / f"class {number}" / name).write_bytes(jpeg(*size))
    flags = ["--validation_fraction=0", "--num_files=1", "--store=pixels"]
    make(*flags, "--resize_shorter=32", tmp_path / "photos", tmp_path / "one")
    sizes = [(40, 60), (30, 20)] * 2
    examples = [
        {"image/encoded": jpeg(*size), "image/class/label": n} for n, size in enumerate(sizes)
    ]
    source = write_tfrecord(tmp_path / "two", examples)
    dti.build_index(source)
    make(*flags, source, tmp_path / "three")
    for folder, shapes in (("one", {(32, 48), (30, 20)}), ("three", {(40, 60), (30, 20)})):
        files = tmp_path / folder / "*-of-*"
        report = dti.build_index(files, dti.Checks(verify="decode", decoder="dali"))
        assert report.summary.images.formats == {"pixels": 4}
        dataset = dti.Records.from_files(files)
        found = [dataset.read(number) for number in range(4)]
        sides = {(one["image/height"][0], one["image/width"][0]) for one in found}
        assert sides == shapes
        assert not any("image/encoded" in one for one in found)
    small = next(one for one in found if one["image/height"][0] == 30)
    expected = np.asarray(Image.open(io.BytesIO(jpeg(30, 20))).convert("RGB"))
    assert small["image/pixels"][0] == expected.tobytes()
    process = run(
        "preview", f"--files={files}", f"--out={tmp_path / 'sheet.png'}", "--num_images=4"
    )
    assert process.returncode == 0, process.stderr
