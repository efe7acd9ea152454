"""The plan decode="scaled": JPEGs decoded at 1/2, 1/4 and 1/8. Its pixels are its own, and held
against a Lanczos resize.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from conftest import at_night, encode, jpeg, valid_images
from PIL import Image
from test_parity import CROPS, RAW, SIZE, UNMIRRORED, by_batch, by_tensorflow, draw

from dali_tf_input import CenterCrop, RandomResizedCrop
from dali_tf_input.backends import tf_images
from dali_tf_input.spec.crops import NoCrop

PLANS = ("scaled", "full")
# 4 to 25 times 46 x 38: every ratio.
SIZES = [(184, 152), (269, 265), (369, 305), (575, 636), (749, 951)]


@pytest.fixture(scope="module")
def images():
    """JPEGs with detail of every size, as photos have it: amplitudes fall as 1 / frequency."""
    return [
        detailed_jpeg(height, width, np.random.default_rng(number))
        for number, (height, width) in enumerate(SIZES)
    ]


def detailed_jpeg(height, width, random):
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / width)
    spectrum = np.fft.rfft2(random.normal(size=(height, width, 3)), axes=(0, 1))
    field = np.fft.irfft2(amplitude[..., None] * spectrum, s=(height, width), axes=(0, 1))
    return encode(128 + 48 * field / field.std(), "JPEG", quality=90)


def signal_to_noise(made, reference):
    """Returns the PSNR in dB over 0..255."""
    return 10 * np.log10(255**2 / np.mean((made - reference) ** 2))


def compare(images, preprocess):
    """Yields what decode="scaled" and "full" score for each image against a Lanczos resize."""
    uniforms = draw(preprocess, len(images))
    made = [by_batch(images, uniforms, preprocess, decode=decode) for decode in PLANS]
    for image, scaled, plain in zip(images, *made, strict=True):
        full = Image.fromarray(tf_images.decode_image(tf.constant(image), upright=False).numpy())
        reference = np.asarray(full.resize(SIZE[::-1], Image.Resampling.LANCZOS), np.float32)
        yield signal_to_noise(scaled, reference), signal_to_noise(plain, reference)


@pytest.mark.slow
def test_without_antialias_it_is_closer_to_the_truth(images):
    assert all(scaled > plain for scaled, plain in compare(images, UNMIRRORED))


@pytest.fixture(scope="module")
def ramps():
    """JPEGs of a gray level a pixel of the output, in each direction: where a shift shows."""
    encoded = []
    for height, width in SIZES:
        rows, columns = np.mgrid[:height, :width]
        parts = [rows / height, columns / width, (rows + columns) / (height + width)]
        encoded.append(encode(np.stack(parts, 2) * 255, "JPEG", quality=95))
    return encoded


ALL_CROPS = {**CROPS, "center_crop_at_its_edge": CenterCrop(resize_shorter=46)}


@pytest.mark.slow
@pytest.mark.parametrize("antialias", at_night([True], [True, False]))
@pytest.mark.parametrize("crop", ALL_CROPS.values(), ids=ALL_CROPS)
def test_it_is_the_same_region(ramps, crop, antialias):
    preprocess = dataclasses.replace(RAW, crop=crop, antialias=antialias)
    numbers = draw(preprocess, len(ramps), seed=3)
    scaled, plain = (by_batch(ramps, numbers, preprocess, decode=plan) for plan in PLANS)
    difference = scaled - plain
    assert np.abs(difference).mean((1, 2, 3)).max() < 1  # half a pixel of the output would be 1.8
    assert np.abs(difference.mean((1, 2))).max() < 0.5


@pytest.mark.slow
def test_small_images_and_other_kinds_are_as_ever(images):
    """What is not twice as large as needed, or no JPEG, comes out as by the other plans, to the
    bit.
    """
    small = [jpeg(91, 200), jpeg(200, 75), jpeg(1, 1), *valid_images()]
    for crop in (NoCrop(), RandomResizedCrop()):
        preprocess = dataclasses.replace(RAW, crop=crop)
        numbers = draw(preprocess, len(small))
        auto = "full" if preprocess.resizes_plainly else "region"
        made = [by_batch(small, numbers, preprocess, decode=plan) for plan in ("scaled", auto)]
        np.testing.assert_array_equal(*made)


# The largest difference on 0..255. With antialias, TensorFlow's operations cut the filter off
# beside the region; without it, their bicubic weights are from a table.
MOST = {
    ("bilinear", True): 1.5,
    ("bilinear", False): 0.01,
    ("bicubic", True): 1.5,
    ("bicubic", False): 0.25,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", at_night(list(MOST)[:2], MOST))
def test_both_kernels_make_the_same(images, how):
    for name in at_night(["random_resized_crop", "cover_crop", "no_crop"], CROPS):
        changes = {"crop": CROPS[name], "interpolation": how[0], "antialias": how[1]}
        preprocess = dataclasses.replace(RAW, **changes)
        uniforms = draw(preprocess, len(images))
        one = by_batch(images, uniforms, preprocess, decode="scaled")
        other = by_tensorflow(images, uniforms, preprocess, decode="scaled", eagerly=True)
        found = np.abs(one - other)
        assert found.max() <= MOST[how], name
        assert found.mean() < 0.01, name
