"""A pass with `repeat=False` sees each record once: what Keras makes of it is what one plain pass
over the records gives.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import write_dataset

from dali_tf_input import DaliOptions, InputSpec, Preprocess, Shard, TfDataOptions
from dali_tf_input.dataset import make_dataset
from dali_tf_input.distribution import distribute

PREPROCESS = Preprocess.for_evaluation(16)
BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """1, 7 and 23 records."""
    root = tmp_path_factory.mktemp("evaluation")
    return {
        sum(counts): write_dataset(root / str(sum(counts)), counts)
        for counts in ([1], [7], [5, 11, 7])
    }


def evaluation_spec(dataset, **arguments):
    return InputSpec(
        dataset=dataset, preprocess=PREPROCESS, order="sequential", repeat=False, **arguments
    )


def make_model(one_hot=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((16, 16, 3)),
            keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(23),
        ]
    )
    loss = (
        keras.losses.CategoricalCrossentropy
        if one_hot
        else keras.losses.SparseCategoricalCrossentropy
    )
    accuracy = (
        keras.metrics.CategoricalAccuracy if one_hot else keras.metrics.SparseCategoricalAccuracy
    )
    model.compile("sgd", loss(from_logits=True), weighted_metrics=[accuracy(name="accuracy")])
    return model


def plain_pass(dataset, model):
    """Loss and accuracy over the records, one by one."""
    spec = InputSpec(dataset=dataset, preprocess=PREPROCESS, order="sequential")
    iterator = iter(make_dataset(spec, TfDataOptions(), batch_size=1))
    losses, right = [], []
    for _ in range(dataset.num_records):
        image, label = next(iterator)
        logits = model(image, training=False)
        losses.append(
            float(keras.losses.sparse_categorical_crossentropy(label, logits, from_logits=True)[0])
        )
        right.append(int(np.argmax(logits)) == int(label[0]))
    return np.mean(losses), np.mean(right)


@pytest.mark.slow
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("num_replicas", [None, "one device", 2, 3])
def test_evaluate(datasets, options, num_replicas):
    strategy = None
    if num_replicas == "one device":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    elif num_replicas:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(num_replicas)])
    with strategy.scope() if strategy else tf.device(None):
        model = make_model()
    for num_records, global_batch_size, with_steps in (
        (1, 6, False),
        (7, 6, True),
        (23, 12, False),
    ):
        dataset = datasets[num_records]
        evaluation = distribute(
            evaluation_spec(dataset),
            options,
            strategy=strategy,
            global_batch_size=global_batch_size,
        )
        assert evaluation.steps_per_epoch == -(-num_records // global_batch_size)
        steps = evaluation.steps_per_epoch if with_steps else None  # the pass ends by itself
        found = model.evaluate(evaluation.dataset, steps=steps, verbose=0)
        np.testing.assert_allclose(found, plain_pass(dataset, model), rtol=2e-5)


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_validation_in_fit(datasets, options):
    dataset = datasets[23]
    model = make_model(one_hot=True)
    train = distribute(
        InputSpec(
            dataset=dataset, preprocess=Preprocess.for_training(16), order="global", one_hot=23
        ),
        options,
        global_batch_size=5,
    )
    validation = distribute(evaluation_spec(dataset, one_hot=23), options, global_batch_size=10)
    history = model.fit(
        train.dataset,
        steps_per_epoch=train.steps_per_epoch,
        epochs=2,
        validation_data=validation.dataset,
        shuffle=False,
        verbose=0,
    ).history
    np.testing.assert_allclose(
        [history["val_loss"][-1], history["val_accuracy"][-1]],
        plain_pass(dataset, model),
        rtol=2e-5,
    )
    assert len(history["val_loss"]) == 2


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(
    ("num_shards", "batch_size"), [(1, 1), (1, 23), (1, 30), (2, 4), (3, 3), (8, 16)]
)
def test_each_record_once(datasets, options, num_shards, batch_size):
    served, total_weight = [], 0.0
    for shard in range(num_shards):
        made = make_dataset(
            evaluation_spec(datasets[23]),
            options,
            batch_size=batch_size,
            shard=Shard(shard, num_shards),
        )
        batches = list(made)
        assert len(batches) == -(-23 // (num_shards * batch_size))
        for images, labels, weights in batches:
            assert images.shape == (batch_size, 16, 16, 3)
            served += labels.numpy()[weights.numpy() > 0].tolist()
            total_weight += float(tf.reduce_sum(weights))
    assert sorted(served) == list(range(23))
    np.testing.assert_allclose(
        total_weight, num_shards * batch_size * -(-23 // (num_shards * batch_size)), rtol=1e-5
    )
