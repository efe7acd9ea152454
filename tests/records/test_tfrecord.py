"""TFRecord files and Examples: as TensorFlow writes them, and with every kind of damage."""

import contextlib
import os
import resource
from random import Random

import pytest
import tensorflow as tf
from conftest import at_night, bytes_read, refused, scan_records

from dali_tf_input.records.example import decode_example, encode_example
from dali_tf_input.records.tfrecord import (
    BadRecord,
    find_records,
    frame_record,
    masked_crc,
    read_data,
    read_record,
    record_size,
)

# "hello" as TensorFlow's writer frames it: length 5, its masked CRC, the data, its masked CRC.
HELLO = bytes.fromhex("0500000000000000 eab2043e 68656c6c6f bb1f1c19")


def test_frame_is_tensorflows(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "file")) as writer:
        writer.write(b"hello")
    assert (tmp_path / "file").read_bytes() == frame_record(b"hello") == HELLO


def test_scan_records(tmp_path):
    file = str(tmp_path / "file")
    data = [b"", b"a", b"b" * 1000, b"c" * 70_000]
    with tf.io.TFRecordWriter(file) as writer:
        for record in data:
            writer.write(record)
    # An empty record is legal; its frame alone is 16 bytes.
    assert list(scan_records(file)) == [(0, 16), (16, 17), (33, 1016), (1049, 70016)]
    assert [read_record(file, offset) for offset in (0, 16, 33, 1049)] == data


WORLD = frame_record(b"world, after hello")
RUINED = HELLO[:13] + b"E" + HELLO[14:]  # a flipped byte in the data


@contextlib.contextmanager
def opened(path):
    """Yields a file descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def header(length):
    """Returns the length of a record and its CRC."""
    length = length.to_bytes(8, "little", signed=True)
    return length + masked_crc(length).to_bytes(4, "little")


def find(path, content):
    """Returns the places of the records found in `content`, and the faults."""
    path.write_bytes(content)
    places, faults = [], []
    with opened(path) as descriptor:
        for found in find_records(str(path), descriptor):
            if isinstance(found, BadRecord):
                assert found.record in (None, len(places) + len(faults))
                faults.append(found)
            else:
                places += found
    # Without a gap and without an overlap, from the first byte to the last.
    extents = sorted([*places, *((fault.offset, fault.size) for fault in faults)])
    ends = [0, *(offset + size for offset, size in extents)]
    assert [offset for offset, _ in extents] == ends[:-1]
    assert not extents or ends[-1] == len(content)
    return places, faults


@pytest.mark.parametrize(
    ("content", "places", "reason", "offset", "size"),
    [
        (b"", [], "empty file", 0, 0),
        (HELLO[:7], [], "cut short", 0, 7),
        (HELLO[:20], [], "cut short", 0, 20),  # in the last CRC
        (HELLO + HELLO[:3], [(0, 21)], "cut short", 21, 3),
        (HELLO + HELLO[:15], [(0, 21)], "cut short", 21, 15),
        (HELLO + bytes(5), [(0, 21)], "trailing bytes", 21, 5),
        (HELLO + b"x" * 50, [(0, 21)], "trailing bytes", 21, 50),
        # a flipped bit in a length
        (HELLO + b"\x01" + HELLO[1:] + WORLD, [(0, 21), (42, 34)], "length CRC", 21, 21),
        (b"\x01" + HELLO[1:] + WORLD, [(21, 34)], "length CRC", 0, 21),
        (HELLO + b"\x06" + HELLO[1:], [(0, 21)], "trailing bytes", 21, 21),
        # in the CRC of the last length
        (HELLO + HELLO[:8] + b"\0" + HELLO[9:], [(0, 21)], "length CRC", 21, 21),
        # A record says that it is longer than the file, but others follow: its length is wrong,
        # whatever its CRC says.
        (header(1000) + HELLO, [(12, 21)], "length beyond the file", 0, 12),
        # Bytes went missing inside a record: its length leads into the next one, which is found all
        # the same.
        (HELLO + WORLD[:20] + WORLD[25:] + HELLO, [(0, 21), (50, 21)], "data CRC", 21, 29),
        (HELLO + bytes(9) + WORLD, [(0, 21), (30, 34)], "length CRC", 21, 9),
        # an empty record: all zeros
        (HELLO + b"junk" + frame_record(b""), [(0, 21), (25, 16)], "length CRC", 21, 4),
        (HELLO + bytes(1000) + frame_record(b""), [(0, 21), (1021, 16)], "length CRC", 21, 1000),
        (b"\x1f\x8b\x08" + b"x" * 30, [], "GZIP file", 0, 33),
        (b"\x78\x9c" + b"x" * 30, [], "ZLIB file", 0, 32),
        (b"version https://git-lfs.github.com/spec/v1\noid", [], "Git LFS pointer", 0, 46),
        (b"\n<!DOCTYPE html><html>", [], "HTML page", 0, 22),
        (b"<?xml version='1.0'?><Error>", [], "XML document", 0, 28),
        (b"\xff\xd8\xff\xe0 a JPEG", [], "JPEG image", 0, 11),
        (b"PK\x03\x04" + HELLO, [], "ZIP archive", 0, 25),  # even one that holds a record
        (b"random bytes \x00\x01\x02 of no", [], "not a TFRecord file", 0, 22),
        (bytes(100), [], "not a TFRecord file", 0, 100),
    ],
)
def test_find_records_names_the_fault(tmp_path, content, places, reason, offset, size):
    found, faults = find(tmp_path / "file", content)
    assert found == places
    (fault,) = faults
    assert (fault.reason, fault.offset, fault.size) == (reason, offset, size)
    with refused(f"{tmp_path}/file: byte {offset}: "):
        list(scan_records(str(tmp_path / "file")))


def test_damaged_data_without_a_break_is_not_a_matter_of_framing(tmp_path):
    assert find(tmp_path / "file", RUINED + WORLD) == ([(0, 21), (21, 34)], [])


def test_a_zlib_file_is_not_taken_for_records_of_its_length(tmp_path):
    """A record of 0x9c78 bytes starts as a ZLIB file does; it is a record."""
    assert find(tmp_path / "file", frame_record(bytes(0x9C78))) == ([(0, 0x9C78 + 16)], [])


def test_many_records_over_many_reads(tmp_path):
    """Over the sizes at which reading changes: a page, a block of pages, a batch of places."""
    random = Random(0)
    sizes = [
        random.choice([0, 1, 100, 4070, 4080, 4090, 70_000]) for _ in range(at_night(1000, 5000))
    ]
    data = [random.randbytes(size) for size in sizes]
    places, faults = find(tmp_path / "file", b"".join(map(frame_record, data)))
    assert faults == []
    assert [size - 16 for _, size in places] == sizes


# A gap is searched in pieces of 4 KB, 16 KB, and so on to 4 MB: around the ends of three of them.
SHORT = [1, *range(4070, 4110), *range(20_440, 20_490)]
LONG = [*range(5_590_980, 5_591_010, 3), 12 << 20]


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\1\0\0\0\0"])  # which looks like headers
def test_the_next_record_is_found_over_any_gap(tmp_path, junk):
    """Also where it lies across two of the pieces in which a gap is searched."""
    for gap in at_night(SHORT, SHORT + LONG):
        content = HELLO + (junk * gap)[:gap] + WORLD
        places, faults = find(tmp_path / "file", content)
        assert places == [(0, 21), (21 + gap, 34)], gap
        assert len(faults) == 1


def test_fuzz(tmp_path):
    """Flipped bits, cuts, splices and random bytes: whatever stands whole in the file is found, all
    the rest is faults.
    """
    random, rounds = Random(1), at_night(400, 4000)
    missed = 0
    for _ in range(rounds):
        records = [
            frame_record(random.randbytes(random.choice([0, 1, 30, 200, 5000])))
            for _ in range(random.randint(1, 8))
        ]
        content = bytearray(b"".join(records))
        position = random.randrange(len(content))
        match random.randrange(5):
            case 0:
                content[position] ^= 1 << random.randrange(8)
            case 1:
                del content[position:]
            case 2:
                del content[position : position + random.randint(1, 60)]
            case 3:
                content[position:position] = random.randbytes(random.randint(1, 60))
            case _:
                other = random.randrange(len(content))
                content[position : position + 40] = content[other : other + 40]
        path = tmp_path / "file"
        places, faults = find(path, bytes(content))  # which checks that they cover the file
        assert places or faults
        with opened(path) as descriptor:
            valid = sum(read_data(descriptor, *place) is not None for place in places)
        whole, start = 0, 0
        for record in records:
            found = content.find(record, start)
            if found >= 0:
                whole, start = whole + 1, found + len(record)
        missed += max(0, whole - valid)
    # Rarely a record that lost as many bytes as the next ones have swallows them whole: its frame
    # is valid, only its data is not.
    assert missed <= rounds / 200


def test_fuzz_of_random_bytes(tmp_path):
    random = Random(2)
    for _ in range(at_night(200, 1000)):
        content = random.randbytes(random.randint(1, 300))
        places, faults = find(tmp_path / "file", content)
        assert (places, len(faults)) == ([], 1)


def test_a_file_made_to_break_everywhere_is_no_hang(tmp_path):
    """Each of 20,000 headers, valid in itself, claims most of the rest of the file."""
    content = bytearray()
    for number in range(20_000):
        content += header(16 * (20_000 - number) - 40) + b"\xff" * 4
    before = bytes_read()
    _, faults = find(tmp_path / "file", bytes(content))
    assert bytes_read() - before < 1000 * len(
        content
    )  # each header by itself would be 10,000 times
    assert faults


@pytest.mark.nightly
def test_five_gigabytes_with_a_break(tmp_path):
    """A hole of 3 GB between two records is searched; memory stays."""
    path = tmp_path / "sparse"
    path.write_bytes(HELLO)
    os.truncate(path, 3 << 30)
    with open(path, "ab") as stream:
        stream.write(WORLD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with opened(path) as descriptor:
        found = [found for found in find_records(str(path), descriptor) if found]
    assert found[0] == [(0, 21)]
    assert (found[1].reason, found[1].size) == ("length CRC", (3 << 30) - 21)
    assert found[2] == [(3 << 30, 34)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_file_that_shrinks_meanwhile_is_no_hang(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(WORLD * 200_000)
    with opened(path) as descriptor:
        found = find_records(str(path), descriptor)
        next(found)
        os.truncate(path, 0)
        assert any(isinstance(item, BadRecord) for item in found)


def test_read_record_finds_flipped_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(RUINED)
    with refused("byte 0: expected a whole record, found none"):
        read_record(str(path), 0)


def test_record_size(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(HELLO + HELLO[:12])
    with opened(path) as descriptor:
        sizes = [record_size(descriptor, offset) for offset in (0, 3, 21, 99)]
    assert sizes == [21, None, None, None]


def test_example_is_tensorflows():
    text = "caf\u00e9"
    features = {"image/encoded": b"\xff\xd8", "image/class/text": text, "image/class/label": -3}
    data = encode_example(features)
    parsed = tf.train.Example.FromString(data).features.feature
    assert parsed["image/encoded"].bytes_list.value == [b"\xff\xd8"]
    assert parsed["image/class/text"].bytes_list.value == [text.encode()]
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
    assert decode_example(data) == {
        "floats": ("float_list", [0.5, 2.0]),
        "nothing": ("", []),
        "no_values": ("int64_list", []),
    }
    with refused(r"3 bytes that are not a serialized tf\.train\.Example"):
        decode_example(b"\xff\xff\xff")


def field(number, data):
    return bytes([number << 3 | 2, len(data)]) + data


def entry(key, value):
    return field(1, field(1, key) + field(2, value))


PLAIN = entry(b"label", field(3, field(1, b"\3")))
GROUP = bytes([5 << 3 | 3, 5 << 3 | 4])
UNUSUAL = {
    "plain": field(1, PLAIN),
    "features twice": 2 * field(1, PLAIN),
    "a key twice": field(1, 2 * PLAIN),
    "value before key": field(1, field(1, field(2, b"") + field(1, b"label"))),
    "not packed": field(1, entry(b"label", field(3, bytes([1 << 3, 7])))),
    "long varint": field(1, entry(b"label", field(3, field(1, b"\x83\x80\0")))),
    "unknown in the example": field(9, b"ab") + field(1, PLAIN) + b"\x4d" + bytes(4) + b"\x48\5",
    "unknown in features": field(1, PLAIN + b"\x49" + bytes(8)),
    "unknown in an entry": field(1, field(1, field(1, b"label") + field(2, b"") + field(9, b"ab"))),
    "unknown in a feature": field(1, entry(b"label", field(9, b"ab") + field(3, b""))),
    "unknown in a list": field(1, entry(b"label", field(3, field(9, b"ab")))),
    "empty feature": field(1, entry(b"label", b"")),
    "empty kind": field(1, entry(b"label", field(3, b""))),
    "a kind twice": field(1, entry(b"label", 2 * field(3, field(1, b"\3")))),
    "no value": field(1, field(1, field(1, b"label"))),
    "no key": field(1, field(1, field(2, b""))),
    "two kinds": field(1, entry(b"label", field(1, b"") + field(3, field(1, b"\3")))),
    "group": field(1, PLAIN) + GROUP,
    "group in features": field(1, PLAIN + GROUP),
    "group in a list": field(1, entry(b"label", field(3, GROUP))),
    "group in an entry": field(1, field(1, field(1, b"label") + field(2, b"") + GROUP)),
    "group in a feature": field(1, entry(b"label", GROUP)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_tensorflow_reads_is_what_the_index_accepts(name):
    """Protobuf takes all of them."""
    data = UNUSUAL[name]
    decode_example(data)
    try:
        tf.io.parse_example([data], {"label": tf.io.VarLenFeature(tf.int64)})
        is_read = True
    except (tf.errors.OpError, UnicodeDecodeError):
        is_read = False
    if is_read:
        decode_example(data, as_tensorflow=True)
    else:
        with refused("which TensorFlow does not read"):
            decode_example(data, as_tensorflow=True)


def test_an_example_above_64_mib_is_too_large():
    data = encode_example({"image": bytes(1 << 26)})
    with refused(r"an Example must be at most 67,108,864 bytes, found 67,108,\d+"):
        decode_example(data)
