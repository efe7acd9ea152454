"""Order "buffer" by tf.data: files in sequence, and records drawn from a buffer."""

from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends.callbacks import make_callback
from dali_tf_input.backends.locations import check_versions, versions_of
from dali_tf_input.backends.stream import EPOCH_STRIDE, ReadEpoch, Stream
from dali_tf_input.backends.tf_native import check_files, uses_native
from dali_tf_input.records.records import Records
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.spec.plan import Shard


def read_buffer(stream: Stream, options: TfDataOptions) -> ReadEpoch:
    """Returns the function that reads an epoch of order "buffer".

    The shard's files are read in a new order, `num_parallel_reads` at a time, and each record is
    drawn at random from the buffer. The order is a function of (seed, epoch) for a given number of
    shards and `num_parallel_reads`.
    """
    spec = stream.spec
    runs = list_runs(stream)
    num_runs = len(runs)
    with tf.device("CPU:0"):
        slots = tf.constant(stream.plan.slots(stream.shard.shard_id))

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        seeds = tf.stack([tf.constant(spec.seed, tf.int64), -1 - epoch])
        encoded = interleave(shuffle(runs, num_runs, seeds), stream, options)
        encoded = shuffle(encoded, spec.buffer_size, seeds)
        keys = tf.data.Dataset.from_tensor_slices(slots + epoch * EPOCH_STRIDE)
        zipped = tf.data.Dataset.zip(keys, encoded)
        return zipped.map(lambda key, record: (key, *record)) if spec.record_ids else zipped

    return read_epoch


def list_runs(stream: Stream) -> tf.data.Dataset:
    """Returns the runs of neighboring records of a shard: file, state, offset, count, first."""
    numbers, offsets, counts, firsts = runs_of(stream.spec.records, stream.shard)
    versions = versions_of(stream.spec.records)[numbers]
    files = [stream.spec.records.files[number].path for number in numbers]
    runs = (tf.constant(values, tf.int64) for values in (offsets, counts, firsts))
    return tf.data.Dataset.from_tensor_slices((files, versions, *runs))


def interleave(runs: tf.data.Dataset, stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Returns the serialized records of `runs`, interleaving several files.

    With `spec.record_ids` the elements are (record, record id).
    """
    is_native = uses_native(options.kernel)
    check = None if is_native else make_callback(check_versions)

    @tf.autograph.experimental.do_not_convert
    def read(
        file: tf.Tensor, state: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, first: tf.Tensor
    ) -> Any:
        file = file[None]
        if options.service is None:  # its workers cannot call this process
            if is_native:
                with tf.control_dependencies([check_files(file, state[None])]):
                    file = tf.identity(file)
            else:
                checked = tf.numpy_function(check, [file, state[None]], tf.string)
                file = tf.ensure_shape(checked, (1,))
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=file,
            compression_type="",
            buffer_size=options.read_buffer_bytes,
            byte_offsets=[offset],
        )
        run = tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)
        # TensorFlow ends a truncated file without an error and would continue with the next one.
        run = run.apply(tf.data.experimental.assert_cardinality(count))
        if not stream.spec.record_ids:
            return run
        return tf.data.Dataset.zip(run, tf.data.Dataset.range(first, first + count))

    if options.num_parallel_reads == 1:
        return runs.flat_map(read)
    return runs.interleave(
        read,
        cycle_length=options.num_parallel_reads,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def shuffle(dataset: tf.data.Dataset, buffer_size: int, seeds: Any) -> tf.data.Dataset:
    """Shuffles by two seeds, which may be tensors; (0, 0) differs each time.

    Unlike `Dataset.shuffle` it does not depend on `tf.random.set_seed`.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def runs_of(records: Records, shard: Shard) -> tuple[list[int], ...]:
    """Returns file number, offset, number of records and first id of each run of a shard.

    If all records of a file are read, its part of the shard is one run.
    """
    shared = shard.records(records.num_records)
    runs: tuple[list[int], ...] = ([], [], [], [])
    before = 0  # records of the files before
    for number, (file, count) in enumerate(zip(records.files, records.counts, strict=True)):
        start, stop = max(shared.start - before, 0), min(shared.stop - before, count)
        if start >= stop:
            rows = []
        elif start == 0 and count == file.num_records and not file.num_skipped:
            rows = [(number, 0, stop, records.first_ids[number])]
        else:
            extents = records.index(number)[start:stop]
            is_first = np.append(True, extents[1:, 0] != extents[:-1].sum(1))
            firsts = np.flatnonzero(is_first)
            counts = np.diff(firsts, append=len(extents))
            ids = records.ids_at(before + start + firsts)
            rows = [*zip([number] * len(firsts), extents[firsts, 0], counts, ids, strict=True)]
        for values, column in zip(runs, zip(*rows, strict=True) if rows else (), strict=False):
            values += map(int, column)
        before += count
    return runs
