"""What a model must be, to be trained or evaluated on an input."""

from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.records.labels import COUNT_FROM_1
from dali_tf_input.training import strategies


def check_model(model: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Raises InputError unless Keras runs `model` under `strategy`, whose replicas are fed."""
    if not isinstance(model, keras.Model):
        raise InputError(
            f"`model` must be a keras.Model, got {type(model)}: for models of tf_keras call"
            " model.fit(train.dataset), their own."
        )
    if strategy is not None:
        strategies.check_keras("A strategy")
    own = strategies.strategy_of(model)
    if own is not strategy:
        if strategy is None:
            name = type(own).__name__
            remedy = f"load(..., strategy=...) needs the {name} of the model's scope"
        else:
            remedy = "make and compile it in `with strategy.scope():`"
        raise InputError(f"`model` was made under another strategy than this input: {remedy}.")


def check_labels(model: keras.Model, label_range: tuple[int, int] | None) -> None:
    """Raises InputError if a classifier has fewer outputs than there are labels.

    Args:
      model: a compiled model.
      label_range: the lowest and the highest label; None if they are not known.
    """
    outputs = count_outputs(model)
    if label_range and outputs and outputs <= label_range[1]:
        raise InputError(
            f"Labels run from {label_range[0]} to {label_range[1]}, the model has {outputs}"
            f" outputs, for labels 0 to {outputs - 1}. {COUNT_FROM_1} Otherwise the model needs"
            " more outputs."
        )


def count_outputs(model: keras.Model) -> int | None:
    """Returns the number of outputs of a model with a sparse cross-entropy, else None."""
    loss, shape = getattr(model, "loss", None), getattr(model, "output_shape", None)
    name = str(getattr(loss, "name", None) or getattr(loss, "__name__", loss))
    if "sparse_categorical" not in name or not isinstance(shape, tuple):
        return None
    return shape[-1] if isinstance(shape[-1], int) else None
