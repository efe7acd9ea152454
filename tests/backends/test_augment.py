"""Augmentations of images: the same pixels by each backend, the same ones again after a resume."""

import dataclasses
import io
import warnings

import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, encode, jpeg, refused, spec_of, write_indexed
from conftest import take as take_batches
from nvidia import dali
from nvidia.dali import fn, types
from PIL import Image

import dali_tf_input as dti
from dali_tf_input import Preprocess, TfDataOptions
from dali_tf_input.backends import dali_augment, tf_augment, tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.cli.flags import AUGMENTATIONS
from dali_tf_input.serving import iterate_batches
from dali_tf_input.spec.augment import Augmentation, Choices, Program
from dali_tf_input.spec.crops import NoCrop
from dali_tf_input.spec.primitives import Primitive, Warp, make_table

SIZE = (96, 80)
PLAIN = Preprocess(image_size=SIZE, crop=NoCrop(), mirror_probability=0, dtype="uint8")
BY_TF = TfDataOptions(kernel="tensorflow")
EITHER = (DALI, TF_DATA)
every_path = pytest.mark.parametrize("options", at_night(EITHER, [*EITHER, BY_TF]))
STEPS = tf.TensorSpec((2,), tf.int64)
AT_STRENGTHS = {
    "rand": [dti.augment.RandAugment(magnitude=magnitude) for magnitude in (3, 9, 30)],
    "rand_tf": [
        dti.augment.RandAugment(dialect="tf", magnitude=3, increasing=False),
        dti.augment.RandAugment(dialect="tf", magnitude_std=0.5, p=0.5, fill=77),
        dti.augment.RandAugment(dialect="tf", magnitude=15, num_ops=3, interpolation="bilinear"),
    ],
    "trivial": [
        dti.augment.TrivialAugment(),
        dti.augment.TrivialAugment(fill=99, interpolation="bilinear"),
    ],
    "jitter": [
        dti.augment.ColorJitter(brightness=x, contrast=x, saturation=x, hue=x / 4)
        for x in (0.1, 0.4, 1.5)
    ],
    "gray": [dti.augment.RandomGrayscale(p=p) for p in (0.1, 1.0)],
    "blur": [
        dti.augment.GaussianBlur(sigma=sigma) for sigma in ((0.1, 0.3), (0.1, 2.0), (4.0, 30.0))
    ],
    "solarize": [dti.augment.Solarize(threshold=threshold) for threshold in (0, 127.5, 255)],
    "erasing": [
        dti.augment.RandomErasing(p=0.9),
        dti.augment.RandomErasing(p=1, area_range=(0.8, 0.9), aspect_ratio_range=(1, 1), fill=3.4),
        dti.augment.RandomErasing(p=1, fill=(255, 0.5, 9)),
    ],
    "vertical": [dti.augment.VerticalMirror(p=p) for p in (0.5, 1.0)],
    "all": [tuple(AUGMENTATIONS.values())],
}
CASES = {
    f"{name}{number}": one
    for name, those in AT_STRENGTHS.items()
    for number, one in enumerate(those)
}
COUNT = at_night(30, 100)


def pictures(count, size=SIZE):
    """Different images, some of one color, of few values, or without a channel."""
    made = []
    for number in range(count):
        image = np.array(Image.open(io.BytesIO(jpeg(*size, seed=number))))
        if number % 10 == 7:
            image[:] = 40 * number % 256
        elif number % 10 == 8:
            image //= 100
        elif number % 10 == 9:
            image[..., number % 3] = 0
        made.append(image)
    return np.stack(made)


def draw(program, count):
    drawing = tf.function(
        lambda seed: tf_augment.draw_rows(program, seed), [STEPS], autograph=False
    )
    return np.stack([drawing(tf.constant([3, number], tf.int64)) for number in range(count)])


def by_native(images, rows, preprocess=PLAIN, *, mirrored=False):
    return np.stack(
        [
            tf_native.augment(image, own, preprocess, tf.constant(mirrored))
            for image, own in zip(images, rows, strict=True)
        ]
    )


def by_tensorflow(images, rows, program):
    shapes = (tf.TensorSpec(images.shape[1:], tf.uint8), tf.TensorSpec(rows.shape[1:]))
    apply = tf.function(
        lambda image, own: tf_augment.apply_rows(image, own, program), shapes, autograph=False
    )
    return np.stack([apply(image, own) for image, own in zip(images, rows, strict=True)])


def by_dali(images, rows, program):
    def define():
        pixels = fn.external_source(
            name="images", device="cpu", dtype=types.UINT8, ndim=3, layout="HWC"
        )
        drawn = fn.external_source(name="rows", device="cpu", dtype=types.FLOAT, ndim=2)
        return dali_augment.apply_rows(pixels, drawn, program, images.shape[1:3])

    make = dali.pipeline_def(define, enable_conditionals=True)
    pipeline = make(batch_size=len(images), num_threads=2, device_id=None)
    pipeline.build()
    pipeline.feed_input("images", list(images))
    pipeline.feed_input("rows", list(rows))
    return np.stack([np.array(image) for image in pipeline.run()[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(["all0", "rand_tf1"], CASES))
def test_the_same_pixels(name):
    """Of each image at most 1 of 255 apart on average, and nearly all no more than that.

    A warp takes the nearest pixel, which for a place between two is another one by rounding.
    """
    augmentations = CASES[name] if isinstance(CASES[name], tuple) else (CASES[name],)
    program, images = Program(augmentations, SIZE), pictures(COUNT)
    rows = draw(program, len(images))
    made = by_native(images, rows)
    for others in (by_tensorflow(images, rows, program), by_dali(images, rows, program)):
        difference = np.abs(made.astype(int) - others)
        assert difference.mean((1, 2, 3)).max() <= 1
        assert difference.mean() < 0.02
        assert (difference <= 1).mean() > 0.999


def test_each_primitive_by_hand():
    """What a row says, computed here in another way."""
    image = pictures(1)[0]
    height, width = SIZE
    one = np.zeros(13, np.float32)

    def apply(primitive, *numbers):
        row = one.copy()
        row[: len(numbers) + 1] = (primitive, *numbers)
        return by_native([image], [row[None]])[0]

    values = image.astype(np.float32)

    def rounded(values):
        return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8)

    red_for_all = [1, 0, 0, 2] * 3
    np.testing.assert_array_equal(
        apply(Primitive.COLOR, *red_for_all), rounded(values[..., :1] + [2, 2, 2])
    )
    gray = (values @ np.float32([0.299, 0.587, 0.114])).mean()
    np.testing.assert_array_equal(
        apply(Primitive.CONTRAST, 0.5), rounded(gray + (values - gray) / 2)
    )
    inverted = np.where(image >= 100, 255 - image, image)
    np.testing.assert_array_equal(apply(Primitive.SOLARIZE, 99.5), inverted)
    np.testing.assert_array_equal(apply(Primitive.POSTERIZE, 192), image & 192)
    np.testing.assert_array_equal(
        apply(Primitive.ADD, 50), np.where(image < 128, image + 50.0, image)
    )
    stretched = apply(Primitive.AUTOCONTRAST)
    assert (stretched.min((0, 1)), stretched.max((0, 1))) == pytest.approx((0, 255))
    counts = np.bincount(apply(Primitive.EQUALIZE)[..., 0].ravel(), minlength=256).cumsum()
    assert np.abs(counts / counts[-1] - np.arange(256) / 255).max() < 0.05
    identity = [0, 0, 0, 0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(apply(Primitive.FILTER, *identity), image)
    shifted = apply(Primitive.FILTER, 0, 0, 0, 0, 0, 1, 0, 0, 0)  # the right neighbor
    np.testing.assert_array_equal(shifted[:, :-1], image[:, 1:])
    np.testing.assert_array_equal(shifted[:, -1], image[:, -2])
    kernel = np.exp(-(np.arange(-6, 7) ** 2) / 8)
    blurred = values
    for axis in (0, 1):
        blurred = np.apply_along_axis(np.convolve, axis, blurred, kernel / kernel.sum(), "valid")
    made = apply(Primitive.BLUR, 2.0)[6:-6, 6:-6]
    assert np.abs(made - blurred).max() <= 0.501
    np.testing.assert_array_equal(apply(Primitive.BLUR, 0.1), image)
    moved = apply(Primitive.WARP, 1, 0, 5, 0, 1, -7, 66, 0)
    np.testing.assert_array_equal(moved[7:, : width - 5], image[:-7, 5:])
    assert (moved[:7] == 66).all()
    assert (moved[:, width - 5 :] == 66).all()
    half = apply(Primitive.WARP, 1, 0, 0.5, 0, 1, 0, 0, 1)
    np.testing.assert_array_equal(half[:, :-1], rounded((values[:, :-1] + values[:, 1:]) / 2))
    upside_down = apply(Primitive.WARP, 1, 0, 0, 0, -1, height, 0, 0)
    np.testing.assert_array_equal(upside_down, image[::-1])
    erased = apply(Primitive.ERASE, 3, 4, 30, 44, 5, 0, 9, 8, 7)
    assert (erased[3:30, 4:44] == [9, 8, 7]).all()
    erased[3:30, 4:44] = image[3:30, 4:44]
    np.testing.assert_array_equal(erased, image)
    noise = apply(Primitive.ERASE, 0, 0, *SIZE, 1234, 0, 128, 128, 128, 30, 30, 30) / 1.0 - 128
    assert noise.mean() == pytest.approx(0, abs=1)
    assert noise.std() == pytest.approx(30, abs=1)
    assert abs(np.corrcoef(noise[:, 1:].ravel(), noise[:, :-1].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("size", at_night([(7, 1)], [(7, 1), (1, 1), (1, 9), (2, 3)]))
def test_small_images(size):
    """Margins that are wider than the image, and sides of one pixel."""
    images, preprocess = pictures(30, size), dataclasses.replace(PLAIN, image_size=size)
    for augmentation in (
        dti.augment.RandAugment(num_ops=1, magnitude=30),
        dti.augment.GaussianBlur(sigma=(0.5, 3)),
        dti.augment.ColorJitter(contrast=1.0),
    ):
        program = Program([augmentation], size)
        rows = draw(program, len(images))
        others = by_tensorflow(images, rows, program)
        difference = np.abs(by_native(images, rows, preprocess).astype(int) - others)
        assert (difference <= 1).mean() > 0.98


def test_the_end_of_the_pass():
    """Mirror, normalization, layout and type, as without augmentation."""
    images = pictures(2)
    rows = np.zeros((2, 1, 13), np.float32)
    for dtype in ("float32", "float16", "bfloat16", "uint8"):
        for layout in ("HWC", "CHW"):
            preprocess = dataclasses.replace(PLAIN, dtype=dtype, layout=layout)
            made = by_native(images, rows, preprocess, mirrored=True)
            expected = images[:, :, ::-1].astype(np.float32)
            if dtype != "uint8":
                expected = (expected - preprocess.mean) * (1 / np.float32(preprocess.std))
            expected = expected.transpose(0, 3, 1, 2) if layout == "CHW" else expected
            tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3, "uint8": 0}[dtype]
            assert made.dtype == tf.as_dtype(dtype)
            np.testing.assert_allclose(made.astype(float), expected, tolerance, tolerance)


@pytest.mark.parametrize(
    ("image", "row", "message"),
    [
        (np.zeros((96, 81, 3), np.uint8), [0] * 13, "of the output's size"),
        (np.zeros((96, 80, 4), np.uint8), [0] * 13, "of the output's size"),
        (np.zeros((96, 80, 3), np.uint8), [0] * 12, "rows must be of 13 numbers"),
        (np.zeros((96, 80, 3), np.uint8), [12] + [0] * 12, "no such primitive"),
        (np.zeros((96, 80, 3), np.uint8), [-1] + [0] * 12, "no such primitive"),
        (np.zeros((96, 80, 3), np.uint8), [np.nan] + [0] * 12, "must be finite"),
        (np.zeros((96, 80, 3), np.uint8), [9, 31] + [0] * 11, "sigma must be in"),
        (np.zeros((96, 80, 3), np.uint8), [9, 0] + [0] * 11, "sigma must be in"),
        (np.zeros((96, 80, 3), np.uint8), [11, 0, 0, 9, 9, -1] + [0] * 7, "a seed must not"),
    ],
)
def test_the_operation_refuses(image, row, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        tf_native.augment(image, np.array([row], np.float32), PLAIN, tf.constant(False))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One image, 16 times: whatever differs between two that come out is augmentation."""
    examples = [{"image": jpeg(*SIZE, seed=5), "label": 0}] * 16
    return write_indexed(tmp_path_factory.mktemp("augment") / "train", examples)


def feed(records, options, *, order="global", transform=None, start_step=0, seed=0, **changes):
    preprocess = dataclasses.replace(PLAIN, **changes)
    spec = spec_of(records, order, preprocess, seed=seed, transform=transform)
    return make_dataset(spec, options, batch_size=4, start_step=start_step)


WORK = [
    {"augment": (dti.augment.GaussianBlur(),), "mirror_probability": 0.5, "dtype": "float32"},
    {"augment": (dti.augment.RandAugment(), dti.augment.RandomErasing(p=1.0))},
    {"augment": (dti.augment.TrivialAugment(),), "dtype": "float16", "layout": "CHW"},
    {"augment": (dti.augment.ColorJitter(hue=0.2),), "channels": 1, "mean": (0,), "std": (1,)},
]


@pytest.mark.nightly
@pytest.mark.parametrize("changes", WORK)
def test_datasets_of_both_backends(records, changes):
    """And of each kernel: the same images, whatever the type and the layout."""
    kinds = [TF_DATA, BY_TF, DALI]
    made = [take_batches(feed(records, options, **changes), 4)[0] for options in kinds]
    assert made[0].shape[1:] == dataclasses.replace(PLAIN, **changes).image_shape
    scale = 1 if made[0].dtype == np.uint8 or changes.get("channels") else 58
    for others in made[1:]:
        assert others.dtype == made[0].dtype
        assert np.abs(made[0].astype(float) - others.astype(float)).mean() * scale < 0.1
    assert len({image.tobytes() for image in made[0]}) > 8


@pytest.mark.parametrize("options", at_night([DALI], EITHER))
def test_with_a_mask(tmp_path, options):
    """A mask is not changed by colors, nor by what erases a part of its image."""
    mask = np.zeros(SIZE, np.uint8)
    mask[20:50, 20:50] = 3
    examples = [{"image": jpeg(*SIZE), "label": 0, "mask": encode(mask)}] * 8
    records = write_indexed(tmp_path / "train", examples)
    masks = dti.SegmentationMask(key="mask")
    colors = dataclasses.replace(
        PLAIN, augment=(dti.augment.ColorJitter(brightness=0.5), dti.augment.RandomErasing())
    )
    spec = spec_of(records, "global", colors, mask=masks)
    targets = next(iter(make_dataset(spec, options, batch_size=4)))[1]
    np.testing.assert_array_equal(targets["mask"], [mask] * 4)
    with refused("`transform` works without `mask` only"):
        spec_of(records, "global", PLAIN, mask=masks, transform=lambda image, seed: image)


@every_path
def test_an_augmentation_that_does_nothing(tmp_path, options):
    """As a strength that a sweep sets to 0."""
    records = write_indexed(tmp_path / "train", [{"image": jpeg(*SIZE), "label": 0}] * 4)
    made = []
    for augment in ((), (dti.augment.ColorJitter(), dti.augment.VerticalMirror(p=0))):
        spec = spec_of(records, "global", dataclasses.replace(PLAIN, augment=augment))
        made.append(next(iter(make_dataset(spec, options, batch_size=4)))[0].numpy())
    np.testing.assert_array_equal(*made)


class Turns(Augmentation):
    """Turns, shears, shifts or flips by many amounts."""

    def plan(self, image_size):
        warp = Warp(image_size, fill=99)
        rows = [warp.turn(degrees) for degrees in range(-40, 41, 5)]
        rows += [warp.shear(0.3, 0), warp.shift(7, -5), warp.row(1, 0, 0, 0, -1, image_size[0])]
        return Choices((make_table(rows),), p=0.9)


@every_path
def test_pixels_of_a_mask_move_with_those_of_its_image(tmp_path, options):
    """In order: crop, augmentations, mirror; what comes from outside is to be ignored."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 2, (12, 16), dtype=np.uint8).repeat(5, 0).repeat(5, 1)
    image, mask = encode(np.dstack([blocks * 200] * 3)), encode(blocks)
    records = write_indexed(tmp_path / "train", [{"image": image, "label": 0, "mask": mask}] * 8)
    moved = dti.Preprocess(
        image_size=(40, 50),
        crop=dti.RandomCrop(),
        mirror_probability=0.5,
        augment=(Turns(), dti.augment.VerticalMirror(), Turns()),
        dtype="uint8",
    )
    spec = spec_of(records, "global", moved, mask=dti.SegmentationMask(key="mask"))
    images, targets = next(iter(make_dataset(spec, options, batch_size=8)))
    images, masks = images.numpy()[..., 0], targets["mask"].numpy()
    assert {*np.unique(images)} == {0, 99, 200}
    assert len({image.tobytes() for image in images}) == 8
    differs = np.select([masks == 0, masks == 1, masks == 255], [0, 200, 99]) != images
    # DALI computes where a pixel comes from in another order, and may round to its neighbor.
    assert differs.mean() <= (1e-3 if options is DALI else 0)


def add_noise(image, seed):
    noise = tf.random.stateless_uniform(image.shape, seed, -20, 21, tf.int32)
    return tf.cast(tf.clip_by_value(tf.cast(image, tf.int32) + noise, 0, 255), tf.uint8)


@pytest.mark.slow
def test_a_function_of_ones_own(records):
    """After crop and augmentation, before mirror and normalization; repeatable."""
    made, _ = take_batches(feed(records, TF_DATA, transform=add_noise), 8)
    (original,) = take_batches(feed(records, TF_DATA), 1)[0][:1]
    assert len({image.tobytes() for image in made}) == 32
    assert np.abs(made.astype(int) - original).max() == 20
    rest, _ = take_batches(feed(records, TF_DATA, transform=add_noise, start_step=3), 2)
    np.testing.assert_array_equal(made[12:20], rest)
    others, _ = take_batches(feed(records, BY_TF, transform=add_noise), 4)
    assert np.abs(made[:16].astype(int) - others).max() <= 1

    def whiten(image, seed):  # by NumPy, of unknown shape
        return tf.numpy_function(lambda pixels: pixels * 0 + 255, [image], tf.uint8)

    changes = {"dtype": "float32", "augment": (dti.augment.Solarize(),), "mirror_probability": 0.5}
    white, _ = take_batches(feed(records, TF_DATA, transform=whiten, **changes), 1)
    expected = (255 - np.float32(PLAIN.mean)) / PLAIN.std
    np.testing.assert_allclose(white, np.broadcast_to(expected, white.shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda image, seed: tf.cast(image, tf.float32), r"uint8 .*, got float32 "),
        (lambda image, seed: image[:50], r"got uint8 \(50, 80, 3\)"),
        (lambda image, seed: (image, seed), "must return an image like the one it gets"),
        (lambda image: image, "`transform` fails: TypeError"),
    ],
)
def test_refuses_a_function(records, transform, message):
    with refused(message):
        feed(records, TF_DATA, transform=transform)


def test_refuses(records):
    with refused("DALI does not support `transform`: make it a layer"):
        feed(records, DALI, transform=add_noise)
    with refused("must not be random"):
        next(iterate_batches([], dataclasses.replace(PLAIN, augment=(dti.augment.Solarize(),))))


@pytest.mark.slow
def test_quiet(records, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_batches(feed(records, DALI, augment=tuple(AUGMENTATIONS.values())), 1)
    assert "deprecated" not in capfd.readouterr().err
