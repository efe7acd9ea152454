"""The tf.train.Example messages that TFRecord files hold, without TensorFlow."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from dali_tf_input.errors import InputError

FeatureValue = bytes | str | int | float | Sequence[int] | Sequence[float]

_LARGE = 1 << 20  # bytes; what is larger is not parsed as a whole
_PAYLOAD = 0x0A  # field 1 with a length: a value of bytes, or packed numbers


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """Serializes `features`, each one value or a list of them, by the type of the first.

    bytes and str become a bytes_list, float a float_list, int an int64_list, an empty list none.
    """
    return _serialize(_EXAMPLE(), features)


def replace_features(
    data: bytes, features: Mapping[str, FeatureValue], *, without: str = ""
) -> bytes:
    """Returns a serialized Example with the values of `features` replaced and all others kept."""
    example = _EXAMPLE.FromString(data)
    example.features.feature.pop(without, None)
    return _serialize(example, features)


def decode_example(data: bytes) -> dict[str, tuple[str, Sequence[Any]]]:
    """Parses a serialized tf.train.Example.

    Returns:
      For each feature key its kind ("bytes_list", "float_list", "int64_list", or "" for a feature
      without a value) and the sequence of its values, which stay in the message: as Python's
      objects they would take five times the memory. Of a list of over 1 MiB with more than one
      value it is a range of as many numbers: the values would take up to 16 times its memory.

    Raises:
      InputError: `data` is not a serialized Example.
    """
    features: dict[str, tuple[str, Sequence[Any]]] = {}
    try:
        if len(data) > _LARGE:
            for entry in _OUTLINE.FromString(data).features.feature:
                if len(UnknownFieldSet(entry)):
                    raise DecodeError("an entry holds unknown fields.")
                features[entry.key] = _read_outline(entry.value)
            return features
        for key, feature in _EXAMPLE.FromString(data).features.feature.items():
            kind = feature.WhichOneof("kind") or ""
            features[key] = (kind, getattr(feature, kind).value if kind else [])
        return features
    except DecodeError as error:
        text = f"{len(data)} bytes that are not a serialized tf.train.Example"
        raise InputError(f"{text}: {error}") from error


def _read_outline(outline: Any) -> tuple[str, Sequence[Any]]:
    """Returns kind and values of a feature whose lists were left as they are on the wire."""
    lists = [(kind, data) for kind in _LISTS for data in getattr(outline, kind)]
    if not lists:
        return "", []
    if len(lists) > 1:
        raise DecodeError("a feature holds several lists.")
    ((kind, data),) = lists
    if len(data) <= _LARGE:
        return kind, _LISTS[kind].FromString(data).value
    num_values = start = end = 0
    while end < len(data):
        if data[end] != _PAYLOAD:  # a list that no writer of TFRecords writes
            return kind, _LISTS[kind].FromString(data).value
        length, start = _read_varint(data, end + 1)
        end = start + length
        if end > len(data):
            raise DecodeError("a list is cut short.")
        num_values += 1 if kind == "bytes_list" else _count_numbers(kind, data, start, end)
    if num_values > 1:
        return kind, range(num_values)
    return kind, [data[start:end]] if kind == "bytes_list" else _LISTS[kind].FromString(data).value


def _count_numbers(kind: str, data: bytes, start: int, end: int) -> int:
    """Returns how many numbers are packed in ``data[start:end]``."""
    if kind == "float_list":
        if (end - start) % 4:
            raise DecodeError("a float is cut short.")
        return (end - start) // 4
    count = 0
    while start < end:  # in parts, each up to the end of a number
        stop = min(start + _LARGE, end)
        while stop < end and data[stop - 1] > 0x7F:
            stop += 1
        header = bytes([_PAYLOAD]) + _write_varint(stop - start)
        count += len(_LISTS[kind].FromString(header + data[start:stop]).value)
        start = stop
    return count


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a number, 7 bits in each byte, lowest first, and the position after it."""
    value = data[position] if position < len(data) else 0x80
    if value < 0x80:
        return value, position + 1
    value = 0
    for shift in range(0, 64, 7):
        byte = data[position] if position < len(data) else 0x80
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a length is cut short.")


def _write_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


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


def _make_classes(*, outline: bool) -> dict[str, Any]:
    """Builds tf.train.Example's message classes. Source: tensorflow/core/example/*.proto.

    In a descriptor pool of their own, so that TensorFlow can register the same names beside it.
    With `outline` a feature's lists stay bytes, which look the same on the wire.
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

    one, many, message_type = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    add_message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    add_message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    add_message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    lists = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
    kinds = [
        (name, number, many, field.TYPE_BYTES, "")
        if outline
        else (name, number, one, message_type, f".tensorflow.{lists[name]}")
        for number, name in enumerate(lists, 1)
    ]
    feature = add_message("Feature", *kinds)
    if not outline:
        feature.oneof_decl.add(name="kind")
        for kind_field in feature.field:
            kind_field.oneof_index = 0
    entry_name = ".tensorflow.Features.FeatureEntry"
    features = add_message("Features", ("feature", 1, many, message_type, entry_name))
    # What protoc makes of map<string, Feature>.
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = not outline
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    feature_name = ".tensorflow.Feature"
    entry.field.add(name="value", number=2, label=one, type=message_type, type_name=feature_name)
    add_message("Example", ("features", 1, one, message_type, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.{kind}"))
        for name, kind in {"example": "Example", **lists}.items()
    }


_LISTS = _make_classes(outline=False)
_EXAMPLE = _LISTS.pop("example")
_OUTLINE = _make_classes(outline=True)["example"]
