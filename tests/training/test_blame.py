"""`Blame`: the loss of each record, noted while a model trains."""

import logging

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, encode, refused, spec_of, write_indexed

import dali_tf_input as dti
from dali_tf_input.records.losses import write_losses

LOSS = "sparse_categorical_crossentropy"
PREPROCESS = dti.Preprocess.for_training(8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """320 small images of four colors; ten have the label of another."""
    random = np.random.default_rng(0)
    colors = np.array([(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)])
    wrong = {*range(5, 320, 32)}
    examples = []
    for number in range(320):
        color = number % 4
        pixels = np.clip(colors[color] + random.normal(0, 30, (10, 10, 3)), 0, 255)
        label = (color + (number in wrong)) % 4
        image = encode(pixels.astype(np.uint8), "JPEG")
        examples.append({"image/encoded": image, "image/class/label": label})
    checks = dti.Checks(verify="schema")
    records = write_indexed(tmp_path_factory.mktemp("photos") / "train-0", examples, checks)
    return records, wrong


def make_model(blame, loss=LOSS, strategy=None, *, run_eagerly=True):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(16, activation="relu")]
    adam = {"class_name": "adam", "config": {"learning_rate": 0.02}}  # made in the scope
    compiled = {"optimizer": adam, "loss": loss, "metrics": ["accuracy", blame.metric]}
    run_eagerly = run_eagerly and strategy is None  # which is faster for few steps
    how = {"activation": "softmax", "strategy": strategy, "run_eagerly": run_eagerly}
    return models.make_model(8, 4, *layers, **compiled, **how)


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))
def test_mislabeled_photos_are_the_hardest(photos, options, tmp_path):
    records, wrong = photos
    train = dti.load(spec_of(records, "global", PREPROCESS), options, batch_size=32)
    blame = train.blame(tmp_path / "blame", loss=LOSS)
    model = make_model(blame, run_eagerly=False)
    history = train.fit(model, epochs=8, callbacks=[blame], verbose=0)
    assert len(wrong & {*blame.hardest(50).tolist()}) >= 8
    assert blame.hardest(3).tolist() == np.argsort(-blame.losses)[:3].tolist()
    assert max(history.history["largest_loss"]) > 1
    again = train.blame(tmp_path / "blame", loss=LOSS)
    np.testing.assert_array_equal(again.losses, blame.losses)
    assert {entry.name for entry in (tmp_path / "blame").iterdir()} == {"blame.npz"}
    rest = records.exclude(blame.hardest(10))
    assert rest.num_records == 310


def fit_one_epoch(records, folder, loss=LOSS, strategy=None, **fields):
    """Trains an epoch at a learning rate of 0; returns its losses, by id."""
    spec = spec_of(records, "global", PREPROCESS, **fields)
    train = dti.load(spec, DALI, batch_size=32, strategy=strategy)
    blame = train.blame(folder, loss=loss)
    model = make_model(blame, loss, strategy)
    model.optimizer.learning_rate.assign(0)
    train.fit(model, epochs=1, callbacks=[blame], verbose=0)
    return model, train, blame


@pytest.fixture(scope="module")
def one_epoch(photos, tmp_path_factory):
    return fit_one_epoch(photos[0].sample(100), tmp_path_factory.mktemp("one epoch"))


def test_the_losses_are_those_of_the_model(one_epoch):
    model, train, blame = one_epoch
    seen = np.flatnonzero(~np.isnan(blame.losses))
    assert len(seen) == 96
    for step in range(3):
        images, labels = train.batch_at(step)
        expected = keras.losses.sparse_categorical_crossentropy(labels, model(images))
        np.testing.assert_allclose(blame.losses[train.records_of(step)], expected, rtol=1e-4)


@pytest.mark.slow
def test_on_two_replicas_they_are_the_same(photos, one_epoch, tmp_path):
    """Also if the metric is taken outside the strategy's scope, as here."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    one = one_epoch[-1]
    _, _, two = fit_one_epoch(photos[0].sample(100), tmp_path, strategy=strategy)
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-4)


@pytest.mark.slow
def test_one_hot_labels_and_a_loss_object(photos, one_epoch, tmp_path):
    label = dti.ClassLabel(one_hot=True, num_classes=4)
    loss = keras.losses.CategoricalCrossentropy()
    how = {"loss": loss, "label": label}
    _, _, one_hot = fit_one_epoch(photos[0].sample(100), tmp_path, **how)
    np.testing.assert_allclose(one_hot.losses, one_epoch[-1].losses, rtol=1e-4)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(photos, tmp_path):
    """Later steps are those of the resumed run, and belong to its records."""
    spec = spec_of(photos[0].sample(96), "global", PREPROCESS)

    def fit(place, *callbacks):
        train = dti.load(spec, DALI, batch_size=32)
        blame = train.blame(tmp_path / place / "blame", loss=LOSS)
        model = make_model(blame)
        resume = dti.Resume(tmp_path / place / "state", save_every=1)
        train.fit(model, epochs=3, callbacks=[blame, *callbacks], resume=resume, verbose=0)
        return blame

    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("parts", models.stop_at(5))
    parts = fit("parts")
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-3)


@pytest.mark.slow
def test_steps_that_stand_out(photos, tmp_path, caplog):
    records, _ = photos
    train = dti.load(spec_of(records, "global", PREPROCESS), DALI, batch_size=32)
    blame = train.blame(tmp_path, loss=LOSS)
    model = make_model(blame, run_eagerly=False)

    class Spoil(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.iterations == 115:
                for weights in self.model.trainable_variables:
                    weights.assign(50 * weights)

    with caplog.at_level(logging.WARNING, "dali_tf_input"):
        train.fit(model, epochs=12, callbacks=[Spoil(), blame], verbose=0)
    assert blame.spikes[0][0] == 115
    assert "Step 115 stands out: its loss was" in caplog.text
    assert train.blame(tmp_path, loss=LOSS).spikes == blame.spikes


def test_a_model_with_the_metric_is_saved(one_epoch, tmp_path):
    model, _, _ = one_epoch
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "largest_loss" in loaded.evaluate(
        np.zeros((32, 8, 8, 3)), np.zeros(32), verbose=0, return_dict=True
    )


@pytest.mark.slow
def test_refuses(photos, tmp_path):
    records, _ = photos
    with refused("`blame` needs to know the records of a step: use order 'global'"):
        dti.load(spec_of(records, "buffer", PREPROCESS), batch_size=4).blame(tmp_path, loss=LOSS)
    train = dti.load(spec_of(records, "global", PREPROCESS), DALI, batch_size=32)
    blame = train.blame(tmp_path / "blame", loss=LOSS)
    model = make_model(blame)
    with refused("`Blame` works with train.fit"):
        model.fit(train.dataset, callbacks=[blame], verbose=0)
    other = train.blame(tmp_path / "blame", loss=LOSS)
    with refused("compile it with metrics=.blame.metric."):
        train.fit(model, callbacks=[other], verbose=0)
    (tmp_path / "file").touch()
    with refused("file cannot be written: File exists"):
        write_losses(str(tmp_path / "file"), records, blame.losses, [])


@pytest.mark.slow
def test_what_does_not_fit_is_said_before_the_first_step(photos, tmp_path, caplog):
    train = dti.load(spec_of(photos[0], "global", PREPROCESS), DALI, batch_size=32)
    other = train.blame(tmp_path / "other", loss="categorical_crossentropy")
    model = make_model(other, LOSS)
    with refused("The loss of `blame` does not fit this training"):
        train.fit(model, callbacks=[other], verbose=0)
    assert train.next_step == 0
    model = make_model(train.blame(tmp_path / "same", loss=LOSS))
    with caplog.at_level(logging.WARNING):
        train.fit(model, steps_per_epoch=1, verbose=0, class_weight={0: 2.0})
    assert "nothing keeps it: pass callbacks=[blame]" in caplog.text


@pytest.mark.slow
def test_class_weights_and_a_step_of_the_users(photos):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return super().train_step((x, y))

    train = dti.load(spec_of(photos[0], "global", PREPROCESS), DALI, batch_size=32)
    model = Own([keras.layers.Flatten(), keras.layers.Dense(4, activation="softmax")])
    model.compile("sgd", LOSS, run_eagerly=True)
    train.fit(model, steps_per_epoch=1, verbose=0)
    with refused(r"`class_weight` adds the weights .*: take \(x, y, sample_weight\)"):
        train.fit(model, steps_per_epoch=1, verbose=0, class_weight={0: 2.0})


LOSSES = {
    "hinge": "hinge",
    "poisson": "poisson",
    "mse": "mse",
    "huber": "huber",
    "binary_crossentropy": "binary_crossentropy",
    "object": keras.losses.BinaryCrossentropy(label_smoothing=0.1),
    "own": lambda y_true, y_pred: keras.ops.square(y_true - y_pred),
}


@pytest.mark.parametrize("name", at_night(["hinge", "object", "own"], LOSSES))
def test_the_loss_of_an_image_is_that_of_a_batch_of_one(photos, tmp_path, name):
    """Labels are (n,), outputs (n, 1)."""
    loss = LOSSES[name]
    train = dti.load(spec_of(photos[0], "global", PREPROCESS), TF_DATA, batch_size=8)
    metric = train.blame(tmp_path, loss=loss).metric
    layers = keras.layers
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", loss, metrics=[metric], run_eagerly=True)
    x = np.random.default_rng(1).normal(size=(8, 3))
    y = np.arange(8) % 2
    metric.update_state(y, model(x))
    alone = [model.evaluate(x[n : n + 1], y[n : n + 1], verbose=0)[0] for n in range(8)]
    model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(metric.losses, alone, rtol=1e-4)
    assert len({*np.round(alone, 4)}) > 4


@pytest.mark.slow
def test_a_blame_of_another_input(photos, tmp_path):
    records, _ = photos
    first, second = (
        dti.load(spec_of(records.filter(labels={label}), "global", PREPROCESS), DALI, batch_size=8)
        for label in (0, 1)
    )
    blame = first.blame(tmp_path, loss=LOSS)
    model = make_model(blame)
    smaller = dti.load(first.spec, DALI, batch_size=4)
    for other in (second, smaller):
        with refused("This `blame` is of another input"):
            other.fit(model, callbacks=[blame], verbose=0)
    again = dti.load(first.spec, DALI, batch_size=8)
    again.fit(model, callbacks=[blame], class_weight={0: 2.0}, verbose=0)
    assert {*records.labels[blame.hardest(500)]} == {0}
    rest = dti.load(first.spec, DALI, batch_size=8).blame(tmp_path, loss=LOSS)
    assert len(rest.hardest(500)) == len(blame.hardest(500))
    assert not len(second.blame(tmp_path, loss=LOSS).hardest(500))


def test_bad_folders_and_losses(photos, tmp_path, monkeypatch):
    """All said before training begins."""
    train = dti.load(spec_of(photos[0], "global", PREPROCESS), TF_DATA, batch_size=32)
    (tmp_path / "file").touch()
    for folder, message in (
        ("", "`folder` must be a path, got ''"),
        ("/proc/none", "/proc/none cannot be written"),
        (tmp_path / "file", "Not a directory"),
    ):
        with refused(message):
            train.blame(folder, loss=LOSS)
    for loss in (None, 3, "no_such"):
        with refused("`loss` .*a? ?loss of Keras"):
            train.blame(tmp_path / "a", loss=loss)
    monkeypatch.setenv("HOME", str(tmp_path))
    train.blame("~/home", loss=LOSS)
    assert (tmp_path / "home" / "blame.npz").exists()
    good = dict(np.load(tmp_path / "home" / "blame.npz"))
    for damage in (
        {"spikes": np.zeros(3)},
        {"losses": good["losses"].astype(str)},
        {"losses": good["losses"].astype(object)},
    ):
        np.savez(tmp_path / "home" / "blame.npz", **{**good, **damage})
        with refused("blame.npz cannot be read: .* Remove it"):
            train.blame("~/home", loss=LOSS)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"PK\x03\x04 cut", (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "home" / "blame.npz").write_bytes(content)
        with refused("blame.npz cannot be read: .* Remove it"):
            train.blame("~/home", loss=LOSS)
    mean = train.blame(tmp_path / "m", loss=lambda y, p: keras.ops.mean(y - p[:, 0]))
    with refused("`loss` returns one of a batch"):
        mean.metric.update_state(np.zeros(32), np.zeros((32, 4)))
