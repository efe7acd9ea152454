"""Record reading from stored objects, by byte ranges or from complete local copies."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends.callbacks import make_callback
from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers
from dali_tf_input.records.records import Records
from dali_tf_input.records.tfrecord import unframe_record
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.storage.client import close_at_exit
from dali_tf_input.storage.copies import fetch_copies
from dali_tf_input.storage.objects import ByteRange, read_parts


def make_remote_read(
    records: Records,
    options: TfDataOptions,
    names: tf.Tensor,
    file_of: tf.Tensor,
    extents: tf.Tensor,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function like that of `make_read`, which reads byte ranges of stored objects."""
    with tf.device("CPU:0"):
        etags = tf.constant([file.etag for file in records.files])
    retry_seconds, check_crc = records.retry_seconds, options.check_crc

    @make_callback
    def read(names: Any, etags: Any, extents: Integers) -> Any:
        parts = [
            ByteRange(name.decode(), etag.decode(), start, start + size)
            for name, etag, (start, size) in zip(names, etags, extents.tolist(), strict=True)
        ]
        found = []
        for part, framed in zip(parts, read_parts(parts, retry_seconds=retry_seconds), strict=True):
            record = unframe_record(framed, check_crc=check_crc)
            if record is None:
                raise InputError(f"corrupted record: {part.url}, byte {part.start}: wrong CRC.")
            found.append(record)
        return np.array(found, object)

    close_at_exit()  # before the callbacks, which would wait for the store

    @tf.autograph.experimental.do_not_convert
    def read_remotely(positions: tf.Tensor) -> tf.Tensor:
        files = tf.gather(file_of, positions)
        arguments = [
            tf.gather(names, files),
            tf.gather(etags, files),
            tf.gather(extents, positions),
        ]
        return tf.ensure_shape(tf.numpy_function(read, arguments, tf.string), (None,))

    return read_remotely


def localize(records: Records) -> Records:
    """Returns the same records in local copies, fetched if missing; unchanged without a cache.

    Raises:
      InputError: `cache_dir` cannot hold all objects, or one cannot be read.
    """
    if not records.is_remote or records.cache_dir is None:
        return records
    objects = {file.path: file.version for file in records.files if file.version}
    paths = fetch_copies(objects, records.cache_dir, retry_seconds=records.retry_seconds)
    copies = (
        dataclasses.replace(file, path=path, mtime_ns=os.stat(path).st_mtime_ns, etag=None)
        for file, path in zip(records.files, paths, strict=True)
    )
    return dataclasses.replace(records, files=tuple(copies))


def fetch_all(records: Records) -> Records:
    """Does the same as `localize`, for an order that needs whole files.

    Raises:
      InputError: there is no `cache_dir`, or `localize` raises.
    """
    if records.cache_dir is None:
        size = sum(file.size for file in records.files)
        raise InputError(
            "This order reads whole files, so objects need local copies: pass `cache_dir` to"
            f" Records.from_files, a folder with {size:,} bytes free, or use order 'global'."
        )
    return localize(records)
