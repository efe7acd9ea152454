"""What one pipeline serves, and the key that names each of its images."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import tensorflow as tf

from dali_tf_input.random import Purpose, seed_of
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.plan import Plan, Shard, StepCursor

EPOCH_STRIDE = 1 << 40  # between the keys of two epochs
MAX_EPOCHS = 1 << 22

# Reads the epoch of the given number, starting at the given step.
ReadEpoch = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one pipeline serves.

    Attributes:
      spec: the batches to produce.
      shard_batch_size: images in each batch of this shard.
      shard: which records are read.
      cursor: where the next iterator starts.
      endless: whether an iterator goes on with the next epoch where one ends.
    """

    spec: InputSpec
    shard_batch_size: int
    shard: Shard = Shard()
    cursor: StepCursor = field(default_factory=StepCursor)
    endless: bool = False

    @property
    def num_images(self) -> int:
        """How many images an epoch of this shard has."""
        return self.plan.num_images(self.shard.shard_id)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of an epoch."""
        return self.spec.plan(self.shard_batch_size, num_shards=self.shard.num_shards)


def index_in_batch(stream: Stream, key: tf.Tensor) -> tf.Tensor:
    """Returns the index of a key's image in its batch, from 0: see `Plan`."""
    return key % EPOCH_STRIDE % stream.shard_batch_size


def seeds_of(stream: Stream, purpose: Purpose, key: tf.Tensor, view: int = 0) -> tf.Tensor:
    """Returns the seed of a key's random numbers for a purpose, int64 (2,)."""
    return tf.stack([tf.constant(seed_of(stream.spec.seed, purpose, view), tf.int64), key])


def draw_uniforms(stream: Stream, key: tf.Tensor, view: int = 0) -> tf.Tensor:
    """Draws the random numbers for a key's image: float32 (num_uniforms,) in [0, 1)."""
    preprocess = [*stream.spec.image_views.values()][view]
    # The numbers of `tf.random.stateless_uniform`, without the operations that scale them.
    return tf.raw_ops.StatelessRandomUniform(
        shape=[preprocess.num_uniforms], seed=seeds_of(stream, Purpose.CROP, key, view)
    )


def with_cardinality(dataset: tf.data.Dataset, stream: Stream) -> tf.data.Dataset:
    """Sets the cardinality of `dataset`, unless its first epoch is partial."""
    if stream.endless:
        count = int(tf.data.INFINITE_CARDINALITY)
    elif stream.cursor.step % stream.plan.steps_per_epoch:  # the first epoch is a part of one
        return dataset
    else:
        count = -(-stream.num_images // stream.shard_batch_size)
    return dataset.apply(tf.data.experimental.assert_cardinality(count))
