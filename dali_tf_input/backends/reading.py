"""Reads records in the order of a plan, with tf.data for both backends."""

import atexit
import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends.remote import make_remote_read
from dali_tf_input.backends.tf_native import load, uses_native
from dali_tf_input.errors import InputError
from dali_tf_input.records.index_file import Integers
from dali_tf_input.records.manifest import find_change
from dali_tf_input.records.records import Records
from dali_tf_input.records.tfrecord import read_record
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.spec.order import EpochSteps, Shard, StartStep, list_records
from dali_tf_input.storage.staging import make_process_folder, private_folder

_STRIDE = 1 << 40  # between the keys of two epochs
MAX_EPOCHS = 1 << 22
_CHUNK, _CHUNK_BYTES = 16, 1 << 22  # most records, and bytes, that a reader reads in one go


@atexit.register
def _drop_iterators() -> None:
    # A thread in a `numpy_function` would wait for Python for ever, and the process for it; and
    # DALI, which is unloaded later, must have no pipeline left.
    for one in gc.get_objects():
        if issubclass(type(one), tf.data.Iterator):
            vars(one).clear()


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one pipeline serves.

    Attributes:
      spec: what comes out.
      batch_size: images in each batch; at most the shard's records, unless `spec.repeat` is False.
      shard: which records are read.
      start_step: where each iterator starts, for order "global".
    """

    spec: InputSpec
    batch_size: int
    shard: Shard = Shard()
    start_step: StartStep = field(default_factory=StartStep)

    @property
    def steps(self) -> EpochSteps:
        """The steps of an epoch."""
        return EpochSteps(
            num_records=self.spec.records.num_records,
            batch_size=self.batch_size,
            num_shards=self.shard.num_shards,
            padded=not self.spec.repeat,
        )


def read_fixed_order(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Reads the records of a stream of fixed order, as `order.list_records` says.

    Returns:
      A dataset of (key, record): key int64, from which `describe_key` computes epoch and slot;
      record a serialized Example. With `spec.record_ids` of (key, record, its number). Infinite if
      `spec.repeat`, else one pass, padded to whole steps by repeating the last record.
    """
    spec, batch_size, dataset = stream.spec, stream.batch_size, stream.spec.records
    steps, start_step, per_epoch = stream.steps, stream.start_step, stream.steps.per_epoch
    indexes = [dataset.index(file) for file in range(len(dataset.files))]
    list_them = partial(
        list_records,
        steps=steps,
        shard=stream.shard,
        seed=spec.seed if spec.order == "global" else None,
        shuffle_block_size=spec.shuffle_block_size,
    )
    # TensorFlow never frees a function given to `numpy_function`, nor what the function holds. So
    # large values are tensors, which the dataset holds and which are freed with it.
    with tf.device("CPU:0"):
        names, states = tf.constant(dataset.files), tf.constant(states_of(dataset))
        counts = tf.constant(dataset.records_per_file, tf.int64)
        file_of = tf.repeat(tf.range(len(indexes)), counts)
        extents = tf.constant(np.concatenate(indexes))
    if dataset.etags:
        read = make_remote_read(dataset, options, names, file_of, extents)
    else:
        read = make_read(options, names, states, file_of, extents)
    mean_bytes = int(extents[:, 1].numpy().mean())
    parallel = options.num_parallel_reads
    most = 2 * _CHUNK if dataset.etags else _CHUNK  # more of them wait, and are neighbors
    chunk = int(np.clip(_CHUNK_BYTES // max(1, mean_bytes), 1, most))

    def list_epoch(epoch: int, step: int, names: Any, states: Any, counts: Any) -> Integers:
        check_states(names, states)
        return list_them(counts, epoch=int(epoch), start_step=int(step))

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        numbers = tf.numpy_function(list_epoch, [epoch, step, names, states, counts], tf.int64)
        numbers.set_shape((None,))
        records = tf.data.Dataset.from_tensor_slices(numbers).batch(chunk)
        records = records.map(read, num_parallel_calls=parallel, deterministic=True).unbatch()
        # Threads waiting for storage must not take decoding threads, which are as many as cores.
        variant = tf.raw_ops.PrivateThreadPoolDataset(
            input_dataset=tf.data.experimental.to_variant(records),
            num_threads=parallel,
            output_types=[tf.string],
            output_shapes=[()],
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string))
        first = epoch * _STRIDE
        keys = tf.data.Dataset.range(first + step * batch_size, first + per_epoch * batch_size)
        ids = [tf.data.Dataset.from_tensor_slices(numbers)] if spec.record_ids else []
        return tf.data.Dataset.zip(keys, records, *ids)

    if not spec.repeat:
        return tf.data.Dataset.from_tensors((np.int64(0), np.int64(0))).flat_map(read_epoch)

    @tf.autograph.experimental.do_not_convert
    def list_epochs(_: tf.Tensor) -> tf.data.Dataset:
        # Read when an iterator makes its first batch.
        start = tf.numpy_function(lambda: np.int64(start_step.step), [], tf.int64)
        start.set_shape(())
        first_epoch = start // per_epoch
        return tf.data.Dataset.range(first_epoch, MAX_EPOCHS).map(
            lambda epoch: (epoch, tf.where(epoch == first_epoch, start % per_epoch, 0))
        )

    return tf.data.Dataset.from_tensors(0).flat_map(list_epochs).flat_map(read_epoch)


def make_read(
    options: TfDataOptions,
    names: tf.Tensor,
    states: tf.Tensor,
    file_of: tf.Tensor,
    extents: tf.Tensor,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that reads and checks records by their numbers, int64 (n,).

    For each file it needs its name and its row of `states_of`; for each record the number of its
    file, int32, and its extent, int64: offset and size in bytes.
    """
    if uses_native(options.kernel):
        native = partial(load().dali_tf_input_read, names, states, file_of, extents)
        return lambda numbers: tf.ensure_shape(
            native(numbers, check_crc=options.check_crc), (None,)
        )

    def read(names: Any, states: Integers, offsets: Integers) -> Any:
        files = map(os.fsdecode, check_states(names, states))
        return np.array([*map(read_record, files, offsets.tolist())], object)

    @tf.autograph.experimental.do_not_convert
    def read_by_python(numbers: tf.Tensor) -> tf.Tensor:
        files = tf.gather(file_of, numbers)
        offsets = tf.gather(extents, numbers)[:, 0]
        given = [tf.gather(names, files), tf.gather(states, files), offsets]
        return tf.ensure_shape(tf.numpy_function(read, given, tf.string), (None,))

    return read_by_python


def states_of(dataset: Records) -> Integers:
    """Returns size in bytes and time of modification in ns of each file when it was indexed.

    int64 (files, 2); -1 where they are unknown.
    """
    if dataset.etags:  # each request names the version that it expects
        return np.full((len(dataset.files), 2), -1)
    return np.array(dataset.states or [(-1, -1, -1)] * len(dataset.files), np.int64)[:, :2]


def check_states(names: Any, states: Integers) -> Any:
    """Returns `names`, bytes (n,), if each file is still the one that was indexed."""
    for name, (size, mtime) in zip(names, states.tolist(), strict=True):
        change = find_change(os.fsdecode(name), size, mtime) if size >= 0 else None
        if change:
            raise InputError(f"{change}: index it again.")
    return names


def hold_indexes(dataset: Records) -> list[str]:
    """Copies the indexes to a folder that the process removes when it ends; returns their paths.

    DALI reads them again for each iterator: one that is gone ends the process, and one that was
    cut would lose records without an error.
    """
    held = _copy_indexes(dataset)
    if not all(map(os.path.exists, held)):  # someone emptied the folder
        _copy_indexes.cache_clear()
        held = _copy_indexes(dataset)
    return held


@functools.cache
def _copy_indexes(dataset: Records) -> list[str]:
    staging = make_process_folder(private_folder())
    held = [staging.path(f"{file}.idx") for file in range(len(dataset.files))]
    for file, path in enumerate(held):
        with open(path, "wb") as stream:
            stream.write(dataset.index_text(file))
    return held


def describe_key(key: tf.Tensor, stream: Stream) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (epoch, slot) of a key of `read_fixed_order`, int64; the slot is over all shards."""
    batch_size, shard = stream.batch_size, stream.shard
    epoch = key // _STRIDE
    number = key - epoch * _STRIDE
    step, within = number // batch_size, number % batch_size
    return epoch, (step * shard.num_shards + shard.shard_id) * batch_size + within


def draw_uniforms(stream: Stream, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws the random numbers for a key's image.

    In a fixed order it is a function of (seed, epoch, slot), in others of (seed, shard, position in
    the stream): a parallel map calls in no fixed order, so a generator with a state would not
    repeat.

    Returns:
      float32 (spec.preprocess.num_uniforms,) in [0, 1), and an int64 (2,) seed for augmentation.
    """
    spec, shard = stream.spec, stream.shard
    if spec.has_fixed_order:
        epoch, slot = describe_key(key, stream)
        seed = tf.stack([tf.constant(spec.seed, tf.int64), epoch * _STRIDE + slot])
    else:
        seed = tf.stack([tf.constant(spec.seed * shard.num_shards + shard.shard_id, tf.int64), key])
    uniforms = tf.random.stateless_uniform((spec.preprocess.num_uniforms,), seed=seed)
    return uniforms, tf.stack([seed[0], ~seed[1]])


def find_weight(stream: Stream, key: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the sample weight of a key in one pass; nothing for training."""
    if stream.spec.repeat:
        return {}
    return {"weight": weight_of(describe_key(key, stream)[1], stream.steps)}


def weight_of(slot: tf.Tensor, steps: EpochSteps) -> tf.Tensor:
    """Returns the sample weight of a slot: 0 for padding; the mean of all weights is 1.

    Keras divides the loss of each batch by all images in it, including padding; with these weights
    the result is the mean over the records.
    """
    served = steps.per_epoch * steps.batch_size * steps.num_shards
    weight = tf.constant(served / steps.num_records, tf.float32)
    return tf.where(slot < steps.num_records, weight, 0.0)
