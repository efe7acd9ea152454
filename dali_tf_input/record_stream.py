"""Reads the records in exactly the order that a plan says, by tf.data for both backends: global order, and single passes."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.options import TfDataOptions
from dali_tf_input.order import Integers, Places, Plan, Position, Steps, longest_stretch
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.tfrecord import InputError

_STRIDE = 1 << 40  # between the keys of two epochs
MAX_EPOCHS = 1 << 22


def steps_of(spec: InputSpec, *, batch_size: int, num_shards: int) -> Steps:
    """Returns the steps of an epoch of `spec`."""
    return Steps(num_records=spec.dataset.num_records, batch_size=batch_size, num_shards=num_shards, padded=not spec.repeat)


def read_planned(
    spec: InputSpec, options: TfDataOptions, *, batch_size: int, shard: Shard, position: Position
) -> tf.data.Dataset:
    """Reads the records of a shard as its `order.Plan` says.

    Args:
      spec: its `order` is "global", or its `repeat` False.
      options: `num_parallel_reads` and `read_buffer_bytes` count here.
      batch_size: images in each batch of the shard.
      shard: which records are read.
      position: where each iterator starts.

    Returns:
      A dataset of (key, record): key int64, by which `describe_key` tells epoch and place; record a serialized Example. Without
      end if `spec.repeat`, else one pass, padded by repetitions of the last record to whole steps.
    """
    dataset = spec.dataset
    steps = steps_of(spec, batch_size=batch_size, num_shards=shard.num_shards)
    places = Places.of(
        [
            _read_index(index_file, num_records)
            for index_file, num_records in zip(dataset.index_files, dataset.records_per_file, strict=True)
        ]
    )
    files = tf.constant(dataset.files)
    per_epoch = steps.per_epoch
    # TensorFlow never forgets a function that it was given for `numpy_function`, nor what the function holds: so the places are
    # tensors, which the dataset holds and which go with it.
    with tf.device("CPU:0"):
        held = [tf.constant(part) for part in places]
    plan = partial(
        Plan,
        steps=steps,
        shard=shard,
        seed=spec.seed if spec.order == "global" else None,
        fragment_size=spec.fragment_size,
    )

    def find_stretches(epoch: int, start_step: int, *parts: Any) -> Any:
        return plan(Places(*parts)).stretches(epoch, start_step)

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, start_step: tf.Tensor) -> tf.data.Dataset:
        stretches = tf.numpy_function(find_stretches, [epoch, start_step, *held], (tf.int32, tf.int64, tf.int64))
        for part in stretches:
            part.set_shape((None,))
        numbers, offsets, counts = stretches
        records = tf.data.Dataset.from_tensor_slices((numbers, offsets, counts)).interleave(
            lambda number, offset, count: read_stretch(files[number], offset, count, options.read_buffer_bytes),
            cycle_length=options.num_parallel_reads,
            # Longer than any stretch: each is read to its end before the next one's turn, while those are opened ahead.
            block_length=longest_stretch(spec.fragment_size) + 1,
            num_parallel_calls=options.num_parallel_reads,
            deterministic=True,
        )
        first = epoch * _STRIDE
        keys = tf.data.Dataset.range(first + start_step * batch_size, first + per_epoch * batch_size)
        return tf.data.Dataset.zip(keys, records)

    if not spec.repeat:
        return tf.data.Dataset.from_tensors((np.int64(0), np.int64(0))).flat_map(read_epoch)

    @tf.autograph.experimental.do_not_convert
    def list_epochs(_: tf.Tensor) -> tf.data.Dataset:
        start = tf.numpy_function(lambda: np.int64(position.step), [], tf.int64)  # read with an iterator's first batch
        start.set_shape(())
        first_epoch = start // per_epoch
        return tf.data.Dataset.range(first_epoch, MAX_EPOCHS).map(
            lambda epoch: (epoch, tf.where(epoch == first_epoch, start % per_epoch, 0))
        )

    return tf.data.Dataset.from_tensors(0).flat_map(list_epochs).flat_map(read_epoch)


def _read_index(index_file: str, num_records: int) -> Integers:
    """Returns (offset, size) of each record in an index, int64 (records, 2); InputError if it changed since it was checked."""
    try:
        with open(index_file, "rb") as stream:
            places = np.array(stream.read().split(), dtype=np.int64).reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise InputError(f"{index_file} changed since `DatasetSpec.from_files` read it: {error}. Make the spec again.") from error
    if len(places) != num_records:
        raise InputError(
            f"{index_file} changed since `DatasetSpec.from_files` read it: then {num_records} records, now {len(places)}. Make "
            "the spec again."
        )
    return places


def parse_record(record: tf.Tensor, dataset: DatasetSpec) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the encoded image of a serialized Example, a scalar string, and its label as stored, a scalar int64."""
    features = {
        dataset.image_key: tf.io.FixedLenFeature((), tf.string),
        dataset.label_key: tf.io.FixedLenFeature((), tf.int64),
    }
    parsed = tf.io.parse_single_example(record, features)
    return parsed[dataset.image_key], parsed[dataset.label_key]


def describe_key(key: tf.Tensor, steps: Steps, shard: Shard) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (epoch, place) of a key that `read_planned` made: int64 scalars; the place is that in the order of all records."""
    epoch = key // _STRIDE
    number = key - epoch * _STRIDE
    step, within = number // steps.batch_size, number % steps.batch_size
    return epoch, (step * shard.num_shards + shard.shard_id) * steps.batch_size + within


def random_numbers(spec: InputSpec, epoch: tf.Tensor, place: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what is random of an image, a function of (seed, epoch, place) alone: numbers, and a seed for augmentation.

    Returns:
      float32 (spec.preprocess.num_random,) in [0, 1), and int64 (2,).
    """
    seed = tf.stack([tf.constant(spec.seed, tf.int64), epoch * _STRIDE + place])
    return tf.random.stateless_uniform((spec.preprocess.num_random,), seed=seed), tf.stack([seed[0], ~seed[1]])


def weight_of(place: tf.Tensor, steps: Steps) -> tf.Tensor:
    """Returns the sample weight of a place: 0 for padding, else such that all weights have a mean of 1 over the pass.

    Keras divides the loss of each batch by all images in it, padding too; with these weights that comes out as the mean over the
    records.
    """
    served = steps.per_epoch * steps.batch_size * steps.num_shards
    return tf.where(place < steps.num_records, tf.constant(served / steps.num_records, tf.float32), 0.0)


@tf.autograph.experimental.do_not_convert
def read_stretch(file: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, read_buffer_bytes: int) -> tf.data.Dataset:
    """Reads `count` records of a file from a byte offset on, which `tf.data.TFRecordDataset` does not offer."""
    # A buffer is filled whole, for a single record too: an eighth holds most images of ImageNet's size, others take two reads.
    buffer = tf.where(count < 8, max(1, read_buffer_bytes // 8), read_buffer_bytes)
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file], compression_type="", buffer_size=tf.cast(buffer, tf.int64), byte_offsets=[offset]
    )
    records = tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)
    # A file that was cut since is at its end for TensorFlow, and other records would take the place of those that are missing.
    return records.apply(tf.data.experimental.assert_cardinality(tf.cast(count, tf.int64)))
