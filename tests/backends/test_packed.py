"""Batches that are packed for DALI, and the operator that unpacks them."""

import dataclasses
import itertools
import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
from commands import python
from conftest import (
    BACKENDS,
    DALI,
    TF_DATA,
    at_night,
    check_iterators,
    jpeg,
    refused,
    spec_of,
    write_dataset,
    write_indexed,
    write_tfrecord,
)
from nvidia.dali import fn, pipeline_def, types

import dali_tf_input as dti
from dali_tf_input import Preprocess
from dali_tf_input.backends import dali, dali_operator, tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.backends.dali_reading import pack_batches
from dali_tf_input.backends.locations import find_locations
from dali_tf_input.backends.stream import Stream
from dali_tf_input.records.example import encode_example
from dali_tf_input.spec.plan import StepCursor

ORDERS = ("global", "buffer", "sequential")
PLAIN = Preprocess.for_training(32)


def examples_of(images):
    return [{"image": image, "label": number % 5} for number, image in enumerate(images)]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Small images, and a large one whose bytes lie in the rows of many others."""
    images = [jpeg(20 + 3 * number, 60 - 2 * number, seed=number) for number in range(12)]
    images[5] = jpeg(900, 1200)
    return write_indexed(tmp_path_factory.mktemp("packed") / "train-0", examples_of(images))


def pack(records, images, *, numbers=(), examples=(), values=b"", **flags):
    """Returns a packed batch, of rows that all have the same values."""
    locations = find_locations(records)
    packed = tf_native.pack_batch(
        (locations.names, locations.versions, *locations.where),
        tf.constant(numbers, tf.int64),
        tf.constant(examples, tf.string),
        tf.constant(images, tf.string),
        values_size=len(values),
        image_keys=records.image_keys,
        size_keys=(),
        check_crc=True,
        num_readers=2,
        num_threads=2,
        **{"by_location": False, "returns_images": False, **flags},
    )
    if int(packed.num_refused):
        return packed, None
    count = packed.batch.shape[0]
    values = tf.constant(np.tile(np.frombuffer(values, np.uint8), (count, 1)))
    return packed, tf_native.fill_packed(packed.batch, values).numpy()


def unpack(batch, *, values_size=0, records=None):
    """Returns the images that the operator finds in a packed batch, bytes."""
    dali_operator.load_operator()
    files = {}
    if records:
        versions = [str(n) for file in records.files for n in (file.size, file.mtime_ns)]
        files = {"files": [*records.paths], "versions": versions}

    @pipeline_def(
        batch_size=max(1, len(batch)), num_threads=2, device_id=None, prefetch_queue_depth=1
    )
    def define():
        packed = fn.external_source(name="packed", dtype=types.UINT8, ndim=1, batch=True)
        return fn.dali_tf_input_images(packed, values_size=values_size, **files)

    pipeline = define()
    pipeline.build()
    pipeline.feed_input("packed", batch)
    (images,) = pipeline.run()
    return [np.asarray(images.at(number)).tobytes() for number in range(len(images))]


@pytest.mark.parametrize("values", [b"", b"seven b"])
@pytest.mark.parametrize(
    "sizes", [[5], [0], [0, 0], [1, 0, 0], [0, 0, 9], [3, 1000, 0, 1], [7] * 20, range(60)]
)
def test_images_of_all_sizes(records, sizes, values):
    """An image begins in the row of one and ends in that of another, or has no byte."""
    random = np.random.default_rng(0)
    images = [random.bytes(size) for size in sizes]
    _, batch = pack(records, images, values=values)
    share = -(-sum(sizes) // len(images))
    assert batch.shape == (len(images), 24 + len(values) + share)
    assert {row[24 : 24 + len(values)].tobytes() for row in batch} == {values}
    assert unpack(batch, values_size=len(values)) == images


@pytest.mark.parametrize("by_location", [False, True])
def test_records_that_are_read(records, by_location):
    numbers = [5, 0, 11, 5, 3]
    packed, batch = pack(records, [], numbers=numbers, by_location=by_location, returns_images=True)
    expected = [records.read(number)["image"][0] for number in numbers]
    assert packed.images.numpy().tolist() == expected
    assert unpack(batch, records=records) == expected
    assert (batch.shape[1] == 24) == by_location
    for example in packed.examples.numpy():
        assert [*tf.train.Example.FromString(example).features.feature] == ["label"]


def test_what_is_no_packed_batch(records):
    _, batch = pack(records, [b"abc", b"de"])
    with pytest.raises(RuntimeError, match="rows of one size are needed"):
        unpack(np.ascontiguousarray(batch[:, :20]))
    for column, value in ((0, 1), (1, -1), (1, 5), (2, -1), (2, 1 << 62), (1, 1 << 62)):
        wrong = batch.copy()
        wrong[1, :24].view(np.int64)[column] = value
        with pytest.raises(RuntimeError, match="a row names no image"):
            unpack(wrong)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "truncated record at byte"),
        ("remove", "cannot be read: No such file or directory: index it again"),
        ("replace", "changed since it was indexed"),
    ],
)
def test_a_file_that_changes_in_between(tmp_path, damage, message):
    """Between the reading of the record and that of its image, which is read again on a GPU."""
    records = write_indexed(tmp_path / "train-0", examples_of([jpeg(200, 300)] * 3))
    path = pathlib.Path(records.paths[0])
    _, batch = pack(records, [], numbers=[0, 1, 2], by_location=True)
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
        file = dataclasses.replace(
            records.files[0], size=path.stat().st_size, mtime_ns=path.stat().st_mtime_ns
        )
        records = dataclasses.replace(records, files=(file,))  # as if it was cut while it is open
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(RuntimeError, match=message):
        unpack(batch, records=records)


def unusual_examples():
    """Examples that TensorFlow reads, and from which the operation does not take the image."""
    image = jpeg(30, 40)
    whole, other = (encode_example({"image": image, "label": label}) for label in (3, 1))
    return [whole, whole + whole, whole + b"\x12\x02ab", other], image


def test_unusual_examples(tmp_path):
    """TensorFlow finds the images of their batch, also in files, also for masks."""
    examples, image = unusual_examples()
    path = str(tmp_path / "train-0")
    with tf.io.TFRecordWriter(path) as writer:
        for example in examples:
            writer.write(example)
    dti.build_index(path)
    records = dti.Records.from_files(path)
    spec = spec_of(records, "sequential", PLAIN, repeat=False)
    for by_location in (False, True):
        (batch,) = pack_batches(Stream(spec=spec, shard_batch_size=4), by_location=by_location)
        size = batch.shape[1] - 24 - 4 * len(image) // 4
        assert unpack(batch.numpy(), values_size=size) == [image] * 4
    made, expected = (next(iter(make_dataset(spec, one, batch_size=4))) for one in (DALI, TF_DATA))
    assert made[1].numpy().tolist() == expected[1].numpy().tolist() == [3, 3, 3, 1]
    np.testing.assert_allclose(made[0], expected[0], atol=1e-4)


@pytest.fixture
def placed(monkeypatch):
    """Has a GPU's pipelines need none; returns whether each batch was packed by place."""
    monkeypatch.setattr(dali, "decoder_device", lambda options: "cpu")
    monkeypatch.setattr(dali, "decoder_hints", lambda *_: {})
    monkeypatch.setattr(dali, "can_use_dali_reader", lambda *_: False)
    monkeypatch.setattr(type(fn.constant(idata=1)), "gpu", lambda node: node)
    placed, pack = [], dali.pack_batches

    def note(*one, by_location):
        placed.append(by_location)
        return pack(*one, by_location=by_location)

    monkeypatch.setattr(dali, "pack_batches", note)
    return placed


def compare_devices(spec, count, *, step=0, endless=False):
    """Checks that the batches of two epochs, or the first, are those of a pipeline for the CPU."""
    served = []
    for device in ("gpu", "cpu"):
        stream = Stream(spec=spec, shard_batch_size=5, cursor=StepCursor(step), endless=endless)
        made = dali.build(stream, dti.DaliOptions(device=device, decode="full"), None)
        epochs = (batch for _ in range(2) for batch in made)
        served.append([*itertools.islice(epochs, count)])
    assert len(served[0]) == count
    for batch, expected in zip(*served, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


@pytest.mark.parametrize("order", at_night(ORDERS[:2], ORDERS))
def test_a_gpus_dataset_made_on_the_cpu(records, order, placed):
    """All that lies on a GPU, of a pipeline that needs none: no epoch goes to the trial."""
    spec = spec_of(records, order, PLAIN, seed=4)
    compare_devices(spec, 5, endless=True)
    assert placed == [order != "buffer"] * 2 + [False]


@pytest.mark.parametrize("is_pass", [True, False])
def test_a_gpus_dataset_of_epochs_made_on_the_cpu(records, is_pass, placed):
    """From the middle of an epoch, or of one pass with a shorter last batch."""
    how = {"order": "sequential", "repeat": False} if is_pass else {"order": "global"}
    spec = spec_of(records, how.pop("order"), PLAIN, record_ids=True, **how)
    compare_devices(spec, 6 if is_pass else 3, step=0 if is_pass else 1)
    assert placed == [False] * 3


@pytest.mark.slow
def test_iterators_in_turn_and_at_once(records):
    spec = spec_of(records, "global", PLAIN)
    dataset = make_dataset(spec, DALI, batch_size=4, endless=True)
    first = iter(dataset)
    expected = [next(first)[0].numpy() for _ in range(6)]
    check_iterators(dataset, expected)


EXIT = """
import os, sys
from dali_tf_input import *
from dali_tf_input.backends import dali, tf_data  # once for all
files, backend, order, count = sys.argv[1:]
for _ in range(4 if order == "buffer" else 0):  # chances; before TensorFlow has threads
    if not os.fork():
        break
    assert os.wait()[1] == 0
options = DaliOptions(device="cpu") if backend == "dali" else TfDataOptions()
spec = InputSpec.for_training(files, 16, order=order)
made = make_dataset(spec, options, batch_size=4, endless=True)
iterator, _ = iter(made.prefetch(16) if order == "buffer" else made), iter(made)
for _ in range(int(count)):
    next(iterator)
if backend == "dali":
    if not (child := os.fork()):  # which does nothing
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    next(iterator)
"""
ENDS = at_night(
    [("dali", "global", [2])],
    [(one, *how) for one in BACKENDS for how in (("global", range(20)), ("buffer", [30]))],
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(("backend", "order", "counts"), ENDS)
def test_a_process_forks_and_ends_while_it_reads(tmp_path, backend, order, counts):
    """Quietly: no thread waits for a Python that is gone; nor do iterators that gave nothing yet.

    In order "buffer" files are opened one after the other, all the time.
    """
    write_dataset(tmp_path, [2] * 60)
    for count in counts:
        files = tmp_path / "train-*-of-?????"
        process = python("-c", EXIT, files, backend, order, count)
        assert process.returncode == 0, process.stderr
        assert "Traceback" not in process.stderr


def test_without_the_operator(records, tmp_path, monkeypatch):
    """What is missing, and what compiles it; also where one is of another DALI."""
    monkeypatch.setattr(dali_operator, "find_library", lambda: tmp_path / "lib.so")
    spec = spec_of(records, "global", PLAIN)
    load = dali_operator.load_operator.__wrapped__
    monkeypatch.setattr(dali, "load_operator", load)
    text = "needs an operator that is compiled against the installed DALI, .*lib.so is not there"
    with refused(f"{text}.*python -m dali_tf_input.backends.dali_operator. Or use TfDataOptions"):
        make_dataset(spec, DALI, batch_size=4)
    (tmp_path / "lib.so").write_bytes(b"no library")
    with refused("lib.so cannot be loaded: .*Compile it again: .*dali_operator"):
        make_dataset(spec, DALI, batch_size=4)


def test_its_name_has_the_versions(monkeypatch, tmp_path):
    """A library of another DALI, or of another source, is not found."""
    library = dali_operator.find_library()
    assert library.exists()
    monkeypatch.setattr(dali_operator.dali, "__version__", "9.9.9")
    assert "-9.9.9-" in dali_operator.find_library().name
    monkeypatch.undo()
    native = shutil.copytree(dali_operator._NATIVE, tmp_path / "native")
    monkeypatch.setattr(dali_operator, "_NATIVE", native)
    assert dali_operator.find_library().name == library.name
    (native / "read.h").write_text("// another")
    assert dali_operator.find_library().name != library.name


@pytest.mark.nightly
def test_compiling(monkeypatch, tmp_path, capsys):
    """Anew where there was one of another version; and what may be missing."""
    native = shutil.copytree(dali_operator._NATIVE, tmp_path / "native")
    monkeypatch.setattr(dali_operator, "_NATIVE", native)
    monkeypatch.setattr(dali_operator, "load_operator", lambda: None)  # it is loaded already
    old = tmp_path / f"libdali_images-{dali_operator.dali.__version__}-abc.so"
    old.touch()
    (tmp_path / "libdali_images-1.0-abc.so").touch()  # of another environment
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert dali_operator.main() == 1
    assert "There is no " in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    (native / "packed.h").rename(native / "packed")
    (native / "packed.h").write_text("#error no layout")
    assert dali_operator.main() == 1
    assert "no layout" in capsys.readouterr().err
    (native / "packed").rename(native / "packed.h")
    assert dali_operator.main() == 0
    made = {path.name for path in tmp_path.glob("*.so")}
    assert made == {dali_operator.find_library().name, "libdali_images-1.0-abc.so"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]
    monkeypatch.setattr(dali_operator, "_CUDA_HEADERS", ("gone.h",))
    with refused("CUDA's header gone.h is not there: .*pip install"):
        dali_operator.compile_operator()


def test_features_of_any_name(tmp_path):
    """Also those that a packed batch has values for."""
    names = ("sides", "mix", "partner", "packed")
    examples = [
        {"photo": jpeg(20, 30), "label": number, **{name: [number, 7] for name in names}}
        for number in range(4)
    ]
    path = tmp_path / "train-0"
    write_tfrecord(path, examples)
    dti.build_index(path, dti.Checks(image_key="photo", label=dti.ClassLabel(key="label")))
    records = dti.Records.from_files(path, image_key="photo")
    label = dti.ClassLabel(key="label", num_classes=5, one_hot=True)
    features = {name: dti.Stored(size=2) for name in names}
    how = {"label": label, "mix": dti.Mix(mixup=1.0), "features": features}
    spec = spec_of(records, "global", PLAIN, **how)
    made, expected = (next(iter(make_dataset(spec, one, batch_size=4))) for one in (DALI, TF_DATA))
    for name in features:
        np.testing.assert_array_equal(made[0][name], expected[0][name])


def test_dalis_own_reader_needs_no_operator(tmp_path, monkeypatch):
    """It serves order "buffer" on a GPU."""
    file = tmp_path / "train-0"
    records = write_indexed(file, examples_of([jpeg(20, 30)] * 4), dti.Checks(verify="schema"))

    def fail():
        raise AssertionError

    monkeypatch.setattr(dali, "load_operator", fail)
    gpu = dti.DaliOptions(device="gpu")
    dali.check_spec(spec_of(records, "buffer", PLAIN), gpu)
    with pytest.raises(AssertionError):
        dali.check_spec(spec_of(records, "global", PLAIN), gpu)
