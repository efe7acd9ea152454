"""Labels of every kind, record ids, masks and further features: the same from both backends."""

import contextlib
import dataclasses
import functools
import io
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    DALI,
    TF_DATA,
    at_night,
    encode,
    jpeg,
    refused,
    spec_of,
    table,
    write_indexed,
    write_tfrecord,
)
from PIL import Image

import dali_tf_input as dti
from dali_tf_input import ClassLabel, MultiHot, SegmentationMask, Stored, Values
from dali_tf_input.index.decoders import make_trial_decode
from dali_tf_input.records.checks import InvalidRecord, check_mask, find_schema_problem
from dali_tf_input.records.example import decode_example, encode_example
from dali_tf_input.spec.crops import NoCrop
from dali_tf_input.spec.rules import find_vectors

COUNTS = (5, 12, 7)
RECORDS = sum(COUNTS)
NAMES = ("cat", "dog", "horse")
ORDERS = ("global", "pass", "buffer", "sequential")
SMALL = dti.Preprocess(image_size=(8, 8), dtype="uint8")
EITHER = (DALI, TF_DATA)
LABELS = {
    "class": ClassLabel(key="class", num_classes=3, one_hot=True, smoothing=0.3),
    "name": ClassLabel(key="name", vocabulary=NAMES),
    "multi_hot": MultiHot(key="list", num_classes=90, offset=1),
    "values": Values(key="box", size=4),
    "integers": Values(key="pair", size=2),
    "offset": ClassLabel(key="class", offset=-1000),
    "none": None,
}


def list_of(number: int) -> list[int]:
    """The classes of a record: none, one, or 80; they count from 1."""
    return [[], [number + 1], [*range(3, 83)]][number % 3]


def make_example(number: int) -> dict:
    random = np.random.default_rng(number)
    # Of odd sides: then no pixel lies exactly between two, where rounding decides.
    image = random.integers(0, 256, (19 + 2 * (number % 9), 41 - 2 * (number % 7), 3), np.uint8)
    mask = image[..., 0] if number % 2 else image[..., 0].tobytes()
    return {
        "image": encode(image),
        "class": number % 3,
        "name": NAMES[number % 3],
        "list": list_of(number),
        "box": [number / 8, 0.5, -1.0, 2.0],
        "pair": [number, -number],
        "mask": encode(Image.fromarray(mask)) if number % 2 else mask,
        "filename": f"{number}.png",
        "scores": [0.5] * (number % 4),
    }


def expect_label(kind: str, number: int):
    if kind == "class":
        return np.eye(3, dtype=np.float32)[number % 3] * np.float32(0.7) + np.float32(0.1)
    if kind == "multi_hot":
        hot = np.zeros(90, np.float32)
        hot[[one - 1 for one in list_of(number)]] = 1
        return hot
    expected = {"name": number % 3, "values": make_example(number)["box"]}
    expected |= {"offset": number % 3 + 1000}
    return expected.get(kind, [number, -number])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for position, count in enumerate(COUNTS):
        first = sum(COUNTS[:position])
        examples = [make_example(number) for number in range(first, first + count)]
        write_tfrecord(folder / f"train-{position}", examples)
    dti.build_index(folder / "train-*")
    return dti.Records.from_files(folder / "train-*")


def feed(records, options, order, *, num_replicas=1, batch_size=4, **changes):
    preprocess = changes.pop("preprocess", SMALL)
    if order == "pass":
        order, changes = "sequential", {**changes, "repeat": False}
    devices = [f"CPU:{number}" for number in range(num_replicas)]
    return dti.load(
        spec_of(records, order, preprocess, **changes),
        options,
        strategy=tf.distribute.MirroredStrategy(devices) if num_replicas > 1 else None,
        batch_size=batch_size,
    )


def elements(fed, steps):
    """The values of the records of some steps, over all replicas, each with its name."""
    rows = []
    for _, batch in zip(range(steps), fed.dataset, strict=False):
        parts = keras.tree.flatten(batch)
        split = [
            fed.strategy.experimental_local_results(one) if fed.strategy else [one] for one in parts
        ]
        for replica in zip(*split, strict=True):
            arranged = keras.tree.pack_sequence_as(batch, replica)
            x, *others = arranged
            named = dict(x) if isinstance(x, dict) else {"image": x}
            if fed.spec.label or fed.spec.mask:
                y, *others = others
                named |= y if isinstance(y, dict) else {"label" if fed.spec.label else "mask": y}
            named |= dict(zip(["weight"], others, strict=False))
            arrays = {name: value.numpy() for name, value in named.items()}
            rows += [
                {name: array[row] for name, array in arrays.items()}
                for row in range(len(arrays["image"]))
            ]
    return rows


# Each kind, order and backend, and one kind in each order.
USUAL = [
    ("class", "global", 1, TF_DATA),
    ("name", "sequential", 1, DALI),
    ("values", "pass", 1, TF_DATA),
    ("integers", "global", 1, DALI),
    ("none", "sequential", 1, DALI),
    ("offset", "sequential", 1, TF_DATA),
    ("multi_hot", "global", 2, DALI),
    ("multi_hot", "pass", 2, TF_DATA),
    ("multi_hot", "buffer", 1, TF_DATA),
    ("multi_hot", "sequential", 1, DALI),
]


@table("kind, order, num_replicas, options", USUAL, LABELS, ORDERS, [1, 2], EITHER)
def test_labels(records, kind, order, num_replicas, options):
    """Every kind comes out as it was stored, with its own record, in every order."""
    how = {"label": LABELS[kind], "record_ids": True, "num_replicas": num_replicas}
    fed = feed(records, options, order, **how)
    if kind == "class" and num_replicas == 1:
        size = None if order == "pass" else 4
        assert fed.dataset.element_spec[1] == tf.TensorSpec((size, 3), tf.float32)
    rows = elements(fed, fed.steps_per_epoch)
    found = sorted(int(row["record_id"]) for row in rows if row.get("weight", 1))
    if order != "buffer" and (order != "sequential" or num_replicas == 1):
        assert found == [*range(RECORDS)]
    assert len({*found}) == len(found) or order == "buffer"
    for row in rows:
        number = int(row["record_id"])
        assert ("label" in row) == (kind != "none")
        if kind != "none":
            np.testing.assert_allclose(row["label"], expect_label(kind, number), atol=1e-6)


MASK = SegmentationMask(key="mask", ignore=7)
CROPS = {
    "resize": NoCrop(),
    "random": dti.ResizeRandomCrop(resize=(24, 24)),
    "resized": dti.RandomResizedCrop(),
    "center": dti.CenterCrop(resize_shorter=20),
    "padded": dti.RandomCrop(),
}


@pytest.mark.slow
@table(
    "crop, options", [("random", TF_DATA), ("resized", DALI), ("padded", TF_DATA)], CROPS, EITHER
)
def test_masks_stay_with_their_images(records, options, crop):
    """A mask that is one of the image's own channels is that channel of what comes out."""
    preprocess = dti.Preprocess(
        image_size=(16, 30 if crop == "padded" else 16),
        crop=CROPS[crop],
        interpolation="nearest",
        mirror_probability=0.5,
        dtype="uint8",
    )
    how = {"label": None, "mask": MASK, "preprocess": preprocess}
    fed = feed(records, options, "global", **how)
    rows = [row for _ in range(2) for row in elements(fed, 6)]
    assert len(rows) == 2 * RECORDS
    padding = 0
    for row in rows:
        red, mask = row["image"][..., 0].astype(np.int32), row["mask"]
        assert (mask.shape, mask.dtype) == (preprocess.image_size, np.int32)
        outside = (row["image"] == 0).all(-1) & (mask == MASK.ignore)
        padding += outside.sum()
        np.testing.assert_array_equal(np.where(outside, 0, mask), red)
    assert bool(padding) == (crop == "padded")


@pytest.mark.slow
def test_masks_are_the_same_from_both(records):
    """With any resize of the images, and for images of the training preprocessing."""
    preprocess = dti.Preprocess.for_training(16)
    how = {"label": LABELS["class"], "mask": MASK, "preprocess": preprocess}
    one, other = (elements(feed(records, options, "pass", **how), 6) for options in EITHER)
    for row, twin in zip(one, other, strict=True):
        np.testing.assert_array_equal(row["mask"], twin["mask"])
        assert row.keys() == {"image", "label", "mask"}


@pytest.mark.parametrize("options", at_night([DALI], EITHER))
def test_features_that_are_too_long(records, options):
    """The record is named, where the index step did not see it."""
    dataset = dataclasses.replace(records, features={})
    how = {"features": {"list": Stored(size=9, padding=0)}, "label": LABELS["class"]}
    with pytest.raises(
        dti.BadRecordError, match="`features` 'list' must be 0 to 9 values, found 80"
    ):
        list(feed(dataset, options, "pass", **how))


@pytest.mark.parametrize("options", at_night([TF_DATA], EITHER))
def test_further_features(records, options):
    """As they are stored; those of fewer values are padded."""
    features = {"pair": Stored(size=2), "scores": Stored(size=4, padding=-1.0), "class": Stored()}
    features |= {"filename": Stored()} if options is TF_DATA else {}
    fed = feed(records, options, "pass", features=features, label=LABELS["name"])
    for number, row in enumerate(elements(fed, 6)):
        scores = [0.5] * (number % 4)
        assert row["pair"].tolist() == [number, -number]
        assert row["scores"].tolist() == [*scores, *[-1.0] * (4 - len(scores))]
        assert (row["class"], row["label"]) == (number % 3, number % 3)
        assert row.get("filename", f"{number}.png".encode()) == f"{number}.png".encode()
        assert records.read(number)["filename"] == [f"{number}.png".encode()]


def test_dali_has_no_strings(records):
    with refused("DALI does not support strings, as `features` 'filename': use TfDataOptions"):
        feed(records, DALI, "pass", label=None, features={"filename": Stored()})


WEIGHTS = {"global": {0: 2.0, 2: 0.5}, "buffer": {1: 0.0}}


@pytest.mark.slow
@table(
    "order, num_replicas, options",
    [("global", 2, TF_DATA), ("buffer", 1, DALI)],
    WEIGHTS,
    [1, 2],
    EITHER,
)
def test_class_weight(records, order, options, num_replicas):
    """Weights of classes are sample weights, in every order and with one-hot labels."""
    label, given = ClassLabel(key="class", num_classes=4, one_hot=True), WEIGHTS[order]
    how = {"label": label, "class_weight": given, "num_replicas": num_replicas}
    for row in elements(feed(records, options, order, **how), 6):
        assert row["weight"] == given.get(int(row["label"].argmax()), 1.0)


def test_balanced_weights(records, tmp_path):
    """As scikit-learn computes them; every class has the same weight in all."""
    examples = [{"image": encode(np.zeros((4, 4, 3))), "label": 5 + (n == 0)} for n in range(8)]
    file = write_tfrecord(tmp_path / "train", examples)
    dti.build_index(file)
    how = {"class_weight": "balanced", "label": ClassLabel(offset=5)}
    with refused("`class_weight` 'balanced' needs the classes of all records: .*--verify=schema"):
        spec_of(dti.Records.from_files(file), "global", SMALL, **how)
    dti.build_index(file, dti.Checks(verify="schema"))
    fed = feed(dti.Records.from_files(file), TF_DATA, "global", batch_size=8, **how)
    assert fed.spec.class_counts == ((0, 7), (1, 1))
    rows = elements(fed, 1)
    assert sorted(float(row["weight"]) for row in rows) == pytest.approx([4 / 7] * 7 + [4.0])


TASKS = [
    ("multi_label", 1, DALI),
    ("weighted", 2, TF_DATA),
    ("segmentation", 1, TF_DATA),
    ("regression", 1, TF_DATA),
    ("segmentation", 2, DALI),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "num_replicas", "options"), at_night(TASKS[:1], TASKS))
def test_keras_trains(records, task, num_replicas, options):
    """Keras trains and evaluates on several labels, at night on each kind of target."""
    layers, losses = keras.layers, keras.losses
    head = [layers.Flatten(), layers.Dense(90)]
    how, loss = {"label": LABELS["multi_hot"]}, losses.BinaryCrossentropy(from_logits=True)
    if task == "regression":
        head[1], how, loss = layers.Dense(4), {"label": LABELS["values"]}, losses.MeanSquaredError()
    if task == "segmentation":
        head, how = [layers.Conv2D(256, 1)], {"label": None, "mask": MASK}
        loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=7)
    if task == "weighted":
        how = {"label": LABELS["name"], "class_weight": {0: 3.0}}
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    how["preprocess"] = dti.Preprocess.for_training(8)
    train = feed(records, options, "global", num_replicas=num_replicas, **how)
    how.pop("class_weight", None)
    held_out = feed(records, options, "pass", num_replicas=num_replicas, batch_size=10, **how)
    keras.utils.set_random_seed(0)
    with train.strategy.scope() if train.strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, padding="same"), *head]
        )
        model.compile("adam", loss)
    if train.strategy:
        held_out = dti.load(held_out.spec, options, strategy=train.strategy, batch_size=10)
    history = train.fit(model, epochs=2, validation=held_out, verbose=0).history
    assert history["val_loss"][1] < history["val_loss"][0]
    assert len(held_out.predict(model, verbose=0)) == RECORDS


GRAY, RGB = np.zeros((5, 5), np.uint8), np.zeros((19, 41, 3), np.uint8)
BAD = {  # what is stored instead, kind of label, reason, level of checking, whether training stops
    "no list": ({"list": None}, "multi_hot", "label missing", "schema", False),
    "out of range": ({"list": [1, 91]}, "multi_hot", "label range", "schema", True),
    "below the offset": ({"list": [0]}, "multi_hot", "label range", "schema", True),
    "floats": ({"class": 0.5}, "class", "label kind", "schema", True),
    "two classes": ({"class": [0, 1]}, "class", "label kind", "schema", True),
    "unknown name": ({"name": "cow"}, "name", "label range", "schema", True),
    "short": ({"box": [0.5] * 3}, "values", "label kind", "schema", True),
    "not a number": ({"box": [float("nan")] * 4}, "values", "label range", "schema", False),
    "no mask": ({"mask": None}, "none", "mask missing", "schema", True),
    "other size": ({"mask": encode(Image.fromarray(GRAY))}, "none", "mask kind", "decode", True),
    "colors": ({"mask": encode(Image.fromarray(RGB))}, "none", "mask kind", "decode", True),
    "few bytes": ({"mask": bytes(99)}, "none", "mask kind", "decode", True),
}


def checks_of(kind: str, level: str) -> dti.Checks:
    mask_key = "mask" if kind == "none" else None
    return dti.Checks(verify=level, label=LABELS[kind], mask_key=mask_key, decoder="tf_data")


def write_bad(folder, name):
    """Writes 18 records, of which number 9 is bad; returns their file, and what an input takes."""
    change, kind, *_ = BAD[name]
    examples = [make_example(number) for number in range(18)]
    examples[9] = {key: one for key, one in (examples[9] | change).items() if one is not None}
    how = {"label": LABELS[kind], "mask": MASK if kind == "none" else None}
    return write_tfrecord(folder / "train", examples), how


@pytest.mark.parametrize("name", BAD)
def test_each_fault_has_its_reason(name):
    change, kind, reason, level, _ = BAD[name]
    example = {key: one for key, one in (make_example(9) | change).items() if one is not None}
    features, checks = decode_example(encode_example(example)), checks_of(kind, level)
    about = {"label": checks.label, "mask_key": checks.mask_key}
    found = find_schema_problem(features, image_key="image", **about)
    if level == "decode":
        assert found is None
        size = Image.open(io.BytesIO(example["image"])).size[::-1]
        with pytest.raises(InvalidRecord) as caught:
            check_mask(example["mask"], size, make_trial_decode(checks))
        found = caught.value.args
    assert found[0] == reason


# The others, each rule of the parsing, at night.
USUALLY = ["out of range", "unknown name", "other size"]
STOPPING = [name for name, (*_, stops) in BAD.items() if stops]


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
@pytest.mark.parametrize(
    ("name", "options"), [*zip(at_night(USUALLY, STOPPING), itertools.cycle(EITHER), strict=False)]
)
def test_training_names_bad_records(records, tmp_path, name, options):
    """Where the index step did not look: with the command that would have found them."""
    _, kind, reason, *_ = BAD[name]
    file, how = write_bad(tmp_path, name)
    dti.build_index(file)
    features = {
        key: dataclasses.replace(feature, range=None) for key, feature in records.features.items()
    }
    unchecked = dataclasses.replace(dti.Records.from_files(file), features=features)
    with pytest.raises(dti.BadRecordError) as caught:  # by `load`, if it reads so far
        fed = feed(unchecked, options, "pass", **how)
        list(fed)
    assert (caught.value.bad_record.record, caught.value.bad_record.reason) == (9, reason)
    flags = {"multi_hot": "--label=multi_hot --label_offset=1 --num_classes=90"}
    flags |= {"values": "--label=values --label_size=4", "name": "--vocabulary=labels.txt"}
    flags |= {"none": "--label=none --mask_key=mask"}
    assert flags.get(kind, "--label_key=class") in str(caught.value)


OUT_OF_RANGE = {
    "offset": (dti.ClassLabel(offset=1), 0),
    "num_classes": (dti.ClassLabel(num_classes=6), 6),
    "one-hot": (dti.ClassLabel(num_classes=6, one_hot=True), 6),
    "one-hot, offset": (dti.ClassLabel(offset=1, num_classes=6, one_hot=True), 0),
}
KINDS = (TF_DATA, dti.TfDataOptions(kernel="tensorflow"), DALI)


@pytest.mark.slow
@table("kind, options", [("offset", TF_DATA), ("one-hot", DALI)], OUT_OF_RANGE, KINDS)
def test_a_class_that_no_sample_shows(tmp_path, options, kind):
    """Of 300 records the index step samples some, of which none has the wrong class."""
    label, stored = OUT_OF_RANGE[kind]
    labels = [stored if number == 50 else 1 + number % 5 for number in range(300)]
    examples = [{"image": jpeg(9, 9), "label": one} for one in labels]
    records = write_indexed(tmp_path / "train-0", examples)
    assert records.features["label"].range == (1, 5)
    evaluated = dti.load(spec_of(records, "sequential", SMALL, label=label), options, batch_size=60)
    with pytest.raises(dti.BadRecordError, match=f"record 50, .*label range.* found {stored}"):
        list(evaluated)


def test_lists_of_a_0_or_1_for_each_class(tmp_path):
    """They are no numbers of classes: all records would get the classes 0 and 1."""
    examples = [{"image": jpeg(9, 9), "label": [n % 2, 1 - n % 2]} for n in range(4)]
    records = write_indexed(tmp_path / "train-0", examples, dti.Checks(label=None))
    for_training = functools.partial(dti.InputSpec.for_training, records, 8)
    with refused("all of them 0 or 1, so they are no numbers of classes.*Values.size=2."):
        for_training(label=dti.MultiHot(key="label", num_classes=2))
    assert find_vectors(for_training(label=dti.MultiHot(key="label", num_classes=3))) == 2
    made = dti.load(for_training(label=dti.Values(key="label", size=2)), TF_DATA, batch_size=4)
    assert sorted(next(iter(made))[1].numpy().tolist()) == [[0, 1], [0, 1], [1, 0], [1, 0]]


def test_balanced_weights_of_many_classes(tmp_path):
    """More than the index step lists; a billion that were typed have no weights."""
    image = jpeg(9, 9)
    examples = [{"image": image, "label": n} for n in range(10_500)]
    records = write_indexed(tmp_path / "train-0", examples, dti.Checks(verify="schema"))
    for_training = functools.partial(dti.InputSpec.for_training, records, 8)
    assert for_training(class_weight="balanced").class_weights() == [1.0] * 10_500
    with refused("`num_classes` must be at most 1,048,576, got 1000000000"):
        for_training(label=dti.ClassLabel(num_classes=10**9), class_weight={0: 2.0})


@pytest.mark.parametrize("options", at_night([TF_DATA], EITHER))
def test_a_feature_that_some_records_lack(tmp_path, options):
    """With a default they need not have it."""
    examples = [{"image": jpeg(9, 9), "label": n, "score": 0.5 + n} for n in range(4)]
    del examples[0]["score"], examples[2]["score"]
    records = write_indexed(tmp_path / "train-0", examples, dti.Checks(verify="schema"))
    with refused("`features` 'score' is not in record 0"):
        dti.InputSpec.for_evaluation(records, 8, features={"score": Stored()})
    features = {"score": Stored(padding=-1.0), "image/none": Stored(padding=-1.0)}
    with refused("'image/none' is not in the records"):
        dti.InputSpec.for_evaluation(records, 8, features=features)
    del features["image/none"]
    spec = dti.InputSpec.for_evaluation(records, 8, features=features)
    inputs, _ = next(iter(dti.load(spec, options, batch_size=4)))
    assert inputs["score"].numpy().tolist() == [-1.0, 1.5, -1.0, 3.5]


def test_names_that_a_sample_does_not_place(tmp_path):
    """Whether the first of six names is that of label 0 or 1."""
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\nf\n")
    labels = [6 if number == 50 else 1 + number % 5 for number in range(300)]
    examples = [{"image": jpeg(9, 9), "label": one} for one in labels]
    records = write_indexed(tmp_path / "train-0", examples)
    spec = functools.partial(dti.InputSpec.for_training, label=dti.ClassLabel(offset=1))
    assert spec(records, 8).class_names is None
    records = write_indexed(tmp_path / "train-0", examples, dti.Checks(verify="schema"))
    assert spec(records, 8).class_names == ("a", "b", "c", "d", "e", "f")
    examples[50]["label"] = 5
    records = write_indexed(tmp_path / "train-0", examples)
    assert spec(records, 8).class_names == ("b", "c", "d", "e", "f")


def test_what_the_manifest_says(tmp_path):
    """Ranges, the records of each class, the longest list."""
    file = write_tfrecord(tmp_path / "train", [make_example(number) for number in range(18)])
    summary = dti.build_index(file, checks_of("multi_hot", "schema")).summary
    feature = summary.features["list"]
    assert (feature.range, feature.lengths) == ((2, 82), (0, 80))
    assert (dict(feature.counts)[50], len(feature.counts)) == (6, 81)
    spec = spec_of(dti.Records.from_files(file), "global", SMALL, label=LABELS["multi_hot"])
    assert (spec.label_range, len(spec.class_counts)) == ((1, 81), 81)
    features = dti.build_index(file, checks_of("values", "schema")).summary.features
    assert features["box"].range == (-1.0, 17 / 8)
    assert {feature.counts for feature in features.values()} == {None}
    for kind in ("values", "integers"):
        spec = spec_of(dti.Records.from_files(file), "global", SMALL, label=LABELS[kind])
        assert (spec.label_range, spec.class_counts) == (None, None)
    features = dti.build_index(file, checks_of("class", "schema")).summary.features
    assert features["class"].counts == ((0, 6), (1, 6), (2, 6))
