"""Record reading with tf.data in a planned order, for both backends; all orders by epochs."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends import tf_native
from dali_tf_input.backends.buffer import read_buffer
from dali_tf_input.backends.callbacks import make_callback
from dali_tf_input.backends.locations import check_versions, find_grouped_records, find_locations
from dali_tf_input.backends.remote import make_remote_read
from dali_tf_input.backends.stream import EPOCH_STRIDE, MAX_EPOCHS, ReadEpoch, Stream
from dali_tf_input.backends.tf_native import load_ops, uses_native
from dali_tf_input.random import Integers
from dali_tf_input.records.tfrecord import read_record
from dali_tf_input.spec.options import TfDataOptions

_CHUNK, _CHUNK_BYTES = 16, 1 << 22  # most records, and bytes, that a reader reads in one go
# Makes something of a batch: of the keys of its images, int64 (k,); the positions of their records,
# int64 (k,), or else int64 (0,); or the records, string (k,), or else string (0,); and what
# `InputSpec.outputs_of_index` names, (k,) each.
MakeBatch = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]], Any]
_LISTED = 4096  # images that Python lists in a call, which takes half a millisecond


def read_records(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Reads the records of a shard, epoch after epoch, see `join_epochs`.

    Returns:
      A dataset of (key, record). The key is int64, unique to an image in an epoch, and independent
      of the backend and the number of shards; the record is a serialized Example. The values named
      by `spec.outputs_of_index`, int64, follow.
    """
    read = read_planned if stream.spec.has_fixed_order else read_buffer
    return join_epochs(stream, read(stream, options))


def list_batches(stream: Stream) -> tf.data.Dataset:
    """Lists the batches of a shard, epoch after epoch, see `join_epochs`; of a fixed order.

    Returns:
      A dataset of (keys, positions): the keys of a batch's images, see `read_records`, and the
      positions of their records; int64 (k,) each.
    """
    return join_epochs(stream, list_planned(stream, stream.shard_batch_size, native=True))


def map_batches(
    stream: Stream,
    options: TfDataOptions,
    make: MakeBatch,
    *,
    num_calls: int,
    num_threads: int,
    as_records: bool = False,
) -> tf.data.Dataset:
    """Calls `make` for each batch of a shard, epoch after epoch, see `join_epochs`.

    Records of a fixed order that are in local files are left to `make`, unless it wants them
    `as_records`; others are read.

    Args:
      stream: what to read.
      options: how to read it.
      make: makes the batch.
      num_calls: how many batches are made at the same time.
      num_threads: how many threads may wait in `make`, or do what it leaves to TensorFlow.
      as_records: whether to read all records.
    """
    spec = stream.spec
    if spec.has_fixed_order and not spec.records.is_remote and not as_records:
        locations = find_locations(spec.records)

        @tf.autograph.experimental.do_not_convert
        def make_next(keys: tf.Tensor, *given: tf.Tensor) -> Any:
            (positions,) = given
            from_index = locations.gather_outputs(spec, positions)
            return make(keys, positions, tf.constant([], tf.string), from_index)

        batches = list_batches(stream)
    else:

        @tf.autograph.experimental.do_not_convert
        def make_next(keys: tf.Tensor, *given: tf.Tensor) -> Any:
            records, *from_index = given
            return make(keys, tf.constant([], tf.int64), records, tuple(from_index))

        batches = read_records(stream, options)
        batches = batches.batch(stream.shard_batch_size, drop_remainder=spec.repeat)
    if num_calls == 1:
        made = batches.map(make_next)
    else:
        made = batches.map(make_next, num_parallel_calls=num_calls, deterministic=True)
    # A call waits for the process's threads, and must not hold one of those that TensorFlow trains
    # with.
    return with_own_threads(made, num_threads)


def join_epochs(stream: Stream, read_epoch: ReadEpoch) -> tf.data.Dataset:
    """Joins what is read of each epoch.

    Each iterator serves the next epoch that has not been served yet; if `stream.endless`, also all
    later epochs. With `spec.repeat` False, each iterator serves each record once.
    """
    cursor, per_epoch = stream.cursor, stream.plan.steps_per_epoch
    if not stream.spec.repeat:
        start = np.int64(0)
        return tf.data.Dataset.from_tensors((start, start)).flat_map(read_epoch)
    if stream.endless:
        first_epoch, first_step = divmod(cursor.step, per_epoch)

        @tf.autograph.experimental.do_not_convert
        def read_later_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            is_first = tf.equal(epoch, np.int64(first_epoch))
            return read_epoch(epoch, tf.where(is_first, np.int64(first_step), np.int64(0)))

        return tf.data.Dataset.range(first_epoch, MAX_EPOCHS).flat_map(read_later_epoch)
    next_epoch = make_callback(lambda: np.int64(cursor.next_epoch(per_epoch)))

    @tf.autograph.experimental.do_not_convert
    def read_next_epoch(_: tf.Tensor) -> tf.data.Dataset:
        step = tf.ensure_shape(tf.numpy_function(next_epoch, [], tf.int64), ())
        return read_epoch(step // per_epoch, step % per_epoch)

    return tf.data.Dataset.from_tensors(0).flat_map(read_next_epoch)


def list_planned(stream: Stream, count: int, *, native: bool) -> ReadEpoch:
    """Returns the function that lists an epoch from a step on, in the order of its `Plan`.

    It makes a dataset of (keys, positions), of `count` images each: see `list_batches`.
    """
    spec, plan = stream.spec, stream.plan
    locations = find_locations(spec.records)
    groups = find_grouped_records(spec) if plan.groups else None
    listed = count if native else _LISTED
    check, list_images = (_list_natively if native else _list_by_python)(stream, listed)

    @tf.autograph.experimental.do_not_convert
    def list_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        # Before the first record, as files stay open from one epoch to the next.
        with tf.control_dependencies([check(locations.names, locations.versions)]):
            first = step * stream.shard_batch_size

        def list_next(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            keys, positions = list_images(epoch, start)
            return keys, positions if groups is None else tf.gather(groups.records, positions)

        num_images = plan.num_images(stream.shard.shard_id)
        images = tf.data.Dataset.range(first, num_images, listed).map(list_next)
        return images if native else images.rebatch(count)

    return list_epoch


def _list_natively(stream: Stream, count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what checks all files, and what lists `count` images of an epoch from one on."""
    with tf.device("CPU:0"):
        plan = [tf.constant(numbers) for numbers in stream.plan.to_numbers(stream.shard.shard_id)]
    return tf_native.check_files, partial(tf_native.list_images, plan, count=count)


def _list_by_python(stream: Stream, count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the same as `_list_natively`, where there are no compiled operations."""
    plan, shard_id = stream.plan, stream.shard.shard_id
    check_now = make_callback(check_versions)

    @make_callback
    def list_now(epoch: int, first: int) -> tuple[Integers, Integers]:
        slots = plan.slots(shard_id, int(first), int(first) + count)
        return int(epoch) * EPOCH_STRIDE + slots, plan.positions(int(epoch), slots)

    def check(names: tf.Tensor, versions: tf.Tensor) -> Any:
        return tf.numpy_function(check_now, [names, versions], tf.string)

    def list_images(epoch: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        listed = tf.numpy_function(list_now, [epoch, first], (tf.int64, tf.int64))
        return tuple(tf.ensure_shape(values, (None,)) for values in listed)

    return check, list_images


def read_planned(stream: Stream, options: TfDataOptions) -> ReadEpoch:
    """Returns the function that reads an epoch from a step on, in the order of its `Plan`."""
    spec = stream.spec
    locations = find_locations(spec.records)
    if spec.records.is_remote:
        read = make_remote_read(spec.records, options, locations.names, *locations.where)
    else:
        read = make_read(options, locations.names, locations.versions, *locations.where)
    parallel = options.num_parallel_reads
    # Remote reads wait longer, and neighboring ranges share a request.
    max_chunk = 2 * _CHUNK if spec.records.is_remote else _CHUNK
    chunk = int(np.clip(_CHUNK_BYTES // locations.mean_bytes, 1, max_chunk))
    list_epoch = list_planned(stream, chunk, native=uses_native(options.kernel))

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        def read_next(keys: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return (keys, read(positions), *locations.gather_outputs(spec, positions))

        # A thread reads a few records at a time.
        records = list_epoch(epoch, step).map(
            read_next, num_parallel_calls=parallel, deterministic=True
        )
        specs = [tf.TensorSpec((), one.dtype) for one in records.element_spec]
        variant = tf.raw_ops.UnbatchDataset(
            input_dataset=tf.data.experimental.to_variant(records),
            output_types=[one.dtype for one in specs],
            output_shapes=[one.shape for one in specs],
        )
        unbatched = tf.data.experimental.from_variant(variant, tuple(specs))
        # Waiting for storage must not block the decoding threads, of which there is one per core.
        return with_own_threads(unbatched, parallel)

    return read_epoch


def with_own_threads(dataset: tf.data.Dataset, num_threads: int) -> tf.data.Dataset:
    """Has what a dataset does run in threads of its own, which may wait."""
    specs = tf.nest.flatten(dataset.element_spec)
    variant = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_threads=num_threads,
        output_types=[one.dtype for one in specs],
        output_shapes=[one.shape for one in specs],
    )

    # A variant holds the tensors that `dataset` uses, and this function the Python objects.
    @tf.autograph.experimental.do_not_convert
    def read(_: tf.Tensor) -> tf.data.Dataset:
        return tf.data.experimental.from_variant(variant, dataset.element_spec)

    return tf.data.Dataset.from_tensors(0).flat_map(read)


def make_read(
    options: TfDataOptions,
    names: tf.Tensor,
    versions: tf.Tensor,
    file_of: tf.Tensor,
    extents: tf.Tensor,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that reads and checks records by their positions, int64 (n,).

    See `RecordLocations` for the tensors.
    """
    if uses_native(options.kernel):
        native = partial(load_ops().dali_tf_input_read, names, versions, file_of, extents)
        return lambda positions: tf.ensure_shape(
            native(positions, check_crc=options.check_crc), (None,)
        )

    @make_callback
    def read_by_name(names: Any, versions: Integers, offsets: Integers) -> Any:
        files = map(os.fsdecode, check_versions(names, versions))
        return np.array([*map(read_record, files, offsets.tolist())], object)

    @tf.autograph.experimental.do_not_convert
    def read_by_python(positions: tf.Tensor) -> tf.Tensor:
        files = tf.gather(file_of, positions)
        offsets = tf.gather(extents, positions)[:, 0]
        given = [tf.gather(names, files), tf.gather(versions, files), offsets]
        return tf.ensure_shape(tf.numpy_function(read_by_name, given, tf.string), (None,))

    return read_by_python
