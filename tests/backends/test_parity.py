"""One table of pixels: what each engine makes of each crop, resize and output, against a reference.

The reference is NumPy in float64, after the definitions in docs/preprocessing.md. Engines are the
compiled batch operation, TensorFlow's operations and DALI's on the CPU.
"""

import dataclasses
import io
import itertools

import keras
import numpy as np
import nvidia.dali as dali
import pytest
import tensorflow as tf
from conftest import at_night, encode, jpeg, refused, spec_of, valid_images
from nvidia.dali import fn, types
from PIL import Image

from dali_tf_input import (
    CenterCrop,
    ClassLabel,
    Letterbox,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
)
from dali_tf_input.backends import dali_images, tf_images, tf_native, tf_views
from dali_tf_input.records.example import encode_example
from dali_tf_input.serving import make_normalization
from dali_tf_input.spec.crops import CoverCrop, NoCrop, Uniforms
from dali_tf_input.spec.primitives import ROW_SIZE

SELDOM_FITS = RandomResizedCrop(
    area_range=(0.9, 1.0), aspect_ratio_range=(0.5, 2.0), num_attempts=2
)
CROPS = {
    "resize_random_crop": ResizeRandomCrop(resize=(58, 46)),
    "random_resized_crop": RandomResizedCrop(),
    "random_resized_crop_that_seldom_fits": SELDOM_FITS,
    "random_crop": RandomCrop(),
    "center_crop": CenterCrop(resize_shorter=58),
    "cover_crop": CoverCrop(cover=(58, 46)),
    "cover_crop_by_default": CoverCrop(),
    "cover_crop_in_the_center": CoverCrop(cover=(53, 47), position="center"),
    "no_crop": NoCrop(),
    "letterbox": Letterbox(fill=99.5),
}
SIZE = (46, 38)
UNCHANGED = {"mean": (0, 0, 0), "std": (1, 1, 1)}
RAW = Preprocess(image_size=SIZE, crop=NoCrop(), mirror_probability=0.5, **UNCHANGED)
UNMIRRORED = dataclasses.replace(RAW, mirror_probability=0.0)
LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture(scope="module")
def images():
    """Encoded images: of odd sizes down to one pixel, which are enlarged too, a larger one, and of
    every kind that both backends decode.
    """
    sizes = [(97, 64), (33, 47), (16, 101), (101, 16), (1, 1), (1, 50), (50, 1), SIZE, (375, 500)]
    sizes += [(31, 31), (23, 17), (12, 75), (75, 13), (1, 7)]
    encoded = [jpeg(height, width, seed=number) for number, (height, width) in enumerate(sizes)]
    return encoded + valid_images()


def draw(preprocess, count, seed=0):
    return np.random.default_rng(seed).random((count, preprocess.num_uniforms), dtype=np.float32)


class ArrayOps:
    """`crops.Ops` on arrays of one axis for each of many images, the last axis."""

    floor, exp, sqrt = np.floor, np.exp, np.sqrt
    minimum, maximum, where = np.minimum, np.maximum, staticmethod(np.where)

    def constant(self, values):
        return np.array(values, np.float64)[:, None]

    def max(self, values):
        return values.max(axis=0, keepdims=True)

    def sum(self, values):
        return values.sum(axis=0, keepdims=True)

    def concat(self, first, second):
        return np.concatenate([first, second])


def plan_regions(sizes, uniforms, preprocess):
    """Returns where the crops of many images lie; each field is (2, images)."""
    out = np.array(preprocess.image_size, np.float64)[:, None]
    named = Uniforms.split(uniforms.T.astype(np.float64))
    return preprocess.crop.plan(np.array(sizes, np.float64).T, out, named, ArrayOps())


def decode_exactly(image):
    """Returns the pixels of a file, by libjpeg-turbo with its accurate DCT, or by Pillow."""
    if image.startswith(b"\xff\xd8"):
        return tf.io.decode_jpeg(image, channels=3, dct_method="INTEGER_ACCURATE").numpy()
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


def weigh(preprocess, size, outputs, start, extent, shift):
    """Returns how much each pixel of an axis counts for each output, float64 (outputs, size)."""
    pixels = np.arange(size)
    if preprocess.crop.sampling == "crop_and_pad":
        return (pixels == start + np.arange(outputs)[:, None]).astype(np.float64)
    centers = start + (np.arange(outputs)[:, None] + 0.5) * extent / outputs
    if preprocess.interpolation == "nearest":
        return (pixels == np.floor(centers + shift).clip(0, size - 1)).astype(np.float64)
    stretch = max(extent / outputs, 1) if preprocess.antialias else 1
    x = np.abs(pixels + 0.5 - centers) / stretch
    if preprocess.interpolation == "bilinear":
        weights = np.maximum(1 - x, 0)
    else:  # Keys, a = -0.5
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    if preprocess.crop.sampling == "crop_then_resize":  # what is beside the region has no effect
        weights *= (pixels >= start) & (pixels < start + extent)
    return weights / weights.sum(1, keepdims=True)


def make_exactly(image, uniforms, preprocess, shift=(0, 0)):
    """Returns what should come of an image, in float64; of type uint8 before it is rounded.

    The positions of "nearest" are shifted by parts of a pixel.
    """
    pixels = decode_exactly(image).astype(np.float64)
    size, crop = pixels.shape[:2], preprocess.crop
    region = plan_regions([size], uniforms[None], preprocess)
    outputs, start, extent = preprocess.image_size, region.start[:, 0], region.extent[:, 0]
    if isinstance(crop, Letterbox):
        outputs, start, extent = region.resized[:, 0].astype(int), (0, 0), size
    rows, columns = (
        weigh(preprocess, *axis) for axis in zip(size, outputs, start, extent, shift, strict=True)
    )
    made = np.einsum("yh,hwc,xw->yxc", rows, pixels, columns, optimize=True)
    if isinstance(crop, Letterbox):
        (top, left), inside = -region.corner[:, 0].astype(int), made
        made = np.full((*preprocess.image_size, 3), crop.fill)
        made[top : top + outputs[0], left : left + outputs[1]] = inside
    if preprocess.channels == 1:
        made = (made @ LUMA)[..., None]
    if uniforms[0] < preprocess.mirror_probability:
        made = made[:, ::-1]
    if preprocess.dtype == "uint8":
        made = made.clip(0, 255)
    else:
        made = (made - preprocess.mean) / preprocess.std
    return made.transpose(2, 0, 1) if preprocess.layout == "CHW" else made


# The largest error of rounding to each type, in parts of the number; to uint8 it is 1/2.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def measure(made, images, uniforms, preprocess):
    """Returns how far each number is from the reference, but for rounding, on 0..255.

    Where a position is just between two pixels, "nearest" may take either.
    """
    made = np.asarray(made, np.float64)
    either = (-1e-4, 1e-4) if preprocess.interpolation == "nearest" else (0,)
    found = []
    for shift in itertools.product(either, either):
        pairs = zip(images, uniforms, strict=True)
        expected = np.stack([make_exactly(*given, preprocess, shift) for given in pairs])
        difference = np.abs(made - expected)
        if preprocess.dtype == "uint8":
            found.append(np.maximum(difference - 0.5, 0))
        else:
            std = np.array(preprocess.std)
            std = std[:, None, None] if preprocess.layout == "CHW" else std
            allowed = np.abs(expected) * ROUNDING[preprocess.dtype]
            found.append(np.maximum(difference - allowed, 0) * std)
    return np.min(found, 0)


NO_FILES = (
    tf.zeros(0, tf.string),
    tf.zeros((0, 2), tf.int64),
    tf.zeros(0, tf.int32),
    tf.zeros((0, 2), tf.int64),
)


# Of `tf_native.make_batch`, for records that are given.
GIVEN = {
    "files": NO_FILES,
    "positions": tf.zeros(0, tf.int64),
    "records": tf.zeros(0, tf.string),
    "drawn": tf.zeros(0),
    "image_keys": ["image"],
    "size_keys": [],
    "whole": True,
    "maximum": np.inf,
    "check_crc": True,
    "num_readers": 1,
    "num_threads": 1,
}


def make_batch(images, uniforms, preprocess, **changes):
    """Returns what the compiled operation makes of encoded images; some it may refuse."""
    records = tf.constant([encode_example({"image": bytes(image)}) for image in images])
    rows = tf.zeros((len(images), 0, ROW_SIZE))
    given = {"records": records, "uniforms": tf.constant(uniforms), "rows": rows, **changes}
    return tf_native.make_batch(**{**GIVEN, **given, "views": [preprocess]})


def make_view(image, uniforms, preprocess, decode):
    """Returns what the compiled operations make of an image that TensorFlow decodes."""
    limits = tf_native.limits_of(preprocess, decode=decode)
    given = tf.constant(image), tf.constant(uniforms), tf.zeros((0, ROW_SIZE))
    (made,), _ = tf_views.make_views(*given, [preprocess], **limits)
    return made.numpy()


def by_batch(images, uniforms, preprocess, *, decode="full"):
    """By the compiled operations: a batch, and one by one what the batch's refuses."""
    is_gray = preprocess.channels == 1
    view = tf_views.make_plain(preprocess, changes=False) if is_gray else preprocess
    batch = make_batch(images, uniforms, view, **tf_native.limits_of(view, decode=decode))
    made = batch.images[0].numpy()
    for place in batch.refused_indices.numpy():
        made[place] = make_view(images[place], uniforms[place], view, decode)
    if is_gray:
        made = tf_images.normalize_image(made, tf.constant(uniforms), preprocess).numpy()
    return made


def by_tensorflow(images, uniforms, preprocess, *, decode="full", eagerly=False):
    """Image by image. Eagerly it takes a fraction of the time."""
    drawn = tf.TensorSpec((preprocess.num_uniforms,), tf.float32)

    @tf.autograph.experimental.do_not_convert
    def prepare(encoded, drawn):
        return tf_images.prepare_image(encoded, drawn, preprocess, decode=decode)

    if not eagerly:
        prepare = tf.function(prepare, input_signature=[tf.TensorSpec((), tf.string), drawn])
    given = zip(map(tf.constant, images), map(tf.constant, uniforms), strict=True)
    return np.stack([prepare(*one).numpy() for one in given])


def run_dali(define, *inputs):
    """Runs a pipeline once over `inputs`, lists of arrays; returns lists of arrays."""
    pipeline = dali.Pipeline(batch_size=len(inputs[0]), num_threads=2, device_id=None)
    with pipeline:
        sources = map(itertools.repeat, inputs)
        nodes = [fn.external_source(source=source, batch=True) for source in sources]
        pipeline.set_outputs(*define(*nodes))
    pipeline.build()
    return [[np.array(value) for value in output] for output in pipeline.run()]


def by_dali(images, uniforms, preprocess, *, decode="full"):
    how = {"decode": decode, "device": "cpu", "hints": {}}

    def define(encoded, drawn):
        return [dali_images.prepare_images(encoded, drawn, preprocess, **how)]

    files = [np.frombuffer(image, np.uint8) for image in images]
    (made,) = run_dali(define, files, list(uniforms))
    return np.stack(made)


def regions_by_dali(sizes, uniforms, preprocess):
    """Returns where the crops start, and their extents."""

    def define(size, drawn):
        return dali_images.find_region(fn.cast(size, dtype=types.FLOAT64), drawn, preprocess)[:2]

    return [np.stack(one) for one in run_dali(define, list(sizes), list(uniforms))]


# Over 0..255: the mean, the 99.9th percentile, the largest difference to the reference.
BOUNDS = {
    by_batch: dict.fromkeys(
        [("bilinear", False), ("bilinear", True), ("bicubic", False), ("bicubic", True)],
        (0.0002, 0.001, 0.001),
    ),
    by_tensorflow: {
        ("bilinear", False): (0.0005, 0.002, 0.002),
        ("bilinear", True): (0.0005, 0.002, 0.002),
        ("bicubic", False): (0.008, 0.1, 0.2),  # its weights are from a table of 1024
        ("bicubic", True): (0.0005, 0.002, 0.002),
    },
    by_dali: {
        ("bilinear", False): (0.0005, 0.005, 0.005),
        ("bilinear", True): (0.04, 8, 8),
        ("bicubic", False): (0.08, 6, 32),
        ("bicubic", True): (0.08, 6, 32),
    },
}
HOWS = (*BOUNDS[by_dali], ("nearest", False))
FAST, FILTERED = HOWS[:2]
PLANS = ("full", "region")
DTYPES = ("float32", "float16", "bfloat16", "uint8")
# A crop, interpolation and antialias, how much is decoded; type, layout and channels of the output.
USUAL = [
    ("resize_random_crop", FAST, "full", "float32", "HWC", 3),
    ("random_resized_crop", FILTERED, "region", "float32", "HWC", 3),
    ("random_crop", FAST, "region", "float32", "CHW", 1),
    ("random_resized_crop_that_seldom_fits", ("nearest", False), "full", "uint8", "HWC", 3),
    ("center_crop", ("bicubic", False), "region", "float32", "HWC", 3),
    ("cover_crop", FAST, "full", "float16", "CHW", 3),
    ("cover_crop_by_default", FILTERED, "region", "float32", "CHW", 3),
    ("cover_crop_in_the_center", ("nearest", False), "region", "bfloat16", "HWC", 3),
    ("no_crop", ("bicubic", True), "full", "float32", "HWC", 3),
    ("letterbox", FILTERED, "full", "uint8", "HWC", 1),
]
THOROUGH = [
    *((*row, "float32", "HWC", 3) for row in itertools.product(CROPS, HOWS, PLANS)),
    *((crop, FAST, "full", "float32", "HWC", 1) for crop in CROPS),
    *itertools.product(["cover_crop"], [FILTERED], ["region"], DTYPES, ["HWC", "CHW"], [3, 1]),
]


@pytest.mark.parametrize(
    ("crop", "how", "decode", "dtype", "layout", "channels"), at_night(USUAL, THOROUGH)
)
def test_pixels(images, crop, how, decode, dtype, layout, channels):
    """Each engine makes the numbers of the reference, however much of an image it decodes."""
    statistics = {"mean": (117.0,), "std": (57.0,)} if channels == 1 else {}
    preprocess = Preprocess(
        image_size=SIZE,
        crop=CROPS[crop],
        mirror_probability=0.5,
        interpolation=how[0],
        antialias=how[1],
        dtype=dtype,
        layout=layout,
        channels=channels,
        **statistics,
    )
    uniforms = draw(preprocess, len(images))
    # Eagerly, sizes are known, and resizing in whole and cropping is not left to the graph.
    eagerly = at_night(not preprocess.resizes_plainly, False)
    for engine in (by_batch, by_tensorflow, by_dali)[: 2 if dtype == "bfloat16" else 3]:
        given = {"eagerly": eagerly} if engine is by_tensorflow else {}
        made = engine(images, uniforms, preprocess, decode=decode, **given)
        assert made.shape[1:] == preprocess.image_shape
        if dtype != "bfloat16":
            assert made.dtype == dtype
        found = measure(made, images, uniforms, preprocess)
        if preprocess.copies_pixels:
            assert found.max() <= 1e-4, engine
        else:
            mean, high, largest = BOUNDS[engine][how]
            assert found.mean() <= mean, engine
            assert np.quantile(found, 0.999) <= high, engine
            assert found.max() <= largest, engine
        if engine is by_dali and how == FILTERED:  # which is further from the reference
            other = engine(images, uniforms, preprocess, decode=PLANS[decode == "full"])
            assert np.abs(other.astype(float) - made).max() <= (0.02 if dtype == "float32" else 1)


@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_regions(crop):
    """Of images of many sizes, by both backends, and within the images."""
    count = at_night(1000, 4000)
    preprocess = dataclasses.replace(RAW, crop=crop)
    sizes = np.random.default_rng(3).integers(1, 700, (count, 2))
    uniforms = draw(preprocess, count, seed=4)
    expected = plan_regions(sizes, uniforms, preprocess)
    starts, extents = (np.broadcast_to(one, (2, count)).T for one in expected[:2])
    for made, one in zip(regions_by_dali(sizes, uniforms, preprocess), expected, strict=False):
        np.testing.assert_allclose(made, np.broadcast_to(one, (2, count)).T, atol=1e-4)
    for number in range(at_night(20, count)):
        given = tf.constant(sizes[number], tf.int32), tf.constant(uniforms[number])
        made = tf_images.find_region(*given, preprocess)
        np.testing.assert_allclose(made.start, starts[number], atol=1e-4)
        np.testing.assert_allclose(made.extent, extents[number], atol=1e-4)
    if isinstance(crop, Letterbox):  # around the whole image, the same on both sides but for one
        margins = np.stack([-starts, starts + extents - sizes]) * np.array(SIZE) / extents
        assert (margins >= -1e-6).all()
        assert (np.abs(margins[1] - margins[0] - 0.5) < 0.5001).all()
        assert (margins.min(0).min(1) < 0.5001).all()
        return
    # Around a smaller image a RandomCrop takes black.
    fits = (sizes >= SIZE) | (not isinstance(crop, RandomCrop))
    assert (starts[fits] >= 0).all()
    assert ((starts + extents)[fits] <= sizes[fits] + 1e-6).all()
    centered = np.floor((sizes - SIZE) / 2)
    np.testing.assert_array_equal(starts[~fits], centered[~fits])


def test_random_resized_crops_are_distributed_as_said():
    """Area uniform, aspect log-uniform, positions uniform; where every attempt fits."""
    crop = RandomResizedCrop(area_range=(0.1, 0.3), aspect_ratio_range=(0.5, 2.0))
    preprocess = dataclasses.replace(RAW, crop=crop)
    count = 20_000
    uniforms = draw(preprocess, count, seed=5)
    region = plan_regions(np.full((count, 2), 2000), uniforms, preprocess)
    area = region.extent.prod(0) / 2000**2
    aspect = np.log2(region.extent[1] / region.extent[0])
    top, left = region.start / (2000 - region.extent)
    for values, low, high in ((area, 0.1, 0.3), (aspect, -1, 1), (top, 0, 1), (left, 0, 1)):
        counts, _ = np.histogram(values, bins=10, range=(low - 0.001, high + 0.001))
        assert np.abs(counts - count / 10).max() < 5 * np.sqrt(count / 10)
    assert abs(np.corrcoef(area, aspect)[0, 1]) < 0.04


def by_each_backend(images, uniforms, preprocess):
    yield by_tensorflow(images, uniforms, preprocess, eagerly=True)
    yield by_dali(images, uniforms, preprocess)


def test_random_resized_crop_that_never_fits():
    """The center, as much as the aspect allows: of a 100x1000 image a square is wanted."""
    crop = RandomResizedCrop(area_range=(1.0, 1.0), aspect_ratio_range=(1.0, 1.0))
    preprocess = dataclasses.replace(UNMIRRORED, crop=crop)
    pixels = np.zeros((100, 1000, 3))
    pixels[:, 500:] = 255
    uniforms = draw(preprocess, 1)
    uniforms[:, 1:3] = 0.9  # the position has no effect
    middle = SIZE[1] // 2
    for (image,) in by_each_backend([encode(pixels)], uniforms, preprocess):
        assert image[:, : middle - 1].max() == 0
        assert image[:, middle + 1 :].min() == 255


def test_random_crop_by_hand():
    """The pixels of the image as they are; a smaller one is centered on black."""
    preprocess = dataclasses.replace(UNMIRRORED, crop=RandomCrop())
    encoded = [jpeg(67, 90), jpeg(21, 60)]
    uniforms = draw(preprocess, 2, seed=6)
    large, small = map(decode_exactly, encoded)
    (top, left), (_, other) = (
        [
            int(uniforms[number, 1 + axis] * (side - SIZE[axis] + 1))
            for axis, side in enumerate(size)
        ]
        for number, size in enumerate([(67, 90), (21, 60)])
    )
    above = (SIZE[0] - 21) // 2 + 1  # floor of a negative half
    for one, two in by_each_backend(encoded, uniforms, preprocess):
        np.testing.assert_array_equal(one, large[top : top + SIZE[0], left : left + SIZE[1]])
        assert two[:above].max() == two[above + 21 :].max() == 0
        np.testing.assert_array_equal(two[above : above + 21], small[:, other : other + SIZE[1]])


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("channels", [3, 1])
def test_a_layer_normalizes_what_is_uint8(layout, channels):
    """As images of other types are normalized: by default, with ImageNet's statistics."""
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    if channels == 1:
        mean, std = (117.037605,), (57.63,)
    preprocess = Preprocess.for_evaluation(8, layout=layout, channels=channels, dtype="uint8")
    if layout == "CHW" and keras.__version__ < "3.14":
        with refused("cannot normalize layout 'CHW': pip install 'keras>=3.14'"):
            make_normalization(preprocess)
        return
    layer = make_normalization(preprocess)
    assert isinstance(layer, keras.layers.Layer)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, channels)).astype(np.float32)
    axes = (0, 3, 1, 2) if layout == "CHW" else (0, 1, 2, 3)
    made = layer(pixels.transpose(axes)).numpy()
    np.testing.assert_allclose(made, ((pixels - mean) / std).transpose(axes), atol=1e-5)


def test_one_hot_refuses(dataset):
    feature = dataclasses.replace(dataset.features["image/class/label"], range=(0, 11))
    features = {**dataset.features, "image/class/label": feature}
    checked = dataclasses.replace(dataset, features=features)
    with refused("`num_classes` must be above the highest label, 11, got 11"):
        spec_of(checked, "sequential", RAW, label=ClassLabel(num_classes=11, one_hot=True))
    for changes, needed in (({"one_hot": True}, "num_classes"), ({"smoothing": 0.1}, "one_hot")):
        with refused(f"needs `{needed}`"):
            ClassLabel(**changes)
