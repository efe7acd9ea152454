"""Small Keras models for tests, and how they are trained."""

import contextlib

import keras

FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(
    size, outputs, *layers, strategy=None, optimizer="sgd", loss=FROM_LOGITS, **compiled
):
    """Returns a compiled model of square images: `layers`, by default Flatten, and a Dense one."""
    layers = layers or (keras.layers.Flatten(),)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.layers.Input((size, size, 3)), *layers, keras.layers.Dense(outputs)]
        model = keras.Sequential(layers)
        model.compile(optimizer, loss, **compiled)
    return model


def fit(model, train, epochs=1, **arguments):
    """Trains on what `load` returned; returns the history."""
    return train.fit(model, epochs=epochs, verbose=0, **arguments).history
