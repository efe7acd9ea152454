"""Where the records are, and in which groups, as tensors that all pipelines share."""

import os
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers
from dali_tf_input.records.manifest import find_change
from dali_tf_input.records.records import Records
from dali_tf_input.spec.input import InputSpec


class RecordLocations:
    """Where the records are, as tensors that the pipelines of all replicas share.

    TensorFlow never frees a function given to `numpy_function`, nor what the function holds. So
    what has a value per record is a tensor, which datasets hold and which is freed with them.

    Attributes:
      names: the path or URL of each file: string (files,).
      versions: see `versions_of`.
      where: the number of each record's file, int32 (records,), and its offset and size in bytes,
        int64 (records, 2).
      mean_bytes: bytes of a record on average, at least 1.
    """

    def __init__(self, records: Records) -> None:
        self._records, self._outputs = records, dict[str, tf.Tensor]()
        with tf.device("CPU:0"):
            self.names, self.versions = (
                tf.constant(records.paths),
                tf.constant(versions_of(records)),
            )
            file_of = tf.repeat(tf.range(len(records.files)), records.counts)
            indexes = [records.index(file) for file in range(len(records.files))]
            self.where = (file_of, tf.constant(np.concatenate(indexes)))
        num_bytes = sum(int(extents[:, 1].sum()) for extents in indexes)
        self.mean_bytes = max(1, num_bytes // max(1, records.num_records))

    def list_output(self, name: str) -> tf.Tensor:
        """Returns the values of all records that `InputSpec.outputs_of_index` names."""
        if name not in self._outputs:
            values = self._records.ids if name == "record_id" else self._records.labels
            with tf.init_scope(), tf.device("CPU:0"):
                self._outputs[name] = tf.constant(values)
        return self._outputs[name]

    def gather_outputs(self, spec: InputSpec, positions: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns what `spec.outputs_of_index` names of the records at these positions."""
        return tuple(tf.gather(self.list_output(name), positions) for name in spec.outputs_of_index)


class GroupedRecords:
    """The records of a spec, sorted by class or part: int64 (records,), shared by pipelines."""

    def __init__(self, spec: InputSpec) -> None:
        with tf.device("CPU:0"):
            self.records = tf.constant(spec.grouped_records)


_locations = weakref.WeakValueDictionary[Records, RecordLocations]()
_groups = weakref.WeakValueDictionary[InputSpec, GroupedRecords]()
_making = threading.Lock()


def find_locations(records: Records) -> RecordLocations:
    """Returns the locations of records, which all datasets of these records share."""
    with _making:
        locations = _locations.get(records) or RecordLocations(records)
        _locations[records] = locations
        return locations


def find_grouped_records(spec: InputSpec) -> GroupedRecords:
    """Returns the grouped records of a spec, which all its datasets share."""
    with _making:
        groups = _groups.get(spec) or GroupedRecords(spec)
        _groups[spec] = groups
        return groups


def versions_of(records: Records) -> Integers:
    """Returns each file's size in bytes and modification time in ns when it was indexed.

    The result is int64 (files, 2), with -1 for stored objects.
    """
    if records.is_remote:  # each request names the version that it expects
        return np.full((len(records.files), 2), -1)
    return np.array([(file.size, file.mtime_ns) for file in records.files], np.int64)


def check_versions(names: Any, versions: Integers) -> Any:
    """Returns `names`, bytes (n,); raises InputError if a file changed since it was indexed."""
    for name, (size, mtime) in zip(names, versions.tolist(), strict=True):
        change = find_change(os.fsdecode(name), size, mtime) if size >= 0 else None
        if change:
            raise InputError(f"{change}: index it again.")
    return names
