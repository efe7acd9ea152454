"""Keras on JAX and PyTorch, and tf_keras, in processes of their own.

`make test-nightly` installs JAX. PyTorch is large: its tests run where it is installed.
"""

import importlib.util
import itertools
import os

import pytest
from commands import python, succeeds
from conftest import ROOT

KERAS = """
import os, sys
import keras, numpy as np
import dali_tf_input as dti

OPTIONS = {"dali": dti.DaliOptions(device="cpu"), "tf_data": dti.TfDataOptions()}[sys.argv[2]]
records = dti.Records.from_files(sys.argv[1])

def refused(words, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except dti.InputError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

def feed():
    spec = dti.InputSpec(records=records, preprocess=dti.Preprocess.for_training(8), order="global")
    return dti.load(spec, OPTIONS, batch_size=5)

def make_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(24)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model

def weights(model):
    return np.concatenate([one.ravel() for one in model.get_weights()])
"""

FIT = """
assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
center = dti.Preprocess.for_evaluation(8)
spec = dti.InputSpec(records=records, preprocess=center, order="sequential", repeat=False)
held_out = dti.load(spec, OPTIONS, batch_size=10)
model, plain = make_model(), make_model()
history = feed().fit(model, epochs=2, validation=held_out, verbose=0).history
assert len(history["loss"]) == len(history["val_accuracy"]) == 2, history
fed = feed()
for epoch in range(2):
    for images, labels in fed:
        plain.train_on_batch(images.numpy(), labels.numpy())
np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
logits = held_out.predict(model, verbose=0)
assert logits.shape == (24, 24)
right = np.mean(logits.argmax(axis=1) == np.arange(24))
np.testing.assert_allclose(held_out.evaluate(model, verbose=0)["accuracy"], right, rtol=1e-5)

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt

folder, stopped, resumed = sys.argv[3], make_model(), make_model()
try:
    resume = dti.Resume(folder, save_every=2)
    feed().fit(stopped, epochs=2, resume=resume, callbacks=[Stop()], verbose=0)
except KeyboardInterrupt:
    pass
train = feed()
again = train.fit(resumed, epochs=2, resume=folder, verbose=0).history
for name in ("loss", "accuracy"):
    np.testing.assert_allclose(again[name], history[name], rtol=1e-4)
np.testing.assert_allclose(weights(resumed), weights(model), rtol=1e-4, atol=1e-5)

needs = f"needs Keras on TensorFlow, but it runs on {keras.backend.backend()}"
refused(f"`profile` {needs}", train.profile, model)
refused(f"export_saved_model {needs}", dti.serving.export_saved_model, model, center, folder + "/saved")
import tensorflow as tf
one = tf.distribute.OneDeviceStrategy("CPU:0")
fed = dti.load(train.spec, OPTIONS, strategy=one, batch_size=5)
refused(f"A strategy {needs}", fed.fit, model, epochs=1)
"""

# One process of two; its two devices share each of its batches.
SHARDS = """
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
assert len(keras.distribution.list_devices()) == 2
spec = dti.InputSpec(records=records, preprocess=dti.Preprocess.for_training(8), order="global")
shards = [dti.make_dataset(spec, OPTIONS, batch_size=4, shard=dti.Shard(process, 2)) for process in range(2)]
steps = records.num_records // 8
labels = [label for shard in shards for _, batch in shard.take(steps) for label in batch.numpy()]
assert sorted(labels) == list(range(24)), labels
endless = dti.make_dataset(spec, OPTIONS, batch_size=4, shard=dti.Shard(0, 2), endless=True)
history = make_model().fit(endless, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0)
assert len(history.history["loss"]) == 2
"""

LEGACY = """
import tf_keras

model = tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(24)])
model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
train = feed()
assert len(model.fit(train.dataset, epochs=2, verbose=0).history["loss"]) == 2
assert int(model.optimizer.iterations) == 2 * train.steps_per_epoch == 8
refused("for models of tf_keras call model.fit(train.dataset)", train.fit, model, epochs=1)
"""


def run(module, code, dataset, tmp_path, backend, **environment):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    files = os.path.join(os.path.dirname(dataset.paths[0]), "train-*-of-?????")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    succeeds(
        python("-c", KERAS + code, files, backend, tmp_path / "state", env=environment), quiet=False
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keras_backend", "backend"), [*itertools.product(["jax", "torch"], ["dali", "tf_data"])]
)
def test_fit_evaluate_predict_resume(dataset, tmp_path, backend, keras_backend):
    environment = {"KERAS_BACKEND": keras_backend}
    if keras_backend == "jax":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    code = FIT + SHARDS * (keras_backend == "jax")
    run(keras_backend, code, dataset, tmp_path, backend, **environment)


@pytest.mark.nightly
def test_tf_keras(dataset, tmp_path):
    run("tf_keras", LEGACY, dataset, tmp_path, "tf_data")
