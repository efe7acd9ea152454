"""The compiled operations: half precision, what they refuse, and no access out of bounds."""

import logging
import pkgutil
import re
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, TF_DATA, jpeg, make_once, refused, spec_of, take

from dali_tf_input import InputError, Preprocess, TfDataOptions, backends
from dali_tf_input.backends import tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.tfrecord import frame_record

NATIVE = ROOT / "dali_tf_input/backends/native"
WORK = {"height": 2, "width": 2, "kernel": 1, "antialias": True, "clip": False, "chw": False}
WORK |= {"mean": [0.0] * 3, "scale": [1.0] * 3, "T": tf.float32}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


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
            made = tf_native.load_ops().dali_tf_input_prepare(
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
            tf_native.load_ops().dali_tf_input_prepare(
                image, np.array(region, np.float64), False, **WORK
            )


def test_without_the_library(dataset, monkeypatch, caplog):
    """One line says so, and TensorFlow's operations do the work."""
    tf_native.load_ops.cache_clear(), tf_native.uses_native.cache_clear()
    monkeypatch.setattr(tf_native, "LIBRARY", ROOT / "dali_tf_input/backends/no library")
    spec = spec_of(dataset, "global", Preprocess.for_training(24))
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                take(make_dataset(spec, TF_DATA, batch_size=6), 1)
        (line,) = (one.message for one in caplog.records if "preprocess" in one.message)
        assert re.search("TensorFlow's operations preprocess.* not compiled.* g\\+\\+ ", line)
        assert f"pip install --no-deps -e {ROOT}`" in line
        with refused("need compiled operations: /.* not there.*kernel='tensorflow'"):
            make_dataset(spec, TfDataOptions(kernel="native"), batch_size=6)
    finally:
        tf_native.load_ops.cache_clear(), tf_native.uses_native.cache_clear()


def compile_native(out, *flags):
    words = ["g++", "-std=c++17", "-g1", *map(str, flags), f"-I{NATIVE}", "-ldl", "-o", str(out)]
    subprocess.run(words, check=True, timeout=300)


@needs_compiler
@pytest.mark.nightly
def test_a_library_of_another_tensorflow(tmp_path, monkeypatch):
    """A function that it needs is not there: named, and no crash."""
    library = tmp_path / "other.so.1"
    for file in NATIVE.iterdir():
        shutil.copy(file, tmp_path)
    written = (NATIVE / "api.h").read_text()
    (tmp_path / "api.h").write_text(written.replace("F(TF_GetInput,", "F(TF_GetInputV9,"))
    assert (tmp_path / "api.h").read_text() != written
    compile_native(library, "-shared", "-fPIC", "-DTF_GetInput=TF_GetInputV9", tmp_path / "op.cc")
    tf_native.load_ops.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tf_native, "LIBRARY", library)
            with pytest.raises(
                InputError, match=f"{library} does not work .* has no TF_GetInputV9"
            ):
                tf_native.load_ops()
    finally:
        tf_native.load_ops.cache_clear()
    image, region = np.zeros((4, 4, 3), np.uint8), np.array([0, 0, 4, 4], np.float64)
    assert tf_native.load_ops().dali_tf_input_prepare(image, region, False, **WORK).shape == (
        2,
        2,
        3,
    )  # ours still works


SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
SOURCES = ROOT / "tests/backends"


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    """A program of the operations and a stand-in for TensorFlow, under the sanitizers.

    Without optimization: to compile it takes longer than to run it.
    """

    def make(folder):
        folder.mkdir()
        flags = [*SANITIZERS, "-DDALI_TF_INPUT_PLAIN", "-pthread"]
        compile_native(folder / "mock", *flags, SOURCES / "mock_native.cc")

    return make_once(tmp_path_factory, "mock_native", make) / "mock"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A file of one serialized Example."""
    file = tmp_path_factory.mktemp("native") / "example"
    file.write_bytes(encode_example({"image": jpeg(40, 60), "label": 1, "text": "é" * 40}))
    return file


def run_program(*command):
    """Runs a program to its end; returns what it says."""
    process = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=1500, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@needs_compiler
@pytest.mark.nightly
def test_no_access_out_of_bounds(tmp_path):
    """Under the sanitizers, over images from 1x1 to 65500x1 and regions at and beyond the edges."""
    program = tmp_path / "fuzz"
    compile_native(program, *SANITIZERS, "-O1", "-DDALI_TF_INPUT_PLAIN", SOURCES / "fuzz_native.cc")
    rounds = 20_000
    done, refused_regions = map(int, re.findall(r"\d+", run_program(program, rounds)))
    assert done > 0.625 * rounds
    assert refused_regions > 0.075 * rounds


@needs_compiler
@pytest.mark.nightly
def test_an_exit_and_no_memory(tmp_path, example):
    """Threads may read until the process is gone; without memory a call fails, and frees all."""
    program, file = tmp_path / "mock", tmp_path / "record"
    compile_native(program, "-O1", "-pthread", SOURCES / "mock_native.cc")
    file.write_bytes(frame_record(bytes(5000)))
    for _ in range(40):
        run_program(program, "exit", file)
    output = run_program(program, "memory", file, example)
    read, prepare, augment, place, batch, pack = map(int, output.split())
    assert min(read, prepare, augment, batch, pack) > 3
    assert place <= 1  # it needs no memory but the output, and the pool itself


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_threads_of_batches(tmp_path, mock, example, sanitizer):
    """Under the sanitizers: several calls share the teams and the pools."""
    if sanitizer == "thread":
        mock = tmp_path / "mock"
        # The loader resolves target clones before the thread sanitizer is there.
        flags = ["-fsanitize=thread", "-DDALI_TF_INPUT_PLAIN", "-O1", "-pthread"]
        compile_native(mock, *flags, SOURCES / "mock_native.cc")
    assert run_program(mock, "threads", example) == "0 failed, 0 left\n"


@needs_compiler
@pytest.mark.nightly
def test_examples_with_changed_bytes(mock, example):
    """Under the sanitizers, from the record to the finished, or packed, batch."""
    rounds = 50_000
    output = run_program(mock, "examples", example, rounds)
    done, refused_batches, left = map(int, re.findall(r"\d+", output))
    assert min(done, refused_batches) > rounds // 10
    assert left == 0


def test_python_cannot_import_the_library():
    """What imports all modules, as freezers do, would load it before TensorFlow."""
    names = [module.name for module in pkgutil.walk_packages(backends.__path__)]
    assert "tf_native" in names
    assert not [name for name in names if "lib" in name]
