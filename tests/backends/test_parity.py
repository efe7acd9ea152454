"""Both backends make the same pixels of the same random numbers: every crop, interpolation and kind
of image.
"""

import dataclasses
import functools
import itertools

import conftest
import keras
import numpy as np
import nvidia.dali as dali
import pytest
import tensorflow as tf
from conftest import (
    DALI,
    TF_DATA,
    backends,
    cases,
    encode,
    jpeg,
    refused,
    slowly,
    spec_of,
    valid_images,
)
from nvidia.dali import fn, types

from dali_tf_input import (
    CenterCrop,
    ClassLabel,
    DaliOptions,
    Letterbox,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    TfDataOptions,
)
from dali_tf_input.backends import dali_images, tf_images
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.serving import make_normalization
from dali_tf_input.spec.crops import CoverCrop, NoCrop

SELDOM_FITS = RandomResizedCrop(
    area_range=(0.9, 1.0), aspect_ratio_range=(0.5, 2.0), num_attempts=2
)
CROPS = {
    "resize_random_crop": ResizeRandomCrop(resize=(96, 80)),
    "random_resized_crop": RandomResizedCrop(),
    "random_resized_crop_that_seldom_fits": SELDOM_FITS,
    "random_crop": RandomCrop(),
    "center_crop": CenterCrop(resize_shorter=96),
    "cover_crop": CoverCrop(cover=(96, 80)),
    "cover_crop_by_default": CoverCrop(),
    "cover_crop_in_the_center": CoverCrop(cover=(91, 82), position="center"),
    "no_crop": NoCrop(),
    "letterbox": Letterbox(fill=99.5),
}
UNCHANGED = {"mean": (0, 0, 0), "std": (1, 1, 1)}
RAW = Preprocess(image_size=(80, 72), crop=NoCrop(), mirror_probability=0.5, **UNCHANGED)
UNMIRRORED = dataclasses.replace(RAW, mirror_probability=0.0)
crops = pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)


@pytest.fixture(scope="module")
def images():
    """Encoded images: large and small, of odd sizes down to one pixel, and of every kind that both
    backends decode.
    """
    sizes = [(375, 500), (500, 375), (401, 467), (97, 1000), (1000, 97), (720, 1280), (33, 47)]
    sizes += [(1, 1), (1, 50), (50, 1), (80, 72)]
    encoded = [jpeg(height, width, seed=number) for number, (height, width) in enumerate(sizes)]
    return encoded + valid_images()


@pytest.fixture(scope="module")
def odd_images():
    """Small images of odd sizes, which are enlarged."""
    sizes = [(64, 64), (47, 33), (31, 31), (24, 300), (301, 25), (27, 40), (1, 7)]
    return [jpeg(height, width, seed=number) for number, (height, width) in enumerate(sizes)]


def draw(preprocess, count, seed=0):
    return np.random.default_rng(seed).random((count, preprocess.num_uniforms), dtype=np.float32)


def by_tensorflow(images, numbers, preprocess, *, decode="full", native=True):
    drawn = tf.TensorSpec((preprocess.num_uniforms,), tf.float32)

    @tf.function(input_signature=[tf.TensorSpec((), tf.string), drawn])
    @tf.autograph.experimental.do_not_convert
    def prepare(encoded, drawn):
        return tf_images.prepare_image(encoded, drawn, preprocess, decode=decode, native=native)

    return np.stack([prepare(*given).numpy() for given in zip(images, numbers, strict=True)])


def run_dali(define, *inputs):
    """Runs a pipeline once over `inputs`, lists of arrays; returns lists of arrays."""
    pipeline = dali.Pipeline(batch_size=len(inputs[0]), num_threads=2, device_id=None)
    with pipeline:
        sources = map(itertools.repeat, inputs)
        nodes = [fn.external_source(source=source, batch=True) for source in sources]
        pipeline.set_outputs(*define(*nodes))
    pipeline.build()
    return [[np.array(value) for value in output] for output in pipeline.run()]


def by_dali(images, numbers, preprocess, *, decode="full"):
    how = {"decode": decode, "device": "cpu", "hints": {}}

    def define(encoded, drawn):
        return [dali_images.prepare_images(encoded, drawn, preprocess, **how)]

    (made,) = run_dali(define, [np.frombuffer(image, np.uint8) for image in images], list(numbers))
    return np.stack(made)


def regions_by_dali(sizes, numbers, preprocess):
    """Returns where the crops start, and their extents."""

    def define(size, drawn):
        return dali_images.find_region(fn.cast(size, dtype=types.FLOAT64), drawn, preprocess)[:2]

    return map(np.stack, run_dali(define, list(sizes), list(numbers)))


MAKERS = {"tensorflow": by_tensorflow, "dali": by_dali}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


# Over 0..255: the mean, the 99.9th percentile, the largest difference. Nearest: where a position is
# just between two pixels the backends may take either, so few pixels differ, but by anything.
BOUNDS = {
    ("bilinear", False): (0.001, 0.01, 0.01),
    ("bilinear", True): (0.05, 16, 16),
    ("bicubic", False): (0.1, 8, 64),
    ("bicubic", True): (0.1, 8, 64),
    ("nearest", False): (0.1, 64, 255),
}


PLANS = ("full", "region")
# Each crop with each resize, by the plans in turn: each of the three meets each of the others.
FAST = [
    (crop, how, PLANS[(number + other) % 2])
    for number, crop in enumerate(CROPS)
    for other, how in enumerate(BOUNDS)
]


@pytest.mark.parametrize(("crop", "how", "decode"), cases(CROPS, BOUNDS, PLANS, fast=FAST))
def test_same_pixels(images, odd_images, crop, how, decode):
    interpolation, antialias = how
    changes = {"crop": CROPS[crop], "interpolation": interpolation, "antialias": antialias}
    preprocess = dataclasses.replace(RAW, **changes)
    # Enlarging puts many positions just between two pixels.
    images = images + (odd_images if interpolation != "nearest" else [])
    numbers = draw(preprocess, len(images))
    one, other = (
        make(images, numbers, preprocess, decode=decode) for make in (by_tensorflow, by_dali)
    )
    difference = np.abs(one - other)
    mean, high, largest = BOUNDS[interpolation, antialias]
    assert difference.mean() <= mean
    assert np.quantile(difference, 0.999) <= high
    assert difference.max() <= largest


@pytest.mark.parametrize(
    "crop", cases(CROPS, fast=[("resize_random_crop",), ("random_crop",), ("letterbox",)])
)
def test_gray_is_the_luma_of_rgb(images, crop):
    """Of the resized image, by every way of making it."""
    rgb = dataclasses.replace(RAW, crop=CROPS[crop])
    gray = dataclasses.replace(rgb, channels=1, mean=(0,), std=(1,))
    numbers = draw(rgb, len(images))
    for make in (by_dali, by_tensorflow, functools.partial(by_tensorflow, native=False)):
        of_rgb, made = (make(images, numbers, one) for one in (rgb, gray))
        np.testing.assert_allclose(made[..., 0], of_rgb @ [0.299, 0.587, 0.114], atol=1e-3)
        assert made.shape == (len(images), 80, 72, 1)


@pytest.mark.parametrize("make", [by_tensorflow, slowly(by_dali)], ids=MAKERS)
@pytest.mark.parametrize("antialias", [True, slowly(False)])
@crops
def test_the_plan_does_not_show(images, crop, antialias, make):
    """Decoding only the region makes the pixels that decoding the whole image makes."""
    preprocess = dataclasses.replace(RAW, crop=crop, antialias=antialias)
    numbers = draw(preprocess, len(images), seed=1)
    whole, region = (
        make(images, numbers, preprocess, decode=decode) for decode in ("full", "region")
    )
    difference = np.abs(whole - region)
    assert difference.max() <= 0.02


@crops
def test_same_regions(crop):
    """Of 4000 images of many sizes, and within them."""
    preprocess = dataclasses.replace(RAW, crop=crop)
    generator = np.random.default_rng(3)
    sizes, numbers = generator.integers(1, 700, (4000, 2)), draw(preprocess, 4000, seed=4)
    starts, extents = regions_by_dali(sizes, numbers, preprocess)

    @tf.autograph.experimental.do_not_convert
    def find(inputs):
        region = tf_images.find_region(inputs[0], inputs[1], preprocess)
        return region.start, region.extent

    inputs = tf.constant(sizes, tf.int32), tf.constant(numbers)
    spec = (tf.TensorSpec((2,), tf.float64), tf.TensorSpec((2,), tf.float64))
    theirs = tf.function(lambda: tf.map_fn(find, inputs, fn_output_signature=spec))()
    np.testing.assert_allclose(starts, theirs[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(extents, theirs[1].numpy(), atol=1e-4)
    if isinstance(crop, Letterbox):  # around the whole image, the same on both sides but for one
        margins = np.stack([-starts, starts + extents - sizes]) * np.array([80, 72]) / extents
        assert (margins >= -1e-6).all()
        assert (np.abs(margins[1] - margins[0] - 0.5) < 0.5001).all()
        assert (margins.min(0).min(1) < 0.5001).all()
        return
    # Around a smaller image a RandomCrop takes black.
    fits = (sizes >= preprocess.image_size) | (not isinstance(crop, RandomCrop))
    assert (starts[fits] >= 0).all()
    assert ((starts + extents)[fits] <= sizes[fits] + 1e-6).all()
    centered = np.floor((sizes - preprocess.image_size) / 2)
    np.testing.assert_array_equal(starts[~fits], centered[~fits])


@pytest.mark.slow
def test_random_resized_crops_are_distributed_as_said():
    """Area uniform, aspect log-uniform, positions uniform; where every attempt fits."""
    crop = RandomResizedCrop(area_range=(0.1, 0.3), aspect_ratio_range=(0.5, 2.0))
    preprocess = dataclasses.replace(RAW, crop=crop)
    count = 20_000
    sizes = np.full((count, 2), 2000)
    starts, extents = regions_by_dali(sizes, draw(preprocess, count, seed=5), preprocess)
    area = extents.prod(1) / 2000**2
    aspect = np.log2(extents[:, 1] / extents[:, 0])
    top, left = (starts / (2000 - extents)).T
    for values, low, high in ((area, 0.1, 0.3), (aspect, -1, 1), (top, 0, 1), (left, 0, 1)):
        counts, _ = np.histogram(values, bins=10, range=(low - 0.001, high + 0.001))
        assert np.abs(counts - count / 10).max() < 5 * np.sqrt(count / 10)
    assert abs(np.corrcoef(area, aspect)[0, 1]) < 0.04


def test_random_resized_crop_that_never_fits():
    """The center, as much as the aspect allows: of a 100x1000 image a square is wanted."""
    crop = RandomResizedCrop(area_range=(1.0, 1.0), aspect_ratio_range=(1.0, 1.0))
    preprocess = dataclasses.replace(UNMIRRORED, crop=crop)
    pixels = np.zeros((100, 1000, 3))
    pixels[:, 500:] = 255
    numbers = draw(preprocess, 1)
    numbers[:, 1:3] = 0.9  # the position has no effect
    for make in (by_tensorflow, by_dali):
        (image,) = make([encode(pixels)], numbers, preprocess)
        assert image[:, :35].max() == 0
        assert image[:, 37:].min() == 255


def test_random_crop_keeps_the_scale(images):
    """The pixels of the image as they are, where it is large enough."""
    preprocess = dataclasses.replace(UNMIRRORED, crop=RandomCrop())
    numbers = draw(preprocess, 1, seed=6)
    whole = tf_images.decode_image(tf.constant(images[0]), upright=False).numpy()
    top, left = (
        int(numbers[0, 1 + axis] * (side - out + 1))
        for axis, (side, out) in enumerate(zip((375, 500), (80, 72), strict=True))
    )
    for make in (by_tensorflow, by_dali):
        (image,) = make(images[:1], numbers, preprocess, decode="region")
        np.testing.assert_array_equal(image, whole[top : top + 80, left : left + 72])


@pytest.mark.parametrize("decode", ["full", "region"])
@makers
def test_random_crop_puts_a_smaller_image_on_black(make, decode):
    preprocess = dataclasses.replace(UNMIRRORED, crop=RandomCrop())
    (image,) = make([jpeg(41, 100)], draw(preprocess, 1), preprocess, decode=decode)
    assert image[:19].max() == image[61:].max() == 0
    assert image[20:60].mean() > 20


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return conftest.write_indexed(
        tmp_path_factory.mktemp("parity") / "train", conftest.numbered_examples(12)
    )


def take_batch(records, options, **changes):
    preprocess = dataclasses.replace(Preprocess.for_evaluation(24), **changes)
    made = make_dataset(spec_of(records, "sequential", preprocess), options, batch_size=12)
    images, _ = next(iter(made))
    assert made.element_spec[0] == tf.TensorSpec((12, *preprocess.image_shape), images.dtype)
    return images


@pytest.mark.parametrize(
    ("options", "layout", "channels"),
    cases(
        [DALI, TF_DATA],
        ["HWC", "CHW"],
        [3, 1],
        fast=[(TF_DATA, "HWC", 3), (TF_DATA, "CHW", 1), (DALI, "HWC", 1), (DALI, "CHW", 3)],
    ),
)
def test_output_types(records, options, layout, channels):
    imagenet = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
    if channels == 1:
        imagenet = {"mean": (117.037605,), "std": (57.63,)}
    made = Preprocess.for_evaluation(24, layout=layout, channels=channels)
    assert made.mean == pytest.approx(imagenet["mean"])
    assert made.std == pytest.approx(imagenet["std"])
    work = {"layout": layout, "channels": channels, **imagenet}
    full = take_batch(records, options, **work).numpy()
    half = take_batch(records, options, **work, dtype="float16")
    assert half.dtype == tf.float16
    np.testing.assert_allclose(half.numpy().astype(np.float32), full, atol=2e-3)
    small = take_batch(records, options, **work, dtype="uint8")
    assert small.dtype == tf.uint8
    if layout == "CHW" and keras.__version__ < "3.14":
        with refused("cannot normalize layout 'CHW': pip install 'keras>=3.14'"):
            make_normalization(dataclasses.replace(RAW, **work))
        return
    normalized = make_normalization(dataclasses.replace(RAW, **work))
    np.testing.assert_allclose(normalized(tf.cast(small, tf.float32)).numpy(), full, atol=0.51 / 57)
    assert isinstance(normalized, keras.layers.Layer)


@backends
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_hot_labels(records, options, smoothing):
    label = ClassLabel(num_classes=20, one_hot=True, smoothing=smoothing)
    spec = spec_of(records, "sequential", Preprocess.for_evaluation(8), label=label)
    made = make_dataset(spec, options, batch_size=12)
    assert made.element_spec[1] == tf.TensorSpec((12, 20), tf.float32)
    _, labels = next(iter(made))
    expected = np.eye(20)[:12] * (1 - smoothing) + smoothing / 20
    np.testing.assert_allclose(labels.numpy(), expected, atol=1e-6)


def test_one_hot_refuses(records):
    feature = dataclasses.replace(records.features["image/class/label"], range=(0, 11))
    features = {**records.features, "image/class/label": feature}
    checked = dataclasses.replace(records, features=features)
    with refused("`num_classes` must be above the highest label, 11, got 11"):
        spec_of(checked, "sequential", RAW, label=ClassLabel(num_classes=11, one_hot=True))
    for changes, needed in (({"one_hot": True}, "num_classes"), ({"smoothing": 0.1}, "one_hot")):
        with refused(f"needs `{needed}`"):
            ClassLabel(**changes)


def test_uint8_is_the_same_from_both(records):
    one, other = (take_batch(records, options, dtype="uint8") for options in (DALI, TF_DATA))
    difference = np.abs(one.numpy().astype(int) - other.numpy())
    assert difference.max() <= 1
    values = take_batch(records, TF_DATA, **UNCHANGED).numpy()
    from_half = np.abs(values - np.floor(values) - 0.5)  # there the last bit decides
    assert from_half[difference > 0].max(initial=0) < 1e-4


def test_what_a_backend_cannot_do_is_refused(records):
    assert take_batch(records, TF_DATA, dtype="bfloat16").dtype == tf.bfloat16
    with refused(
        "DALI does not support `dtype` 'bfloat16': use 'float32', 'float16', 'uint8', or "
    ):
        take_batch(records, DALI, dtype="bfloat16")


raw, cpu = functools.partial(dataclasses.replace, RAW), functools.partial(DaliOptions, device="cpu")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            RandomResizedCrop,
            {"area_range": (0.5, 0.1)},
            r"`area_range` must be \(smallest, largest\),",
        ),
        (RandomResizedCrop, {"area_range": (0.0, 0.1)}, "`area_range` must be"),
        (RandomResizedCrop, {"area_range": (0.5, 1.1)}, "`area_range` must be"),
        (RandomResizedCrop, {"aspect_ratio_range": (2, 1)}, "`aspect_ratio_range` must be"),
        (RandomResizedCrop, {"aspect_ratio_range": (0, 1)}, "`aspect_ratio_range` must be"),
        (RandomResizedCrop, {"num_attempts": 0}, r"`num_attempts` must be in \[1, 100\], got 0"),
        (raw, {"crop": "center"}, "`crop` must be one of ResizeRandomCrop, .*, got 'center'"),
        (raw, {"interpolation": "area"}, "must be one of 'bilinear', 'bicubic', 'nearest'"),
        (raw, {"dtype": "int8"}, "must be one of 'float32', 'float16', 'bfloat16', 'uint8'"),
        (raw, {"interpolation": "nearest", "antialias": True}, "`antialias` has no meaning for"),
        (raw, {"std": (0.2, 0.2, 0.2)}, r"`std` is in 0..255 units, got .*0..1 by 255"),
        (raw, {"std": (float("nan"), 1, 1)}, "`std` must be a finite number"),
        (raw, {"mean": (1, 2, 3, 4)}, "`mean` must be one number for each of `channels`=3, got"),
        (raw, {"channels": 1}, "`mean` must be one number for each of `channels`=1, got"),
        (raw, {"channels": 4}, "`channels` must be one of 1, 3, got 4"),
        (TfDataOptions, {"decode": "on"}, "one of 'auto', 'full', 'region', 'scaled', got 'on'"),
        (cpu, {"decode": "on"}, "`decode` must be one of 'auto', 'full', 'region', got 'on'"),
    ],
)
def test_refuses(make, arguments, message):
    with refused(message):
        make(**arguments)
