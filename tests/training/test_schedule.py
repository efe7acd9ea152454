"""Schedules: other images from an epoch on, by `fit`, by iteration, and after a resume."""

import dataclasses

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, DALI, TF_DATA, at_night, backends, refused

import dali_tf_input as dti
from dali_tf_input import InputSpec, Mix, Preprocess, load

SMALL = Preprocess.for_training(8)
LARGE = Preprocess.for_training(12, augment=(dti.augment.Solarize(p=0.5),))
LABEL = dti.ClassLabel(one_hot=True, num_classes=24)
BATCH = 6  # of 24 records: 4 steps
dali = pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
tf_data = pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))


@pytest.fixture
def spec(dataset):
    return InputSpec.for_training(dataset, SMALL, label=LABEL, seed=5)


@pytest.fixture
def stages(spec):
    mixed = dataclasses.replace(spec, preprocess=LARGE, mix=Mix(mixup=0.5))
    return {1: LARGE, 3: mixed}


def make_model(*, dropout=0.3, **compiled):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(dropout)]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    how = {"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"], "run_eagerly": True}
    return models.make_model(None, 24, *layers, **{**how, **compiled})


@pytest.mark.slow
@dali
def test_iteration(spec, stages, options):
    """Each epoch is that of its spec alone; the next one goes on."""
    train = load(spec, options, batch_size=BATCH, schedule=stages)
    large = dataclasses.replace(spec, preprocess=LARGE)
    for first, epochs, alone in ((0, 1, spec), (1, 2, large), (3, 1, stages[3])):
        expected = load(alone, options, batch_size=BATCH, start_step=4 * first)
        for _ in range(epochs):
            batches = [*zip(train, expected, strict=True)]
            assert len(batches) == 4
            for batch, other in batches:
                for values, others in zip(batch, other, strict=True):
                    np.testing.assert_array_equal(values, others)
    assert train.batch_at(2)[0].shape == (BATCH, 8, 8, 3)
    images, labels = train.batch_at(13)
    assert images.shape == (BATCH, 12, 12, 3)
    assert ((np.asarray(labels) > 0).sum(1) <= 2).all()
    assert train.records_of(13).tolist() == load(spec, batch_size=BATCH).records_of(13).tolist()


@pytest.mark.slow
@tf_data
def test_fit(spec, stages, options):
    """One training for the callbacks; the same as by hand, epoch for epoch."""
    train = load(spec, options, batch_size=BATCH, schedule=stages)
    model, seen = make_model(dropout=0), []
    note = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_epoch_begin=lambda epoch, logs: seen.append(epoch),
    )
    history = train.fit(model, epochs=4, verbose=0, callbacks=[note])
    assert seen == ["begin", 0, 1, 2, 3]
    assert history.epoch == [0, 1, 2, 3]
    by_hand = make_model(dropout=0)
    batches = load(spec, options, batch_size=BATCH, schedule=stages)

    def train_on(batch):
        by_hand.reset_metrics()  # Keras before 3.13 returns their mean since then
        return float(by_hand.train_on_batch(*batch)[0])

    losses = [np.mean([*map(train_on, batches)]) for _ in range(4)]
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-5)
    for one, other in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_resumes(spec, stages, tmp_path):
    """Stopped in the last step of a stage, at night again and again: the same weights to the bit."""

    def train(resume, callbacks=()):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
        model = make_model(optimizer=optimizer)
        model(np.zeros((1, 8, 8, 3)))
        fed = load(spec, DALI, batch_size=BATCH, schedule=stages)
        resume = dti.Resume(tmp_path / resume, save_every=at_night(3, 1))
        history = fed.fit(model, epochs=4, verbose=0, resume=resume, callbacks=list(callbacks))
        return model.get_weights(), history.history["loss"]

    expected = train("whole")
    for after in at_night((4,), (1, 4, 5)):  # since the one before
        with pytest.raises(KeyboardInterrupt):
            train("stopped", [models.stop_at(after)])
    found = train("stopped")
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(one, other)
    other = load(spec, DALI, batch_size=BATCH, schedule={1: LARGE})
    with refused("`schedule` was .*3: .*mix.*, is {1: "):
        other.fit(make_model(), epochs=4, resume=str(tmp_path / "whole"))


@pytest.mark.slow
def test_averaged_weights(spec, stages):
    """A stage does not train on from the averages that Keras puts in place at the end of `fit`."""

    def train(schedule, preprocess):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
        model = make_model(optimizer=optimizer)
        own = dataclasses.replace(spec, preprocess=preprocess)
        load(own, DALI, batch_size=BATCH, schedule=schedule).fit(model, epochs=4, verbose=0)
        return model.get_weights()

    # Stages that change nothing but the decode of the image are one training.
    almost = dataclasses.replace(SMALL, mirror_probability=0.5 + 1e-12)
    for one, other in zip(train({2: almost}, SMALL), train(None, SMALL), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
@backends
def test_on_replicas_with_validation_and_blame(dataset, spec, tmp_path, options):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    plain = dataclasses.replace(spec, label=dti.ClassLabel())
    valid_spec = InputSpec.for_evaluation(dataset, 8)
    schedule = {1: LARGE, 2: SMALL}
    train = load(plain, options, batch_size=BATCH, strategy=strategy, schedule=schedule)
    valid = load(valid_spec, options, batch_size=BATCH, strategy=strategy)
    blame = train.blame(tmp_path / "blame", loss=models.FROM_LOGITS)
    pool = keras.layers.GlobalAveragePooling2D()
    model = models.make_model(None, 24, pool, strategy=strategy, metrics=[blame.metric])
    history = train.fit(model, epochs=3, validation=valid, callbacks=[blame], verbose=0).history
    assert len(history["val_loss"]) == 3
    assert np.isfinite(blame.losses).all()


@pytest.mark.slow
def test_of_a_function(spec):
    """It is asked for each epoch; equal specs are one stage."""

    def by_epoch(epoch):
        return Preprocess.for_training(8 + 4 * (epoch // 2))

    train = load(spec, DALI, batch_size=BATCH, schedule=by_epoch)
    assert [next(iter(train))[0].shape[1] for _ in range(3)] == [8, 8, 12]
    assert train.schedule.end_of(0, 9) == 2
    assert train.schedule.end_of(3, 9) == 4
    assert train.schedule.end_of(8, 9) == 9
    assert "by_epoch" in repr(train.schedule)
    again = load(spec, DALI, batch_size=BATCH, schedule=by_epoch)
    assert len(again.fit(make_model(), epochs=3, verbose=0).epoch) == 3
    assert next(iter(again))[0].shape[1] == 12  # the fourth


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({1: 64}, "must give a Preprocess or an InputSpec, got 64 for epoch 1"),
        ({-1: SMALL}, "`schedule` must be a dict by epochs, from 0, got -1"),
        (lambda epoch: None, "must give a Preprocess or an InputSpec, got None for epoch 0"),
        ({2: {"seed": 9}}, "for epoch 2 it changes `seed`. Begin another training with it"),
        ({2: {"label": None}}, "for epoch 2 it changes `label`"),
        ({2: {"views": (SMALL, LARGE)}}, "must keep what comes out, image, label;"),
        ({2: {"repeated_augmentation": 2}}, "for epoch 2 it changes `repeated_augmentation`"),
    ],
)
def test_refuses(spec, schedule, message):
    if isinstance(schedule, dict):
        schedule = {
            epoch: dataclasses.replace(spec, **stage) if isinstance(stage, dict) else stage
            for epoch, stage in schedule.items()
        }
    with refused(message):
        load(spec, TF_DATA, batch_size=BATCH, schedule=schedule)


def test_refuses_what_cannot_follow(spec, stages, dataset):
    train = load(spec, TF_DATA, batch_size=BATCH, schedule=stages)
    with refused("`dataset` cannot follow a `schedule`: use train.fit"):
        _ = train.dataset
    with refused("`steps_per_epoch` must be all 4 of an epoch with a `schedule`, got 3"):
        train.fit(make_model(), steps_per_epoch=3)
    with refused("`schedule` is for training"):
        load(InputSpec.for_evaluation(dataset, 8), batch_size=4, schedule={1: LARGE})
    halved = dataclasses.replace(SMALL, dtype="bfloat16")
    with refused("DALI does not support `dtype` 'bfloat16'"):
        load(spec, BACKENDS["dali"], batch_size=BATCH, schedule={7: halved})
