"""What a model and its loss must be for an input is said before the first step, in one sentence."""

import keras
import numpy as np
import pytest
from conftest import DALI, encode, jpeg, refused, write_indexed

import dali_tf_input as dti
from dali_tf_input.training import strategies

SPARSE, ONE_HOT = "sparse_categorical_crossentropy", "categorical_crossentropy"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records of six classes."""
    folder = tmp_path_factory.mktemp("fits")
    return write_indexed(
        folder / "train-0", [{"image": jpeg(9, 9, seed=n), "label": n} for n in range(6)]
    )


def load(records, *, evaluation=False, size=8, **fields):
    kind = dti.InputSpec.for_evaluation if evaluation else dti.InputSpec.for_training
    return dti.load(kind(records, size, **fields), DALI, batch_size=2)


def make(outputs=6, loss=SPARSE, *, activation="softmax", shape=(8, 8, 3), compiled=True):
    layers = [keras.layers.Flatten(), keras.layers.Dense(outputs, activation=activation)]
    model = keras.Sequential([keras.Input(shape), *layers])
    return compile_eagerly(model, loss) if compiled else model


def compile_eagerly(model, loss=SPARSE):
    model.compile("sgd", loss, run_eagerly=True)
    return model


def connect(*inputs):
    """Returns all inputs in one row; Keras before 3.13 takes no others."""
    rows = [keras.ops.cast(keras.layers.Flatten()(one), "float32") for one in inputs]
    return keras.ops.concatenate(rows, -1)


def functional(names, outputs=1):
    inputs = {name: keras.Input((8, 8, 3) if "image" in name else (), name=name) for name in names}
    flat = connect(*inputs.values())
    heads = [keras.layers.Dense(6, activation="softmax")(flat) for _ in range(outputs)]
    return compile_eagerly(keras.Model(inputs, heads if outputs > 1 else heads[0]))


def categorical_crossentropy(labels, outputs):
    """A user's, called like Keras's."""
    return keras.ops.mean(keras.ops.square(outputs), -1)


def unnamed():
    """Its dictionary names the inputs, not they themselves."""
    image, number = keras.Input((8, 8, 3)), keras.Input((1,), dtype="int64")
    made = keras.layers.Dense(6, activation="softmax")(connect(image, number))
    return compile_eagerly(keras.Model({"image": image, "record_id": number}, made))


def outputs_by_name():
    """Of two outputs one has a loss."""
    image = keras.Input((8, 8, 3))
    flat = keras.layers.Flatten()(image)
    main = keras.layers.Dense(6, activation="softmax")(flat)
    model = keras.Model(image, [main, flat])
    model.compile("sgd", [SPARSE, None])  # eager Keras takes two labels for two outputs
    return model


def built_for(size):
    """Was called on other images before; it takes any."""
    pool, dense = keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(6, "softmax")
    model = keras.Sequential([keras.layers.Conv2D(4, 3), pool, dense])
    model(np.zeros((1, size, size, 3)))
    return compile_eagerly(model)


@pytest.fixture
def no_pipeline(monkeypatch):
    """Fails where a pipeline is built."""
    monkeypatch.delattr(strategies, "make_dataset")


TWO = dti.Preprocess.for_training(8)
LABELS = {"one_hot": dti.ClassLabel(one_hot=True, num_classes=6)}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (lambda: make(compiled=False), {}, "`model` must be compiled: model.compile"),
        (lambda: make(shape=(16, 16, 3)), {}, r"shape \(16, 16, 3\), this input gives \(8, 8, 3\)"),
        (lambda: make(shape=(8, 8, 3)), {"layout": "CHW"}, r"this input gives \(3, 8, 8\)"),
        (make, {"channels": 1}, r"this input gives \(8, 8, 1\)"),
        (make, {"record_ids": True}, "A Sequential model takes one input"),
        (
            lambda: functional(["image", "number"]),
            {"record_ids": True},
            "nothing is called 'number'",
        ),
        (
            lambda: functional(["image_a", "image_1"]),
            {"views": (TWO, TWO)},
            "nothing is called 'image_a'",
        ),
        (lambda: functional(["image"], outputs=2), {}, "The model has 2 outputs, and"),
        (make, {"label": None}, "needs labels or masks: this input has none"),
        (make, {"label": LABELS["one_hot"]}, "takes a class for each .*: categorical_cross"),
        (lambda: make(loss=ONE_HOT), {}, r"takes values of the shape .*\(6,\), `label` has "),
        (lambda: make(7, ONE_HOT), {"label": LABELS["one_hot"]}, r"\(7,\), `label` has \(6,\)"),
        (lambda: make(loss="mse"), {}, "for classes use sparse_categorical_crossentropy"),
        (
            lambda: make(1, "binary_crossentropy", activation="sigmoid"),
            {},
            "of two classes, 0 and 1, and",
        ),
        (lambda: make(5), {}, "Labels run from 0 to 5, the model has 5 outputs"),
        (
            lambda: make(5, keras.losses.SparseCategoricalCrossentropy(name="mine")),
            {},
            "for labels 0 to 4",
        ),
        (lambda: make(7, "poisson"), {"label": LABELS["one_hot"]}, "The loss poisson takes values"),
    ],
)
@pytest.mark.usefixtures("no_pipeline")
def test_what_does_not_fit(records, model, fields, message):
    """In `fit`, and of validation too, before anything is read or traced."""
    with refused(message):
        load(records, **fields).fit(model(), verbose=0)
    evaluated = {name: value for name, value in fields.items() if name != "views"}
    if evaluated == fields:
        with refused(message):
            load(records, evaluation=True, **fields).evaluate(model(), verbose=0)


def test_validation_that_does_not_fit(records):
    """It is said before an epoch of training, not after it."""
    train, steps = load(records), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    with refused(r"The model takes `image` of shape \(8, 8, 3\), this input gives \(9, 9, 3\)"):
        valid = load(records, evaluation=True, size=9)
        train.fit(make(), validation=valid, callbacks=[count], verbose=0)
    assert not steps


def test_prediction_and_profile_and_export(records, tmp_path):
    valid = load(records, evaluation=True, size=9)
    wrong = r"The model takes `image` of shape \(8, 8, 3\)"
    with refused(wrong):
        valid.predict(make(), verbose=0)
    with refused(wrong):
        dti.serving.export_saved_model(make(), valid.spec, tmp_path / "model")
    with refused("`model` must be compiled"):
        load(records).profile(make(compiled=False))
    with refused("`model` has no variables yet"):
        layers = [keras.layers.Flatten(), keras.layers.Dense(6)]
        dti.serving.export_saved_model(keras.Sequential(layers), valid.spec, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (make, {}),
        (lambda: make(loss=ONE_HOT), {"label": LABELS["one_hot"]}),
        (lambda: make(1, "mse", activation=None), {}),
        (lambda: functional(["image", "record_id"]), {"record_ids": True}),
        (lambda: functional(["image"]), {"record_ids": True}),
        (lambda: functional(["image_0", "image_1"]), {"views": (TWO, TWO)}),
        (lambda: make(loss=lambda y, out: keras.ops.mean(out)), {}),
        (lambda: make(loss=categorical_crossentropy), {}),
        (
            lambda: make(loss="binary_crossentropy", activation="sigmoid"),
            {"label": LABELS["one_hot"]},
        ),
        (lambda: make(shape=(8, 8)), {"channels": 1}),
        (lambda: unnamed(), {"record_ids": True}),
        (lambda: outputs_by_name(), {}),
        (lambda: built_for(16), {}),
    ],
)
def test_what_fits(records, model, fields):
    history = load(records, **fields).fit(model(), steps_per_epoch=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("no_training")
def test_what_an_export_does_not_do_is_said(records, tmp_path, caplog):
    spec, model = dti.InputSpec.for_training(records, 8), make()
    for decode, is_said in (("scaled", True), ("full", False)):
        options = dti.TfDataOptions(decode=decode)
        dti.load(spec, options, batch_size=2).fit(model, verbose=0)
        dti.serving.export_saved_model(model, dti.Preprocess.for_evaluation(8), tmp_path / decode)
        assert ("decode='scaled', which an exported model does not do" in caplog.text) == is_said
        caplog.clear()


@pytest.mark.slow
def test_masks_of_two_classes(tmp_path):
    """An output of a channel, as usual for one object."""
    mask = np.zeros((9, 9), np.uint8)
    mask[3:6] = 1
    examples = [{"image": jpeg(9, 9, seed=n), "mask": encode(mask)} for n in range(4)]
    records = write_indexed(tmp_path / "train-0", examples)
    image = keras.Input((8, 8, 3))
    model = keras.Model(image, keras.layers.Conv2D(1, 1, activation="sigmoid")(image))
    model.compile("sgd", "binary_crossentropy", run_eagerly=True)
    train = load(records, label=None, mask=dti.SegmentationMask(key="mask"))
    assert np.isfinite(train.fit(model, verbose=0).history["loss"]).all()


class Rebuild(keras.Model):
    """Needs no labels: it adds its own loss."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, image):
        made = self.inner(image)
        self.add_loss(keras.ops.mean(keras.ops.square(made - image)))
        return made


@pytest.mark.slow
def test_a_model_that_needs_no_labels_is_validated(records):
    model = Rebuild()
    model.compile("sgd", run_eagerly=True)
    valid = load(records, evaluation=True, label=None)
    history = load(records, label=None).fit(model, validation=valid, verbose=0)
    assert history.history["val_loss"][0] > 0
    assert valid.evaluate(model, verbose=0)["loss"] > 0


@pytest.mark.usefixtures("no_training")
def test_doubts(records, caplog):
    """What is likely not meant, but may be, is a warning."""
    load(records).fit(make(activation=None), verbose=0)
    assert "takes probabilities, and the last layer has no softmax" in caplog.text
    caplog.clear()
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    load(records).fit(make(loss=logits), verbose=0)
    assert "takes logits, and the last layer makes probabilities" in caplog.text
    caplog.clear()
    load(records).fit(make(), verbose=0, class_weight={99: 2.0})
    assert "`class_weight` is of classes that no record has, such as 99" in caplog.text
    caplog.clear()
    load(records).fit(make(), verbose=0, class_weight={np.int64(2): 2.0})
    assert not [one for one in caplog.records if one.name == "dali_tf_input"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": True}, "`shuffle` is decided by the `order` of the spec: leave it out"),
        ({"initial_epoch": 3}, "`initial_epoch` must be below `epochs` 1, got 3"),
        ({"class_weight": {0: 1e39}}, "`class_weight` must be finite weights"),
        ({"x": 1}, r"fit\(\) has no argument `x`"),
        ({"callbacks": [None]}, "`callbacks` must be keras.callbacks.Callback, or a list of them"),
    ],
)
def test_arguments_of_fit(records, arguments, message):
    train = load(records)
    with refused(message):
        train.fit(make(), verbose=0, **arguments)
    assert train.next_step == 0


def test_steps_of_an_evaluation(records):
    message = "must be a whole number of at least 1, or None, got"
    valid, train, model = load(records, evaluation=True), load(records), make()
    for steps in (0, -1, 1.5, "2"):
        for call in (valid.evaluate, valid.predict):
            with refused(f"`steps` {message}"):
                call(model, steps=steps, verbose=0)
        with refused(f"`validation_steps` {message}"):
            train.fit(model, validation=valid, validation_steps=steps, verbose=0)


@pytest.mark.usefixtures("checked_here", "no_training")
def test_masks_of_more_values_than_outputs(tmp_path, caplog):
    """As the index step counted them; `fit` says that it does not know if it did not."""
    mask = encode(np.full((9, 9), 3, np.uint8))
    examples = [{"image": jpeg(9, 9, seed=n), "mask": mask} for n in range(4)]

    def fit(outputs, checks=None):
        records = write_indexed(tmp_path / "train-0", examples, checks)
        model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(outputs, 1)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=True)
        load(records, label=None, mask=dti.SegmentationMask(key="mask")).fit(model, verbose=0)

    fit(4)
    assert "The values of the masks' pixels are not known" in caplog.text
    caplog.clear()
    counted = dti.Checks(verify="decode", decoder="tf_data", mask_key="mask", label=None)
    with refused("Pixels of the masks have values up to 3, and the model has 3 outputs for each"):
        fit(3, counted)
    fit(4, counted)
    assert "not known" not in caplog.text


def test_arguments_of_evaluate_and_predict(records):
    valid, model = load(records, evaluation=True), make()
    for method in ("evaluate", "predict"):
        call = getattr(valid, method)
        with refused("`shuffle` is decided by the `order`"):
            call(model, shuffle=1)
        for name in ("x", "batch_size", "sample_weight", "kwargs"):
            with refused(f"{method}.. has no argument `{name}`"):
                call(model, **{name: 1})
        with refused("`callbacks` must be keras.callbacks.Callback"):
            call(model, callbacks=3)


@pytest.mark.slow
def test_both_validations_and_steps_that_are_chosen(records):
    train, valid = load(records), load(records, evaluation=True)
    with refused("`validation` and `validation_data` are the same"):
        train.fit(make(), validation=valid, validation_data=valid.dataset)
    model = make()
    model.compile("sgd", SPARSE, steps_per_execution="auto")
    with refused("`steps_per_execution` must be a number, got 'auto'"):
        train.fit(model, verbose=0)
    history = train.fit(
        make(), validation=valid, validation_freq=np.int64(2), epochs=np.int64(2), verbose=0
    )
    assert len(history.history["val_loss"]) == 1
