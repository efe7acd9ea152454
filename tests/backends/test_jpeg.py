"""The compiled JPEG decoder: libjpeg-turbo's pixels, or refused."""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    ROOT,
    TF_DATA,
    at_night,
    encode,
    image_zoo,
    jpeg,
    make_once,
    spec_of,
    table,
    take,
)
from PIL import Image
from test_native import SANITIZERS, compile_native, needs_compiler, run_program
from test_parity import CROPS, RAW, draw, make_batch, make_view, plan_regions

from dali_tf_input import Preprocess, RandomCrop, ResizeRandomCrop
from dali_tf_input.backends import tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.spec.crops import Crop, NoCrop, Region

with open("/proc/cpuinfo", encoding="ascii") as stream:
    HAS_AVX2 = {"avx2", "bmi1", "bmi2"} <= set(stream.read().split())
pytestmark = pytest.mark.skipif(not HAS_AVX2, reason="this processor has no AVX2")
SIZES = [(97, 130), (33, 47), (16, 17), (1, 1), (1, 50), (9, 5)]
SIZES = at_night(SIZES, [*SIZES, (375, 500), (130, 97), (8, 8), (50, 1)])
KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "best": {"subsampling": 2, "quality": 100},
    "worst": {"subsampling": 2, "quality": 3},
    "restarts": {"subsampling": 2, "restart_marker_blocks": 3},
    "rows": {"subsampling": 1, "restart_marker_rows": 1},
    "optimized": {"subsampling": 2, "optimize": True},
    "metadata": {"exif": b"Exif\0\0" + bytes(99), "icc_profile": bytes(70_000), "comment": b"x"},
    "wide tables": {"qtables": [[300 + place for place in range(64)]] * 2},
}


def make_image(height, width, mode="RGB"):
    return Image.open(io.BytesIO(jpeg(height, width, seed=height))).convert(mode)


def decode_all(files, size, *, whole=True):
    """Returns all pixels of each of many JPEGs of a size, or None where it is refused."""
    preprocess = Preprocess(
        image_size=size, crop=NoCrop(), mirror_probability=0, dtype="uint8", interpolation="nearest"
    )
    uniforms = np.zeros((len(files), preprocess.num_uniforms), np.float32)
    made = make_batch(files, uniforms, preprocess, whole=whole)
    images, refused = made.images[0].numpy(), set(made.refused_indices.numpy())
    return [None if place in refused else image for place, image in enumerate(images)]


def decode(encoded, *, whole=True):
    """Returns all pixels of a JPEG, or None if it is refused."""
    size = 8, 8
    with contextlib.suppress(tf.errors.InvalidArgumentError):
        size = tuple(map(int, tf.io.extract_jpeg_shape(encoded)[:2]))
    return decode_all([encoded], size, whole=whole)[0]


def decode_by_tensorflow(encoded):
    """Returns the pixels, or None if it is refused."""
    try:
        return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE").numpy()
    except tf.errors.InvalidArgumentError:
        return None


@pytest.mark.parametrize("kind", [*KINDS, "gray"])
def test_it_has_the_pixels_of_libjpeg_turbo(kind):
    for height, width in SIZES:
        image = make_image(height, width, "L" if kind == "gray" else "RGB")
        encoded = encode(image, "JPEG", **KINDS.get(kind, {}))
        pixels = decode(encoded)
        if pixels is None:  # there libjpeg repeats colors
            assert width <= 4
            assert kind not in ("4:4:4", "gray")
        else:
            np.testing.assert_array_equal(pixels, decode_by_tensorflow(encoded))


def test_what_it_refuses():
    image = make_image(40, 60)
    sound = encode(image, "JPEG", subsampling=2)
    frame = sound.index(b"\xff\xc0") + 4
    for encoded in (
        encode(image, "JPEG", progressive=True),
        encode(image.convert("CMYK"), "JPEG"),
        encode(image, "PNG"),
        sound[:-1],
        sound[:-2] + b"\xff\xd0\xff\xd9",
        sound[:-2] + bytes(4) + sound[-2:],
        sound[:-2] + b"\xff" + sound[-2:],  # a fill byte
        sound[:frame] + b"\x0c" + sound[frame + 1 :],  # 12 bits
        sound[: frame + 1] + b"\xff\xff" + sound[frame + 3 :],  # 65,535 lines
        b"",
        b"\xff\xd8\xff",
    ):
        assert decode(encoded) is None
    assert decode(sound + b"trailing") is not None
    assert decode(sound[:-2] + b"\xff\xd0\xff\xd9", whole=False) is not None


def test_cut_at_every_byte():
    """Refused as by TensorFlow; of a part, only what was whole is taken."""
    sound = encode(make_image(40, 60), "JPEG", subsampling=2, restart_marker_blocks=5)
    expected = decode_by_tensorflow(sound)
    files = [sound[:length] for length in range(len(sound))]
    assert decode_all(files, (40, 60)) == [None] * len(files)
    top = Preprocess(image_size=(20, 60), crop=RandomCrop(), mirror_probability=0, dtype="uint8")
    uniforms = np.zeros((len(files), top.num_uniforms), np.float32)
    made = make_batch(files, uniforms, top, whole=False)
    refused = {*made.refused_indices.numpy()}
    parts = [part for place, part in enumerate(made.images[0].numpy()) if place not in refused]
    assert 0 < len(parts) < len(files)
    for part in parts:
        np.testing.assert_array_equal(part, expected[:20])


PLANS = ("full", "region", "scaled")
CHANGES = ({}, {"antialias": True}, {"dtype": "uint8", "layout": "CHW"})


@table("crop, plan", [*zip(CROPS, itertools.cycle(PLANS), strict=False)], CROPS, PLANS)
def test_the_same_images(crop, plan):
    """Decoded by it or by TensorFlow: the same to the bit, unless it refuses an image."""
    sizes = [(97, 300), (130, 120), (375, 500), (33, 47), (1, 50)]
    images = [jpeg(*size, seed=number) for number, size in enumerate(sizes)]
    images += [file for file, image_format, _ in image_zoo().values() if image_format]
    # Each change with each crop, and with each plan.
    turn = list(CROPS).index(crop)
    changes = CHANGES[(turn + turn // 3 + PLANS.index(plan)) % len(CHANGES)]
    preprocess = dataclasses.replace(RAW, crop=CROPS[crop], **changes)
    numbers = draw(preprocess, len(images))
    limits = tf_native.limits_of(preprocess, decode=plan)
    made = make_batch(images, numbers, preprocess, **limits)
    taken = {*range(len(images))} - {*made.refused_indices.numpy()}
    for place in taken:
        other = make_view(images[place], numbers[place], preprocess, plan)
        np.testing.assert_array_equal(made.images[0][place], other)
    assert len(taken) > (0 if plan == "scaled" else 4)


@pytest.fixture(scope="module")
def find_regions(tmp_path_factory):
    """A program that says what the operation reads of each image."""

    def make(folder):
        folder.mkdir()
        flags = "-O1", "-ffp-contract=off", ROOT / "tests/backends/find_regions.cc"
        compile_native(folder / "regions", *flags)

    return make_once(tmp_path_factory, "find_regions", make) / "regions"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("count", [at_night(100_000, 1_000_000)])
@pytest.mark.parametrize("name", CROPS)
def test_many_regions(find_regions, name, count):
    """Its plan of a crop is the one of spec/crops.py, which the DALI backend has too."""
    preprocess = dataclasses.replace(RAW, crop=CROPS[name])
    sizes = np.random.default_rng(3).integers(1, 2000, (count, 2)).astype(np.float64)
    uniforms = draw(preprocess, count)
    kind, *numbers = tf_native.describe_crop(preprocess)
    head = np.array([kind, *preprocess.image_size, len(numbers), uniforms.shape[1], *numbers])
    rows = np.concatenate([sizes.view(np.uint8), uniforms.view(np.uint8)], axis=1)
    given = head.tobytes() + rows.tobytes()
    process = subprocess.run(
        [find_regions], input=given, capture_output=True, timeout=300, check=True
    )
    found = np.frombuffer(process.stdout).reshape(count, 5).T
    region = plan_regions(sizes, uniforms, preprocess)
    np.testing.assert_array_equal(found[:2], np.broadcast_to(region.start, (2, count)))
    np.testing.assert_array_equal(found[2:4], np.broadcast_to(region.extent, (2, count)))
    np.testing.assert_array_equal(found[4], uniforms[:, 0] < 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopLeft(Crop):
    """A crop of a user's own."""

    def plan(self, size, out, uniforms, ops):
        return Region(size * 0.0, out, out, out * 0.0)


def test_crops_of_ones_own_are_not_its(dataset):
    preprocess = Preprocess(image_size=(8, 8), crop=TopLeft(), mirror_probability=0)
    images, _ = take(
        make_dataset(spec_of(dataset, "sequential", preprocess), TF_DATA, batch_size=4), 1
    )
    assert images.shape == (4, 8, 8, 3)
    assert not tf_native.decodes(TopLeft())
    assert tf_native.decodes(ResizeRandomCrop(resize=(9, 9)))


@needs_compiler
@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/usr/include/jpeglib.h"), reason="there is no libjpeg")
def test_damaged_files(tmp_path, monkeypatch):
    """What it takes, libjpeg takes without a warning, and makes the same of; under sanitizers."""
    program, rounds = tmp_path / "fuzz", 300_000
    flags = [*SANITIZERS, "-O1", "-fsanitize-coverage=trace-pc"]
    compile_native(program, *flags, ROOT / "tests/backends/fuzz_jpeg.cc", "-ljpeg")
    photos = []
    for kind, how in KINDS.items():
        photos.append(tmp_path / f"{kind}.jpg")
        photos[-1].write_bytes(encode(make_image(60, 90), "JPEG", **how))
    monkeypatch.chdir(tmp_path)  # where it leaves a file that it decodes wrongly
    output = run_program(program, rounds, os.getpid(), *photos)
    done, sound, taken, windows, *_, found = map(int, re.findall(r"\b\d+\b", output))
    assert found > min(100, rounds // 80)  # files that led where none had led before
    assert done == rounds
    assert min(sound, taken, windows) > rounds // 15


def damage(encoded, random):
    """Returns a file with one to three bits, bytes or short runs of bytes changed."""
    data = bytearray(encoded)
    for _ in range(random.integers(1, 4)):
        at, length = random.integers(len(data)), random.integers(1, 9)
        new = (
            bytes([data[at] ^ 1 << random.integers(8)]),
            random.bytes(1),
            b"\xff",
            b"",
            bytes(data[at : at + length]) * 2,
        )[random.integers(5)]
        data[at : at + max(1, length * (len(new) != 1))] = new
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [at_night(800, 10_000)])
def test_damaged_files_by_tensorflow(rounds):
    """What it takes, TensorFlow's own libjpeg-turbo takes, and makes the same of."""
    random = np.random.default_rng(os.getpid())
    images = [encode(make_image(24, 40), "JPEG", **how) for how in KINDS.values()]
    images.append(encode(make_image(24, 40, "L"), "JPEG"))
    taken = 0
    for number in range(rounds):
        encoded = damage(images[number % len(images)], random)
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            if not 0 < tf.reduce_prod(tf.io.extract_jpeg_shape(encoded)) <= 1 << 18:
                continue
        pixels = decode(encoded)
        if pixels is not None:
            taken += 1
            expected = decode_by_tensorflow(encoded)
            assert expected is not None, encoded
            np.testing.assert_array_equal(pixels, expected, encoded.hex())
    assert taken > rounds // 20
