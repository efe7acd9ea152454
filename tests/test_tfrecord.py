import os

import pytest
import tensorflow as tf

from dali_tf_input import InputError
from dali_tf_input.tfrecord import check_record, decode_example, encode_example, frame_record, read_record, scan_records

# "hello" as TensorFlow's writer frames it: length 5, its masked CRC, the data, its masked CRC.
HELLO = bytes.fromhex("0500000000000000 eab2043e 68656c6c6f bb1f1c19")


def test_frame_is_tensorflows(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "file")) as writer:
        writer.write(b"hello")
    assert (tmp_path / "file").read_bytes() == frame_record(b"hello") == HELLO


def test_scan_records(tmp_path):
    data = [b"", b"a", b"b" * 1000, b"c" * 70_000]
    with tf.io.TFRecordWriter(str(tmp_path / "file")) as writer:
        for record in data:
            writer.write(record)
    # An empty record is legal; its frame alone is 16 bytes.
    assert list(scan_records(str(tmp_path / "file"))) == [(0, 16), (16, 17), (33, 1016), (1049, 70016)]
    assert [read_record(str(tmp_path / "file"), offset) for offset in (0, 16, 33, 1049)] == data


@pytest.mark.parametrize(
    ("content", "byte", "expected", "found"),
    [
        (b"", 0, "a TFRecord header of 12 bytes", "an empty file"),
        (HELLO[:7], 0, "a record header of 12 bytes", "the end of the file after 7"),
        (HELLO[:20], 0, "a record of 21 bytes", "the end of the file after 20"),  # in the last CRC
        (HELLO + HELLO[:3], 21, "a record header of 12 bytes", "the end of the file after 3"),
        (HELLO + HELLO[:15], 21, "a record of 21 bytes", "the end of the file after 15"),
        (b"\x1f\x8b\x08" + b"x" * 30, 0, "a TFRecord header", "GZIP data"),
        (b"<html>not a TFRecord", 0, "a record header", "3c 68 74 6d 6c 3e"),
        (HELLO + b"\x01" + HELLO[1:], 21, "a record header", "01 00 00 00"),  # a flipped bit in the length
    ],
)
def test_scan_records_names_the_fault(tmp_path, content, byte, expected, found):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(scan_records(str(path)))
    message = str(caught.value)
    assert message.startswith(f"{path}: byte {byte}: expected {expected}")
    assert found in message


def test_scan_records_reads_headers_only(tmp_path):
    """A record of 5 GB of holes is one hop."""
    path = tmp_path / "sparse"
    size = 5 * 2**30
    length = size.to_bytes(8, "little")
    from dali_tf_input.tfrecord import masked_crc

    path.write_bytes(length + masked_crc(length).to_bytes(4, "little"))
    os.truncate(path, 12 + size + 4)
    assert list(scan_records(str(path))) == [(0, size + 16)]


def test_read_record_finds_flipped_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(HELLO[:13] + b"E" + HELLO[14:])
    check_record(str(path), 0, 21)  # the header is whole
    with pytest.raises(InputError, match="byte 0: the data of this record is damaged"):
        read_record(str(path), 0)


def test_check_record(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(HELLO)
    with pytest.raises(InputError, match="byte 0: expected a record of 22 bytes, found one of 21"):
        check_record(str(path), 0, 22)
    with pytest.raises(InputError, match="byte 3"):
        check_record(str(path), 3, 18)


def test_example_is_tensorflows():
    features = {"image/encoded": b"\xff\xd8", "image/class/text": "caf\u00e9", "image/class/label": -3}
    data = encode_example(features)
    parsed = tf.train.Example.FromString(data).features.feature
    assert parsed["image/encoded"].bytes_list.value == [b"\xff\xd8"]
    assert parsed["image/class/text"].bytes_list.value == ["caf\u00e9".encode()]
    assert parsed["image/class/label"].int64_list.value == [-3]
    assert decode_example(data)["image/class/label"] == ("int64_list", [-3])
    assert encode_example(features) == data


def test_decode_example_of_every_kind():
    feature = {
        "floats": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 2.0])),
        "nothing": tf.train.Feature(),
        "no_values": tf.train.Feature(int64_list=tf.train.Int64List()),
    }
    data = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    assert decode_example(data) == {"floats": ("float_list", [0.5, 2.0]), "nothing": ("", []), "no_values": ("int64_list", [])}
    with pytest.raises(InputError, match=r"3 bytes that are no serialized tf\.train\.Example"):
        decode_example(b"\xff\xff\xff")
