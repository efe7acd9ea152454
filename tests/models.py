"""Small Keras models for tests, and how they are trained."""

import contextlib
import itertools

import keras

import dali_tf_input as dti

FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(
    size,
    outputs,
    *layers,
    activation=None,
    strategy=None,
    optimizer="sgd",
    loss=FROM_LOGITS,
    **compiled,
):
    """Returns a compiled model of square images: `layers`, by default Flatten, and a Dense one.

    The images may be of any size if `size` is None.
    """
    layers = layers or (keras.layers.Flatten(),)
    with strategy.scope() if strategy else contextlib.nullcontext():
        last = keras.layers.Dense(outputs, activation=activation)
        layers = [keras.layers.Input((size, size, 3)), *layers, last]
        model = keras.Sequential(layers)
        model.compile(optimizer, loss, **compiled)
    return model


def fit(model, train, epochs=1, **arguments):
    """Trains on what `load` returned; returns the history."""
    return train.fit(model, epochs=epochs, verbose=0, **arguments).history


def save_at(step, folder, model, spec, *, batch_size):
    """Restores what is in a folder, and saves as training would at `step`.

    Returns the step that was there.
    """
    resume = dti.Resume(folder)
    state, arrays = resume.restore(model, spec, batch_size=batch_size)
    before, state.step = state.step, step
    resume.save(model, state, arrays)
    return before


class Crash(BaseException):
    """What stands for kill -9: nothing catches it, so that nothing cleans up."""


def stop_at(number, error=KeyboardInterrupt, when="on_train_batch_end"):
    """Returns a callback that raises an error in its n-th call."""
    calls = itertools.count(1)

    def count(_, logs=None):
        if next(calls) == number:
            raise error

    return keras.callbacks.LambdaCallback(**{when: count})
