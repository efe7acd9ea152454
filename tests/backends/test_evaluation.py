"""A pass with `repeat=False` sees each record once: what Keras makes of it is what one plain pass
over the records gives.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, DALI, TF_DATA, at_night, refused, spec_of, write_dataset
from models import fit, make_model

from dali_tf_input import ClassLabel, Preprocess, Shard
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.training.load import load

PREPROCESS = Preprocess.for_evaluation(8)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """1, 7 and 23 records."""
    root = tmp_path_factory.mktemp("evaluation")
    all_counts = ([1], [7], [5, 11, 7])
    return {sum(one): write_dataset(root / str(sum(one)), one) for one in all_counts}


def evaluation_spec(dataset, **changes):
    return spec_of(dataset, "sequential", PREPROCESS, repeat=False, **changes)


def make_classifier(strategy=None, one_hot=False):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(4, 3, strides=2, activation="relu"), keras.layers.Flatten()]
    losses, metrics, kind = keras.losses, keras.metrics, "" if one_hot else "Sparse"
    loss = getattr(losses, f"{kind}CategoricalCrossentropy")(from_logits=True)
    with strategy.scope() if strategy else tf.device(None):
        accuracy = getattr(metrics, f"{kind}CategoricalAccuracy")(name="accuracy")
        compiled = {"loss": loss, "weighted_metrics": [accuracy]}
        return make_model(8, 23, *layers, strategy=strategy, **compiled)


def plain_pass(dataset, model, options):
    """Loss and accuracy over the records, one by one."""
    spec = evaluation_spec(dataset)
    iterator = iter(make_dataset(spec, options, batch_size=1))
    losses, right = [], []
    cross_entropy = keras.losses.sparse_categorical_crossentropy
    for _ in range(dataset.num_records):
        image, label = next(iterator)
        logits = model(image, training=False)
        losses.append(float(cross_entropy(label, logits, from_logits=True)[0]))
        right.append(int(np.argmax(logits)) == int(label[0]))
    return np.mean(losses), np.mean(right)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "num_replicas"), [*itertools.product(BACKENDS.values(), (None, "one device", 2, 3))]
)
def test_evaluate(datasets, options, num_replicas):
    strategy = None
    if num_replicas == "one device":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    elif num_replicas:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(num_replicas)])
    model = make_classifier(strategy)
    evaluations = [(7, 6, True), (23, 12, False)]
    if num_replicas not in (2, 3):  # Keras adds up the first batches of replicas, which must match
        evaluations.append((1, 6, False))
    for num_records, batch_size, with_steps in evaluations:
        spec = evaluation_spec(datasets[num_records])
        evaluation = load(spec, options, strategy=strategy, batch_size=batch_size)
        assert evaluation.steps_per_epoch == -(-num_records // batch_size)
        steps = evaluation.steps_per_epoch if with_steps else None  # the pass ends by itself
        found = model.evaluate(evaluation.dataset, steps=steps, verbose=0)
        np.testing.assert_allclose(
            found, plain_pass(datasets[num_records], model, options), rtol=2e-5
        )


def test_replicas_need_a_full_step(datasets):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with refused("`batch_size` must be at most the number of records, 7, got 8"):
        load(evaluation_spec(datasets[7]), TF_DATA, strategy=strategy, batch_size=8)
    assert load(evaluation_spec(datasets[7]), TF_DATA, batch_size=8).steps_per_epoch == 1


def test_a_remainder_is_divided_evenly(datasets):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    evaluation = load(evaluation_spec(datasets[23]), DALI, strategy=strategy, batch_size=12)
    *_, (_, labels) = evaluation
    parts = [part.numpy().tolist() for part in strategy.experimental_local_results(labels)]
    assert parts == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], BACKENDS.values()))
def test_validation_in_fit(datasets, options):
    dataset = datasets[23]
    model = make_classifier(one_hot=True)
    label = ClassLabel(num_classes=23, one_hot=True)
    spec = spec_of(dataset, "global", Preprocess.for_training(8), label=label)
    train = load(spec, options, batch_size=5)
    validation = load(evaluation_spec(dataset, label=label), options, batch_size=10)
    history = fit(model, train, epochs=2, validation_data=validation.dataset)
    found = [history["val_loss"][-1], history["val_accuracy"][-1]]
    np.testing.assert_allclose(found, plain_pass(dataset, model, options), rtol=2e-5)
    assert len(history["val_loss"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "options"),
    at_night(
        [((1, 30), DALI), ((3, 3), DALI), ((1, 23), TF_DATA)],
        [
            *itertools.product(
                [(1, 1), (1, 23), (1, 30), (2, 4), (3, 3), (8, 16)], BACKENDS.values()
            )
        ],
    ),
)
def test_each_record_once(datasets, division, options):
    num_shards, batch_size = division
    served, spec = [], evaluation_spec(datasets[23])
    for shard in (Shard(number, num_shards) for number in range(num_shards)):
        dataset = make_dataset(spec, options, batch_size=batch_size, shard=shard)
        sizes = [len(labels) for _, labels in dataset]
        assert len(sizes) == int(dataset.cardinality())
        assert sizes[:-1] == [batch_size] * (len(sizes) - 1)  # the last one has the remainder
        labels = [label for _, labels in dataset for label in labels.numpy().tolist()]
        assert len(labels) == sum(sizes)
        served += labels
    assert sorted(served) == list(range(23))
