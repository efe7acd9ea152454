"""The card of a set: what its files hold and what their labels mean, in the files of tfds.

tfds reads a folder that has ``dataset_info.json``, ``features.json`` and names of classes, by
``tfds.builder_from_directory``. Neither tfds nor TensorFlow is needed to write them. Fields of our
own are in ``metadata.json``, under one key, as tfds refuses unknown fields in the other two.
Source: tensorflow-datasets 4.9, core/dataset_info.py and core/features.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dali_tf_input import __version__
from dali_tf_input.errors import InputError
from dali_tf_input.records.class_names import LABELS_NAME, MAIN_KEYS, names_file
from dali_tf_input.storage.versions import refuse_newer

INFO_NAME, FEATURES_NAME, METADATA_NAME = "dataset_info.json", "features.json", "metadata.json"
CARD_NAMES = (INFO_NAME, FEATURES_NAME, METADATA_NAME)
_OWN_KEY, _VERSION = "dali_tf_input", 1  # in metadata.json
_CLASSES = "tensorflow_datasets.core.features"
_FRAME_BYTES = 16  # of a record, which tfds does not count


class Described(NamedTuple):
    """A feature that all records have.

    Attributes:
      kind: "image", "label", "text", "integer" or "float".
      length: how many values it has; None is one, -1 any number.
      num_classes: of a label.
      encoding: of an image: "jpeg" or "png".
    """

    kind: str
    length: int | None = None
    num_classes: int = 0
    encoding: str = "jpeg"


class SplitFile(NamedTuple):
    """A file of a split: how many records it has, and its size in bytes."""

    num_records: int
    num_bytes: int


def make_card(
    folder: str,
    splits: Mapping[str, Sequence[SplitFile]],
    features: Mapping[str, Described],
    names: Mapping[str, Sequence[str]],
    *,
    template: str = "{SPLIT}-{SHARD_X_OF_Y}",
    supervised: tuple[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Returns the files of a card by their names.

    Args:
      folder: the folder of the set, whose name becomes that of the set.
      splits: the files of each split, in their order.
      features: what all records have, by key.
      names: the names of the classes in their order, by the key of their label.
      template: how files are named.
      supervised: the keys of the image and of its label.
      metadata: what ``metadata.json`` has under the key of this package.
    """
    name = re.sub(r"[^a-z0-9_]+", "_", os.path.basename(os.path.abspath(folder)).lower()).strip("_")
    info: dict[str, Any] = {
        "fileFormat": "tfrecord",
        "name": name if name[:1].isalpha() else f"set_{name}",
        "splits": [
            {
                "filepathTemplate": template,
                "name": split,
                "numBytes": str(sum(size - _FRAME_BYTES * count for count, size in shards)),
                "shardLengths": [str(count) for count, _ in shards],
            }
            for split, shards in splits.items()
        ],
        "version": "1.0.0",
    }
    if supervised:
        items = [{"featureKey": key} for key in supervised]
        info["supervisedKeys"] = {"tuple": {"items": items}}
    described = {
        "featuresDict": {"features": {key: _describe(one) for key, one in features.items()}},
        "pythonClassName": f"{_CLASSES}.features_dict.FeaturesDict",
    }
    own = {_OWN_KEY: {"version": _VERSION, "release": __version__, **(metadata or {})}}
    files = {
        INFO_NAME: json.dumps(info, indent=2, sort_keys=True).encode(),
        FEATURES_NAME: json.dumps(described, indent=4, sort_keys=True).encode(),
        METADATA_NAME: json.dumps(own, indent=2, sort_keys=True).encode(),
    }
    for key, classes in names.items():
        files[names_file(key)] = "".join(f"{one}\n" for one in classes).encode()
    return files


def merge_metadata(folder: str, made: bytes) -> bytes:
    """Returns the bytes of ``metadata.json`` for a folder that may have one, of a user's own.

    Raises:
      InputError: there is one that is no JSON object, or of a newer release.
    """
    read_facts(folder)
    present = _read_object(os.path.join(folder, METADATA_NAME))
    return json.dumps({**present, **json.loads(made)}, indent=2, sort_keys=True).encode()


def read_facts(folder: str) -> dict[str, Any]:
    """Returns what ``metadata.json`` of a local folder has under the key of this package.

    Raises:
      InputError: there is such a file, and it is no JSON object, or of a newer release.
    """
    path = os.path.join(folder, METADATA_NAME)
    facts = _read_object(path).get(_OWN_KEY, {})
    refuse_newer(path, json.dumps(facts).encode(), _VERSION)
    return facts if isinstance(facts, dict) else {}


def find_card_files(folder: str) -> set[str]:
    """Returns the names of the files that the card of a local folder may have.

    Names of classes belong to it if ``features.json`` has their key.

    Raises:
      InputError: there is such a file, and it is no JSON object.
    """
    described = _read_object(os.path.join(folder, FEATURES_NAME)).get("featuresDict", {})
    features = described.get("features", {}) if isinstance(described, dict) else {}
    return {*CARD_NAMES, LABELS_NAME, *map(names_file, (*MAIN_KEYS, *features))}


def _read_object(path: str) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if there is no file."""
    try:
        with open(path, "rb") as stream:
            found = json.loads(stream.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Repair it, or move it away.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object, so it is no part of a card: move it away.")
    return found


def _describe(feature: Described) -> dict[str, Any]:
    """Returns what features.json says of a feature."""
    if feature.length is not None:
        one = feature._replace(length=None)
        if feature.length >= 0 and feature.kind in ("integer", "float"):
            return _tensor(feature.kind, [feature.length])
        return {
            "pythonClassName": f"{_CLASSES}.sequence_feature.Sequence",
            "sequence": {"feature": _describe(one), "length": str(feature.length)},
        }
    if feature.kind == "image":
        dimensions = ["-1", "-1", "1" if feature.encoding == "png" else "3"]
        image = {"dtype": "uint8", "encodingFormat": feature.encoding}
        return {
            "image": {**image, "shape": {"dimensions": dimensions}},
            "pythonClassName": f"{_CLASSES}.image_feature.Image",
        }
    if feature.kind == "label":
        return {
            "classLabel": {"numClasses": str(feature.num_classes)},
            "pythonClassName": f"{_CLASSES}.class_label_feature.ClassLabel",
        }
    if feature.kind == "text":
        return {"pythonClassName": f"{_CLASSES}.text_feature.Text", "text": {}}
    return _tensor(feature.kind, [])


def _tensor(kind: str, dimensions: list[int]) -> dict[str, Any]:
    shape = {"dimensions": [str(size) for size in dimensions]} if dimensions else {}
    dtype = "int64" if kind == "integer" else "float32"
    name = "tensor_feature.Tensor" if dimensions else "scalar.Scalar"
    return {
        "pythonClassName": f"{_CLASSES}.{name}",
        "tensor": {"dtype": dtype, "encoding": "none", "shape": shape},
    }
