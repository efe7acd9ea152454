"""Images per second of an epoch, and the wait for input: right on cases that are made."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, refused, spec_of
from models import make_model

from dali_tf_input import Preprocess, load
from dali_tf_input.training.profile import ImagesPerSecond, InputProfile, profile_input


def feed(dataset, options=DALI, **changes):
    return load(
        spec_of(dataset, "global", Preprocess.for_training(8)), options, batch_size=6, **changes
    )


def test_images_per_second_by_a_fake_clock():
    """Of five steps the first has no start: 4 steps of 6 images in 8 seconds."""
    times = iter([0.0, 1.0, 3.0, 6.0, 8.0])
    callback, logs = ImagesPerSecond(6, clock=lambda: next(times)), {}
    callback.on_epoch_begin(0)
    for batch in range(5):
        callback.on_train_batch_end(batch)
    callback.on_epoch_end(0, logs)
    assert logs == {"images_per_second": 3.0}
    callback.on_epoch_begin(1)
    callback.on_epoch_end(1, logs := {})
    assert logs == {}  # no step says nothing


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_wait_by_a_fake_clock(monkeypatch):
    """Batches that take 3 seconds for steps of 1: three quarters of a step are waited."""
    clock, model = Clock(), make_model(8, 24, run_eagerly=True)
    batch = (tf.zeros((6, 8, 8, 3)), tf.zeros((6,), tf.int64))
    model.train_on_batch(*batch)

    def batches():
        while True:
            clock.now += 3
            yield batch

    def step(iterator):
        clock.now += 1

    monkeypatch.setattr(model, "make_train_function", lambda: None)
    monkeypatch.setattr(model, "train_function", step)
    profile = profile_input(batches(), model, batch_size=6, steps=5, clock=clock)
    assert profile == InputProfile(1.5, 4.0, 1.0)
    assert profile.wait == 0.75


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_the_model_is_as_before(dataset, options):
    """Weights, optimizer and metrics; the records that training sees are too. `fit` logs a rate."""
    model = make_model(8, 24, optimizer="adam", metrics=["accuracy"])
    train = feed(dataset, options)
    with refused("`profile` needs a model that was trained: call `fit` for an epoch first"):
        train.profile(model)
    seen = []  # by a callback such as TensorBoard's; the rate is there before
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append({**logs}))
    history = train.fit(model, profile=True, callbacks=[note], verbose=0).history
    (rate,) = history["images_per_second"]
    assert rate > 0
    assert seen[0]["images_per_second"] == rate
    kept = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [variable.numpy() for variable in kept]
    profile = train.profile(model, steps=3)
    for variable, value in zip(kept, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert 0 <= profile.wait < 1
    labels = [batch[1].numpy().tolist() for batch in train]
    again = feed(dataset, options)
    list(again)
    assert labels == [batch[1].numpy().tolist() for batch in again]


def test_what_cannot_be_profiled(dataset):
    train = feed(dataset)
    several = make_model(8, 24, steps_per_execution=2)
    with refused("compiled with steps_per_execution=1"):
        train.profile(several)
