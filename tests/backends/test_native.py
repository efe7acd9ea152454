"""The compiled operation: TensorFlow's pixels, and no access out of bounds."""

import dataclasses
import logging
import re
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
import warm
from conftest import ROOT, TF_DATA, jpeg, nightly, refused, slowly, spec_of, take, valid_images
from test_parity import CROPS, RAW, by_tensorflow, draw

from dali_tf_input import (
    InputError,
    Preprocess,
    RandomCrop,
    RandomErasing,
    TfDataOptions,
    TrivialAugment,
)
from dali_tf_input.backends import tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.tfrecord import frame_record

NATIVE = ROOT / "dali_tf_input/backends/native"
# Of 255. TensorFlow's bicubic resize of whole images takes its weights from a table of 1024.
TOLERANCE = {"bilinear": 0.01, "bicubic": 0.25, "nearest": 0.0}
WORK = {"height": 2, "width": 2, "kernel": 1, "antialias": True, "clip": False, "chw": False}
WORK |= {"mean": [0.0] * 3, "scale": [1.0] * 3, "T": tf.float32}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


@pytest.fixture(scope="module")
def images():
    sizes = [(375, 500), (97, 1000), (1000, 97), (720, 1280), (33, 47), (1, 1), (1, 50), (50, 1)]
    encoded = [jpeg(height, width, seed=number) for number, (height, width) in enumerate(sizes)]
    return encoded + valid_images()


def differences(images, preprocess, **how):
    numbers = draw(preprocess, len(images))
    made = (by_tensorflow(images, numbers, preprocess, native=one, **how) for one in (0, 1))
    one, other = (np.asarray(images, np.float64) for images in made)
    return np.abs(one - other)


PLANS = ("region", "scaled")


@pytest.mark.parametrize("decode", ["full", *map(slowly, PLANS)])
@pytest.mark.parametrize(
    ("interpolation", "antialias"),
    [
        *(("bilinear", True), slowly("nearest", False)),
        *(nightly("bilinear", False), nightly("bicubic", False), nightly("bicubic", True)),
    ],
)
def test_the_same_pixels(images, interpolation, antialias, decode):
    for number, crop in enumerate(CROPS.values()):
        # Of the other plans one has antialias and the other has not, for each crop in turn.
        if interpolation != "nearest" and decode == PLANS[(number + antialias) % 2]:
            continue
        changes = {"crop": crop, "interpolation": interpolation, "antialias": antialias}
        preprocess = dataclasses.replace(RAW, **changes)
        found = differences(images, preprocess, decode=decode)
        if interpolation == "nearest":  # where a pixel's edge is met exactly, rounding decides
            assert (found > 0).mean() < 0.02, crop
            continue
        most = 0.02 if antialias else TOLERANCE[interpolation]
        if decode == "scaled" and antialias:
            most = 1.5  # TensorFlow's operations cut a Lanczos filter off beside the region
        assert found.max() <= most, crop
        assert found.mean() < 0.01, crop


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_the_same_numbers(images, dtype, layout):
    """Normalized, cast, rounded and mirrored alike: one step of the type at most."""
    changes = {"dtype": dtype, "layout": layout}
    preprocess = dataclasses.replace(Preprocess.for_training(80), **changes)
    step = {"float32": 1e-4, "float16": 2**-9, "bfloat16": 2**-6, "uint8": 1}[dtype]
    found = differences(images, preprocess)
    assert found.max() <= step
    assert (found > 1e-4).mean() < 0.01


def test_half_rounds_to_nearest_even():
    """All roundings, subnormal and huge numbers: as NumPy casts."""
    work = {"height": 1, "width": 1, "kernel": 0, "antialias": False, "clip": False, "chw": False}
    image, region = np.full((1, 1, 3), 1, np.uint8), np.array([0.0, 0, 1, 1])
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-27, 18, 300)) * random.choice([-1, 1], 300)
    values = np.concatenate([values, [0, 1, 65504, 65519.99, 65520, 2.0**-24, 2.0**-25, 6.1e-5]])
    for dtype in (tf.float16, tf.bfloat16):
        for value in values.astype(np.float32):
            scale = [float(value)] * 3
            made = tf_native.load().dali_tf_input_prepare(
                image, region, False, mean=[0.0] * 3, scale=scale, T=dtype, **work
            )
            with np.errstate(over="ignore"):
                assert (made.numpy() == value.astype(dtype.as_numpy_dtype)).all(), value


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ([0, 0, np.nan, 4], "must be finite"),
        ([0, np.inf, 4, 4], "must be finite"),
        ([0, 0, 0, 4], "show its image, and not be empty"),
        ([0, 0, -1, 4], "show its image, and not be empty"),
        ([0, 3, 4, 9], "show its image, and not be empty"),
        ([-3, 0, 4, 4], "show its image, and not be empty"),
        ([0, 0, 1], "must be 4 numbers"),
    ],
)
def test_regions_that_are_none(region, message):
    for image in (np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=message if image.ndim > 2 else "sh"
        ):
            tf_native.load().dali_tf_input_prepare(
                image, np.array(region, np.float64), False, **WORK
            )


@pytest.mark.slow
def test_a_dataset_by_each_kernel(dataset):
    """With augmentation too, and in evaluation; "auto" is the compiled one where it is there."""
    for changes in (
        {},
        {"augment": (TrivialAugment(), RandomErasing())},
        {"crop": RandomCrop(), "dtype": "uint8"},
    ):
        preprocess = dataclasses.replace(Preprocess.for_training(24), **changes)
        spec = spec_of(dataset, "global", preprocess)
        made = {
            kernel: take(make_dataset(spec, TfDataOptions(kernel=kernel), batch_size=6), 4)
            for kernel in ("tensorflow", "native", "auto")
        }
        np.testing.assert_array_equal(made["auto"][0], made["native"][0])
        difference = np.abs(made["native"][0].astype(float) - made["tensorflow"][0].astype(float))
        assert np.quantile(difference, 0.99) <= (1 if changes else 1e-4)
        np.testing.assert_array_equal(made["native"][1], made["tensorflow"][1])


def test_without_the_library(dataset, monkeypatch, caplog):
    """One line says so, and TensorFlow's operations do the work."""
    tf_native.load.cache_clear(), tf_native.uses_native.cache_clear()
    monkeypatch.setattr(tf_native, "LIBRARY", ROOT / "dali_tf_input/backends/no library")
    spec = spec_of(dataset, "global", Preprocess.for_training(24))
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                take(make_dataset(spec, TF_DATA, batch_size=6), 1)
        (line,) = (one.message for one in caplog.records if "preprocess" in one.message)
        assert re.search("TensorFlow's operations preprocess.* not compiled.* g\\+\\+ ", line)
        assert f"pip install --no-deps -e {ROOT}`" in line
        with refused(
            "kernel='native' and DALI need compiled operations: /.* not there.*kernel='tensorflow'"
        ):
            make_dataset(spec, TfDataOptions(kernel="native"), batch_size=6)
    finally:
        tf_native.load.cache_clear(), tf_native.uses_native.cache_clear()


def compile_native(out, *flags):
    words = ["g++", "-std=c++17", "-g", *map(str, flags), f"-I{NATIVE}", "-ldl", "-o", str(out)]
    subprocess.run(words, check=True, timeout=300)


@needs_compiler
@pytest.mark.slow
def test_a_library_of_another_tensorflow(tmp_path, monkeypatch):
    """A function that it needs is not there: named, and no crash."""
    library = tmp_path / "other.so.1"
    for file in NATIVE.iterdir():
        shutil.copy(file, tmp_path)
    written = (NATIVE / "api.h").read_text()
    (tmp_path / "api.h").write_text(written.replace("F(TF_GetInput,", "F(TF_GetInputV9,"))
    assert (tmp_path / "api.h").read_text() != written
    compile_native(library, "-shared", "-fPIC", "-DTF_GetInput=TF_GetInputV9", tmp_path / "op.cc")
    tf_native.load.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tf_native, "LIBRARY", library)
            with pytest.raises(
                InputError, match=f"{library} does not work .* has no TF_GetInputV9"
            ):
                tf_native.load()
    finally:
        tf_native.load.cache_clear()
    image, region = np.zeros((4, 4, 3), np.uint8), np.array([0, 0, 4, 4], np.float64)
    assert tf_native.load().dali_tf_input_prepare(image, region, False, **WORK).shape == (
        2,
        2,
        3,
    )  # ours still works


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1500, nightly(20_000)])
def test_no_access_out_of_bounds(tmp_path, rounds):
    """Under the sanitizers, over images from 1x1 to 65500x1 and regions at and beyond the edges."""
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"]
    program = tmp_path / "fuzz"
    source = ROOT / "tests/backends/fuzz_native.cc"
    compile_native(program, *checks, "-DDALI_TF_INPUT_PLAIN", source)
    command = [program, str(rounds)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert process.returncode == 0, process.stdout + process.stderr
    done, refused_regions = map(int, re.findall(r"\d+", process.stdout))
    assert done > 0.625 * rounds
    assert refused_regions > 0.075 * rounds


@needs_compiler
@pytest.mark.slow
def test_an_exit_and_no_memory(tmp_path):
    """Threads may read until the process is gone; without memory a call fails, and frees all."""
    program, file = tmp_path / "mock", tmp_path / "record"
    compile_native(program, "-O1", "-pthread", ROOT / "tests/backends/mock_native.cc")
    file.write_bytes(frame_record(bytes(5000)))
    for _ in range(40):
        assert subprocess.run([program, "exit", file], timeout=300).returncode == 0
    example = tmp_path / "example"
    example.write_bytes(encode_example({"image": jpeg(40, 60), "label": 1}))
    command = [program, "memory", file, example]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    read, prepare, augment, place, batch, pack = map(int, process.stdout.split())
    assert min(read, prepare, augment, batch, pack) > 3
    assert place <= 1  # it needs no memory but the output, and the pool itself


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_of_batches(tmp_path, sanitizer):
    """Under the sanitizers: several calls share the teams and the pools."""
    program, example = tmp_path / "mock", tmp_path / "example"
    example.write_bytes(encode_example({"image": jpeg(40, 60), "label": 1}))
    source = ROOT / "tests/backends/mock_native.cc"
    # The loader resolves target clones before the thread sanitizer is there.
    flags = [f"-fsanitize={sanitizer}", "-DDALI_TF_INPUT_PLAIN", "-O1", "-pthread"]
    compile_native(program, *flags, source)
    command = [program, "threads", example]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "0 failed, 0 left\n"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2000, nightly(50_000)])
def test_examples_with_changed_bytes(tmp_path, rounds):
    """Under the sanitizers, from the record to the finished, or packed, batch."""
    program, example = tmp_path / "mock", tmp_path / "example"
    example.write_bytes(encode_example({"image": jpeg(40, 60), "label": 1, "text": "é" * 40}))
    source = ROOT / "tests/backends/mock_native.cc"
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DDALI_TF_INPUT_PLAIN"]
    compile_native(program, *flags, "-O1", "-pthread", source)
    command = [program, "examples", example, str(rounds)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert process.returncode == 0, process.stdout + process.stderr
    done, refused_batches, left = map(int, re.findall(r"\d+", process.stdout))
    assert min(done, refused_batches) > rounds // 10
    assert left == 0


WALK = """
import importlib, pkgutil
import dali_tf_input.backends as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if "native" in module.name or "lib" in module.name:
        importlib.import_module(module.name)
from dali_tf_input.backends.tf_native import LIBRARY, uses_native
assert not any("lib" in m.name for m in pkgutil.walk_packages(package.__path__)), LIBRARY
print(uses_native("native"))
"""


@pytest.mark.slow
def test_python_cannot_import_the_library():
    """What imports all modules, as freezers do, would load it before TensorFlow."""
    process = warm.run(["-c", WALK])
    assert process.stdout == "True\n", process.stderr
