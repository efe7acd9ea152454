"""What people do with Keras and a dataset."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, nightly, slowly, spec_of
from models import FROM_LOGITS, make_model

from dali_tf_input import ClassLabel, Preprocess, RandAugment
from dali_tf_input.training.load import load

BATCH, STEPS, CLASSES = 6, 4, 24
IMAGES = tf.TensorSpec((BATCH, 8, 8, 3), tf.float32)


class Fed:
    """What a check gets: an input for training, one for evaluation, and a folder."""

    def __init__(self, records, options, folder):
        self.records, self.options, self.folder = records, options, folder
        self.train = self.feed(order="global")
        held_out = spec_of(records, "sequential", Preprocess.for_evaluation(8), repeat=False)
        self.held_out = load(held_out, options, batch_size=10)

    def feed(self, *, augment=(), **changes):
        preprocess = Preprocess.for_training(8, augment=augment)
        spec = spec_of(self.records, preprocess=preprocess, **changes)
        return load(spec, self.options, batch_size=BATCH)

    @property
    def dataset(self):
        return self.train.dataset

    def fit(self, *layers, epochs=1, callbacks=(), data=None, shuffle=False, **compiled):
        """Trains a new model; returns it and its history."""
        model = make_model(8, CLASSES, *layers, **compiled)
        data = self.dataset if data is None else data
        arguments = {"epochs": epochs, "callbacks": list(callbacks), "verbose": 0}
        return model, model.fit(data, shuffle=shuffle, **arguments).history


@pytest.fixture(scope="module")
def fed(request, dataset, tmp_path_factory):
    return Fed(dataset, BACKENDS[request.param], tmp_path_factory.mktemp(request.param))


def element_spec(fed):
    assert fed.dataset.element_spec == (IMAGES, tf.TensorSpec((BATCH,), tf.int64))


def cardinality(fed):
    assert int(fed.dataset.cardinality()) == len(fed.dataset) == STEPS


def mixed_precision(fed):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        _, history = fed.fit()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert np.isfinite(history["loss"]).all()


def steps_per_execution(fed):
    model, _ = fed.fit(epochs=2, steps_per_execution=2)
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS


def jit_compile(fed):
    compare_fits(fed, jit_compile=True)


def run_eagerly(fed):
    compare_fits(fed, run_eagerly=True)


def seeded_fit(fed, **compiled):
    keras.utils.set_random_seed(5)
    return fed.fit(data=fed.feed(order="global").dataset, **compiled)  # from its first epoch


def compare_fits(fed, **compiled):
    """However a model is compiled, it learns the same from the same images."""
    (model, history), (usual, expected) = (seeded_fit(fed, **changes) for changes in (compiled, {}))
    assert int(model.optimizer.iterations.numpy()) == STEPS
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)
    for one, other in zip(model.get_weights(), usual.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


def class_weight(fed):
    """Weights that are all 0 teach nothing, by either `fit`."""
    model = make_model(8, CLASSES)
    before = model.get_weights()
    weights = dict.fromkeys(range(CLASSES), 0.0)
    model.fit(fed.dataset, class_weight=weights, shuffle=False, verbose=0)
    fed.train.fit(model, class_weight=weights, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def one_hot(fed):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    label = ClassLabel(num_classes=CLASSES, one_hot=True, smoothing=0.1)
    smooth = fed.feed(order="global", label=label)
    fed.fit(data=smooth.dataset, loss=loss)


def buffer_order(fed):
    _, history = fed.fit(data=fed.feed(order="buffer", buffer_size=8).dataset, epochs=2)
    assert len(history["loss"]) == 2


def validation_data(fed):
    model = make_model(8, CLASSES, metrics=["accuracy"])
    arguments = {"validation_data": fed.held_out.dataset, "shuffle": False, "verbose": 0}
    history = model.fit(fed.dataset, epochs=2, **arguments)
    assert len(history.history["val_accuracy"]) == 2


def evaluate(fed):
    model = make_model(8, CLASSES, metrics=["accuracy"])
    _, accuracy = model.evaluate(fed.held_out.dataset, verbose=0)
    right = model.predict(fed.held_out.dataset, verbose=0).argmax(axis=1) == np.arange(24)
    assert accuracy == pytest.approx(right.mean())


def unbuilt_model(fed):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
    model.compile("sgd", FROM_LOGITS)
    history = model.fit(fed.dataset, epochs=2, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 2


def own_train_step(fed):
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data) | {"images": tf.shape(data[0])[0]}

    inputs = keras.layers.Input((8, 8, 3))
    model = Own(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(inputs)))
    model.compile("sgd", FROM_LOGITS)
    history = model.fit(fed.dataset, shuffle=False, verbose=0)
    assert history.history["images"] == [BATCH]


def train_on_batch(fed):
    model = make_model(8, CLASSES)
    for images, labels in fed.dataset:
        model.train_on_batch(images, labels)
    assert int(model.optimizer.iterations.numpy()) == STEPS


def callbacks(fed):
    given = [
        keras.callbacks.ModelCheckpoint(
            str(fed.folder / "{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.CSVLogger(str(fed.folder / "log.csv")),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=1e9),
    ]
    _, history = fed.fit(epochs=3, callbacks=given)
    assert {"1.weights.h5", "3.weights.h5"} <= {one.name for one in fed.folder.iterdir()}
    assert len((fed.folder / "log.csv").read_text().splitlines()) == 4
    assert history["learning_rate"][-1] < history["learning_rate"][0]


def backup_and_restore(fed):
    """The epochs that are done are not done again."""
    seen = []

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(epoch)
            if seen == [0, 1]:
                raise KeyboardInterrupt

    callbacks = [keras.callbacks.BackupAndRestore(str(fed.folder / "backup")), Interrupt()]
    with pytest.raises(KeyboardInterrupt):
        fed.fit(epochs=3, callbacks=callbacks)
    callbacks = [keras.callbacks.BackupAndRestore(str(fed.folder / "backup")), Interrupt()]
    fed.fit(epochs=3, callbacks=callbacks)
    assert seen == [0, 1, 1, 2]


def early_stopping(fed):
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    _, history = fed.fit(epochs=5, callbacks=[stop])
    assert len(history["loss"]) == 2


def tensorboard(fed):
    """With the rate before it, which it logs too."""
    board = keras.callbacks.TensorBoard(str(fed.folder / "board"))
    fed.train.fit(make_model(8, CLASSES), callbacks=[board], profile=True, verbose=0)
    (events,) = (fed.folder / "board" / "train").glob("events*")
    logged = events.read_bytes()
    for name in ("loss", "images_per_second"):
        assert f"epoch_{name}".encode() in logged, name


def augment(fed):
    """Under a global policy of mixed precision too."""
    for policy in ("mixed_float16", "mixed_bfloat16"):
        keras.mixed_precision.set_global_policy(policy)
        try:
            images = next(iter(fed.feed(order="global", augment=(RandAugment(),))))[0]
            assert images.dtype == tf.float32
            assert np.isfinite(images).all()
        finally:
            keras.mixed_precision.set_global_policy("float32")


def custom_loop(fed):
    model, optimizer = make_model(8, CLASSES), keras.optimizers.SGD()
    for images, labels in fed.dataset:
        with tf.GradientTape() as tape:
            loss = FROM_LOGITS(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    assert int(optimizer.iterations.numpy()) == STEPS


def loop_in_a_function(fed):
    @tf.function
    def count(batches):
        total = tf.constant(0)
        for images, _ in batches:
            total += tf.shape(images)[0]
        return total

    assert int(count(fed.dataset.take(STEPS))) == STEPS * BATCH


def take(fed):
    assert len(list(fed.dataset.take(2))) == 2
    assert len(fed.dataset.repeat().take(9)) == 9


def map_(fed):
    halves = fed.dataset.map(lambda images, labels: (images / 2, labels))
    assert [images.shape for images, _ in halves] == [IMAGES.shape] * STEPS


def unbatch(fed):
    shapes = [image.shape for image, _ in fed.dataset.unbatch().take(8)]
    assert shapes == [(8, 8, 3)] * 8


def cache(fed):
    kept = fed.dataset.take(2).cache()
    first, second = ([labels.numpy().tolist() for _, labels in kept] for _ in range(2))
    assert first == second


def save(fed):
    path = str(fed.folder / "saved")
    fed.dataset.take(2).save(path)
    assert len(list(tf.data.Dataset.load(path))) == 2


def enumerate_(fed):
    assert [int(number) for number, _ in fed.dataset.take(3).enumerate()] == [0, 1, 2]


def as_numpy_iterator(fed):
    images, labels = next(fed.dataset.as_numpy_iterator())
    assert (images.shape, labels.shape) == ((BATCH, 8, 8, 3), (BATCH,))


def zip_(fed):
    pairs = tf.data.Dataset.zip(fed.dataset.take(2), fed.held_out.dataset)
    assert len(list(pairs)) == 2


def adapt(fed):
    layer = keras.layers.Normalization()
    layer.adapt(fed.dataset.take(STEPS).map(lambda images, _: images))
    assert np.isfinite(layer.mean).all()


# To Keras a dataset is a dataset; to what makes or ends iterators of its own, one of DALI is not.
ON_BOTH = [
    *(element_spec, cardinality, validation_data, evaluate, custom_loop, loop_in_a_function, take),
    *(unbatch, cache, zip_),
]
ON_DALI_SLOWLY = [backup_and_restore, augment, map_, save, as_numpy_iterator]
SLOWLY = [class_weight, one_hot, buffer_order]
ON_ONE = [
    *(mixed_precision, steps_per_execution, unbuilt_model),
    *(own_train_step, train_on_batch, callbacks, early_stopping, tensorboard, enumerate_, adapt),
]
CHECKS = [("tf_data", check) for check in ON_BOTH + ON_DALI_SLOWLY + ON_ONE]
CHECKS += [slowly("tf_data", check) for check in [*SLOWLY, jit_compile, run_eagerly]]
CHECKS += [("dali", check) for check in ON_BOTH]
CHECKS += [nightly("dali", check) for check in ON_DALI_SLOWLY + SLOWLY]


@pytest.mark.parametrize(("fed", "check"), CHECKS, indirect=["fed"])
def test_with_keras(fed, check):
    check(fed)
