"""Epochs that end, evaluation and prediction without padding: what Keras is given, and what it
makes of it.
"""

import contextlib
import dataclasses
import itertools
import warnings

import conftest
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, TF_DATA, backends, refused, spec_of, write_dataset, write_tfrecord
from dali_tf_input.training.epochs import end_epochs
from models import FROM_LOGITS, make_model

from dali_tf_input import (
    ClassLabel,
    InputProfile,
    Preprocess,
    Records,
    Resume,
    StartStep,
    build_index,
)
from dali_tf_input.training.load import load

NUM_RECORDS, BATCH = 24, 5  # 4 steps an epoch, and a remainder
SMALL = Preprocess.for_training(8)
CENTER = Preprocess.for_evaluation(8)


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in (one_device, mirrored)]
strategies = pytest.mark.parametrize(
    "make_strategy", [lambda: None, *SLOW], ids=["none", "one_device", "mirrored"]
)


def feed(dataset, options, order="global", strategy=None, **changes):
    spec = spec_of(dataset, order, SMALL, **({"buffer_size": 6} if order == "buffer" else {}))
    batch_size = 2 * BATCH if strategy and strategy.num_replicas_in_sync > 1 else BATCH
    return load(spec, options, strategy=strategy, batch_size=batch_size, **changes)


def evaluation(dataset, options, batch_size, strategy=None):
    spec = spec_of(dataset, "sequential", CENTER, repeat=False)
    return load(spec, options, strategy=strategy, batch_size=batch_size)


class Recorder(keras.Model):
    """An unbuilt model, so that Keras takes a batch to build it, that notes labels."""

    def __init__(self):
        super().__init__()
        self.seen, self.flat, self.out = [], keras.layers.Flatten(), keras.layers.Dense(24)

    def call(self, images):
        return self.out(self.flat(images))

    def note(self, labels):
        self.seen.append(labels.tolist())
        return np.int64(0)

    def train_step(self, data):
        tf.numpy_function(self.note, [data[1]], tf.int64)
        return super().train_step(data)


def labels_of_training(fed, strategy, epochs=3, **arguments):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Recorder()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    model.fit(fed.dataset, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return sorted(model.seen) if strategy else model.seen  # replicas run side by side


@backends
@strategies
@pytest.mark.parametrize("order", ["global", pytest.param("buffer", marks=pytest.mark.slow)])
def test_three_epochs_end_and_are_those_of_steps_per_epoch(dataset, options, make_strategy, order):
    strategy = make_strategy()
    fed = feed(dataset, options, order, strategy)
    assert int(fed.dataset.cardinality()) == fed.steps_per_epoch
    found = labels_of_training(fed, strategy)
    again = feed(dataset, options, order, strategy)
    steps = {"steps_per_epoch": again.steps_per_epoch}
    expected = labels_of_training(again, strategy, **steps)
    if order == "global" or options != TF_DATA:
        assert found == expected
    else:  # how far an iterator that was dropped had read ahead decides about the next one's order
        assert len(found) == len(expected)
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    assert len(found) == 3 * fed.steps_per_epoch * num_replicas


def loop(fed, most=None):
    return [batch[1].numpy().tolist() for batch in itertools.islice(fed.dataset, most)]


@backends
def test_a_loop_ends_and_the_next_goes_on(dataset, options):
    """Epoch after epoch; an epoch that was left starts again."""
    iterator = iter(feed(dataset, options).dataset.repeat())
    expected = [next(iterator)[1].numpy().tolist() for _ in range(12)]
    fed = feed(dataset, options)
    assert loop(fed, 1) == expected[:1]
    assert loop(fed, 3) == expected[:3]
    assert loop(fed) == expected[:4]
    assert loop(fed, 2) == expected[4:6]
    assert loop(fed) == expected[4:8]
    assert loop(fed) == expected[8:]
    assert fed.dataset.next_step == 12


@backends
def test_buffer_never_repeats_its_order(dataset, options):
    """A new pipeline for each epoch would draw the same records and crops again."""
    fed = feed(dataset, options, "buffer")
    assert loop(fed) != loop(fed)


@backends
def test_a_start_step_and_what_moves_it(dataset, options):
    order = loop(feed(dataset, options)) + loop(feed(dataset, options, start_step=4))
    fed = feed(dataset, options, start_step=2)
    assert loop(fed) == order[2:6]
    fed.start_step.step = 1  # as `Resume` does
    assert loop(fed) == order[1:5]


def test_class_weights_and_map_keep_the_end(dataset):
    """Keras maps the dataset for class weights."""
    expected = labels_of_training(feed(dataset, TF_DATA), None)
    weights = dict.fromkeys(range(24), 1.0)
    assert labels_of_training(feed(dataset, TF_DATA), None, class_weight=weights) == expected
    mapped = feed(dataset, TF_DATA).dataset.map(lambda images, labels: labels)
    assert [labels.numpy().tolist() for labels in mapped] == expected[:4]


@backends
@strategies
def test_fit_evaluate_predict(dataset, options, make_strategy, tmp_path):
    """One call each; 24 records in steps of 10 and 14, exactly those records."""
    strategy = make_strategy()
    accuracy = {"weighted_metrics": ["accuracy"]}
    model = make_model(8, 24, strategy=strategy, **accuracy)
    train = feed(dataset, options, strategy=strategy)
    validation = evaluation(dataset, options, 10, strategy)
    history = train.fit(model, epochs=2, validation=validation, verbose=0)
    assert len(history["loss"]) == len(history["val_accuracy"]) == 2
    assert int(model.optimizer.iterations.numpy()) == 2 * train.steps_per_epoch
    expected = {"images": [], "labels": []}
    for images, labels, _ in evaluation(dataset, TF_DATA, 1).dataset:
        expected["images"].append(images.numpy()[0])
        expected["labels"].append(int(labels[0]))
    logits = model(np.stack(expected["images"]), training=False).numpy()
    for batch_size in (10, 14, 30):
        validation = evaluation(dataset, options, batch_size, strategy)
        np.testing.assert_allclose(validation.predict(model, verbose=0), logits, atol=0.02)
        found = validation.evaluate(model, verbose=0)
        right = np.mean(logits.argmax(axis=1) == expected["labels"])
        np.testing.assert_allclose(found["accuracy"], right, atol=1e-5)
    again = feed(dataset, options, strategy=strategy)
    resumed = Resume(tmp_path, again)
    assert len(again.fit(model, epochs=1, resume=resumed, verbose=0)["loss"]) == 1


@backends
def test_plain_metrics_on_one_replica_are_exact(dataset, options):
    """The last batch is short: 24 records, 16 at a time."""
    model = make_model(8, 24, metrics=["accuracy"])
    validation = evaluation(dataset, options, 16)
    assert [len(batch[0]) for batch in validation.dataset] == [16, 8]
    assert all((batch[2].numpy() == 1).all() for batch in validation.dataset)
    assert len(model.predict(validation.dataset, verbose=0)) == 24
    logits = validation.predict(model, verbose=0)
    right = np.mean(logits.argmax(axis=1) == np.arange(24))
    assert validation.evaluate(model, verbose=0)["accuracy"] == pytest.approx(right, abs=1e-6)


@pytest.mark.slow
@backends
def test_plain_metrics_leave_padding_out(dataset, options, tmp_path):
    """24 records on two replicas, 14 at a time: of the second one's, 4 are padding; 16 at a time:
    all 8.
    """
    strategy = mirrored()

    class Count(keras.metrics.Sum):
        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(y_true * 0 + 1 if sample_weight is None else sample_weight)

    with strategy.scope():
        top = keras.metrics.SparseTopKCategoricalAccuracy(name="top")

    def own(labels, logits):  # what is not a number where there is no record
        return keras.ops.mean(keras.ops.cast(labels, "int32") == keras.ops.argmax(logits, axis=-1))

    compiled = {"metrics": ["accuracy", own], "weighted_metrics": [top, Count(name="count")]}
    model = make_model(8, 24, strategy=strategy, **compiled)
    held_out = evaluation(dataset, options, 14, strategy)
    logits = held_out.predict(model, verbose=0)
    labels = np.arange(24)
    expected = {
        "accuracy": np.mean(logits.argmax(axis=1) == labels),
        "top": np.mean((logits.argsort(axis=1)[:, -5:] == labels[:, None]).any(axis=1)),
        "loss": float(tf.reduce_mean(FROM_LOGITS(labels, logits))),
        "count": 24,
    }
    for batch_size in (14, 16):
        held_out = evaluation(dataset, options, batch_size, strategy)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Keras's own `evaluate` counts")
            found = held_out.evaluate(model, verbose=0)
        assert np.isfinite(found.pop("own"))  # Keras's mean over the batches
        assert found == pytest.approx(expected, rel=1e-4)
    with pytest.warns(UserWarning, match="counts the padding of the last .*held_out.evaluate"):
        model.evaluate(held_out.dataset, verbose=0)
    for resumes in (False, True):
        train = feed(dataset, options, strategy=strategy)
        callback = keras.callbacks.EarlyStopping("val_accuracy", patience=9)
        logged = {"validation": held_out, "callbacks": [callback], "verbose": 0}
        resume = Resume(tmp_path, train) if resumes else None
        history = train.fit(model, epochs=2, resume=resume, **logged)
        assert len(history["val_own"]) == 2
        after = held_out.evaluate(model, verbose=0)
        assert history["val_accuracy"][-1] == pytest.approx(after["accuracy"])
        assert callback.best == max(history["val_accuracy"])


@pytest.mark.parametrize("is_known", [True, False])
def test_labels_that_count_from_1(tmp_path, is_known):
    """Known beforehand, by a sample, or by what TensorFlow says of a batch."""
    write_dataset(tmp_path, [8, 8])
    for file in tmp_path.glob("train-*-of-?????"):
        write_tfrecord(file, conftest.numbered_examples(8, first=1))
    build_index(tmp_path / "train-*")
    records = Records.from_files(tmp_path / "train-*")
    said = "Labels run from 1 to 8, the model has 8 outputs, for labels 0 to 7"
    if not is_known:
        feature = dataclasses.replace(records.features["image/class/label"], range=None)
        features = {**records.features, "image/class/label": feature}
        records = dataclasses.replace(records, features=features)
        said = "train-0000.*: record 7, byte .* has label 8, the model's classes are 0 to 7"
    with refused(rf"{said}\. Where labels count from 1, pass label=ClassLabel.offset=1. to"):
        feed(records, TF_DATA).fit(make_model(8, 8), epochs=1, verbose=0)
    label = ClassLabel(offset=1)
    assert feed(records, TF_DATA, label=label).fit(make_model(8, 8), epochs=1, verbose=0)


def test_transformations_on_a_gpu_are_refused(dataset):
    """No kernel of TensorFlow's would take it there; training and loops do."""
    made = {"steps_per_epoch": 4, "fixed_order": True, "start_step": StartStep()}
    epochs = end_epochs(feed(dataset, TF_DATA).dataset.repeat(), on_gpu=True, **made)
    for transform in (
        lambda: epochs.map(lambda *batch: batch),
        lambda: epochs.prefetch(1),
        lambda: epochs.take(1),
        lambda: epochs.unbatch(),
        lambda: make_model(8, 24).fit(epochs, class_weight={0: 1.0}),
    ):
        with refused("TensorFlow cannot transform a dataset of DALI's on a GPU .*TfDataOptions"):
            transform()
    make_model(8, 24).fit(epochs, verbose=0, shuffle=False)
    assert len(list(epochs)) == 4


def test_what_is_refused(dataset, tmp_path):
    plain, strategy = make_model(8, 24), mirrored()
    scoped = make_model(8, 24, strategy=strategy)
    for options in BACKENDS.values():
        with refused("under another strategy than this input: make and compile it in `with strat"):
            feed(dataset, options, strategy=strategy).fit(plain, epochs=1)
        with refused(r"distribute\(..., strategy=...\) needs the MirroredStrategy of the model"):
            feed(dataset, options).fit(scoped, epochs=1)
    with refused("A dataset of a strategy cannot be mapped, as Keras does for `class_weight`"):
        feed(dataset, TF_DATA, strategy=strategy).fit(scoped, epochs=1, class_weight={0: 1.0})
    several = make_model(8, 24, steps_per_execution=3)
    with refused("`steps_per_execution` must divide the 4 steps of an epoch, .* got 3"):
        feed(dataset, TF_DATA).fit(several, epochs=1)
    train, other = feed(dataset, TF_DATA), feed(dataset, TF_DATA)
    for wrong, message in (
        ({"resume": Resume(tmp_path, other)}, r"Expected Resume\(folder, train\) of this input"),
        ({"resume": "runs/1"}, "of this input, `train`, got 'runs/1'"),
        ({"profile": InputProfile(other)}, r"Expected InputProfile\(train\) of this input"),
        ({"validation": other}, "needs a pass that serves each record once"),
        ({"validation": train.dataset}, "`validation` must be what `load` returned"),
    ):
        with refused(message):
            train.fit(plain, epochs=1, **wrong)
    assert int(plain.optimizer.iterations.numpy()) == 0
    embedding = make_model(8, 4, loss=lambda labels, outputs: keras.ops.mean(outputs, axis=-1))
    assert train.fit(embedding, epochs=1, verbose=0)  # fewer outputs than labels, and no classes
    with refused("needs a pass that serves each record once: InputSpec"):
        feed(dataset, TF_DATA).predict(plain)
