"""The TFRecord file format and the Example messages inside it, without TensorFlow.

A TFRecord file is a plain sequence of records, with no header, no footer and no index of its own:

    uint64  length                    little endian
    uint32  masked CRC-32C of length
    byte    data[length]              here: a serialized tf.train.Example
    uint32  masked CRC-32C of data

The mask is ``rotate_right(crc, 15) + 0xa282ead8``. Source: the comment above ``RecordWriter`` in TensorFlow's
``tsl/lib/io/record_writer.h``. `offset` and `size` of a record, here and everywhere in this package, are in bytes and take in
all four parts, which is what DALI's index files hold.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

HEADER_SIZE = 12  # length and its CRC
FOOTER_SIZE = 4  # the CRC of the data
FRAME_SIZE = HEADER_SIZE + FOOTER_SIZE

_HEADER = struct.Struct("<QI")
_UINT64 = struct.Struct("<Q")
_UINT32 = struct.Struct("<I")
_CRC_MASK = 0xA282EAD8

FeatureValue = bytes | str | int


class InputError(ValueError):
    """A mistake in what this package was given (a file, an argument), found before anything was started.

    Its text says what, where and, where there is one, the command that mends it.
    """


def masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C of `data`, as TFRecord files store it, in [0, 2**32)."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF


def frame_record(data: bytes) -> bytes:
    """Returns `data` as one record: length, CRC of the length, data, CRC of the data."""
    length = _UINT64.pack(len(data))
    return b"".join((length, _UINT32.pack(masked_crc(length)), data, _UINT32.pack(masked_crc(data))))


def scan_records(file: str) -> Iterator[tuple[int, int]]:
    """Hops over the headers of a TFRecord file and yields each record's place.

    Only the 12 bytes of each header are read, never the data; the CRC of every length is checked.

    Args:
      file: path of an uncompressed TFRecord file.

    Yields:
      (offset, size) of each record in bytes, in the order of the file. Together they cover the file without a gap.

    Raises:
      InputError: the file is empty, compressed, cut short or no TFRecord file. The text holds the path, the byte offset,
        what was expected there and what was found.
      OSError: the file cannot be opened or read.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        file_size = os.fstat(descriptor).st_size
        if file_size == 0:
            raise InputError(f"{file}: byte 0: expected a TFRecord header of {HEADER_SIZE} bytes, found an empty file.")
        offset = 0
        while offset < file_size:
            size = _record_size(os.pread(descriptor, HEADER_SIZE, offset), file, offset, file_size)
            yield offset, size
            offset += size
    finally:
        os.close(descriptor)


def read_record(file: str, offset: int) -> bytes:
    """Returns the data of the record at byte `offset` of `file`.

    Raises:
      InputError: there is no whole record at `offset`, or the CRC of its data does not match.
    """
    with open(file, "rb") as stream:
        file_size = os.fstat(stream.fileno()).st_size
        stream.seek(offset)
        size = _record_size(stream.read(HEADER_SIZE), file, offset, file_size)
        data = stream.read(size - FRAME_SIZE)
        stored_crc = _UINT32.unpack(stream.read(FOOTER_SIZE))[0]
    if stored_crc != masked_crc(data):
        raise InputError(
            f"{file}: byte {offset}: the data of this record is damaged: expected CRC {masked_crc(data):#010x}, "
            f"found {stored_crc:#010x}. Copy or make the file again."
        )
    return data


def check_record(file: str, offset: int, size: int) -> None:
    """Checks that a record of `size` bytes starts at byte `offset` of `file`; reads its header only.

    Raises:
      InputError: no record, or one of another size, starts there.
    """
    with open(file, "rb") as stream:
        file_size = os.fstat(stream.fileno()).st_size
        stream.seek(offset)
        found = _record_size(stream.read(HEADER_SIZE), file, offset, file_size)
    if found != size:
        raise InputError(f"{file}: byte {offset}: expected a record of {size} bytes, found one of {found}.")


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """Serializes `features` as a tf.train.Example: bytes and str become a bytes_list of one, int an int64_list of one."""
    example = _EXAMPLE()
    for key, value in features.items():
        feature = example.features.feature[key]
        if isinstance(value, int):
            feature.int64_list.value.append(value)
        else:
            feature.bytes_list.value.append(value.encode() if isinstance(value, str) else value)
    return bytes(example.SerializeToString(deterministic=True))


def decode_example(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Parses a serialized tf.train.Example.

    Returns:
      For each feature key its kind ("bytes_list", "float_list", "int64_list" or "" for a feature without a value) and the
      list of its values.

    Raises:
      InputError: `data` is not a serialized Example.
    """
    try:
        example = _EXAMPLE.FromString(data)
    except DecodeError as error:
        raise InputError(f"{len(data)} bytes that are no serialized tf.train.Example: {error}") from error
    features = {}
    for key, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind") or ""
        features[key] = (kind, list(getattr(feature, kind).value) if kind else [])
    return features


def _record_size(header: bytes, file: str, offset: int, file_size: int) -> int:
    """Returns the size in bytes of the record whose header stands at `offset`; raises InputError where there is none."""
    if offset == 0 and header[:2] == b"\x1f\x8b":
        raise InputError(
            f"{file}: byte 0: expected a TFRecord header, found GZIP data (1f 8b). DALI reads uncompressed files only: "
            f"unpack it with `gunzip -c {file} > {file}.tfrecord`."
        )
    if len(header) < HEADER_SIZE:
        raise InputError(
            f"{file}: byte {offset}: expected a record header of {HEADER_SIZE} bytes, found the end of the file after "
            f"{len(header)}. {_mend(offset)}"
        )
    length, stored_crc = _HEADER.unpack(header)
    expected_crc = masked_crc(header[:8])
    if stored_crc != expected_crc:
        raise InputError(
            f"{file}: byte {offset}: expected a record header (a length, then its CRC), found {header.hex(' ')}: the CRC of "
            f"that length would be {expected_crc:#010x}, not {stored_crc:#010x}. {_mend(offset)}"
        )
    if length > file_size - offset - FRAME_SIZE:
        raise InputError(
            f"{file}: byte {offset}: expected a record of {length + FRAME_SIZE} bytes, found the end of the file after "
            f"{file_size - offset}. {_mend(offset)}"
        )
    return int(length) + FRAME_SIZE


def _mend(offset: int) -> str:
    if offset == 0:
        return "This is no TFRecord file, or its start is damaged: check the path, or make the file again."
    return "The file is damaged or was cut short: copy or make it again."


def _example_class() -> Any:
    """Builds tf.train.Example's message class. Source: tensorflow/core/example/{example,feature}.proto.

    In a descriptor pool of its own, so that TensorFlow can register the same names beside it.
    """
    proto = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add_message(name: str, *fields: tuple[str, int, Any, Any, str]) -> descriptor_pb2.DescriptorProto:
        message = proto.message_type.add(name=name)
        for field_name, number, label, kind, type_name in fields:
            message.field.add(name=field_name, number=number, label=label, type=kind, type_name=type_name or None)
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
    features = add_message("Features", ("feature", 1, many, message_type, ".tensorflow.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")  # what protoc makes of map<string, Feature>
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=message_type, type_name=".tensorflow.Feature")
    add_message("Example", ("features", 1, one, message_type, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_EXAMPLE = _example_class()
