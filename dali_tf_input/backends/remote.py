"""Reads records of objects of a store: by ranges, or from the cache of whole objects."""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.records.index_file import Integers
from dali_tf_input.records.records import Records
from dali_tf_input.records.tfrecord import unframe_record
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.storage.objects import Part, Status, read_parts
from dali_tf_input.storage.staging import make_process_folder


def make_remote_read(
    dataset: Records,
    options: TfDataOptions,
    names: tf.Tensor,
    file_of: tf.Tensor,
    extents: tf.Tensor,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns what `make_read` does, for objects of a store: from the cache, or by ranges."""
    with tf.device("CPU:0"):
        etags = tf.constant([file.etag for file in dataset.files])
        sizes = tf.constant([file.size for file in dataset.files])
    cache, retry_seconds = dataset.cache, dataset.retry_seconds

    def read(names: Any, etags: Any, sizes: Integers, extents: Integers) -> Any:
        wanted = [
            Part(name.decode(), etag.decode(), start, start + size)
            for name, etag, (start, size) in zip(names, etags, extents.tolist(), strict=True)
        ]
        unframe = functools.partial(unframe_record, check_crc=options.check_crc)
        data: list[bytes | None] = [None] * len(wanted)
        missing = [*range(len(wanted))]
        if cache:
            for place, (part, size) in enumerate(zip(wanted, sizes.tolist(), strict=True)):
                path = cache.find(part.url, Status(size, part.etag))
                with contextlib.suppress(FileNotFoundError):  # another one took its place
                    if path:
                        data[place] = unframe(_read_at(path, part))
                        missing.remove(place)
        found = read_parts([wanted[one] for one in missing], unframe, retry_seconds=retry_seconds)
        for place, record in zip(missing, found, strict=True):
            data[place] = record
        for part, one in zip(wanted, data, strict=True):
            if one is None:
                raise InputError(f"corrupted record: {part.url}, byte {part.start}: wrong CRC.")
        return np.array(data, object)

    @tf.autograph.experimental.do_not_convert
    def read_remotely(numbers: tf.Tensor) -> tf.Tensor:
        files = tf.gather(file_of, numbers)
        given = [tf.gather(one, files) for one in (names, etags, sizes)]
        given.append(tf.gather(extents, numbers))
        return tf.ensure_shape(tf.numpy_function(read, given, tf.string), (None,))

    return read_remotely


def _read_at(path: str, part: Part) -> bytes:
    with open(path, "rb", buffering=0) as stream:
        return os.pread(stream.fileno(), part.end - part.start, part.start)


def localize(dataset: Records) -> Records:
    """Returns a dataset of local files if the cache holds all objects; else the same.

    The files are links in a folder of this process: they stay if the cache drops them. What the
    cache lacks and can hold is downloaded meanwhile.
    """
    if not dataset.is_remote or not dataset.cache:
        return dataset
    found = [file.status and dataset.cache.find(file.path, file.status) for file in dataset.files]
    if not all(found):
        if sum(file.size for file in dataset.files) <= dataset.cache.max_bytes:
            _fill(dataset)
        return dataset
    folder = _link_folder(dataset.cache.folder)
    files = []
    for path, file in zip(found, dataset.files, strict=True):
        link = folder.path(os.path.basename(path or ""))
        with contextlib.suppress(FileExistsError):
            os.link(path or "", link)
        mtime_ns = os.stat(link).st_mtime_ns
        files.append(dataclasses.replace(file, path=link, mtime_ns=mtime_ns, etag=None))
    return dataclasses.replace(dataset, files=tuple(files))


_link_folder = functools.cache(make_process_folder)


@functools.cache
def _fill(dataset: Records) -> None:
    """Downloads what the cache lacks, in the background."""
    threading.Thread(target=_fetch, args=(dataset,), daemon=True).start()


def fetch_all(dataset: Records) -> Records:
    """Returns a dataset of local files, after downloading to the cache what it lacks.

    Raises:
      InputError: there is no cache, or it cannot hold all.
    """
    size = sum(file.size for file in dataset.files)
    if not dataset.cache or size > dataset.cache.max_bytes:
        raise InputError(
            f"Without a cache that holds all objects, `cache_bytes` {size:,}, this order is not"
            " read from a store: pass `cache_dir` and `cache_bytes` to Records.from_files, or"
            " use order 'global'."
        )
    _fetch(dataset)
    return localize(dataset)


def _fetch(dataset: Records) -> None:
    for file in dataset.files:
        if file.status and dataset.cache:
            dataset.cache.fetch(file.path, file.status)
