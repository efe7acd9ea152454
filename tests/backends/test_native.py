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
from dali_tf_input.spec.crops import NoCrop
from dali_tf_input.spec.primitives import ROW_SIZE

NATIVE = ROOT / "dali_tf_input/backends/native"
WORK = {"height": 2, "width": 2, "kernel": 1, "antialias": True, "clip": False, "chw": False}
WORK |= {"mean": [0.0] * 3, "scale": [1.0] * 3, "T": tf.float32}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


def test_half_rounds_to_nearest_even():
    """All roundings, subnormal and huge numbers: as NumPy casts."""
    work = {**WORK, "height": 1, "width": 1}
    image, rows = np.full((1, 1, 3), 1, np.uint8), np.zeros((0, ROW_SIZE), np.float32)
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-27, 18, 300)) * random.choice([-1, 1], 300)
    values = np.concatenate([values, [0, 1, 65504, 65519.99, 65520, 2.0**-24, 2.0**-25, 6.1e-5]])
    for dtype in (tf.float16, tf.bfloat16):
        for value in values.astype(np.float32):
            changes = {"scale": [float(value)] * 3, "T": dtype}
            made = tf_native.load_ops().dali_tf_input_augment(
                image, rows, False, **{**work, **changes}
            )
            with np.errstate(over="ignore"):
                assert (made.numpy() == value.astype(dtype.as_numpy_dtype)).all(), value


def test_an_image_that_was_not_decoded_as_planned():
    """No memory but the image's is read, whatever the plan says."""
    view = Preprocess(image_size=(2, 2), crop=NoCrop())
    described = tf_native.describe_views([view], whole=False, maximum=np.inf)
    uniforms, rows = tf.zeros(3), tf.zeros((0, ROW_SIZE))

    def finish(*plan, size=(4, 6), rows=rows, uniforms=uniforms):
        image = np.zeros((*size, 3), np.uint8)
        given = tf.constant(plan, tf.int32), uniforms, rows, [view], described
        (made,), stored = tf_native.finish(image, *given)
        assert made.shape == (2, 2, 3)
        return stored.numpy().tolist()

    assert finish(4, 1, 0, 0, 0, 0, 0, 0) == [4, 6, 1]
    assert finish(0, 6, 4, 6, 0, 0, 4, 6) == [4, 6, 6]
    assert finish(1, 1, 8, 11, 0, 0, 4, 6) == [8, 11, 1]
    big = 2**31 - 1
    for text, wrong, changes in (
        ("what Inspect says is needed", (0, 1, 4), {}),
        ("what Inspect says is needed", (6, 1, 0, 0, 0, 0, 0, 0), {}),
        ("what Inspect says is needed", (0, 9, 0, 0, 0, 0, 0, 0), {}),
        ("a part of the image is not what", (0, 1, 5, 6, 0, 0, 4, 6), {}),
        ("a part of the image is not what", (0, 1, 4, 6, 1, 0, 4, 6), {}),
        ("a part of the image is not what", (0, 1, 4, 6, 0, -1, 4, 6), {}),
        ("a part of the image is not what", (0, 1, 4, 6, big, big, big, big), {}),
        ("needs 1 to 16,777,216 pixels", (0, 1, big, -1, 0, 0, 4, 6), {}),
        ("needs 1 to 16,777,216 pixels", (4, 1, 0, 0, 0, 0, 0, 0), {"size": (0, 6)}),
        ("random numbers and rows", (4, 1, 0, 0, 0, 0, 0, 0), {"uniforms": tf.zeros(4)}),
        ("random numbers and rows", (4, 1, 0, 0, 0, 0, 0, 0), {"rows": tf.zeros((1, ROW_SIZE))}),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            finish(*wrong, **changes)


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
    image, rows = np.zeros((2, 2, 3), np.uint8), np.zeros((0, ROW_SIZE), np.float32)
    made = tf_native.load_ops().dali_tf_input_augment(image, rows, False, **WORK)
    assert made.shape == (2, 2, 3)  # ours still works


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
    done, refused_regions, shown, *found = map(
        int, re.findall(r"\d+", run_program(program, rounds))
    )
    assert done > 0.625 * rounds
    assert refused_regions > 0.075 * rounds
    assert 0.2 * rounds < shown < done  # some parts are not what is needed
    assert min(found) > 100  # images, and those that are to be turned


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
    read, inspect, finish, augment, place, batch, pack = map(int, output.split())
    assert min(read, inspect, finish, augment, batch, pack) > 3
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
