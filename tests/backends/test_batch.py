"""Batches by one operation: the same as image by image, in memory that is used again."""

import contextlib
import dataclasses
import gc
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from commands import python, succeeds
from conftest import (
    TF_DATA,
    at_night,
    check_iterators,
    encode,
    jpeg,
    refused,
    spec_of,
    table,
    valid_images,
    write_indexed,
)
from google.protobuf.message import DecodeError
from PIL import Image
from test_parity import GIVEN
from test_pixels import example as as_pixels

import dali_tf_input as dti
from dali_tf_input import Preprocess, RandomResizedCrop, TfDataOptions
from dali_tf_input.augment import RandAugment, RandomErasing
from dali_tf_input.backends import tf_batch, tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.backends.locations import find_locations
from dali_tf_input.backends.parsing import parse_others, parse_record
from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.records.example import encode_example

PLAIN = Preprocess.for_training(32)
AUGMENTED = dataclasses.replace(
    PLAIN, crop=RandomResizedCrop(), augment=(RandAugment(), RandomErasing())
)


def progressive(height, width, *, seed=0):
    image = Image.fromarray(tf.io.decode_jpeg(jpeg(height, width, seed=seed)).numpy())
    return encode(image, "JPEG", progressive=True)


def examples_of(images):
    values = [[float(number), number + 0.5] for number in range(len(images))]
    return [
        {"image": image, "label": number % 5, "pair": pair}
        for number, (image, pair) in enumerate(zip(images, values, strict=True))
    ]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Records of which the operation refuses none, one, some and all."""
    folder = tmp_path_factory.mktemp("mixtures")
    sizes = [(40 + 7 * number, 90 - 5 * number) for number in range(12)]
    plain = [jpeg(*size, seed=number) for number, size in enumerate(sizes)]
    others = [progressive(*size, seed=number) for number, size in enumerate(sizes[:6])]
    made = {
        "none": plain,
        "one": [*plain[:7], others[0], *plain[8:]],
        "some": [*plain[:3], *others[:3], *plain[6:], *valid_images()],
        "all": [*others, encode(Image.new("RGB", (50, 60), "red"))],
    }
    return {
        name: write_indexed(folder / name, examples_of(images)) for name, images in made.items()
    }


def make_all(spec, options, how, **changes):
    return list(make_dataset(spec, dataclasses.replace(options, **changes), **how))


def compare(spec, options=TF_DATA, *, batch_size=4, **how):
    """Checks that batches are the same to the bit if the operation refuses all images."""
    how = {"batch_size": batch_size, **how}
    assert tf_batch.makes_batches(spec, options)
    made = make_all(spec, options, how)
    with pytest.MonkeyPatch.context() as patch:
        some = tf_native.make_batch
        none = {"maximum": 0.0}  # no image is so small
        patch.setattr(tf_native, "make_batch", lambda *args, **rest: some(*args, **rest | none))
        others = make_all(spec, options, how)
    assert len(made) == len(others) > 0
    for batch, other in zip(made, others, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, batch, other)
    return made


def compare_with_tensorflow(spec):
    """Does the same, and compares what TensorFlow's operations alone make, up to rounding."""
    made = compare(spec)
    others = make_all(spec, TF_DATA, {"batch_size": 4}, kernel="tensorflow")
    for batch, other in zip(made, others, strict=True):
        tf.nest.map_structure(check_close, batch, other)


def check_close(values, others):
    """Checks that images are the same but for rounding, and that other values are the same."""
    if values.shape.rank < 4:
        np.testing.assert_array_equal(values, others)
        return
    # Normalized: a level of 255 is 0.017. Where rounding takes the next one, an augmentation may
    # stretch it.
    difference = np.abs(np.subtract(values, others, dtype=np.float32))
    assert difference.mean() < 1e-3
    assert difference.max() <= (1 if values.dtype == tf.uint8 else 0.2)


GRAY = {"channels": 1, "mean": (120.0,), "std": (60.0,)}
MIXED = {
    "label": dti.ClassLabel(num_classes=5, one_hot=True),
    "mix": dti.Mix(mixup=0.4, cutmix=1.0),
}
WORK = {
    "plain": {},
    "uint8": {"preprocess": Preprocess.for_training(32, dtype="uint8", layout="CHW")},
    "half": {"preprocess": dataclasses.replace(PLAIN, dtype="float16")},
    "augmented": {"preprocess": AUGMENTED},
    "gray": {"preprocess": dataclasses.replace(AUGMENTED, **GRAY)},
    "features": {"features": {"pair": dti.Stored(size=2)}, "record_ids": True},
    "views": {"views": (PLAIN, AUGMENTED, dataclasses.replace(PLAIN, dtype="uint8"))},
    "mix": MIXED,
    "gray mix": {"preprocess": dataclasses.replace(PLAIN, **GRAY), **MIXED},
    "transformed mix": {
        "transform": lambda image, seed: tf.image.stateless_random_flip_up_down(image, seed),
        **MIXED,
    },
    "transform": {
        "transform": lambda image, seed: tf.image.stateless_random_brightness(image, 0.3, seed)
    },
}
REFUSED = ("none", "some", "one", "all")
USUAL = [
    ("uint8", "one"),
    ("features", "all"),
    ("views", "some"),
    ("gray mix", "none"),
    ("transformed mix", "some"),
]


@pytest.mark.slow
@table("work, refused_images", USUAL, WORK, REFUSED)
def test_the_same_as_image_by_image(mixtures, work, refused_images):
    changes = {"preprocess": PLAIN, **WORK[work]}
    preprocess = changes.pop("preprocess")
    compare_with_tensorflow(spec_of(mixtures[refused_images], "global", preprocess, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(["some"], ["some", "none", "all"]))
def test_masks(tmp_path, name):
    """PNGs and raw bytes, of images of all kinds."""
    sizes = [(40 + n, 60 - n) for n in range(8)]
    kinds = {"none": [jpeg], "all": [progressive], "some": [jpeg, progressive]}[name]
    examples = []
    for number, size in enumerate(sizes):
        mask = np.arange(np.prod(size), dtype=np.uint8).reshape(size)
        stored = encode(mask) if number % 2 else mask.tobytes()
        image = kinds[number // 2 % len(kinds)](*size, seed=number)
        examples.append({"image": image, "label": number % 5, "mask": stored})
    records = write_indexed(tmp_path / "train", examples)
    preprocess = dataclasses.replace(AUGMENTED, augment=(RandomErasing(),))
    mask = dti.SegmentationMask(key="mask", ignore=255)
    compare_with_tensorflow(spec_of(records, "global", preprocess, mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", at_night(["views"], ["plain", "augmented", "views", "mix", "gray"])
)
def test_pixels(tmp_path, work):
    """Images that are stored as pixels, of many sizes."""
    random = np.random.default_rng(0)
    images = [random.integers(256, size=(30 + n, 90 - 5 * n, 3), dtype=np.uint8) for n in range(9)]
    stored = [as_pixels(image, number % 5) for number, image in enumerate(images)]
    changes = {"preprocess": PLAIN, **WORK[work]}
    records = write_indexed(tmp_path / "train", stored)
    examples = [*tf.data.TFRecordDataset(records.paths).as_numpy_iterator()]
    assert make_of_records(spec_of(records, "global", PLAIN), examples).refused_indices.shape == (
        0,
    )
    compare(spec_of(records, "global", changes.pop("preprocess"), **changes))


def test_many_views(mixtures):
    """As many as the operations have outputs for."""
    small = Preprocess.for_training(4)
    views = (small,) * 64
    spec = spec_of(mixtures["one"], "global", small, views=views)
    made = next(iter(make_dataset(spec, batch_size=12)))[0]
    assert len([name for name in made if name.startswith("image_")]) == 64
    with refused("`views` must be 2 to 64, got 65"):
        spec_of(mixtures["one"], "global", small, views=(*views, small))


def test_images_that_are_features(tmp_path):
    """Each comes with its own bytes, and is made as without them."""
    images = [jpeg(40, 60, seed=1), progressive(50, 30), jpeg(30, 30, seed=2)] * 2
    examples = [{"image/encoded": image, "label": 1} for image in images]
    records = write_indexed(tmp_path / "train", examples)
    spec = spec_of(records, "global", PLAIN, record_ids=True)
    with_images = dataclasses.replace(spec, features={"image/encoded": dti.Stored()})
    made, other = (make_dataset(one, batch_size=3).take(2) for one in (with_images, spec))
    for (inputs, labels), (plain, _) in zip(made, other, strict=True):
        np.testing.assert_array_equal(inputs["image"], plain["image"])
        ids = inputs["record_id"].numpy()
        assert ids.tolist() == plain["record_id"].numpy().tolist()
        assert inputs["image/encoded"].numpy().tolist() == [images[record] for record in ids]
        assert labels.numpy().tolist() == [1] * 3


def test_a_feature_of_no_message(tmp_path):
    """A record that would end TensorFlow's parser is refused before it is parsed."""
    valid = encode_example({"image/encoded": jpeg(20, 30), "label": 1})
    place = valid.index(b"\xff\xd8\xff") - 2  # the length of the image's bytes
    examples = [valid] * 3 + [valid[:place] + bytes([valid[place], 0xFA]) + valid[place + 2 :]]
    with tf.io.TFRecordWriter(str(tmp_path / "train")) as writer:
        for one in examples:
            writer.write(one)
    dti.build_index(tmp_path / "train")
    records = dti.Records.from_files(tmp_path / "train")
    with_image = {"image/encoded": dti.Stored()}
    spec = spec_of(records, "sequential", PLAIN, features=with_image)
    with pytest.raises(tf.errors.DataLossError, match="not a serialized"):
        list(make_dataset(spec, batch_size=4))


SERIAL = {"num_parallel_calls": 1, "num_parallel_reads": 1, "prefetch_batches": 0}
OPTIONS = {
    "scaled": TfDataOptions(decode="scaled"),
    "serial": TfDataOptions(decode="full", check_crc=False, autotune=False, **SERIAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(mixtures, options):
    compare(spec_of(mixtures["some"], "global", AUGMENTED), options)


@pytest.mark.slow
def test_orders(mixtures):
    """Order "buffer", from the middle, endless, and a shorter last batch."""
    records = mixtures["some"]
    compare(spec_of(records, "buffer", PLAIN))
    compare(spec_of(records, "global", PLAIN), start_step=2)
    spec = spec_of(records, "sequential", PLAIN, repeat=False)
    made = compare(spec, batch_size=5)
    assert len(made[-1][0]) == records.num_records % 5 > 0
    endless = make_dataset(spec_of(records, "global", PLAIN), batch_size=4, endless=True)
    whole = records.num_records // 4
    one = next(
        iter(make_dataset(spec_of(records, "global", PLAIN), batch_size=4, start_step=whole))
    )
    np.testing.assert_array_equal(next(iter(endless.skip(whole)))[0], one[0])


@pytest.mark.parametrize("count", [1, 3, 60])
def test_random_numbers(count):
    """Those of `StatelessRandomUniform`, for seeds and keys of all kinds."""
    keys = [0, -1, 7, (1 << 40) + 3, 1 << 62]
    for seed in (0, 5, (1 << 63) - 1):
        drawn = tf_native.draw_uniforms(tf.constant(keys, tf.int64), seed, count)
        for key, numbers in zip(keys, drawn.numpy(), strict=True):
            expected = tf.random.stateless_uniform((count,), tf.constant([seed, key], tf.int64))
            np.testing.assert_array_equal(numbers, expected)


def make_of_records(spec, examples):
    """Returns what the operation makes of serialized Examples."""
    changes = {
        "records": tf.constant(examples),
        "uniforms": tf.zeros((len(examples), spec.preprocess.num_uniforms)),
        "rows": tf.zeros((len(examples), 0, 13)),
        "image_keys": spec.records.image_keys,
        "size_keys": SIZE_KEYS if spec.records.stores_pixels else (),
    }
    return tf_native.make_batch(**{**GIVEN, **changes, "views": [spec.preprocess]})


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [at_night(100, 20_000)])
def test_examples(mixtures, rounds):
    """What the operation accepts, TensorFlow parses to the same; all else it leaves to it."""
    spec = spec_of(mixtures["none"], "global", PLAIN)
    random = np.random.default_rng(rounds)
    image = jpeg(20, 30)

    features = {"image": image, "label": 3, "pair": [1.0, 2.0], "é": b"x" * 300}

    def serialize(**changes):
        made = {key: value for key, value in {**features, **changes}.items() if value is not None}
        return encode_example(made)

    whole = serialize()
    odd = [
        b"",
        whole + whole,  # two Features, whose entries TensorFlow joins
        serialize(image=None),
        serialize(image=[]),
        serialize(image=[image, image]),
        serialize(image=3),
        serialize(label=None),
        serialize(image=b""),
        whole + b"\x12\x02ab",  # a field that is not known
    ]
    for _ in range(rounds):
        changed = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 3)):
            if random.random() < 0.7:  # near what is not the image
                place = int(place) % 40 if random.random() < 0.5 else len(whole) - 1 - place % 400
            changed[place] = random.integers(256)
        cut = random.integers(len(changed)) if random.random() < 0.1 else len(changed)
        odd.append(bytes(changed[:cut]))
    # What is no message is refused, and not given to TensorFlow: some of it ends the process.
    examples, not_examples, with_groups = odd[:9], 0, 0
    for example in odd[9:]:
        try:
            make_of_records(spec, [example])
            examples.append(example)
        except tf.errors.DataLossError as error:
            assert "not a serialized tf.train.Example" in error.message
            not_examples += 1
            with contextlib.suppress(DecodeError):
                tf.train.Example.FromString(example)
                with_groups += 1  # fields of an old kind, which no version of these messages had
    assert 0 < not_examples < rounds
    assert with_groups <= rounds // 5000
    odd = examples
    made = make_of_records(spec, odd)
    left = set(made.refused_indices.numpy().tolist())
    assert {0, 1, 2, 3, 4, 5, 7, 8} <= left
    assert 6 not in left
    assert len(left) < len(odd)
    assert made.refused.numpy().tolist() == [odd[place] for place in sorted(left)]

    @tf.function(input_signature=[tf.TensorSpec((), tf.string)])
    def parse(example):
        return parse_record(example, spec)

    images = make_of_records(spec, [whole]).images[0][0]
    failures = (tf.errors.OpError, UnicodeDecodeError)  # a message of TensorFlow's may be no UTF-8
    for place, example in enumerate(odd):
        try:
            expected = parse(example)
        except failures:
            expected = None
        try:
            values = parse_others(made.examples[place][None], spec)
            assert place not in left or parse(example) is not None
        except failures:
            assert expected is None, example
            continue
        assert expected is not None, example
        for name, value in values.items():
            np.testing.assert_array_equal(value[0], expected[name])
        if place not in left and expected["image"].numpy() == image:
            np.testing.assert_array_equal(made.images[0][place], images)


def test_an_error_is_the_same(mixtures, tmp_path, monkeypatch):
    """A file that is gone, changed, cut, or holds another byte, and an image that is none."""
    source = mixtures["none"]
    original = Path(source.files[0].path).read_bytes()

    def fail(spec):
        with pytest.raises(tf.errors.OpError) as caught:
            list(make_dataset(spec, batch_size=3))
        return type(caught.value), re.search(r"/\S+: .*again\.", caught.value.message).group()

    def flip(path):
        status = os.stat(path)
        data = bytearray(original)
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def cut(path):
        status = os.stat(path)
        os.truncate(path, len(original) - 200)
        os.truncate(path, len(original))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    for number, damage in enumerate([flip, cut]):
        path = tmp_path / f"train-{number}"
        shutil.copy2(source.files[0].path, path)
        examples = [{"image/encoded": jpeg(40, 60), "label": 1}] * 6
        spec = spec_of(write_indexed(path, examples), "sequential", PLAIN)
        original = path.read_bytes()
        damage(path)
        found = fail(spec)
        with_image = dict.fromkeys(spec.records.image_keys, dti.Stored())
        assert fail(dataclasses.replace(spec, features=with_image)) == found
        assert found[0] is tf.errors.DataLossError
        assert str(path) in found[1]
        path.unlink()
        with refused(f"{path} "):
            make_dataset(spec, batch_size=3)


def test_it_says_what_is_wrong(mixtures):
    spec = spec_of(mixtures["none"], "global", PLAIN)
    found = find_locations(spec.records)
    given = {
        "files": (found.names, found.versions, *found.where),
        "positions": tf.constant([0, 1], tf.int64),
        "uniforms": tf.zeros((2, 3)),
        "rows": tf.zeros((2, 0, 13)),
        "views": [PLAIN],
    }

    def make(**changes):
        return tf_native.make_batch(**{**GIVEN, **given, **changes})

    assert make().images[0].shape == (2, 32, 32, 3)
    wrong = {
        "no such record: 99": {"positions": tf.constant([0, 99], tf.int64)},
        "no such record: -1": {"positions": tf.constant([-1, 0], tf.int64)},
        "not both": {"records": tf.constant(["", ""])},
        "random numbers and rows": {"uniforms": tf.zeros((2, 4))},
        "a mix is 6 numbers": {"drawn": tf.zeros(5)},
        "a weight must be in": {"drawn": tf.constant([2.0, 0, 0, 0, 0, 0])},
        "views cannot be mixed": {
            "views": [PLAIN, PLAIN],
            "drawn": tf.zeros(6),
            "uniforms": tf.zeros((2, 6)),
        },
        "num_readers and num_threads must be": {"num_readers": 0},
        r"num_threads must be in \[1, 1024\]": {"num_threads": 1025},
        "1 to 60 image keys": {"image_keys": []},
        "no or 2 size keys": {"size_keys": ["image/height"]},
        "a version for each file": {"files": (found.names, found.versions[:0], *found.where)},
    }
    for text, changes in wrong.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            make(**changes)
    empty = make(
        positions=tf.zeros(0, tf.int64), uniforms=tf.zeros((0, 3)), rows=tf.zeros((0, 0, 13))
    )
    assert empty.images[0].shape == (0, 32, 32, 3)
    assert empty.examples.shape == (0,)


def test_placing(mixtures):
    """In a batch of the operation, in any other, and beyond it."""
    spec = spec_of(mixtures["none"], "global", PLAIN)
    example = tf.data.TFRecordDataset(spec.records.paths[0]).take(1).get_single_element()
    images = make_of_records(spec, [example.numpy()] * 3).images[0]
    before = images.numpy().copy()
    made = tf.ones((1, 32, 32, 3))
    copied = tf.constant(before)
    for batch in (copied, images):
        placed = tf_native.paste_images(batch, made, tf.constant([1], tf.int64), tf.zeros(0), PLAIN)
        np.testing.assert_array_equal(placed[1], made[0])
        np.testing.assert_array_equal(placed[0], before[0])
    np.testing.assert_array_equal(copied, before)
    for places in ([3], [-1], [0, 1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"places|an image is needed"):
            tf_native.paste_images(images, made, tf.constant(places, tf.int64), tf.zeros(0), PLAIN)


def test_batches_that_are_kept(mixtures):
    """Nothing writes to a batch that a program still holds, nor to a view of its memory."""
    spec = spec_of(mixtures["none"], "global", PLAIN)
    iterator = iter(make_dataset(spec, batch_size=4, endless=True))
    held = [next(iterator)[0] for _ in range(6)]
    copies, views = [batch.numpy().copy() for batch in held], [np.asarray(batch) for batch in held]
    assert all(view.ctypes.data % 64 == 0 for view in views)
    for _ in range(50):
        next(iterator)
    del iterator, held[3:]
    gc.collect()
    for copy, view in zip(copies, views, strict=True):
        np.testing.assert_array_equal(copy, view)


@pytest.mark.nightly
def test_iterators_in_turn_and_at_once(mixtures):
    spec = spec_of(mixtures["some"], "global", AUGMENTED)
    dataset = make_dataset(spec, batch_size=4, endless=True)
    expected = [batch[0].numpy() for batch in dataset.take(6)]
    check_iterators(dataset, expected)


FAULTS = """
import os, resource, sys
import tensorflow as tf
from dali_tf_input import *
records, kind = Records.from_files(sys.argv[1]), sys.argv[2]
augment = (augment.RandAugment(), augment.RandomErasing()) if kind == "augment" else ()
mixed = {"label": ClassLabel(num_classes=5, one_hot=True), "mix": Mix(mixup=0.4, cutmix=1.0)}
spec = InputSpec.for_training(
    records, Preprocess.for_training(224, augment=augment), **(mixed if kind == "mix" else {})
)
iterator = iter(make_dataset(spec, TfDataOptions(), batch_size=16, endless=True))

def serve(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        next(iterator)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count / 16

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

serve(60)
print(min(serve(20) for _ in range(5)))
before = resident()
del iterator
import gc; gc.collect()
tf.random.normal([]).numpy()
print((before - resident()) // (16 * 3 * 224 * 224 * 4))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "mix", "augment"])
def test_memory_is_used_again(tmp_path, kind):
    """Without a pool of TensorFlow's: a fresh image of 224 pixels would be 147 page faults.

    When the dataset is gone, so are its batches.
    """
    images = [jpeg(120, 160, seed=seed) for seed in range(16)]
    records = write_indexed(tmp_path / "train", examples_of(images * 2))
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    process = succeeds(python("-c", FAULTS, records.paths[0], kind, env=environment), quiet=False)
    faults, batches_freed = map(float, process.stdout.split())
    assert faults < 10
    assert batches_freed >= 2
