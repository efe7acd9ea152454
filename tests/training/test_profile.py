"""Whether training waits for input: right on cases that are made, and nothing of training is
changed by asking.
"""

import statistics
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import warm
from commands import fails, run
from conftest import BACKENDS, SCRIPTS, TF_DATA, refused, spec_of
from models import FROM_LOGITS, fit, make_model

from dali_tf_input import Preprocess
from dali_tf_input.training.load import load
from dali_tf_input.training.profile import EpochProfile, InputProfile

TESTS = Path(__file__).parent
ROWS = 4  # of a batch


def taking(seconds, value):
    """Returns `value`, a while later; sleeping, so that what is made beside it does not slow it
    down.
    """

    def sleep(given):
        time.sleep(seconds)
        return given

    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


class Slow(keras.Model):
    """A model whose training step takes a known time."""

    def __init__(self, seconds):
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self._seconds = seconds

    def call(self, images):
        return self.layer(images)

    def train_step(self, data):
        images, labels = data
        return super().train_step((taking(self._seconds, images), labels))


def slow_input(seconds, *, overlapped):
    """Batches that take a known time each, made beside the step or when they are asked for."""
    batch = tf.zeros((ROWS, 2)), tf.zeros((ROWS,), tf.int64)
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    overlapped = 2 if overlapped is True else overlapped  # batches made ahead
    dataset = dataset.map(lambda images, labels: (taking(seconds, images), labels))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return (dataset.prefetch(overlapped) if overlapped else dataset).with_options(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "model", "overlapped", "wait"),
    [
        # Slow input. On a busy machine Keras itself adds some ms to a step, which is no waiting.
        (0.24, 0.06, True, 0.75),
        (0.24, 0.06, 8, 0.75),  # and more of it made ahead
        (0.09, 0.36, True, 0.0),  # slow model
        (0.24, 0.24, True, 0.0),  # both equal: made beside the step, the input costs nothing
        (0.24, 0.24, False, 0.5),  # both equal, one after the other
        (0.09, 0.27, False, 0.25),
    ],
)
def test_right_to_within_5_points(made, model, overlapped, wait):
    steps = 28 if overlapped == 8 else 14  # more than twice what was made ahead
    for _ in range(3):  # others may need the machine just then
        dataset = slow_input(made, overlapped=overlapped)
        trained = Slow(model)
        trained.compile("sgd", FROM_LOGITS)
        profile = InputProfile(dataset, cached_steps=6)
        history = trained.fit(
            dataset, steps_per_epoch=steps, epochs=3, verbose=0, shuffle=False, callbacks=[profile]
        )
        assert [epoch.epoch for epoch in profile.epochs] == [0, 1, 2]
        assert history.history.history["input_wait"] == [epoch.wait for epoch in profile.epochs]
        # The median, as one epoch may meet a hiccup of the machine.
        found = statistics.median(epoch.wait for epoch in profile.epochs)
        if found == pytest.approx(wait, abs=0.05):
            return
    pytest.fail(f"{found} instead of {wait}")


def train_twice(records, options, num_replicas):
    """Trains with and without the callback; raises where that comes out otherwise."""
    found = []
    for profiled in (False, True):
        strategy = num_replicas and tf.distribute.MirroredStrategy(
            [f"CPU:{number}" for number in range(num_replicas)]
        )
        spec = spec_of(records, "global", Preprocess.for_training(8))
        train = load(spec, options, strategy=strategy or None, batch_size=4)
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else tf.device(None):
            layers = [
                keras.layers.Conv2D(4, 3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=1),
                keras.layers.GlobalAveragePooling2D(),
            ]
            schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
            optimizer = keras.optimizers.Adam(schedule)
            model = make_model(8, 24, *layers, optimizer=optimizer, metrics=["accuracy"])
        callbacks = [InputProfile(train, cached_steps=3)] if profiled else []
        history = fit(model, train, epochs=2, steps_per_epoch=12, callbacks=callbacks)
        for name in ("input_wait", "images_per_second"):
            assert len(history.pop(name, [])) == 2 * profiled
        held = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        state = [variable.numpy() for variable in held]
        found.append((history, state))
    (history, state), (profiled_history, profiled_state) = found
    assert history == profiled_history
    for one, other in zip(state, profiled_state, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_comes_out_the_same(dataset, backend, num_replicas):
    """Weights, optimizer, learning rate schedule, batch statistics, metrics: equal to the bit with
    and without it.
    """
    train_twice(dataset, BACKENDS[backend], num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_of_two_replicas_comes_out_the_same(dataset, backend):
    """In a process of its own: what other tests left of TensorFlow's collectives does not meet
    these.
    """
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(SCRIPTS)!r})  # of which conftest.py imports
        import tensorflow as tf
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        from dali_tf_input import Records
        import test_input_profile as test
        test.train_twice(Records.from_files({list(dataset.paths)!r}), test.BACKENDS[{backend!r}], 2)
    """
    process = warm.run(["-c", code], cwd=TESTS)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_steps_per_execution_and_few_steps():
    dataset = slow_input(0.09, overlapped=False)
    model = Slow(0.27)
    model.compile("sgd", FROM_LOGITS, steps_per_execution=3)
    profile = InputProfile(dataset, cached_steps=6)
    model.fit(dataset, steps_per_epoch=12, epochs=2, verbose=0, shuffle=False, callbacks=[profile])
    # Two calls of three: what the queues held at first does not count.
    assert profile.epochs[1].steps == 6
    # Of the three steps of a call TensorFlow asks for the next batch beside the step: 90 ms of 900
    # are waited for.
    assert min(abs(epoch.wait - 0.1) for epoch in profile.epochs) <= 0.05
    model.fit(dataset, steps_per_epoch=3, epochs=1, verbose=0, shuffle=False, callbacks=[profile])
    assert profile.epochs[-1] == EpochProfile(0, 0, 0.0, 0.0)
    assert profile.epochs[-1].wait == 0
    with refused("`cached_steps` must be at least 1, got 0"):
        InputProfile(dataset, cached_steps=0)


def test_other_optimizers_are_left_as_they_are():
    """A model that trains by optimizers of its own, as GANs do."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)
            self.first = keras.optimizers.SGD(0.1, momentum=0.9)
            self.others = [keras.optimizers.Adam(0.1)]

        def call(self, images):
            return self.layer(images)

        def train_step(self, data):
            for optimizer in (self.first, *self.others):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(data[0], training=True) - 1) ** 2)
                gradients = tape.gradient(loss, self.trainable_variables)
                optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    found = []
    for profiled in (False, True):
        keras.utils.set_random_seed(0)
        dataset = slow_input(0.0, overlapped=False).map(lambda images, labels: (images + 1, labels))
        model = Two()
        model.compile("sgd")
        callbacks = [InputProfile(dataset, cached_steps=2)] if profiled else []
        model.fit(
            dataset, steps_per_epoch=12, epochs=2, verbose=0, shuffle=False, callbacks=callbacks
        )
        variables = [*model.variables, *model.first.variables, *model.others[0].variables]
        found.append([variable.numpy() for variable in variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_per_execution_under_a_strategy_is_refused(dataset):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    spec = spec_of(dataset, "global", Preprocess.for_training(8))
    train = load(spec, TF_DATA, strategy=strategy, batch_size=4)
    model = make_model(8, 24, strategy=strategy, steps_per_execution=2)
    with refused("`steps_per_execution` 2 cannot be profiled under a strategy of several replicas"):
        fit(model, train, callbacks=[InputProfile(train)])


@pytest.mark.slow
def test_train_profiles_its_input(sample_folder):
    arguments = ["--files=data/sample/train-*", "--image_size=32", "--epochs=2"]
    arguments += ["--profile_input", "--batch_size=8"]
    process = run("train.py", *arguments, cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(" - input_wait: 0.") == 2
    assert "input: the network waits for it " in process.stdout
    command = "scripts/tune.py '--files=data/sample/train-*' --image_size=32"
    assert "would gain at most that" in process.stdout or command in process.stdout
    process = run("train.py", *arguments, "--strategy=multi_worker", cwd=sample_folder)
    fails(process, "--profile_input are for --strategy=mirrored only")
