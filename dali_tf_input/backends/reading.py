"""Reads records in the order of a plan, with tf.data for both backends."""

import atexit
import contextlib
import functools
import gc
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.index.manifest import find_change
from dali_tf_input.options import TfDataOptions
from dali_tf_input.order import EpochSteps, Extents, Integers, Plan, StartStep, longest_run
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.staging import Staging

_STRIDE = 1 << 40  # between the keys of two epochs
MAX_EPOCHS = 1 << 22


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
            num_records=self.spec.dataset.num_records,
            batch_size=self.batch_size,
            num_shards=self.shard.num_shards,
            padded=not self.spec.repeat,
        )


def read_fixed_order(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Reads the records of a stream of fixed order, as its `order.Plan` says.

    Args:
      stream: what is served.
      options: `num_parallel_reads` and `read_buffer_bytes` are used.

    Returns:
      A dataset of (key, record): key int64, from which `describe_key` computes epoch and slot;
      record a serialized Example. Infinite if `spec.repeat`, else one pass, padded to whole steps
      by repeating the last record.
    """
    spec, batch_size, dataset = stream.spec, stream.batch_size, stream.spec.dataset
    steps, start_step = stream.steps, stream.start_step
    extents = Extents.of([dataset.index(file) for file in range(len(dataset.files))])
    files = tf.constant(dataset.files)
    sizes, mtimes = states_of(dataset)
    per_epoch = steps.per_epoch
    # TensorFlow never frees a function given to `numpy_function`, nor what the function holds. So
    # the extents are tensors, which the dataset holds and which are freed with it.
    with tf.device("CPU:0"):
        held = [tf.constant(part) for part in (files, sizes, mtimes, *extents)]
    plan = partial(
        Plan,
        steps=steps,
        shard=stream.shard,
        seed=spec.seed if spec.order == "global" else None,
        shuffle_block_size=spec.shuffle_block_size,
    )

    def find_epoch_runs(epoch: int, step: int, *held: Any) -> Any:
        check_states(*held[:3])
        return plan(Extents(*held[3:])).runs(epoch, step)

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        runs = tf.numpy_function(
            find_epoch_runs, [epoch, step, *held], (tf.int32, tf.int64, tf.int64)
        )
        for part in runs:
            part.set_shape((None,))
        records = tf.data.Dataset.from_tensor_slices(tuple(runs)).interleave(
            lambda file, offset, count: read_run(
                files[file], offset, count, options.read_buffer_bytes
            ),
            cycle_length=options.num_parallel_reads,
            # Longer than any run: each is read to its end while the next ones are opened ahead.
            block_length=longest_run(spec.shuffle_block_size) + 1,
            num_parallel_calls=options.num_parallel_reads,
            deterministic=True,
        )
        first = epoch * _STRIDE
        keys = tf.data.Dataset.range(first + step * batch_size, first + per_epoch * batch_size)
        return tf.data.Dataset.zip(keys, records)

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


def states_of(dataset: DatasetSpec) -> tuple[Integers, Integers]:
    """Returns size and time of modification of each file when it was indexed; -1 if unknown."""
    states = np.array(dataset.states or [(-1, -1, -1)] * len(dataset.files), np.int64)
    return states[:, 0], states[:, 1]


def check_states(files: Any, sizes: Integers, mtimes: Integers) -> Any:
    """Returns `files`, bytes (n,), if each is still the one that was indexed."""
    for file, size, mtime in zip(files, sizes.tolist(), mtimes.tolist(), strict=True):
        change = find_change(os.fsdecode(file), size, mtime) if size >= 0 else None
        if change:
            raise InputError(f"{change}: index it again.")
    return files


def hold_indexes(dataset: DatasetSpec) -> list[str]:
    """Copies the indexes to a folder that the process removes when it ends; returns their paths.

    DALI reads them anew for each iterator: one that went would end the process, and one that was
    cut would lose records without an error.
    """
    held = _copy_indexes(dataset)
    if not all(map(os.path.exists, held)):  # someone emptied the folder
        _copy_indexes.cache_clear()
        held = _copy_indexes(dataset)
    return held


@functools.cache
def _copy_indexes(dataset: DatasetSpec) -> list[str]:
    folder = os.path.join(tempfile.gettempdir(), f"dali_tf_input-{os.getuid()}")
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(Staging(folder, "Set TMPDIR to another folder."))
        held = [staging.path(f"{file}.idx") for file in range(len(dataset.files))]
        for file, path in enumerate(held):
            with open(path, "wb") as stream:
                stream.write(dataset.index_text(file))
        atexit.register(_close, stack.pop_all(), os.getpid())
    return held


def _close(stack: contextlib.ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        stack.close()


def parse_record(record: tf.Tensor, dataset: DatasetSpec) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the encoded image and the label as stored of a serialized Example, as scalars."""
    features = {
        dataset.image_key: tf.io.FixedLenFeature((), tf.string),
        dataset.label_key: tf.io.FixedLenFeature((), tf.int64),
    }
    parsed = tf.io.parse_single_example(record, features)
    return parsed[dataset.image_key], parsed[dataset.label_key]


def describe_key(key: tf.Tensor, stream: Stream) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (epoch, slot) of a key of `read_fixed_order`, int64; the slot is over all shards."""
    batch_size, shard = stream.batch_size, stream.shard
    epoch = key // _STRIDE
    number = key - epoch * _STRIDE
    step, within = number // batch_size, number % batch_size
    return epoch, (step * shard.num_shards + shard.shard_id) * batch_size + within


def draw_uniforms(
    spec: InputSpec, epoch: tf.Tensor, slot: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what is random about an image, a function of (seed, epoch, slot) alone.

    Returns:
      float32 (spec.preprocess.num_uniforms,) in [0, 1), and an int64 (2,) seed for augmentation.
    """
    seed = tf.stack([tf.constant(spec.seed, tf.int64), epoch * _STRIDE + slot])
    uniforms = tf.random.stateless_uniform((spec.preprocess.num_uniforms,), seed=seed)
    return uniforms, tf.stack([seed[0], ~seed[1]])


def weight_of(slot: tf.Tensor, steps: EpochSteps) -> tf.Tensor:
    """Returns the sample weight of a slot: 0 for padding; the mean of all weights is 1.

    Keras divides the loss of each batch by all images in it, including padding; with these weights
    the result is the mean over the records.
    """
    served = steps.per_epoch * steps.batch_size * steps.num_shards
    weight = tf.constant(served / steps.num_records, tf.float32)
    return tf.where(slot < steps.num_records, weight, 0.0)


@tf.autograph.experimental.do_not_convert
def read_run(
    file: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, read_buffer_bytes: int
) -> tf.data.Dataset:
    """Reads `count` records of a file from a byte offset on."""
    # A buffer is filled even for one record. An eighth holds most images of ImageNet's size; the
    # others take two reads.
    buffer = tf.where(count < 8, max(1, read_buffer_bytes // 8), read_buffer_bytes)
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file],
        compression_type="",
        buffer_size=tf.cast(buffer, tf.int64),
        byte_offsets=[offset],
    )
    records = tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)
    # In a file that was cut, TensorFlow is at the end without an error: later records would follow.
    return records.apply(tf.data.experimental.assert_cardinality(tf.cast(count, tf.int64)))
