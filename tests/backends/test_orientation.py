"""Images are turned upright as they are decoded: equal to those that were turned before."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
from conftest import DALI, TF_DATA, at_night, encode, exif, jpeg, refused, table, write_indexed
from PIL import Image
from test_parity import by_batch, by_dali, by_tensorflow, draw, measure

import dali_tf_input as dti

TURNS = (
    None,
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.ROTATE_180,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
BY_TF = dti.TfDataOptions(kernel="tensorflow")
CROPS = {
    "no": dti.NoCrop(),
    "center": dti.CenterCrop(resize_shorter=40),
    "resize": dti.ResizeRandomCrop(resize=(40, 44)),
    "area": dti.RandomResizedCrop(),
    "random": dti.RandomCrop(),
    "letterbox": dti.Letterbox(),
}


def turned(image, number):
    return image if TURNS[number] is None else image.transpose(TURNS[number])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Records of JPEGs of all orientations, and of the same images turned before, as PNG."""
    stored, upright = [], []
    for number in range(8):
        for size, how in (((61, 95), {}), ((95, 61), {"progressive": True}), ((64, 48), {})):
            image = Image.open(io.BytesIO(jpeg(*size, seed=number)))
            data = encode(image, "JPEG", exif=exif(number + 1), quality=95, subsampling=0, **how)
            mask = Image.fromarray((np.arange(size[0] * size[1]) % 251).reshape(size).astype("u1"))
            about = {"image/class/label": number}
            stored.append({"image/encoded": data, "mask": encode(mask), **about})
            shown = Image.fromarray(np.asarray(Image.open(io.BytesIO(data))))  # without its tag
            shown = turned(shown, number)
            own = {"image/encoded": encode(shown), "mask": encode(turned(mask, number))}
            upright.append(own | about)
    folder = tmp_path_factory.mktemp("orientation")
    return [
        write_indexed(folder / f"{name}-0", examples)
        for name, examples in (("stored", stored), ("upright", upright))
    ]


OUTPUTS = (
    {},
    {"antialias": True},
    {"interpolation": "nearest"},
    {"interpolation": "bicubic", "layout": "CHW"},
    {"dtype": "float16", "channels": 1, "mean": (0,), "std": (1,)},
)
PLANS = ("full", "region")


@table(
    "crop, fields, decode",
    [*zip(CROPS, itertools.cycle(OUTPUTS), itertools.cycle(PLANS), strict=False)],
    CROPS,
    OUTPUTS,
    PLANS,
)
def test_turned_as_before(pairs, crop, fields, decode):
    """All eight orientations, by every engine: what the reference makes of those turned before."""
    plain = {"mean": (0,) * 3, "std": (1,) * 3, "mirror_probability": 0.5, **fields}
    preprocess = dti.Preprocess(image_size=(32, 36), crop=CROPS[crop], **plain)
    images, others = (
        [records.read(number)["image/encoded"][0] for number in range(24)] for records in pairs
    )
    uniforms = draw(preprocess, 24)
    how = {"decode": decode}
    made = by_batch(images, uniforms, preprocess, **how)
    # TensorFlow's bicubic weights are from a table; it does what the batch operation does not crop.
    by_table = 0.2 if fields.get("interpolation") == "bicubic" else 0.01
    most = by_table if crop == "letterbox" else 0.01
    assert measure(made, others, uniforms, preprocess).max() < most
    made = by_tensorflow(images, uniforms, preprocess, eagerly=True, **how)
    assert measure(made, others, uniforms, preprocess).max() < by_table
    made = by_dali(images, uniforms, preprocess, **how)
    assert measure(made, others, uniforms, preprocess).mean() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [TF_DATA, BY_TF, DALI]))
def test_views_are_turned(pairs, options):
    """Of datasets, and before they are augmented."""
    crop = dti.RandomResizedCrop()
    views = [
        dti.Preprocess.for_training(24, normalization=None, crop=crop),
        dti.Preprocess.for_training(
            16, dtype="uint8", crop=crop, augment=(dti.augment.RandAugment(),)
        ),
    ]
    made = []
    for records in pairs:
        spec = dti.InputSpec.for_training(records, views[0], views=tuple(views), order="sequential")
        batch, _ = next(iter(dti.load(spec, options, batch_size=24).dataset))
        made.append([batch[f"image_{view}"].numpy() for view in range(2)])
    (one, augmented), (other, other_augmented) = made
    assert np.abs(one - other).mean() < (0.3 if options is DALI else 0.001)
    difference = np.abs(augmented.astype(float) - other_augmented)
    if options is DALI:
        assert difference.mean() < 1
    else:
        assert difference.max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [TF_DATA, BY_TF, DALI]))
def test_masks_are_turned_with_their_images(pairs, options):
    fields = {"label": None, "mask": dti.SegmentationMask(key="mask")}
    made = []
    for records in pairs:
        spec = dti.InputSpec.for_training(records, (32, 36), order="sequential", seed=3, **fields)
        _, masks = next(iter(dti.load(spec, options, batch_size=24).dataset))
        made.append(masks.numpy())
    np.testing.assert_array_equal(*made)
    assert made[0].max() > 200


def test_images_as_they_are_stored(pairs):
    """Without `apply_orientation` a tag is not read."""
    spec = dti.Preprocess(image_size=(61, 95), apply_orientation=False, mean=(0,) * 3, std=(1,) * 3)
    (image,) = [record["image/encoded"][0] for record in [pairs[0].read(15)]]  # orientation 6
    (whole,) = [batch for _, batch in dti.serving.iterate_batches([image], spec)]
    plain = np.asarray(Image.open(io.BytesIO(image))).astype(float)
    assert np.abs(whole[0] - plain).max() < 0.01
    upright = dataclasses.replace(spec, image_size=(95, 61), apply_orientation=True)
    (whole,) = [batch for _, batch in dti.serving.iterate_batches([image], upright)]
    assert np.abs(whole[0] - np.rot90(plain, -1)).max() < 0.01


def test_prediction_refuses_what_it_would_drop(pairs):
    image = pairs[0].read(0)["image/encoded"][0]
    spec = dti.InputSpec.for_evaluation(pairs[0], 24, transform=lambda image, seed: 255 - image)
    with refused("`transform` of the spec is not done here"):
        next(dti.serving.iterate_batches([image], spec))
    for _, made in dti.serving.iterate_batches([image], spec.preprocess):
        assert made.shape == (1, 24, 24, 3)
