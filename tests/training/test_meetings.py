"""Inputs that meet must agree: training and validation, and a model and what it was trained on."""

import dataclasses

import keras
import pytest
from conftest import DALI, encode, jpeg, refused, write_indexed
from models import FROM_LOGITS, make_model, save_at
from PIL import Image

import dali_tf_input as dti
from dali_tf_input.spec.meetings import check_agreement, compare_masks, find_common

ONE_HOT = dti.ClassLabel(num_classes=3, one_hot=True)


def write(folder, names):
    folder.mkdir()
    if names:
        (folder / "labels.txt").write_text("".join(f"{name}\n" for name in names))
    examples = [
        {"image": jpeg(9, 12, seed=n), "label": n % 3, "pair": [0.0, 1.0], "tags": [n % 3]}
        for n in range(6)
    ]
    return write_indexed(folder / "train-0", examples, dti.Checks(verify="schema"))


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    names = {"named": "abc", "other": "bac", "fewer": "ab", "unnamed": ""}
    return {name: write(folder / name, letters) for name, letters in names.items()}


def load(sets, which="named", *, training=False, **fields):
    make = dti.InputSpec.for_training if training else dti.InputSpec.for_evaluation
    return dti.load(make(sets[which], 8, **fields), DALI, batch_size=3)


def fit(sets, valid, *, of_training=None, **how):
    train = load(sets, training=True, **(of_training or {}))
    outputs = 3 if not isinstance(train.spec.label, dti.Values) else 2
    loss = "sparse_categorical_crossentropy"
    if (of_training or {}).get("label"):
        loss = "mse"
    model = make_model(8, outputs, loss=loss, run_eagerly=True)
    train.fit(model, validation=valid, verbose=0, **how)
    return model


DIFFERENT = [
    ({"which": "other"}, {}, "class 0 is 'a' and 'b'"),
    ({"normalization": None}, {}, "normalized by mean .123.7, .* and by mean 0"),
    ({"dtype": "uint8"}, {}, "pixels are normalized"),
    ({"mean": (0.0, 0.0, 0.0)}, {}, "pixels are normalized"),
    ({"layout": "CHW"}, {}, "`layout` is 'HWC' and 'CHW'"),
    ({"channels": 1, "mean": (120.0,), "std": (60.0,)}, {}, "`channels` is 3 and 1"),
    ({"label": ONE_HOT}, {}, "labels are one-hot in one of them"),
    ({}, {"label": ONE_HOT}, "labels are one-hot in one of them"),
    (
        {"label": dti.ClassLabel(num_classes=4)},
        {"label": dti.ClassLabel(num_classes=3)},
        "`num_classes` is 3 and 4",
    ),
    ({"label": dti.MultiHot(key="tags", num_classes=3)}, {}, "ClassLabel and MultiHot"),
    (
        {"label": dti.Values(key="pair", size=2)},
        {"label": dti.MultiHot(key="tags", num_classes=3)},
        "MultiHot and Values",
    ),
    ({"record_ids": True}, {}, "the inputs of the model are image, and image, record_id"),
]


@pytest.mark.parametrize(("validation", "training", "text"), DIFFERENT)
def test_what_differs(sets, validation, training, text):
    valid = load(sets, **validation)
    with refused(f"Training and validation differ: .*{text}.*Or, if that is right, compare=False"):
        fit(sets, valid, of_training=training)


EQUAL = [
    {"which": "fewer"},
    {"which": "unnamed"},
    {"crop": dti.CenterCrop(resize_shorter=12), "interpolation": "bicubic", "antialias": True},
    {"dtype": "float16"},
    {"label": dti.ClassLabel(num_classes=3)},
    {"normalization": "imagenet"},
]


@pytest.mark.parametrize("fields", EQUAL)
def test_what_may_differ(sets, fields):
    training = dti.InputSpec.for_training(sets["named"], 8)
    valid = load(sets, **fields).spec
    check_agreement(training, valid, ("Training", "validation"))


@pytest.mark.usefixtures("no_training")
def test_values_that_agree(sets):
    """Values are compared: without mean and deviation, integers are the same as floats."""
    model = fit(sets, load(sets, dtype="uint8"), of_training={"normalization": None})
    load(sets, normalization=None).evaluate(model, verbose=0)
    fit(sets, load(sets, "other", normalization=None), compare=False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_training")
def test_what_a_model_was_trained_on(sets, tmp_path):
    """Its evaluation, prediction and export are compared with it; a model from elsewhere is not."""
    model, other = fit(sets, None), load(sets, "other")
    with refused("Training and evaluation differ: class 0 is 'a' and 'b'"):
        other.evaluate(model, verbose=0)
    assert other.evaluate(model, verbose=0, compare=False)["loss"] > 0
    assert len(other.predict(model, verbose=0)) == 6  # it has no labels to compare
    plain = load(sets, normalization=None)
    with refused("Training and prediction differ: pixels are normalized"):
        plain.predict(model, verbose=0)
    with refused("Training and `preprocess` differ: pixels are normalized"):
        dti.serving.export_saved_model(model, plain.spec.preprocess, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    dti.serving.export_saved_model(model, load(sets).spec.preprocess, tmp_path / "exported")
    assert (tmp_path / "exported/assets.extra/labels.txt").read_text() == "a\nb\nc\n"
    elsewhere = make_model(8, 3, run_eagerly=True)
    plain.evaluate(elsewhere, verbose=0)
    fit_again = load(sets, training=True, normalization=None)
    fit_again.fit(model, verbose=0)  # what it is trained on now counts
    plain.evaluate(model, verbose=0)


def test_a_model_with_fewer_outputs_than_labels(sets):
    """It is not the record that is bad."""
    with refused("Labels run from 0 to 2, the model has 2 outputs"):
        load(sets).evaluate(make_model(8, 2), verbose=0)


def test_names_of_what_is_served(sets):
    assert load(sets).class_names == ("a", "b", "c")
    shifted = dataclasses.replace(load(sets).spec, label=dti.ClassLabel(offset=-1))
    assert shifted.class_names == (None, "a", "b", "c")
    assert (
        dataclasses.replace(shifted, label=dti.MultiHot(key="tags", num_classes=3)).class_names
        is None
    )
    assert load(sets, "unnamed").spec.class_names is None


def test_a_set_whose_names_changed_is_not_resumed(tmp_path):
    """Names that were not known before, or that are new, do not matter."""
    records = write(tmp_path / "set", "")
    model = make_model(8, 3)

    def train_until(step):
        spec = dti.InputSpec.for_training(dti.Records.from_files(records.paths), 8)
        return save_at(step, tmp_path / "state", model, spec, batch_size=3)

    assert train_until(2) == 0
    names = tmp_path / "set" / "labels.txt"
    names.write_text("a\nb\nc\n")
    assert train_until(4) == 2
    names.write_text("a\nb\nc\nd\n")
    assert train_until(6) == 4
    names.write_text("b\na\nc\n")
    with refused("belongs to training on other input: `class_names` was .'a', 'b', 'c'"):
        train_until(8)


@pytest.mark.usefixtures("no_training")
def test_records_of_both(sets, caplog):
    """That is a warning: a model that learns its validation set by heart is a usual first trial."""
    fit(sets, load(sets))
    assert "6 of 6 validation records are training records, too." in caplog.text
    caplog.clear()
    parts = sets["named"].split(train=0.5, valid=0.5)
    specs = [
        dti.InputSpec.for_training(parts["train"], 8),
        dti.InputSpec.for_evaluation(parts["valid"], 8),
    ]
    train, valid = (dti.load(spec, DALI, batch_size=1) for spec in specs)
    train.fit(make_model(8, 3, run_eagerly=True), validation=valid, verbose=0)
    fit(sets, load(sets, "unnamed"))
    assert "training records" not in caplog.text
    whole = sets["named"]
    assert find_common(whole, whole.select([1, 4])) == 2
    assert find_common(whole + sets["fewer"], sets["fewer"].exclude([0])) == 5


def doubts_of(caplog, sets, *layers, which="named", outputs=3, valid=None, **training):
    caplog.clear()
    train = load(sets, which, training=True, **training)
    loss = "mse" if valid else FROM_LOGITS
    model = make_model(8, outputs, *layers, loss=loss, run_eagerly=True)
    train.fit(model, validation=valid, verbose=0)
    return caplog.text


@pytest.mark.usefixtures("no_training")
def test_what_is_likely_not_meant(sets, caplog):
    """Warnings: more outputs than names, pixels that are scaled twice, smoothed validation."""
    layers = keras.layers.Rescaling(1 / 255), keras.layers.Flatten()
    nested = keras.Sequential([keras.layers.Input((8, 8, 3)), *layers])
    assert "has 5 outputs, and 3 classes have names" in doubts_of(caplog, sets, outputs=5)
    for inner in (layers, (nested,)):
        said = doubts_of(caplog, sets, *inner)
        assert f"The layer '{layers[0].name}' of the model scales pixels" in said
        assert "scales" not in doubts_of(caplog, sets, *inner, normalization=None)
    smoothed = dti.ClassLabel(num_classes=3, one_hot=True, smoothing=0.1)
    said = doubts_of(caplog, sets, valid=load(sets, label=smoothed), label=smoothed)
    assert "val_loss is that of smoothed labels" in said
    squeezed = {"crop": dti.ResizeRandomCrop(resize=(9, 9)), "label": smoothed}
    said = doubts_of(caplog, sets, valid=load(sets, label=smoothed), **squeezed)
    assert "training squeezes images to another aspect ratio, validation keeps it" in said
    assert doubts_of(caplog, sets) == ""
    assert doubts_of(caplog, sets, which="unnamed", outputs=5) == ""


def test_names_of_masks(tmp_path):
    """Those of a mask are in a file of its key, and are compared."""
    mask, blank, specs = dti.SegmentationMask(key="mask"), encode(Image.new("L", (8, 8))), []
    for name, classes in (("one", "sky road"), ("other", "road sky"), ("third", "")):
        examples = [{"image": jpeg(8, 8, seed=n), "mask": blank} for n in range(2)]
        (tmp_path / name).mkdir()
        if classes:
            text = classes.replace(" ", "\n") + "\n"
            (tmp_path / name / "mask.labels.txt").write_text(text)
        records = write_indexed(tmp_path / name / "train-0", examples)
        how = {"label": None, "mask": mask}
        specs.append(dti.InputSpec.for_evaluation(records, 8, **how))
    assert [spec.mask_names for spec in specs] == [("sky", "road"), ("road", "sky"), None]
    assert compare_masks(specs[0], specs[1]) == "class 0 of masks is 'sky' and 'road'"
    assert compare_masks(specs[0], specs[2]) is None
    plain = dataclasses.replace(specs[0], mask=None)
    assert compare_masks(specs[0], plain) == "one of them has masks: give both the same `mask`"
