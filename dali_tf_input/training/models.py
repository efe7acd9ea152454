"""What a model must be, to be trained or evaluated on an input."""

import inspect
import re
import weakref
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.records.class_names import Names
from dali_tf_input.records.labels import COUNT_FROM_1, ClassLabel
from dali_tf_input.spec import meetings
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import Options
from dali_tf_input.spec.preprocess import Preprocess
from dali_tf_input.spec.rules import find_vectors
from dali_tf_input.training import strategies

Shape = tuple[int | None, ...]
_UNNAMED = re.compile(r"(keras_tensor|input|input_layer)(_\d+)?")  # what Keras calls inputs

# Losses of Keras that compare labels and outputs of equal shape, value by value.
_OF_TWO_CLASSES = ("binary_crossentropy", "binary_focal_crossentropy", "hinge", "squared_hinge")
_ELEMENTWISE = (
    *_OF_TWO_CLASSES,
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "cosine_similarity",
    "kl_divergence",
    "poisson",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "mean_absolute_percentage_error",
    "mean_absolute_error",
    "huber",
    "log_cosh",
)
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


def check_compiled(model: keras.Model) -> None:
    """Raises InputError unless a model is compiled."""
    if not model.compiled:
        text = "`model` must be compiled"
        raise InputError(f"{text}: model.compile(optimizer, loss, metrics=['accuracy']).")


def check_inputs(model: keras.Model, shapes: Mapping[str, Shape]) -> None:
    """Raises InputError unless a model takes what it is given.

    What a model takes is known if it was made by `keras.Sequential` with an `Input`, or from
    `keras.Input`s. Dimensions that are not known are not compared.

    Args:
      model: a model.
      shapes: the shape of one value of each input, by name.
    """
    own = getattr(model, "inputs", None) or []
    taken = {tensor.name: tuple(tensor.shape[1:]) for tensor in own}
    given = ", ".join(shapes)
    if not taken:
        return
    if len(shapes) > 1 and isinstance(model, keras.Sequential):
        text = f"A Sequential model takes one input, this input gives {given}"
        raise InputError(f"{text}: make the model of keras.Input(shape, name=...) for each.")
    # Inputs without a name of the user's may be a part of a dictionary that names them.
    known = [name for name in taken if name not in shapes and not _UNNAMED.fullmatch(name)]
    if missing := known if len(shapes) + len(taken) > 2 else []:
        raise InputError(
            f"The model's inputs are {', '.join(taken)}, this input gives {given}: nothing is"
            f" called {missing[0]!r}. Name each keras.Input(shape, name=...) after what it takes."
        )
    for name, shape in shapes.items():
        due = taken.get(name, next(iter(taken.values()))) if len(shapes) == 1 else taken.get(name)
        if due is not None and not _fits(shape, due) and not _takes(model, shape, due):
            raise InputError(f"The model takes `{name}` of shape {due}, this input gives {shape}.")


def check_targets(model: keras.Model, spec: InputSpec) -> None:
    """Raises InputError unless the labels of a spec fit the loss and the outputs of a model.

    Models with steps of their own, losses that are not Keras's, and losses by output are not looked
    into.
    """
    has_own_steps = any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step", "compute_loss")
    )
    loss, outputs = getattr(model, "loss", None), getattr(model, "outputs", None)
    if isinstance(loss, list | tuple) and len(loss) == 1:
        (loss,) = loss
    if loss is None or has_own_steps:
        return
    shapes = {name: shape for name, (shape, _) in spec.outputs.items() if name in ("label", "mask")}
    if not shapes:
        raise InputError("The loss of the model needs labels or masks: this input has none.")
    if not outputs or isinstance(loss, dict | list | tuple):
        return
    if (len(outputs) > 1) != (len(shapes) > 1):
        raise InputError(
            f"The model has {len(outputs)} outputs, and this input gives {' and '.join(shapes)}:"
            " give each output its label, or use Keras's `fit` on a mapped dataset."
        )
    if len(outputs) > 1:
        return
    check_loss(loss, tuple(outputs[0].shape[1:]), spec)


def check_loss(loss: Any, out: Shape, spec: InputSpec) -> None:
    """Raises InputError unless the label or mask of a spec fits a loss of Keras and its outputs.

    Args:
      loss: a loss, by name or not; others than Keras's are not looked into.
      out: the shape of one output.
      spec: a spec with one of a label and a mask.
    """
    ((name, shape),) = (
        (name, shape) for name, (shape, _) in spec.outputs.items() if name in ("label", "mask")
    )
    kind = _kind_of(loss)
    is_sparse = kind == "sparse_categorical_crossentropy"
    highest_pixel = find_highest_pixel(spec) if name == "mask" and is_sparse else None
    if highest_pixel is not None and isinstance(out[-1], int) and 1 < out[-1] <= highest_pixel:
        raise InputError(
            f"Pixels of the masks have values up to {highest_pixel}, and the model has {out[-1]}"
            " outputs for each: SegmentationMask(values=...) maps values to classes from 0."
        )
    if is_sparse and not _fits(shape, out[:-1]):
        is_one_hot = name == "label" and len(shape) == 1
        remedy = "categorical_crossentropy takes labels that are one-hot" if is_one_hot else ""
        raise InputError(
            f"The loss {kind} takes a class for each of the model's outputs {out}, `{name}` has"
            f" shape {shape}{': ' if remedy else ''}{remedy}."
        )
    if kind in _ELEMENTWISE and not _fits(shape, out):
        remedy = ""
        if isinstance(spec.label, ClassLabel) and not spec.label.one_hot:
            remedy = (
                ": for classes use sparse_categorical_crossentropy, or ClassLabel(one_hot=True)"
            )
        raise InputError(
            f"The loss {kind} takes values of the shape of the model's outputs, {out}, `{name}`"
            f" has {shape}{remedy}."
        )
    highest = spec.label_range[1] if spec.label_range else 0
    is_class = isinstance(spec.label, ClassLabel) and not spec.label.one_hot
    if kind in _OF_TWO_CLASSES and name == "label" and is_class and highest > 1:
        raise InputError(
            f"The loss {kind} is of two classes, 0 and 1, and labels run to {highest}: use"
            " sparse_categorical_crossentropy, and an output for each class."
        )


def find_highest_pixel(spec: InputSpec) -> int | None:
    """Returns the highest class of the masks' pixels, but for what is ignored; None if not known.

    The index step knows it of level "decode" with `mask_key`.
    """
    feature = spec.records.features.get(spec.mask.key) if spec.mask else None
    if spec.mask is None or feature is None or feature.counts is None:
        return None
    served = spec.mask.map_values([value for value, _ in feature.counts])
    return max((value for value in served if value != spec.mask.ignore), default=None)


def _fits(shape: Shape, due: Shape) -> bool:
    """Whether values of a shape are what is due; as for Keras, but for a last axis of 1."""

    def are_equal(one: Shape, other: Shape) -> bool:
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(None in pair or len({*pair}) == 1 for pair in pairs)

    return are_equal(shape, due) or are_equal((*shape, 1), due) or are_equal(shape, (*due, 1))


def _takes(model: keras.Model, shape: Shape, due: Shape) -> bool:
    """Whether a Sequential model takes images of another size than it was built for."""
    if not isinstance(model, keras.Sequential) or len(shape) != len(due) or shape[-1] != due[-1]:
        return False
    call = tf.function(lambda images: model(images, training=False))
    try:
        call.get_concrete_function(tf.TensorSpec((1, *shape), tf.float32))
    except Exception:  # a layer's, of any kind
        return False
    return True


def _kind_of(loss: Any) -> str:
    """Returns the name of Keras's function for a loss of Keras; "" for others."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return ""
    kind = loss if inspect.isfunction(loss) else type(loss)
    if not kind.__module__.startswith("keras."):
        return ""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _name_of(loss: Any) -> str:
    """Returns what Keras calls a loss that is given by name, as a function, or as an object."""
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", loss))


def check_labels(model: keras.Model, label_range: tuple[int, int] | None) -> None:
    """Raises InputError if a classifier has fewer outputs than there are labels.

    Args:
      model: a compiled model.
      label_range: the lowest and the highest label; None if they are not known.
    """
    num_classes = count_classes(model)
    if label_range and num_classes and num_classes <= label_range[1]:
        counts_from_1 = label_range == (1, num_classes)
        hint = f"{COUNT_FROM_1} Otherwise the" if counts_from_1 else "The"
        raise InputError(
            f"Labels run from {label_range[0]} to {label_range[1]}, the model has"
            f" {num_classes} outputs, for labels 0 to {num_classes - 1}. {hint} model needs more"
            " outputs."
        )


def find_doubts(model: keras.Model, spec: InputSpec) -> list[str]:
    """Returns what of a model is likely not meant for its input, but may be."""
    doubts = []
    if text := _doubt_activation(model):
        doubts.append(text)
    if isinstance(spec.class_weight, Mapping) and spec.label_range:
        has_records = {label for label, _ in spec.class_counts or ()}
        unknown = [
            label
            for label in spec.class_weight
            if label > spec.label_range[1] or (has_records and label not in has_records)
        ]
        if unknown:
            offset = getattr(spec.label, "offset", 0)
            hint = f" Classes count from 0: that is the stored label {unknown[0] + offset}."
            text = f"`class_weight` is of classes that no record has, such as {unknown[0]}."
            doubts.append(text + (hint if offset else ""))
    if spec.class_weight is not None and not any(spec.class_weights()):
        doubts.append("`class_weight` is 0 for every class: nothing is learned.")
    masks = spec.records.features.get(spec.mask.key) if spec.mask else None
    if spec.mask and (masks is None or masks.counts is None):
        known = f"--verify=decode --mask_key={spec.mask.key}"
        text = "The values of the masks' pixels are not known, and not compared with the model's"
        doubts.append(f"{text} outputs: dali-tf-input index {known} counts them.")
    if size := find_vectors(spec):
        text = f"`label` has {size} values in each record that was read, all of them 0 or 1"
        doubts.append(f"{text}: a 0 or 1 for each class is Values(size={size}).")
    names, outputs = spec.class_names, count_classes(model)
    num_classes = getattr(spec.label, "num_classes", None)
    if outputs and num_classes and num_classes > outputs:
        text = f"The label has {num_classes:,} classes (`num_classes`), and the model"
        doubts.append(f"{text} {outputs:,} outputs.")
    if names and outputs and outputs > len(names):
        doubts.append(f"The model has {outputs:,} outputs, and {len(names):,} classes have names.")
    if meetings.normalizes(spec.preprocess) and (layer := _find_scaling(model)):
        doubts.append(
            f"The layer {layer!r} of the model scales pixels that are normalized already: leave"
            " that to the model, normalization=None."
        )
    return doubts


def _doubt_activation(model: keras.Model) -> str | None:
    """Says if the loss takes probabilities and the last layer makes none, or the reverse."""
    loss, layers = getattr(model, "loss", None), model.layers
    if "crossentropy" not in _name_of(loss) or not layers or not hasattr(layers[-1], "activation"):
        return None
    activation = layers[-1].activation
    from_logits = loss.get_config().get("from_logits") if isinstance(loss, keras.Loss) else False
    takes = f"The loss {_name_of(loss)} takes"
    if not from_logits and activation is keras.activations.linear:
        return f"{takes} probabilities, and the last layer has no softmax: from_logits=True."
    if from_logits and activation in (keras.activations.softmax, keras.activations.sigmoid):
        return f"{takes} logits, and the last layer makes probabilities: from_logits=False."
    return None


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
_of_reduced = weakref.WeakSet[keras.Model]()  # those that saw images decoded at a reduced size


def note_input(model: keras.Model, spec: InputSpec, options: Options) -> None:
    """Notes what a model is trained on, for `check_noted` and `saw_reduced_images`."""
    _noted[model] = spec
    (_of_reduced.add if options.decode == "scaled" else _of_reduced.discard)(model)


def saw_reduced_images(model: keras.Model) -> bool:
    """Whether `fit` in this program trained a model with decode="scaled"."""
    return model in _of_reduced


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


def count_classes(model: keras.Model) -> int | None:
    """Returns how many classes a model with a sparse cross-entropy tells apart, else None."""
    loss, shape = getattr(model, "loss", None), getattr(model, "output_shape", None)
    kind = _kind_of(loss) or _name_of(loss)
    if "sparse_categorical" not in kind or not isinstance(shape, tuple):
        return None
    return shape[-1] if isinstance(shape[-1], int) else None
