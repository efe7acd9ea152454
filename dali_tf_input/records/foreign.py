"""Names what non-TFRecord files and non-image bytes are, by their first bytes."""

import re

# The pattern of the first bytes, the name, what to do.
_UNPACK = "DALI reads uncompressed files only: unpack it with make_tfrecords.py or "
_MAKE_TFRECORDS = "Make TFRecords of images with scripts/make_tfrecords.py of the repository."
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


def name_content(start: bytes) -> tuple[str, str] | None:
    """Names well-known content by its first bytes: (name, what to do), None if unknown."""
    for pattern, name, remedy in _FOREIGN_CONTENT:
        if pattern.match(start):
            return name, remedy
    return None
