"""The tf.train.Example messages that TFRecord files hold, without TensorFlow."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from dali_tf_input.errors import InputError

FeatureValue = bytes | str | int | float | Sequence[int] | Sequence[float]

MAX_BYTES = 1 << 26  # parsing takes up to 26 times as much memory


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """Serializes `features`, each a value or a list; its first value decides the kind of list.

    bytes and str make a bytes_list, float a float_list, and int an int64_list. An empty list makes
    a feature without a value.
    """
    return _serialize(_EXAMPLE(), features)


def replace_features(
    data: bytes, features: Mapping[str, FeatureValue], *, without: str = ""
) -> bytes:
    """Returns a serialized Example with the values of `features` replaced and all others kept."""
    example = _EXAMPLE.FromString(data)
    example.features.feature.pop(without, None)
    return _serialize(example, features)


def decode_example(
    data: bytes, *, as_tensorflow: bool = False
) -> dict[str, tuple[str, Sequence[Any]]]:
    """Parses a serialized tf.train.Example.

    Args:
      data: a record.
      as_tensorflow: whether to refuse what protobuf takes and TensorFlow's own parser does not.

    Returns:
      For each feature key its kind ("bytes_list", "float_list", "int64_list", or "" for a feature
      without a value) and the sequence of its values, which stay in the message: as Python's
      objects they would take five times the memory.

    Raises:
      InputError: `data` is not a serialized Example, or larger than 64 MiB.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"an Example must be at most {MAX_BYTES:,} bytes, found {len(data):,}.")
    try:
        example = _EXAMPLE.FromString(data)
        # One that is written as protobuf writes it is fine, and the walk takes long.
        if as_tensorflow:
            example.DiscardUnknownFields()
            if example.ByteSize() != len(data) and (oddity := _find_oddity(data)):
                raise InputError(f"an Example with {oddity}, which TensorFlow does not read.")
        features: dict[str, tuple[str, Sequence[Any]]] = {}
        for key, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind") or ""
            features[key] = (kind, getattr(feature, kind).value if kind else [])
        return features
    except DecodeError as error:
        text = f"{len(data)} bytes that are not a serialized tf.train.Example"
        raise InputError(f"{text}: {error}") from error


# What a message may hold, by tags. Lists hold values, or packed ones.
_FIRST, _SECOND, _THIRD = (number << 3 | 2 for number in (1, 2, 3))  # fields with a length
_VALUES = {_FIRST, 1 << 3, 1 << 3 | 5}


def _find_oddity(data: bytes) -> str | None:
    """Says what of a valid message TensorFlow's parser refuses, if anything.

    Unknown fields within Features are refused, also where it would skip them: no writer makes them.
    """

    def inside(messages: list[bytes], tag: int) -> list[bytes]:
        return [value for message in messages for found, value in _walk(message) if found == tag]

    def are_known(messages: list[bytes], *tags: int) -> bool:
        return all(found in tags for message in messages for found, _ in _walk(message))

    if any(tag & 7 in (3, 4) for tag, _ in _walk(data)):
        return "a group"
    features = inside([data], _FIRST)
    entries = inside(features, _FIRST)
    if any({tag for tag, _ in _walk(entry)} < {_FIRST, _SECOND} for entry in entries):
        return "a feature without a key or a value"
    values = inside(entries, _SECOND)
    if any(len({tag for tag, _ in _walk(value)}) > 1 for value in values):
        return "a feature of two kinds"
    lists = [one for tag in (_FIRST, _SECOND, _THIRD) for one in inside(values, tag)]
    is_known = (
        are_known(features, _FIRST)
        and are_known(entries, _FIRST, _SECOND)
        and are_known(values, _FIRST, _SECOND, _THIRD)
        and are_known(lists, *_VALUES)
    )
    return None if is_known else "unknown fields"


def _walk(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the tag of each field of a valid message, and what it holds if it has a length."""
    at, end = 0, len(message)

    def varint() -> int:
        nonlocal at
        start = at
        while message[at] > 127:
            at += 1
        at += 1
        return sum((byte & 127) << 7 * place for place, byte in enumerate(message[start:at]))

    while at < end:
        tag = varint()
        size = {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 == 0:
            varint()
        elif tag & 7 == 2:
            size = varint()
        yield tag, message[at : at + size]
        at += size


def _serialize(example: Any, features: Mapping[str, FeatureValue]) -> bytes:
    for key, value in features.items():
        feature = example.features.feature[key]
        feature.Clear()
        values = [os.fsencode(value) if isinstance(value, str) else value]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            values = [*value]
        kinds = {bytes: feature.bytes_list, float: feature.float_list}
        if values:
            kinds.get(type(values[0]), feature.int64_list).value.extend(values)
    return bytes(example.SerializeToString(deterministic=True))


def _make_class() -> Any:
    """Builds tf.train.Example's message class. Source: tensorflow/core/example/*.proto.

    In a descriptor pool of its own, so that TensorFlow can register the same names beside it.
    """
    proto = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow")
    proto.syntax = "proto3"
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

    optional, repeated = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message_type = field.TYPE_MESSAGE
    add_message("BytesList", ("value", 1, repeated, field.TYPE_BYTES, ""))
    add_message("FloatList", ("value", 1, repeated, field.TYPE_FLOAT, ""))
    add_message("Int64List", ("value", 1, repeated, field.TYPE_INT64, ""))
    lists = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
    feature = add_message(
        "Feature",
        *(
            (name, number, optional, message_type, f".tensorflow.{lists[name]}")
            for number, name in enumerate(lists, 1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    for kind_field in feature.field:
        kind_field.oneof_index = 0
    entry_name = ".tensorflow.Features.FeatureEntry"
    features = add_message("Features", ("feature", 1, repeated, message_type, entry_name))
    # What protoc makes of map<string, Feature>.
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=field.TYPE_STRING)
    feature_name = ".tensorflow.Feature"
    entry.field.add(
        name="value", number=2, label=optional, type=message_type, type_name=feature_name
    )
    add_message("Example", ("features", 1, optional, message_type, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_EXAMPLE = _make_class()
