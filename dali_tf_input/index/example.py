"""The tf.train.Example messages that TFRecord files hold, without TensorFlow."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from dali_tf_input.errors import InputError

FeatureValue = bytes | str | int


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """Serializes `features`, one value each: bytes and str as bytes_list, int as int64_list."""
    return _serialize(_EXAMPLE(), features)


def replace_features(data: bytes, features: Mapping[str, FeatureValue]) -> bytes:
    """Returns a serialized Example with the values of `features` replaced and all others kept."""
    return _serialize(_EXAMPLE.FromString(data), features)


def decode_example(data: bytes) -> dict[str, tuple[str, Sequence[Any]]]:
    """Parses a serialized tf.train.Example.

    Returns:
      For each feature key its kind ("bytes_list", "float_list", "int64_list", or "" for a feature
      without a value) and the sequence of its values, which stay in the message: as Python's
      objects they would take five times the memory.

    Raises:
      InputError: `data` is not a serialized Example.
    """
    try:
        example = _EXAMPLE.FromString(data)
    except DecodeError as error:
        raise InputError(
            f"{len(data)} bytes that are not a serialized tf.train.Example: {error}"
        ) from error
    features = {}
    for key, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind") or ""
        features[key] = (kind, getattr(feature, kind).value if kind else [])
    return features


def _serialize(example: Any, features: Mapping[str, FeatureValue]) -> bytes:
    for key, value in features.items():
        feature = example.features.feature[key]
        feature.Clear()
        if isinstance(value, int):
            feature.int64_list.value.append(value)
        else:
            encoded = os.fsencode(value) if isinstance(value, str) else value
            feature.bytes_list.value.append(encoded)
    return bytes(example.SerializeToString(deterministic=True))


def _make_example_class() -> Any:
    """Builds tf.train.Example's message class. Source: tensorflow/core/example/*.proto.

    In a descriptor pool of its own, so that TensorFlow can register the same names beside it.
    """
    proto = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto

    def add_message(
        name: str, *fields: tuple[str, int, Any, Any, str]
    ) -> descriptor_pb2.DescriptorProto:
        message = proto.message_type.add(name=name)
        for field_name, number, label, kind, type_name in fields:
            message.field.add(
                name=field_name, number=number, label=label, type=kind, type_name=type_name or None
            )
        return message

    one, many, message_type = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    add_message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    add_message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    add_message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    feature = add_message(
        "Feature",
        ("bytes_list", 1, one, message_type, ".tensorflow.BytesList"),
        ("float_list", 2, one, message_type, ".tensorflow.FloatList"),
        ("int64_list", 3, one, message_type, ".tensorflow.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for kind_field in feature.field:
        kind_field.oneof_index = 0
    entry_name = ".tensorflow.Features.FeatureEntry"
    features = add_message("Features", ("feature", 1, many, message_type, entry_name))
    entry = features.nested_type.add(
        name="FeatureEntry"
    )  # what protoc makes of map<string, Feature>
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=one, type=message_type, type_name=".tensorflow.Feature"
    )
    add_message("Example", ("features", 1, one, message_type, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_EXAMPLE = _make_example_class()
