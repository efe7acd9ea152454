"""Both backends make the same pixels of the same random numbers: every crop, interpolation and kind
of image.
"""

import dataclasses
import io
import itertools

import keras
import numpy as np
import nvidia.dali as dali
import pytest
import tensorflow as tf
from conftest import image_zoo, jpeg, numbered_examples, write_tfrecord
from nvidia.dali import fn, types
from PIL import Image

from dali_tf_input import (
    BoxCrop,
    CenterCrop,
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    NoCrop,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    TfDataOptions,
    build_index,
    iterate_batches,
)
from dali_tf_input.backends import dali_images, tf_images
from dali_tf_input.dataset import make_dataset, make_normalization

CROPS = {
    "resize_random_crop": ResizeRandomCrop(resize=(96, 80)),
    "random_resized_crop": RandomResizedCrop(),
    "random_resized_crop_that_seldom_fits": RandomResizedCrop(
        area_range=(0.9, 1.0), aspect_ratio_range=(0.5, 2.0), num_attempts=2
    ),
    "random_crop": RandomCrop(),
    "center_crop": CenterCrop(resize_shorter=96),
    "no_crop": NoCrop(),
    "box_crop": BoxCrop(top=20, left=30, height=301, width=140),
}
RAW = Preprocess(
    image_size=(80, 72), crop=NoCrop(), mirror_probability=0.5, mean=(0, 0, 0), std=(1, 1, 1)
)


def test_box_crop_takes_the_box():
    """At the size of the box the pixels are those of the image; what is outside of it is cut off."""
    image = np.asarray(Image.open(io.BytesIO(jpeg(50, 60))))
    plan = {"mirror_probability": 0.0, "dtype": "uint8", "image_size": (20, 10)}
    for top, left in ((7, 9), (30, 50)):
        crop = BoxCrop(top=top, left=left, height=20, width=10)
        (made,) = (
            images[0]
            for _, images in iterate_batches(
                [jpeg(50, 60)], dataclasses.replace(RAW, crop=crop, **plan), TfDataOptions()
            )
        )
        np.testing.assert_array_equal(made, image[top : top + 20, left : left + 10])


@pytest.fixture(scope="module")
def images():
    """Encoded images: large and small, of odd sizes down to one pixel, and of every kind that both
    backends decode.
    """
    sizes = [
        (375, 500),
        (500, 375),
        (401, 467),
        (97, 1000),
        (1000, 97),
        (720, 1280),
        (33, 47),
        (1, 1),
        (1, 50),
        (50, 1),
        (80, 72),
    ]
    encoded = [jpeg(height, width, seed=number) for number, (height, width) in enumerate(sizes)]
    return encoded + [image for image, image_format, _ in image_zoo().values() if image_format]


def draw(preprocess, count, seed=0):
    return np.random.default_rng(seed).random((count, preprocess.num_uniforms), dtype=np.float32)


def by_tensorflow(images, numbers, preprocess, *, decode="full"):
    @tf.function(
        input_signature=[
            tf.TensorSpec((), tf.string),
            tf.TensorSpec((preprocess.num_uniforms,), tf.float32),
        ]
    )
    @tf.autograph.experimental.do_not_convert
    def prepare(encoded, drawn):
        return tf_images.prepare_image(encoded, drawn, preprocess, decode=decode)

    return np.stack(
        [prepare(image, drawn).numpy() for image, drawn in zip(images, numbers, strict=True)]
    )


def run_dali(define, *inputs):
    """Runs a pipeline once over `inputs`, lists of arrays; returns its outputs as lists of arrays."""
    pipeline = dali.Pipeline(batch_size=len(inputs[0]), num_threads=2, device_id=None)
    with pipeline:
        nodes = [
            fn.external_source(source=itertools.repeat(values), batch=True) for values in inputs
        ]
        pipeline.set_outputs(*define(*nodes))
    pipeline.build()
    return [[np.array(value) for value in output] for output in pipeline.run()]


def by_dali(images, numbers, preprocess, *, decode="full"):
    def define(encoded, drawn):
        return [
            dali_images.prepare_images(
                encoded, drawn, preprocess, decode=decode, device="cpu", hints={}
            )
        ]

    (made,) = run_dali(define, [np.frombuffer(image, np.uint8) for image in images], list(numbers))
    return np.stack(made)


# Over 0..255: the mean, the 99.9th percentile, the largest difference. Nearest: where a position is
# just between two pixels the backends may take either, so few pixels differ, but by anything.
BOUNDS = {
    ("bilinear", False): (0.001, 0.01, 0.02),
    ("bilinear", True): (0.05, 16, 64),
    ("bicubic", False): (0.1, 8, 64),
    ("bicubic", True): (0.1, 8, 64),
    ("nearest", False): (0.1, 64, 255),
}


@pytest.mark.parametrize("decode", ["full", "region"])
@pytest.mark.parametrize(("interpolation", "antialias"), BOUNDS)
@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_same_pixels(images, crop, interpolation, antialias, decode):
    preprocess = dataclasses.replace(
        RAW, crop=crop, interpolation=interpolation, antialias=antialias
    )
    numbers = draw(preprocess, len(images))
    difference = np.abs(
        by_tensorflow(images, numbers, preprocess, decode=decode)
        - by_dali(images, numbers, preprocess, decode=decode)
    )
    mean, high, largest = BOUNDS[interpolation, antialias]
    assert difference.mean() <= mean
    assert np.quantile(difference, 0.999) <= high
    assert difference.max() <= largest


@pytest.mark.parametrize("make", [by_tensorflow, by_dali], ids=["tensorflow", "dali"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_the_plan_does_not_show(images, crop, antialias, make):
    """Decoding only the region makes the pixels that decoding the whole image makes."""
    preprocess = dataclasses.replace(RAW, crop=crop, antialias=antialias)
    numbers = draw(preprocess, len(images), seed=1)
    difference = np.abs(
        make(images, numbers, preprocess) - make(images, numbers, preprocess, decode="region")
    )
    assert difference.max() <= 0.02


@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_same_regions(crop):
    """Of 4000 images of many sizes, and within them."""
    preprocess = dataclasses.replace(RAW, crop=crop)
    generator = np.random.default_rng(3)
    sizes, numbers = generator.integers(1, 700, (4000, 2)), draw(preprocess, 4000, seed=4)

    def define(size, drawn):
        return dali_images.find_region(fn.cast(size, dtype=types.FLOAT64), drawn, preprocess)[:2]

    starts, extents = map(np.stack, run_dali(define, list(sizes), list(numbers)))

    @tf.function
    @tf.autograph.experimental.do_not_convert
    def find(inputs):
        region = tf_images.find_region(inputs[0], inputs[1], preprocess)
        return region.start, region.extent

    spec = (tf.TensorSpec((2,), tf.float64), tf.TensorSpec((2,), tf.float64))
    theirs = tf.map_fn(
        find, (tf.constant(sizes, tf.int32), tf.constant(numbers)), fn_output_signature=spec
    )
    np.testing.assert_allclose(starts, theirs[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(extents, theirs[1].numpy(), atol=1e-4)
    fits = (sizes >= preprocess.image_size) | (
        not isinstance(crop, RandomCrop)
    )  # around a smaller image it takes black
    assert (starts[fits] >= 0).all()
    assert ((starts + extents)[fits] <= sizes[fits] + 1e-6).all()
    np.testing.assert_array_equal(
        starts[~fits], np.floor((sizes - preprocess.image_size) / 2)[~fits]
    )


def test_random_resized_crops_are_distributed_as_said():
    """Area uniform, aspect log-uniform, positions uniform; where every attempt fits."""
    crop = RandomResizedCrop(area_range=(0.1, 0.3), aspect_ratio_range=(0.5, 2.0))
    preprocess = dataclasses.replace(RAW, crop=crop)
    count = 20_000
    sizes = np.full((count, 2), 2000)

    def define(size, drawn):
        return dali_images.find_region(fn.cast(size, dtype=types.FLOAT64), drawn, preprocess)[:2]

    starts, extents = map(
        np.stack, run_dali(define, list(sizes), list(draw(preprocess, count, seed=5)))
    )
    area = extents.prod(1) / 2000**2
    aspect = np.log2(extents[:, 1] / extents[:, 0])
    place = starts / (2000 - extents)
    for values, low, high in (
        (area, 0.1, 0.3),
        (aspect, -1, 1),
        (place[:, 0], 0, 1),
        (place[:, 1], 0, 1),
    ):
        counts, _ = np.histogram(values, bins=10, range=(low - 0.001, high + 0.001))
        assert np.abs(counts - count / 10).max() < 5 * np.sqrt(count / 10)
    assert abs(np.corrcoef(area, aspect)[0, 1]) < 0.04


def test_random_resized_crop_that_never_fits():
    """The center, as much as the aspect allows: of a 100x1000 image a square is wanted."""
    preprocess = dataclasses.replace(
        RAW,
        crop=RandomResizedCrop(area_range=(1.0, 1.0), aspect_ratio_range=(1.0, 1.0)),
        mirror_probability=0.0,
    )
    pixels = np.zeros((100, 1000, 3), np.uint8)
    pixels[:, 500:] = 255
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    numbers = draw(preprocess, 1)
    numbers[:, 1:3] = 0.5
    for make in (by_tensorflow, by_dali):
        (image,) = make([stream.getvalue()], numbers, preprocess)
        assert image[:, :35].max() == 0
        assert image[:, 37:].min() == 255


def test_random_crop_keeps_the_scale(images):
    """The pixels of the image as they are, where it is large enough."""
    preprocess = dataclasses.replace(RAW, crop=RandomCrop(), mirror_probability=0.0)
    numbers = draw(preprocess, 1, seed=6)
    whole = tf_images.decode_image(tf.constant(images[0])).numpy()
    top, left = (
        int(numbers[0, 1 + axis] * (side - out + 1))
        for axis, (side, out) in enumerate(zip((375, 500), (80, 72), strict=True))
    )
    for make in (by_tensorflow, by_dali):
        (image,) = make(images[:1], numbers, preprocess, decode="region")
        np.testing.assert_array_equal(image, whole[top : top + 80, left : left + 72])


@pytest.mark.parametrize("decode", ["full", "region"])
@pytest.mark.parametrize("make", [by_tensorflow, by_dali], ids=["tensorflow", "dali"])
def test_random_crop_puts_a_smaller_image_on_black(make, decode):
    preprocess = dataclasses.replace(RAW, crop=RandomCrop(), mirror_probability=0.0)
    (image,) = make([jpeg(41, 100)], draw(preprocess, 1), preprocess, decode=decode)
    assert image[:19].max() == image[61:].max() == 0
    assert image[20:60].mean() > 20


def test_orientation():
    """DALI turns images upright, with either plan; tf.data refuses, as TensorFlow cannot."""
    image = Image.open(io.BytesIO(jpeg(90, 120)))
    upright = np.asarray(image).astype(float)
    for orientation, operation in (
        (3, Image.Transpose.ROTATE_180),
        (6, Image.Transpose.ROTATE_90),
        (8, Image.Transpose.ROTATE_270),
    ):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stream = io.BytesIO()
        image.transpose(operation).save(stream, "JPEG", exif=exif, quality=95, subsampling=0)
        preprocess = dataclasses.replace(
            RAW, crop=NoCrop(), image_size=(90, 120), mirror_probability=0.0, apply_orientation=True
        )
        for decode in ("full", "region"):
            (made,) = by_dali([stream.getvalue()], draw(preprocess, 1), preprocess, decode=decode)
            assert np.abs(made - upright).mean() < 8


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    file = write_tfrecord(tmp_path_factory.mktemp("parity") / "train", numbered_examples(12))
    build_index(file)
    return DatasetSpec.from_files(file)


def take_batch(records, options, **changes):
    preprocess = dataclasses.replace(Preprocess.for_evaluation(24), **changes)
    made = make_dataset(
        InputSpec(dataset=records, preprocess=preprocess, order="sequential"),
        options,
        batch_size=12,
    )
    images, _ = next(iter(made))
    assert made.element_spec[0] == tf.TensorSpec((12, *preprocess.image_shape), images.dtype)
    return images


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize(
    "options", [DaliOptions(device="cpu"), TfDataOptions()], ids=["dali", "tf_data"]
)
def test_output_types(records, options, layout):
    full = take_batch(records, options, layout=layout).numpy()
    half = take_batch(records, options, layout=layout, dtype="float16")
    assert half.dtype == tf.float16
    np.testing.assert_allclose(half.numpy().astype(np.float32), full, atol=2e-3)
    small = take_batch(records, options, layout=layout, dtype="uint8")
    assert small.dtype == tf.uint8
    normalized = make_normalization(
        dataclasses.replace(
            RAW, layout=layout, mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375)
        )
    )
    np.testing.assert_allclose(normalized(tf.cast(small, tf.float32)).numpy(), full, atol=0.51 / 57)
    assert isinstance(normalized, keras.layers.Layer)


@pytest.mark.parametrize(
    "options", [DaliOptions(device="cpu"), TfDataOptions()], ids=["dali", "tf_data"]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_hot_labels(records, options, smoothing):
    spec = InputSpec(
        dataset=records,
        preprocess=Preprocess.for_evaluation(8),
        order="sequential",
        one_hot=20,
        label_smoothing=smoothing,
    )
    made = make_dataset(spec, options, batch_size=12)
    assert made.element_spec[1] == tf.TensorSpec((12, 20), tf.float32)
    _, labels = next(iter(made))
    expected = np.eye(20)[:12] * (1 - smoothing) + smoothing / 20
    np.testing.assert_allclose(labels.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing": 0.1}, "`label_smoothing` needs `one_hot`"),
        (
            {"label_smoothing": 1.0, "one_hot": 20},
            r"`label_smoothing` must be in \[0, 1\), got 1.0",
        ),
        ({"one_hot": 11}, "`one_hot` must be above the highest label, 11, got 11"),
        ({"one_hot": 0}, "`one_hot` must be at least 1 or None, got 0"),
    ],
)
def test_one_hot_refuses(records, changes, message):
    checked = dataclasses.replace(records, label_range=(0, 11))
    with pytest.raises(InputError, match=message):
        InputSpec(dataset=checked, preprocess=RAW, order="sequential", **changes)


def test_uint8_is_the_same_from_both(records):
    dali_batch, tf_batch = (
        take_batch(records, options, dtype="uint8").numpy()
        for options in (DaliOptions(device="cpu"), TfDataOptions())
    )
    difference = np.abs(dali_batch.astype(int) - tf_batch)
    assert difference.max() <= 1
    assert difference.mean() < 0.001


def test_what_a_backend_cannot_do_is_refused(records):
    brain = take_batch(records, TfDataOptions(), dtype="bfloat16")
    assert brain.dtype == tf.bfloat16
    with pytest.raises(
        InputError,
        match=(
            r"DALI does not support `dtype` 'bfloat16': use 'float32', 'float16', 'uint8', or the"
            r" other"
        ),
    ):
        take_batch(records, DaliOptions(device="cpu"), dtype="bfloat16")
    with pytest.raises(
        InputError,
        match=(
            r"tf.data does not support `apply_orientation` True: use False, .*make_tfrecords.py"
            r" --apply_orientation"
        ),
    ):
        take_batch(records, TfDataOptions(), apply_orientation=True)
    take_batch(records, DaliOptions(device="cpu"), apply_orientation=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RandomResizedCrop(area_range=(0.5, 0.1)),
            r"`area_range` must be \(smallest, largest\), both in \(0, 1\]",
        ),
        (lambda: RandomResizedCrop(area_range=(0.0, 0.1)), "`area_range` must be"),
        (lambda: RandomResizedCrop(area_range=(0.5, 1.1)), "`area_range` must be"),
        (lambda: RandomResizedCrop(aspect_ratio_range=(2, 1)), "`aspect_ratio_range` must be"),
        (lambda: RandomResizedCrop(aspect_ratio_range=(0, 1)), "`aspect_ratio_range` must be"),
        (lambda: RandomResizedCrop(num_attempts=0), r"`num_attempts` must be in \[1, 100\], got 0"),
        (
            lambda: dataclasses.replace(RAW, crop="center"),
            "`crop` must be one of ResizeRandomCrop, .*, got 'center'",
        ),
        (
            lambda: dataclasses.replace(RAW, interpolation="area"),
            "`interpolation` must be one of 'bilinear', 'bicubic', 'nearest'",
        ),
        (
            lambda: dataclasses.replace(RAW, dtype="int8"),
            "`dtype` must be one of 'float32', 'float16', 'bfloat16', 'uint8'",
        ),
        (
            lambda: dataclasses.replace(RAW, interpolation="nearest", antialias=True),
            "`antialias` has no meaning for interpolation",
        ),
        (
            lambda: dataclasses.replace(RAW, std=(0.229, 0.224, 0.225)),
            "`std` is in 0..255 units, got .*: multiply values meant for 0..1 by 255",
        ),
        (
            lambda: dataclasses.replace(RAW, std=(float("nan"), 1, 1)),
            "`std` must be a finite number",
        ),
        (lambda: dataclasses.replace(RAW, mean=(1, 2, 3, 4)), "`mean` must be 3 values"),
        (
            lambda: TfDataOptions(decode="on"),
            "`decode` must be one of 'auto', 'full', 'region', 'scaled', got 'on'",
        ),
        (
            lambda: DaliOptions(device="cpu", decode="on"),
            "`decode` must be one of 'auto', 'full', 'region', got 'on'",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(InputError, match=message):
        make()
