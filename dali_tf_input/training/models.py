"""What a model must be, to be trained or evaluated on an input."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.records.class_names import Names
from dali_tf_input.records.labels import COUNT_FROM_1
from dali_tf_input.spec import meetings
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.preprocess import Preprocess
from dali_tf_input.training import strategies

_FIRST_LAYERS = 4  # in which models scale pixels: after the input, and some augmentation


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


def find_doubts(model: keras.Model, spec: InputSpec) -> list[str]:
    """Returns what of a model is likely not meant for its input, but may be."""
    doubts = []
    names, outputs = spec.class_names, count_outputs(model)
    if names and outputs and outputs > len(names):
        doubts.append(f"The model has {outputs:,} outputs, and {len(names):,} classes have names.")
    if meetings.normalizes(spec.preprocess) and (layer := _find_scaling(model)):
        doubts.append(
            f"The layer {layer!r} of the model scales pixels that are normalized already: leave"
            " that to the model, normalization=None."
        )
    return doubts


def _find_scaling(model: keras.Model) -> str | None:
    """Returns the name of a layer that scales pixels, if a model begins with one."""
    for layer in model.layers[:_FIRST_LAYERS]:
        if isinstance(layer, keras.layers.Rescaling | keras.layers.Normalization):
            return str(layer.name)
        if isinstance(layer, keras.Model) and (name := _find_scaling(layer)):
            return name
    return None


# What models were trained on, by `fit` in this program. Keras's own files do not keep it.
_noted = weakref.WeakKeyDictionary[keras.Model, InputSpec]()


def note_input(model: keras.Model, spec: InputSpec) -> None:
    """Notes what a model is trained on, for `check_noted`."""
    _noted[model] = spec


def check_noted(model: keras.Model, spec: InputSpec, what: str) -> None:
    """Raises InputError if `spec`, for `what`, differs from what the model was trained on."""
    if (trained := _noted.get(model)) is not None:
        comparisons = meetings.WITHOUT_LABELS if what == "prediction" else meetings.ALL
        meetings.check_agreement(trained, spec, ("Training", what), comparisons=comparisons)


def names_of(model: keras.Model) -> Names | None:
    """Returns the names of the classes that a model was trained on, if they are known."""
    trained = _noted.get(model)
    return None if trained is None else trained.class_names


def check_pixels(model: keras.Model, preprocess: Preprocess) -> None:
    """Raises InputError if `preprocess` makes other pixels than the model was trained on."""
    trained = _noted.get(model)
    if trained is None or len(trained.image_views) > 1:
        return
    if problem := meetings.compare_pixels(trained.preprocess, preprocess):
        raise InputError(f"Training and `preprocess` differ: {problem}. Or compare=False.")


def count_outputs(model: keras.Model) -> int | None:
    """Returns the number of outputs of a model with a sparse cross-entropy, else None."""
    loss, shape = getattr(model, "loss", None), getattr(model, "output_shape", None)
    name = str(getattr(loss, "name", None) or getattr(loss, "__name__", loss))
    if "sparse_categorical" not in name or not isinstance(shape, tuple):
        return None
    return shape[-1] if isinstance(shape[-1], int) else None
