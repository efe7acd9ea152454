"""What a training is beside its input: the model, how it is compiled, and its callbacks.

It is described by flat names and plain values, so that a saved description can be compared with
that of a later run, and each difference named. Names that Keras numbers through a program, such as
"dense_3", are no part of it.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

Description = dict[str, Any]

METRICS = ("metrics", "weighted_metrics")
_COMPILED = ("optimizer", "loss", "loss_weights", *METRICS)
# What follows from the rest, has numbers of Keras, or is drawn by it, as RandomCrop's seed; the
# state of random layers is kept with the weights.
_IGNORED = (
    *("module", "registered_name", "build_config", "compile_config", "seed"),
    *("input_layers", "output_layers", "inbound_nodes"),
)
_NUMBER = re.compile(r"_\d+(?=/|$)")  # that Keras adds to a name, to tell it from earlier ones
_TAKEN = re.compile(r'"keras_history": \["([^"]+)"')  # the layer that makes a tensor
_MOST_NAMED = 4


def describe_model(model: keras.Model) -> Description:
    """Describes a compiled model: its optimizer, loss, metrics and layers, by their settings.

    The learning rate is left out if it is a number, as it is a part of the optimizer's state.
    """
    found = describe_compiled(model)
    for number, layer in enumerate(_list_layers(model)):
        found[f"layer {number}"] = type(layer).__name__
        try:
            settings = layer.get_config()
        except Exception:  # a layer's of the user, of any kind
            settings = {"trainable": layer.trainable}
        _describe(f"layer {number}", settings, found)
    for number, one in enumerate(_list_models(model)):
        found |= {f"model {number}, {name}": taken for name, taken in _describe_links(one).items()}
    return found


def describe_compiled(model: keras.Model) -> Description:
    """Describes how a model is compiled: its optimizer, loss and metrics, by their settings."""
    found: Description = {}
    try:
        compiled = model.get_compile_config() or {}
    except Exception:  # something of the user's has no settings, or fails to tell them
        optimizer = model.optimizer
        own = {name: as_plain(value) for name, value in vars(optimizer).items()}
        settings = {n: value for n, value in own.items() if n[0] != "_" and is_plain(value)}
        compiled = {"optimizer": {"class_name": type(optimizer).__name__, "config": settings}}
    for name in _COMPILED:
        _describe(name, compiled.get(name), found)
    loss = getattr(model, "loss", None)
    if loss is not None and not any(name.startswith("loss") for name in found):
        found["loss"] = getattr(loss, "__name__", type(loss).__name__)
    return found


def describe_callback(callback: keras.callbacks.Callback) -> Description:
    """Describes the arguments that a callback was made with, as far as it keeps them."""
    arguments = inspect.signature(type(callback)).parameters
    kept = {name: as_plain(value) for name, value in vars(callback).items() if name in arguments}
    if isinstance(kept.get("min_delta"), int | float):
        kept["min_delta"] = abs(kept["min_delta"])  # Keras turns its sign in training
    return {name: value for name, value in kept.items() if is_plain(value)}


def name_variables(variables: Iterable[keras.Variable]) -> list[str]:
    """Names variables by their paths, without the numbers of Keras; equal names are counted."""
    names, seen = [], Counter[str]()
    for variable in variables:
        name = _NUMBER.sub("", variable.path)
        seen[name] += 1
        names.append(f"{name}#{seen[name]}")
    return names


def as_plain(value: Any) -> Any:
    """Returns a NumPy number as a number of Python, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_plain(value: Any) -> bool:
    """Whether JSON can store a value as it is."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_plain(item) for name, item in value.items())
    return isinstance(value, bool | int | float | str | type(None))


def find_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Says what differs, by name: at most a few things, and how many more.

    Where something is of another class, its settings are not compared; and where a layer is, those
    after it are not.
    """
    changes, changed = list[str](), list[str]()
    for name in dict.fromkeys([*now, *then]):
        is_part = any(name.startswith(f"{whole}.") for whole in changed)
        if _is_equal(then.get(name), now.get(name)) or is_part:
            continue
        changed.append(name)
        changes.append(f"`{name}` was {show(then.get(name))}, is {show(now.get(name))}")
        if name.startswith("layer ") and "." not in name:
            return changes[:_MOST_NAMED]
    more = len(changes) - _MOST_NAMED
    return [*changes[:_MOST_NAMED], *([f"and {more:,} more"] if more > 0 else [])]


def find_names(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of what differs."""
    return [name for name in now if not _is_equal(then.get(name), now[name])]


def _is_equal(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)  # to which a NaN is itself


def show(value: Any) -> str:
    """Returns a setting as a message shows it."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _list_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _list_layers(layer)
        else:
            yield layer


def _list_models(model: keras.Model) -> Iterator[keras.Model]:
    """Yields a model and those within it, if Keras knows how their layers are connected."""
    if not isinstance(model, keras.Sequential) and getattr(model, "inputs", None):
        yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _list_models(layer)


def _describe_links(model: keras.Model) -> dict[str, list[str]]:
    """Returns which layers of a model each layer takes, in the order of its arguments."""
    try:
        layers = model.get_config()["layers"]
    except Exception:  # a layer's of the user, of any kind
        return {}
    number_of = {layer["name"]: number for number, layer in enumerate(layers)}
    links = {}
    for number, layer in enumerate(layers):
        nodes = [node["args"] for node in layer["inbound_nodes"]]
        taken = _TAKEN.findall(json.dumps(nodes, default=str))
        links[f"inputs of layer {number}"] = [
            f"layer {number_of[name]}" for name in taken if name in number_of
        ]
    return links


def _describe(name: str, value: Any, found: Description) -> None:
    """Adds a value, or the values in it, to what was found."""
    if isinstance(value, dict):
        if "class_name" in value and "config" in value:  # as Keras stores an object
            kind = value["class_name"]
            if kind == "DTypePolicy":
                found[name] = value["config"]["name"]
                return
            if kind == "__lambda__":  # its code, with the lines of the program that it stands in
                found[name] = "a lambda"
                return
            is_named = kind == "function"
            found.setdefault(name, value["config"] if is_named else kind)
            value = {} if is_named else value["config"]
        is_metric = name.startswith(METRICS)
        for part, item in value.items() if isinstance(value, dict) else ():
            if part == "name":
                if is_metric:  # which the History is known by
                    found[f"{name}.name"] = _NUMBER.sub("", str(item))
            elif part not in _IGNORED and not (part == "learning_rate" and _is_number(item)):
                _describe(f"{name}.{part}", item, found)
    elif isinstance(value, list | tuple) and any(isinstance(one, dict | list) for one in value):
        found[name] = [one.get("class_name") if isinstance(one, dict) else one for one in value]
        for number, item in enumerate(value):
            _describe(f"{name}.{number}", item, found)
    elif value is not None:
        found[name] = json.loads(json.dumps(value, default=_to_json, skipkeys=True))


def _to_json(value: Any) -> Any:
    """Returns what stands for a value that JSON does not know."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return sorted(map(str, value)) if isinstance(value, set) else type(value).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
