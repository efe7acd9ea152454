"""Compressed TFRecords, inflated so that they can be indexed."""

import os
import zlib

from dali_tf_input import Checks, InputError, build_index
from dali_tf_input.cli import command
from dali_tf_input.records.paths import find_versions
from dali_tf_input.records.tfrecord import name_content
from dali_tf_input.storage import objects
from dali_tf_input.storage.copies import local_copy

_EITHER = 47  # zlib's code for both headers


def inflate_files(source: str, folder: str) -> str:
    """Inflates GZIP and ZLIB files into `folder` and indexes them; returns a pattern of theirs.

    Returns `source` if none of its files is compressed. All or none must be.

    Raises:
      InputError: some are not compressed, or one is damaged.
    """
    versions, kinds = find_versions(source), {}
    files = [*versions]
    for file in files:
        content = name_content(_read_start(file, versions[file]))
        kinds[file] = content[0] if content and content[0] in ("GZIP file", "ZLIB file") else ""
    if not any(kinds.values()):
        return source
    plain = [file for file, kind in kinds.items() if not kind]
    if plain:
        raise InputError(f"{plain[0]} is not compressed, others are: name them one kind at a time.")
    for number, file in enumerate(command.progress(files, what="inflating", total=len(files))):
        path = os.path.join(folder, os.path.basename(file).removesuffix(".gz"))
        if os.path.exists(path):  # files of two folders may have one name
            path = os.path.join(folder, f"{number}-{os.path.basename(path)}")
        try:
            with (
                local_copy(file, versions[file], None) as local,
                open(local, "rb") as stream,
                open(path, "xb") as inflated,
            ):
                inflate = zlib.decompressobj(_EITHER)
                while chunk := inflate.unused_data or stream.read(1 << 20):
                    inflate = zlib.decompressobj(_EITHER) if inflate.eof else inflate
                    inflated.write(inflate.decompress(chunk))
                if not inflate.eof:
                    raise zlib.error("it is cut short")
        except zlib.error as error:
            raise InputError(f"{file} is damaged: {error}.") from error
    pattern = os.path.join(folder, "*")
    build_index(pattern, Checks(verify="crc"), allow_missing=True)
    return pattern


def _read_start(file: str, version: objects.ObjectVersion | None) -> bytes:
    if version is None:
        with open(file, "rb") as stream:
            return stream.read(64)
    part = objects.ByteRange(file, version.etag, 0, min(64, version.size))
    return bytes(objects.read_parts([part])[0])
