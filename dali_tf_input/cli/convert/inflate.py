"""Compressed TFRecords, inflated so that they can be indexed."""

import contextlib
import os
import zlib

from dali_tf_input import Checks, InputError, build_index
from dali_tf_input.cli import command
from dali_tf_input.records.class_names import LABELS_NAME, MAIN_KEYS, names_file
from dali_tf_input.records.paths import find_versions, read_file
from dali_tf_input.records.tfrecord import name_content
from dali_tf_input.storage import objects
from dali_tf_input.storage.copies import local_copy

_EITHER = 47  # zlib's code for both headers


def inflate_files(source: str, folder: str) -> str | list[str]:
    """Inflates GZIP and ZLIB files into `folder` and indexes them; returns their paths.

    Each folder of theirs becomes one in `folder`, in the same order, with its names of classes.
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
    folders: dict[str, str] = {}
    paths = []
    for file in command.progress(files, what="inflating", total=len(files)):
        above, name = os.path.split(file)
        if above not in folders:
            folders[above] = os.path.join(folder, f"{len(folders):06}")
            os.mkdir(folders[above])
        path = os.path.join(folders[above], name.removesuffix(".gz"))
        path = os.path.join(folders[above], name) if os.path.exists(path) else path
        paths.append(path)
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
    report = build_index(paths, Checks(verify="crc"), allow_missing=True)
    keys = dict.fromkeys((*MAIN_KEYS, *report.summary.features))
    for name in (LABELS_NAME, *map(names_file, keys)):
        for above, own in folders.items():
            with contextlib.suppress(FileNotFoundError):
                data = read_file(os.path.join(above, name))
                with open(os.path.join(own, name), "wb") as copy:
                    copy.write(data)
    return paths


def _read_start(file: str, version: objects.ObjectVersion | None) -> bytes:
    if version is None:
        with open(file, "rb") as stream:
            return stream.read(64)
    part = objects.ByteRange(file, version.etag, 0, min(64, version.size))
    return bytes(objects.read_parts([part])[0])
