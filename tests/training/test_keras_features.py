"""What Keras's own methods and loops need of a dataset, once for each backend."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, backends, spec_of, table
from models import FROM_LOGITS, make_model

from dali_tf_input import Preprocess
from dali_tf_input.augment import RandAugment
from dali_tf_input.training.load import load

BATCH, STEPS, CLASSES = 6, 4, 24
IMAGES = tf.TensorSpec((BATCH, 8, 8, 3), tf.float32)


def feed(records, options, *, augment=(), order="global", strategy=None, **changes):
    spec = spec_of(records, order, Preprocess.for_training(8, augment=augment), **changes)
    return load(spec, options, batch_size=BATCH, strategy=strategy)


def feed_evaluation(records, options):
    spec = spec_of(records, "sequential", Preprocess.for_evaluation(8), repeat=False)
    return load(spec, options, batch_size=10)


@pytest.mark.nightly
@backends
def test_keras_trains_and_evaluates(dataset, options):
    """In a graph, of several steps each and compiled by XLA: one epoch after the other."""
    train, held_out = feed(dataset, options), feed_evaluation(dataset, options)
    model = make_model(8, CLASSES, metrics=["accuracy"], steps_per_execution=2, jit_compile=True)
    arguments = {"validation_data": held_out.dataset, "shuffle": False, "verbose": 0}
    history = model.fit(train.dataset, epochs=2, **arguments).history
    assert len(history["val_accuracy"]) == 2
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    _, accuracy = model.evaluate(held_out.dataset, verbose=0)
    right = model.predict(held_out.dataset, verbose=0).argmax(axis=1) == np.arange(CLASSES)
    assert accuracy == pytest.approx(right.mean())


@pytest.mark.nightly
@backends
def test_datasets_of_a_dataset(dataset, options, tmp_path):
    """To what makes or ends iterators of its own, a dataset of DALI is not like others."""
    made = feed(dataset, options).dataset
    halves = made.map(lambda images, labels: (images / 2, labels))
    assert [images.shape for images, _ in halves] == [IMAGES.shape] * STEPS
    assert [image.shape for image, _ in made.unbatch().take(8)] == [(8, 8, 3)] * 8
    kept = made.take(2).cache()
    first, second = ([labels.numpy().tolist() for _, labels in kept] for _ in range(2))
    assert first == second
    made.take(2).save(str(tmp_path / "saved"))
    assert len(list(tf.data.Dataset.load(str(tmp_path / "saved")))) == 2
    images, labels = next(made.as_numpy_iterator())
    assert (images.shape, labels.shape) == ((BATCH, 8, 8, 3), (BATCH,))
    pairs = tf.data.Dataset.zip(made.take(2), feed_evaluation(dataset, options).dataset)
    assert len(list(pairs)) == 2

    @tf.function
    def count(batches):
        total = tf.constant(0)
        for images, _ in batches:
            total += tf.shape(images)[0]
        return total

    assert int(count(made.take(STEPS))) == STEPS * BATCH


@pytest.mark.slow
@table("options, devices", [(DALI, 1)], [DALI, TF_DATA], [1, 2])
def test_class_weights(dataset, options, devices):
    """Weights that are all 0 teach nothing, by either `fit`."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if devices > 1 else None
    train = feed(dataset, options, strategy=strategy)
    model = make_model(8, CLASSES, strategy=strategy, run_eagerly=strategy is None)
    before = model.get_weights()
    weights = dict.fromkeys(range(CLASSES), 0.0)
    if strategy is None:  # Keras maps the dataset, and distributed ones have no `map`
        model.fit(train.dataset, class_weight=weights, shuffle=False, verbose=0)
    train.fit(model, class_weight=weights, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.nightly
@backends
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_models_of_other_kinds(dataset, options, policy):
    """A model without an input shape and a step of its own, in mixed precision."""

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data) | {"images": tf.shape(data[0])[0]}

    keras.mixed_precision.set_global_policy(policy)
    try:
        train = feed(dataset, options, augment=(RandAugment(),))
        images, _ = next(iter(train))
        assert images.dtype == tf.float32  # whatever the policy
        assert np.isfinite(images).all()
        model = Own([keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
        model.compile("sgd", FROM_LOGITS)
        history = model.fit(train.dataset, shuffle=False, verbose=0).history
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert np.isfinite(history["loss"]).all()
    assert history["images"] == [BATCH]
