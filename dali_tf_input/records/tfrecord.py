"""The TFRecord file format, without TensorFlow: finding every record, and all damage.

A TFRecord file is a plain sequence of records, with no header, no footer and no index of its own:

    uint64  length                    little endian
    uint32  masked CRC-32C of length
    byte    data[length]              here: a serialized tf.train.Example
    uint32  masked CRC-32C of data

The mask is ``rotate_right(crc, 15) + 0xa282ead8``. Source: the comment above ``RecordWriter`` in
TensorFlow's ``tsl/lib/io/record_writer.h``. Everywhere in this package, the `offset` and `size` of
a record are in bytes and cover all four parts, as in DALI's index files.
"""

import functools
import os
import re
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c

from dali_tf_input.errors import InputError

HEADER_SIZE, FOOTER_SIZE = 12, 4  # length and its CRC; the CRC of the data
FRAME_SIZE = HEADER_SIZE + FOOTER_SIZE

_HEADER, _UINT64, _UINT32 = struct.Struct("<QI"), struct.Struct("<Q"), struct.Struct("<I")
_CRC_MASK = 0xA282EAD8

_BATCH_RECORDS = 4096  # records per list that `find_records` yields
_PAGE_BYTES = 4096  # of memory and disk
_BLOCK_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22  # read at a time when bytes are summed up
_ZEROS = re.compile(rb"\0\0\0\0+")

# The pattern of the first bytes, the name, what to do.
_UNPACK = "DALI reads uncompressed files only: unpack it with dali-tf-input convert or "
_MAKE_TFRECORDS = "Make TFRecords of images with dali-tf-input convert."
_ZLIB = (
    "`python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress("
    "sys.stdin.buffer.read()))' < {file} > {file}.tfrecord`."
)
_FOREIGN_CONTENT = tuple(
    (re.compile(start), name, remedy)
    for start, name, remedy in (
        (rb"\x1f\x8b", "GZIP file", _UNPACK + "`gunzip -c {file} > {file}.tfrecord`."),
        (rb"\x78[\x01\x5e\x9c\xda]", "ZLIB file", _UNPACK + _ZLIB),
        (rb"\x28\xb5\x2f\xfd", "Zstandard file", _UNPACK + "`unzstd {file}`."),
        (rb"PK\x03\x04", "ZIP archive", "Unpack it."),
        (rb"version https://git-lfs", "Git LFS pointer", "Fetch the file with `git lfs pull`."),
        (rb"\s*(?i:<!doctype|<html|<head|<body)", "HTML page", "A download saved a web page."),
        (rb"\s*<\?xml", "XML document", "A download saved an error message."),
        (rb"\xff\xd8\xff", "JPEG image", _MAKE_TFRECORDS),
        (rb"\x89PNG", "PNG image", _MAKE_TFRECORDS),
        (rb"[\t\r\n\x20-\x7e]+\Z", "text", "Name only the TFRecords, such as 'path/*-of-*'."),
    )
)


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """A record that cannot be used, or bytes of a TFRecord file that are no record.

    Attributes:
      record: its number in the file, from 0, where each bad part before it counts as one record;
        None if the whole file is meant.
      offset: byte where it starts.
      size: bytes up to the next record or the end of the file.
      reason: what is wrong, one of a few names such as "data CRC", "cut short", "truncated JPEG".
      detail: what was expected, what was found and, if there is one, the command that fixes it.
    """

    record: int | None
    offset: int
    size: int
    reason: str
    detail: str

    def describe(self, file: str) -> str:
        """Returns a line that says what is wrong, and where."""
        place = "" if self.record is None else f"record {self.record:,}, byte {self.offset:,}: "
        return f"{file}: {place}{self.reason}: {self.detail}"


def name_content(start: bytes) -> tuple[str, str] | None:
    """Names well-known content by its first bytes: (name, what to do), None if unknown."""
    for pattern, name, remedy in _FOREIGN_CONTENT:
        if pattern.match(start):
            return name, remedy
    return None


def masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C of `data`, as TFRecord files store it, in [0, 2**32)."""
    return _mask(google_crc32c.value(data))


def frame_record(data: bytes) -> bytes:
    """Returns `data` as one record: length, CRC of the length, data, CRC of the data."""
    length = _UINT64.pack(len(data))
    crcs = (_UINT32.pack(masked_crc(part)) for part in (length, data))
    return b"".join((length, next(crcs), data, next(crcs)))


def find_records(
    file: str, descriptor: int, footers: bytearray | None = None
) -> Iterator[list[tuple[int, int]] | BadRecord]:
    """Finds each record of a TFRecord file, and each damaged part, by the headers.

    It reads only the 12 bytes of each header, and the 4 before (whole pages if records are smaller
    than a page), and checks the CRC of every length. Where that fails, it searches for the next
    header that fits its CRC. It then also checks the data of the preceding record, whose length may
    be wrong.

    Args:
      file: its name, for messages.
      descriptor: the open file.
      footers: gets the CRCs of the data as they are stored, but that of the last record.

    Yields:
      In the order of the file, lists of (offset, size) in bytes of up to 4096 records each, and bad
      records. Together they cover the file without a gap or an overlap. A file that holds no record
      at all is one bad record.

    Raises:
      OSError: the file cannot be read.
    """
    file_size = os.fstat(descriptor).st_size
    if file_size == 0:
        detail = "expected records, found an empty file."
        yield BadRecord(record=None, offset=0, size=0, reason="empty file", detail=detail)
    # Bounds the data that is checked, so that a file made to fail at every byte takes linear time.
    check_budget = file_size + _CHUNK_BYTES
    extents: list[tuple[int, int]] = []
    offset, number = 0, 0
    while offset < file_size:
        offset, broken = _hop(descriptor, offset, file_size, extents, footers)
        if not broken:
            yield extents[:-1]  # the last one is held back until a valid record follows it
            number += len(extents) - 1
            extents = extents[-1:]
            continue
        start = offset
        if extents:
            check_budget -= extents[-1][1]
            if check_budget < 0 or not has_valid_data(descriptor, *extents[-1]):
                start = extents.pop()[0]
        yield extents
        number += len(extents)
        extents = []
        foreign = _find_foreign_file(file, descriptor, file_size) if start == 0 else None
        if foreign:
            yield foreign
            return
        offset = _find_header(descriptor, start + 1, file_size)
        yield _describe_damage(descriptor, start, offset, file_size, number)
        number += 1
    yield extents


def has_valid_data(descriptor: int, offset: int, size: int) -> bool:
    """Whether the data of a record fits its CRC; reads it in chunks, whatever its size."""
    crc, position, end = 0, offset + HEADER_SIZE, offset + size - FOOTER_SIZE
    while position < end:
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - position), position)
        if not chunk:
            return False
        crc = google_crc32c.extend(crc, chunk)
        position += len(chunk)
    return os.pread(descriptor, FOOTER_SIZE, end) == _UINT32.pack(_mask(crc))


def read_data(descriptor: int, offset: int, size: int) -> bytes | None:
    """Returns the data of the record at `offset`, or None if it does not fit its CRC."""
    pieces, left = [], size - HEADER_SIZE
    while left > 0:  # one read returns at most 2 GB
        piece = os.pread(descriptor, left, offset + size - left)
        if not piece:
            return None
        pieces.append(piece)
        left -= len(piece)
    return _check_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def unframe_record(record: bytes | memoryview, *, check_crc: bool = True) -> bytes | None:
    """Returns the data of a whole record, or None if a length or a CRC is wrong."""
    if _size_of(bytes(record[:HEADER_SIZE])) != len(record):
        return None
    data = bytes(record[HEADER_SIZE:-FOOTER_SIZE])
    fits = not check_crc or record[-FOOTER_SIZE:] == _UINT32.pack(masked_crc(data))
    return data if fits else None


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
            f"{file}: byte {offset}: expected a whole record, found none. Index the file again to"
            " see what is wrong."
        )
    return data


def record_size(descriptor: int, offset: int) -> int | None:
    """Returns the size of the record at byte `offset`, or None if there is no whole record."""
    header = os.pread(descriptor, HEADER_SIZE, offset)
    size = _size_of(header)
    return size if size is not None and offset + size <= os.fstat(descriptor).st_size else None


def _check_body(body: bytes) -> bytes | None:
    data = body[:-FOOTER_SIZE]
    return data if body[-FOOTER_SIZE:] == _UINT32.pack(masked_crc(data)) else None


def _hop(
    descriptor: int,
    offset: int,
    file_size: int,
    extents: list[tuple[int, int]],
    footers: bytearray | None,
) -> tuple[int, bool]:
    """Appends records from `offset` on; returns where it stopped and whether damage stopped it."""
    size_of, append = _size_of, extents.append
    left = _BATCH_RECORDS - len(extents)
    block, block_start, size = b"", 0, _PAGE_BYTES
    while offset < file_size and left > 0:
        header = block[offset - block_start : offset - block_start + HEADER_SIZE]
        if len(header) < HEADER_SIZE:
            # If records are smaller than a page, every page is read anyway: read many at once.
            length = _BLOCK_BYTES if size < _PAGE_BYTES else FRAME_SIZE
            block_start = max(0, offset - FOOTER_SIZE)  # with the footer of the record before
            block = os.pread(descriptor, length, block_start)
            header = block[offset - block_start : offset - block_start + HEADER_SIZE]
        if footers is not None and offset:
            footers += block[offset - block_start - FOOTER_SIZE : offset - block_start]
        next_size = size_of(header)
        if next_size is None or offset + next_size > file_size:
            return offset, True
        size = next_size
        append((offset, size))
        offset += size
        left -= 1
    return offset, False


@functools.lru_cache(maxsize=1 << 16)  # records of one size share a header: small ones mostly hit
def _size_of(header: bytes) -> int | None:
    """Returns the size of the record that `header` starts, or None if its CRC does not fit."""
    if len(header) < HEADER_SIZE:
        return None
    length = header[:8]
    crc = google_crc32c.value(length)  # `masked_crc` inlined: the hot spot of an index run
    if (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF != int.from_bytes(
        header[8:], "little"
    ):
        return None
    return int.from_bytes(length, "little") + FRAME_SIZE


def _find_header(descriptor: int, start: int, file_size: int) -> int:
    """Returns where the next whole record seems to start, or `file_size`."""
    position, size = start, _PAGE_BYTES  # small at first: the next record is often near
    while position + FRAME_SIZE <= file_size:
        chunk = os.pread(descriptor, size, position)
        size = min(4 * size, _CHUNK_BYTES)
        if len(chunk) < HEADER_SIZE:
            break  # the file has been cut in the meantime
        for candidate in _find_candidates(chunk):
            record = _size_of(chunk[candidate : candidate + HEADER_SIZE])
            if record and position + candidate + record <= file_size:
                return position + candidate
        position += len(chunk) - HEADER_SIZE + 1
    return file_size


def _find_candidates(chunk: bytes) -> Iterator[int]:
    """Yields where a length below 4 GB may start: its upper half is zero, its CRC is not."""
    for zeros in _ZEROS.finditer(chunk):
        # The upper half ends in these zeros, at most 3 bytes before the last one.
        first = max(zeros.start() + 4, zeros.end() - 3)
        for crc in range(first, min(zeros.end(), len(chunk) - 4) + 1):
            if crc >= 8:
                yield crc - 8


def _find_foreign_file(file: str, descriptor: int, file_size: int) -> BadRecord | None:
    """Names the kind of a file that does not start with a record, if its first bytes tell."""
    start = os.pread(descriptor, 64, 0)
    content = name_content(start)
    if content is None:
        return None
    name, remedy = content
    detail = f"expected a TFRecord header, found {start[:4].hex(' ')} ... "
    detail += remedy.format(file=shlex.quote(file))
    return BadRecord(record=None, offset=0, size=file_size, reason=name, detail=detail)


def _describe_damage(
    descriptor: int, start: int, end: int, file_size: int, number: int
) -> BadRecord:
    """Names what is wrong between byte `start`, where record `number` should be, and byte `end`."""
    header = os.pread(descriptor, HEADER_SIZE, start)
    size = _size_of(header)
    record: int | None = number
    if len(header) < HEADER_SIZE:
        reason = "cut short" if any(header) else "trailing bytes"
        detail = f"expected a record header of {HEADER_SIZE} bytes, found the end of the file"
        detail += f" after {len(header)}."
    elif size is not None and start + size > file_size:
        reason = "cut short" if end == file_size else "length beyond the file"
        detail = f"expected a record of {size} bytes, found the end of the file after "
        detail += f"{file_size - start}."
    elif size is not None:
        reason = "data CRC"
        detail = "the data of this record does not fit its CRC, and no record follows at its end,"
        detail += f" byte {start + size}."
    else:
        length, stored_crc = _HEADER.unpack(header)
        at_the_end = end == file_size and length + FRAME_SIZE != file_size - start
        reason = "trailing bytes" if at_the_end else "length CRC"
        detail = (
            f"expected a record header (a length, then its CRC), found {header.hex(' ')}: the CRC"
            f" of that length would be {masked_crc(header[:8]):#010x}, not {stored_crc:#010x}."
        )
        if start == 0 and end == file_size:
            record, reason = None, "not a TFRecord file"
    if end < file_size:
        detail += f" The next record is at byte {end}."
    elif record is None:
        detail += " No record follows: check the path, or make the file again."
    else:
        detail += " The file is damaged or was cut short: copy or make it again."
    return BadRecord(record=record, offset=start, size=end - start, reason=reason, detail=detail)


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF
