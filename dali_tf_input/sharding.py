"""Which records a pipeline reads, and how many steps an epoch has: arithmetic only."""

from dataclasses import dataclass

from dali_tf_input.errors import BatchSize, Count, InputError, check, check_fields, checked


@dataclass(frozen=True)
class Shard:
    """The part of the records that one pipeline reads.

    Shard i of n holds the records [N * i // n, N * (i + 1) // n) of all N, counted over the files
    in their order. The shards are disjoint, together they are all records, and their sizes differ
    by at most one. Source: DALI's reader divides in the same way (``start_index`` in its
    ``loader.h``).

    Attributes:
      shard_id: which shard this pipeline reads, in [0, num_shards).
      num_shards: into how many shards the records are divided, at least 1.
    """

    shard_id: int = 0
    num_shards: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        holds = 0 <= self.shard_id < self.num_shards
        check(holds, "shard_id", f"in [0, {self.num_shards})", self.shard_id)

    def records(self, num_records: int) -> range:
        """Returns the numbers, among `num_records` records, of those in this shard."""
        first, end = (
            num_records * one // self.num_shards for one in (self.shard_id, self.shard_id + 1)
        )
        return range(first, end)


@checked
def check_batch(batch_size: BatchSize, *, shard: Shard, num_records: int) -> None:
    """Checks that a shard can fill a batch.

    Raises:
      InputError: `batch_size` is below 1, the shard is empty, or it holds fewer records than a
        batch.
    """
    shard_records = len(shard.records(num_records))
    if shard_records == 0:
        raise InputError(
            f"Shard {shard.shard_id} of {shard.num_shards} is empty: there are only {num_records} "
            f"records. Use at most {num_records} shards (replicas)."
        )
    part = f"{shard_records} records of shard {shard.shard_id} of {shard.num_shards}"
    rule = f"at most the {part} ({num_records} records in all)"
    check(batch_size <= shard_records, "batch_size", rule, batch_size)


@checked
def replica_batch_size(
    global_batch_size: Count, *, num_replicas: int, num_records: int | None
) -> int:
    """Returns the batch size of each replica; `num_records` None is for passes that are padded.

    Raises:
      InputError: `global_batch_size` is below 1, larger than the data, or not a multiple of
        `num_replicas`.
    """
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        nearest = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise InputError(
            f"`global_batch_size` must be a multiple of the {num_replicas} replicas, got "
            f"{global_batch_size}: use {nearest}."
        )
    holds = num_records is None or global_batch_size <= num_records
    rule = f"at most the number of records, {num_records}"
    check(holds, "global_batch_size", rule, global_batch_size)
    return global_batch_size // num_replicas


def steps_per_epoch(num_records: int, global_batch_size: int) -> int:
    """Returns how many whole global batches `num_records` records fill.

    The remainder, fewer than `global_batch_size` records, is left out of the epoch. With order
    "global" it is other records in each epoch; with the other orders it opens the next epoch.
    """
    return num_records // global_batch_size
