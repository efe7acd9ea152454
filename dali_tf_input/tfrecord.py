"""The TFRecord file format, without TensorFlow: frames, CRCs, and finding every record of a file and every break in it.

A TFRecord file is a plain sequence of records, with no header, no footer and no index of its own:

    uint64  length                    little endian
    uint32  masked CRC-32C of length
    byte    data[length]              here: a serialized tf.train.Example
    uint32  masked CRC-32C of data

The mask is ``rotate_right(crc, 15) + 0xa282ead8``. Source: the comment above ``RecordWriter`` in TensorFlow's
``tsl/lib/io/record_writer.h``. `offset` and `size` of a record, here and everywhere in this package, are in bytes and take in
all four parts, which is what DALI's index files hold.
"""

import functools
import os
import re
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c

HEADER_SIZE = 12  # length and its CRC
FOOTER_SIZE = 4  # the CRC of the data
FRAME_SIZE = HEADER_SIZE + FOOTER_SIZE

_HEADER = struct.Struct("<QI")
_UINT64 = struct.Struct("<Q")
_UINT32 = struct.Struct("<I")
_CRC_MASK = 0xA282EAD8

_BATCH_RECORDS = 4096  # places handed on at a time
_PAGE_BYTES = 4096  # of memory and disk
_BLOCK_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22  # read at a time where bytes are searched or summed up

# What may stand in the place of a TFRecord file: its first bytes, its name, what to do.
_MAKE_TFRECORDS = "Make TFRecords of images with scripts/make_tfrecords.py."
_FOREIGN_FILES = tuple(
    (re.compile(start), name, remedy)
    for start, name, remedy in (
        (rb"\x1f\x8b", "GZIP file", "DALI reads uncompressed files only: unpack it with `gunzip -c {file} > {file}.tfrecord`."),
        (
            rb"\x78[\x01\x5e\x9c\xda]",
            "ZLIB file",
            "DALI reads uncompressed files only: unpack it with `python3 -c 'import sys, zlib; sys.stdout.buffer.write("
            "zlib.decompress(sys.stdin.buffer.read()))' < {file} > {file}.tfrecord`.",
        ),
        (rb"\x28\xb5\x2f\xfd", "Zstandard file", "DALI reads uncompressed files only: unpack it with `unzstd {file}`."),
        (rb"PK\x03\x04", "ZIP archive", "Unpack it."),
        (rb"version https://git-lfs", "Git LFS pointer", "Fetch the file it stands for with `git lfs pull`."),
        (rb"\s*(?i:<!doctype html|<html|<head|<body)", "HTML page", "A download ended in a web page: get the file itself."),
        (rb"\s*<\?xml", "XML document", "A download ended in an error message: get the file itself."),
        (rb"\xff\xd8\xff", "JPEG image", _MAKE_TFRECORDS),
        (rb"\x89PNG", "PNG image", _MAKE_TFRECORDS),
    )
)
_NOT_ZERO = re.compile(rb"[^\0]")


class InputError(ValueError):
    """A mistake in what this package was given (a file, an argument), found before anything was started.

    Its text says what, where and, where there is one, the command that mends it.
    """


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A stretch of a TFRecord file that holds no sound record.

    Attributes:
      record: its number in the file, from 0, each stretch before it counted as one record; None if the fault is the whole file.
      offset: byte where it starts.
      size: bytes to where the next record starts or the file ends.
      reason: the name of the fault, one of few: "data CRC", "cut short", "truncated JPEG".
      detail: what was expected, what was found and, where there is one, the command that mends it.
    """

    record: int | None
    offset: int
    size: int
    reason: str
    detail: str


def masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C of `data`, as TFRecord files store it, in [0, 2**32)."""
    return _mask(google_crc32c.value(data))


def frame_record(data: bytes) -> bytes:
    """Returns `data` as one record: length, CRC of the length, data, CRC of the data."""
    length = _UINT64.pack(len(data))
    return b"".join((length, _UINT32.pack(masked_crc(length)), data, _UINT32.pack(masked_crc(data))))


def find_records(file: str, descriptor: int) -> Iterator[list[tuple[int, int]] | Fault]:
    """Hops over the headers of a TFRecord file and finds each record's place and each break.

    Only the 12 bytes of each header are read (of records smaller than a page, whole pages), and the CRC of every length is
    checked. Where one fails the rest of the file is not given up: the bytes are searched for the next header that fits its CRC.
    Then the data of the record before the break is read too, as its length may have led astray.

    Args:
      file: its path, for messages.
      descriptor: the file, open for reading; uncompressed.

    Yields:
      In the order of the file, lists of (offset, size) in bytes, for up to 4096 records each, and faults. Together they cover the
      file without a gap or an overlap. A file in which nothing is a record is one fault.

    Raises:
      OSError: the file cannot be read.
    """
    file_size = os.fstat(descriptor).st_size
    if file_size == 0:
        yield Fault(record=None, offset=0, size=0, reason="empty file", detail="expected records, found an empty file.")
    check_budget = file_size + _CHUNK_BYTES  # data of suspects that may be read; a file made to break at every byte is no hang
    places: list[tuple[int, int]] = []
    offset, number = 0, 0
    while offset < file_size:
        offset, broken = _hop(descriptor, offset, file_size, places)
        if not broken:
            yield places[:-1]  # the last one is kept back until something sound follows it
            number += len(places) - 1
            places = places[-1:]
            continue
        start = offset
        if places:
            check_budget -= places[-1][1]
            if check_budget < 0 or not has_sound_data(descriptor, *places[-1]):
                start = places.pop()[0]
        yield places
        number += len(places)
        places = []
        foreign = _foreign_file(file, descriptor, file_size) if start == 0 else None
        if foreign:
            yield foreign
            return
        offset = _find_header(descriptor, start + 1, file_size)
        yield _describe_break(file, descriptor, start, offset, file_size, number)
        number += 1
    yield places


def scan_records(file: str) -> Iterator[tuple[int, int]]:
    """Yields the (offset, size) in bytes of each record of a TFRecord file, in order; reads the headers only.

    Raises:
      InputError: the file is not records from its first byte to its last. The text holds the path and the byte.
      OSError: the file cannot be opened or read.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for found in find_records(file, descriptor):
            if isinstance(found, Fault):
                raise InputError(f"{file}: byte {found.offset}: {found.detail}")
            yield from found
    finally:
        os.close(descriptor)


def has_sound_data(descriptor: int, offset: int, size: int) -> bool:
    """Whether the data of the record of `size` bytes at byte `offset` fits its CRC. Reads it in pieces: any size will do."""
    crc, position, end = 0, offset + HEADER_SIZE, offset + size - FOOTER_SIZE
    while position < end:
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - position), position)
        if not chunk:
            return False
        crc = google_crc32c.extend(crc, chunk)
        position += len(chunk)
    return os.pread(descriptor, FOOTER_SIZE, end) == _UINT32.pack(_mask(crc))


def read_data(descriptor: int, offset: int, size: int) -> bytes | None:
    """Returns the data of the record of `size` bytes at byte `offset`, or None where it does not fit its CRC."""
    pieces, left = [], size - HEADER_SIZE
    while left > 0:  # one read returns 2 GB at most
        piece = os.pread(descriptor, left, offset + size - left)
        if not piece:
            return None
        pieces.append(piece)
        left -= len(piece)
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    data = body[:-FOOTER_SIZE]
    return data if body[-FOOTER_SIZE:] == _UINT32.pack(masked_crc(data)) else None


def read_record(file: str, offset: int) -> bytes:
    """Returns the data of the record at byte `offset` of `file`.

    Raises:
      InputError: there is no whole record at `offset`, or its data does not fit its CRC.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = record_size(descriptor, offset)
        data = read_data(descriptor, offset, size) if size else None
    finally:
        os.close(descriptor)
    if data is None:
        raise InputError(
            f"{file}: byte {offset}: expected a whole record, found none. Index the file again to see what is wrong."
        )
    return data


def record_size(descriptor: int, offset: int) -> int | None:
    """Returns the size in bytes of the record at byte `offset`, or None where no header stands there or the file ends before."""
    header = os.pread(descriptor, HEADER_SIZE, offset)
    size = _size_of(header)
    return size if size is not None and offset + size <= os.fstat(descriptor).st_size else None


def _hop(descriptor: int, offset: int, file_size: int, places: list[tuple[int, int]]) -> tuple[int, bool]:
    """Appends the records from `offset` on to `places`; returns where it stopped, and whether the chain breaks there."""
    size_of, append = _size_of, places.append
    left = _BATCH_RECORDS - len(places)
    block, block_start, size = b"", 0, _PAGE_BYTES
    while offset < file_size and left > 0:
        header = block[offset - block_start : offset - block_start + HEADER_SIZE]
        if len(header) < HEADER_SIZE:
            # Among records smaller than a page every page holds a header and is read from the disk anyhow: take many at once.
            block = os.pread(descriptor, _BLOCK_BYTES if size < _PAGE_BYTES else HEADER_SIZE, offset)
            block_start, header = offset, block[:HEADER_SIZE]
        next_size = size_of(header)
        if next_size is None or offset + next_size > file_size:
            return offset, True
        size = next_size
        append((offset, size))
        offset += size
        left -= 1
    return offset, False


@functools.lru_cache(maxsize=1 << 16)  # records of one size have one header: of small ones most are known, and cost no CRC
def _size_of(header: bytes) -> int | None:
    """Returns the size of the record that `header` opens, or None if its CRC does not fit."""
    if len(header) < HEADER_SIZE:
        return None
    length = header[:8]
    crc = google_crc32c.value(length)  # `masked_crc` without its calls: this is what an index run spends its time on
    if (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF != int.from_bytes(header[8:], "little"):
        return None
    return int.from_bytes(length, "little") + FRAME_SIZE


def _find_header(descriptor: int, start: int, file_size: int) -> int:
    """Returns the first byte from `start` on where a header fits its CRC and its record the file; `file_size` if none does."""
    position = start
    while position + FRAME_SIZE <= file_size:
        chunk = os.pread(descriptor, _CHUNK_BYTES, position)
        if len(chunk) < HEADER_SIZE:
            break  # the file was cut short meanwhile
        for candidate in _candidates(chunk):
            size = _size_of(chunk[candidate : candidate + HEADER_SIZE])
            if size is not None and position + candidate + size <= file_size:
                return position + candidate
        position += len(chunk) - HEADER_SIZE + 1
    return file_size


def _candidates(chunk: bytes) -> Iterator[int]:
    """Yields where in `chunk` a header may start: the upper half of its length is zero, as no record has 4 GB.

    In a long run of zeros only the first places, where the lower half is not all zero, and the last one, where the CRC of a
    length of 0 may follow, can be headers.
    """
    zeros = chunk.find(bytes(4), 4)
    while zeros != -1:
        found = _NOT_ZERO.search(chunk, zeros)
        run_end = found.start() if found else len(chunk)
        for upper_half in range(zeros, min(zeros + 4, run_end - 3)):
            yield upper_half - 4
        yield max(0, run_end - 8)
        zeros = chunk.find(bytes(4), run_end)


def _foreign_file(file: str, descriptor: int, file_size: int) -> Fault | None:
    """Names the kind of a file that does not start with a record, where its first bytes tell."""
    start = os.pread(descriptor, 64, 0)
    for pattern, name, remedy in _FOREIGN_FILES:
        if pattern.match(start):
            detail = f"expected a TFRecord header, found {start[:4].hex(' ')} ... {remedy.format(file=shlex.quote(file))}"
            return Fault(record=None, offset=0, size=file_size, reason=name, detail=detail)
    return None


def _describe_break(file: str, descriptor: int, start: int, end: int, file_size: int, number: int) -> Fault:
    """Names what is wrong between byte `start`, where record `number` should be, and byte `end`, where the next one is."""
    header = os.pread(descriptor, HEADER_SIZE, start)
    size = _size_of(header)
    record: int | None = number
    if len(header) < HEADER_SIZE:
        reason = "cut short" if any(header) else "trailing bytes"
        detail = f"expected a record header of {HEADER_SIZE} bytes, found the end of the file after {len(header)}."
    elif size is not None and start + size > file_size:
        reason = "cut short" if end == file_size else "length beyond the file"
        detail = f"expected a record of {size} bytes, found the end of the file after {file_size - start}."
    elif size is not None:
        reason = "data CRC"
        detail = f"the data of this record does not fit its CRC, and at byte {start + size}, where it ends, no record follows."
    else:
        length, stored_crc = _HEADER.unpack(header)
        at_the_end = end == file_size and length + FRAME_SIZE != file_size - start
        reason = "trailing bytes" if at_the_end else "length CRC"
        detail = (
            f"expected a record header (a length, then its CRC), found {header.hex(' ')}: the CRC of that length would be "
            f"{masked_crc(header[:8]):#010x}, not {stored_crc:#010x}."
        )
        if start == 0 and end == file_size:
            record, reason = None, "no TFRecord file"
    if end < file_size:
        detail += f" The next record is at byte {end}."
    elif record is None:
        detail += " No record follows: check the path, or make the file again."
    else:
        detail += " The file is damaged or was cut short: copy or make it again."
    return Fault(record=record, offset=start, size=end - start, reason=reason, detail=detail)


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF
