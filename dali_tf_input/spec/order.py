"""The order of the records in an epoch, and the records of each shard at each step.

Pure arithmetic: the same arguments give the same order on every machine and backend.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dali_tf_input.errors import MAX_BATCH_SIZE, Count, InputError, check, checked
from dali_tf_input.records.index_file import Integers
from dali_tf_input.spec.balance import Shares, draw_balanced, draw_mixed, share_out


@checked
@dataclass(frozen=True)
class Shard:
    """The part of the records that one pipeline reads.

    Shard i of n holds the records [N * i // n, N * (i + 1) // n) of all N, counted over the files
    in their order. The shards are disjoint, cover all records, and differ in size by at most one.
    Source: DALI's reader divides records in the same way (``start_index`` in its ``loader.h``).

    Examples:
      >>> Shard(0, num_shards=4).records(1000)
      range(0, 250)

    Attributes:
      shard_id: which shard this pipeline reads, in [0, num_shards).
      num_shards: into how many shards the records are divided, at least 1.
    """

    shard_id: int = 0
    num_shards: Count = 1

    def __post_init__(self) -> None:
        holds = 0 <= self.shard_id < self.num_shards
        check(holds, "shard_id", f"in [0, {self.num_shards})", self.shard_id)

    def records(self, num_records: int) -> range:
        """Returns which of `num_records` records, counted from 0, belong to this shard."""
        first, end = (
            num_records * shard // self.num_shards for shard in (self.shard_id, self.shard_id + 1)
        )
        return range(first, end)


def check_step(batch_size: int, *, num_shards: int, num_records: int) -> None:
    """Raises InputError if there are not enough records for a step of all shards."""
    part = f" in each of {num_shards} shards" if num_shards > 1 else ""
    rule = f"at most {num_records // num_shards:,}{part}, as there are {num_records:,} records"
    check(batch_size * num_shards <= num_records, "batch_size", rule, batch_size)


@checked
def replica_batch_size(batch_size: Count, *, num_replicas: int, num_records: int | None) -> int:
    """Returns the batch size of each replica; `num_records` None sets no limit.

    Raises:
      InputError: `batch_size` is below 1, larger than the data, above 65,536 on each replica, or
        not a multiple of `num_replicas`.
    """
    if batch_size % num_replicas:
        below = batch_size // num_replicas * num_replicas
        nearest = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise InputError(
            f"`batch_size` must be a multiple of the {num_replicas} replicas, got "
            f"{batch_size}: use {nearest}."
        )
    holds = num_records is None or batch_size <= num_records
    rule = f"at most the number of records, {num_records}"
    check(holds, "batch_size", rule, batch_size)
    per_replica = batch_size // num_replicas
    rule = f"at most {MAX_BATCH_SIZE:,} on each replica"
    check(per_replica <= MAX_BATCH_SIZE, "batch_size", rule, batch_size)
    return per_replica


class Position:
    """The step at which the next iterator of a training dataset starts.

    Attributes:
      step: the number of training steps before it, at least 0.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._lock = threading.Lock()

    def next_epoch(self, steps_per_epoch: int) -> int:
        """Returns the first step of a new iterator; the one after it starts at the next epoch."""
        with self._lock:
            start = self.step
            self.step = (start // steps_per_epoch + 1) * steps_per_epoch
        return start


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """The steps of an epoch: global batches of `num_shards` batches each.

    Attributes:
      num_records: records of the dataset, at least 1.
      batch_size: images in a shard's batch, at least 1.
      num_shards: how many shards make a step.
      padded: True serves the remainder as a last, shorter step; False drops it.
    """

    num_records: int
    batch_size: int
    num_shards: int
    padded: bool

    @property
    def per_epoch(self) -> int:
        """How many steps an epoch has, the same for every shard."""
        batch_size = self.batch_size * self.num_shards
        whole, remainder = divmod(self.num_records, batch_size)
        return whole + (self.padded and remainder > 0)

    def slots(self, shard_id: int, *, start_step: int = 0) -> Integers:
        """Returns the slots of the epoch's order that a shard serves, in order, from a step on.

        With global batches of g images, step s serves the slots [s * g, (s + 1) * g), and shard i
        serves the i-th part of them, so the images of a step do not depend on the number of shards.
        A shorter step is divided evenly, with at most one image more in the first parts, because
        TensorFlow's convolutions on a CPU may fail on an empty batch.
        """
        num_full_steps = self.num_records // (self.batch_size * self.num_shards)
        steps = np.arange(start_step, num_full_steps, dtype=np.int64)[:, None]
        first = (steps * self.num_shards + shard_id) * self.batch_size
        slots = (first + np.arange(self.batch_size, dtype=np.int64)).ravel()
        if not self.padded or start_step > num_full_steps:
            return slots
        done = num_full_steps * self.batch_size * self.num_shards
        remainder = np.arange(done, self.num_records, dtype=np.int64)
        return np.concatenate([slots, np.array_split(remainder, self.num_shards)[shard_id]])


def shuffle(
    num_records: int,
    *,
    seed: int,
    epoch: int,
    shuffle_block_size: int = 1,
    first_of_files: Integers | None = None,
) -> Integers:
    """Returns the records in the order of an epoch, int64 (num_records,), each once.

    It is a function of the arguments alone. Blocks of `shuffle_block_size` neighbors in a file stay
    together; their bounds differ in each epoch, and blocks at the ends of a file may be smaller.
    Every order of the blocks is equally likely; with blocks of 1, every order of the records.

    Args:
      num_records: how many there are; record r is the r-th over all files in their order.
      seed: in [0, 2**31).
      epoch: from 0.
      shuffle_block_size: records in a block, at least 1.
      first_of_files: the first record of each file, ascending; needed for blocks of more than 1.
    """
    # Unlike Generator, raw Philox output is stable across NumPy versions.
    raw = np.random.Philox(key=[seed, epoch]).random_raw
    if shuffle_block_size == 1 or first_of_files is None:
        order: Integers = np.argsort(raw(num_records), kind="stable")
        return order
    phase = int(raw(1)[0]) % shuffle_block_size  # NumPy 1 would divide floats
    lengths = np.diff(np.append(first_of_files, num_records))
    in_file = np.arange(num_records, dtype=np.int64) - np.repeat(first_of_files, lengths)
    starts = (in_file == 0) | ((in_file - phase) % shuffle_block_size == 0)
    blocks = np.cumsum(starts) - 1
    block_order: Integers = np.argsort(raw(int(blocks[-1]) + 1)[blocks], kind="stable")
    return block_order


def list_records(
    records_per_file: Sequence[int] | Integers,
    *,
    steps: EpochSteps,
    shard: Shard,
    seed: int | None,
    shuffle_block_size: int = 1,
    epoch: int = 0,
    start_step: int = 0,
    repeats: int = 1,
    classes: Integers | None = None,
    shares: Shares | None = None,
    mixed: bool = False,
) -> Integers:
    """Returns the records that a shard serves in an epoch, in order, from a step on.

    Peak memory per record of the dataset is about 75 bytes for a single shard and 20 for one of 8;
    `shares` take 40 more.

    Args:
      records_per_file: how many records are in each file.
      steps: the steps of an epoch.
      shard: whose records.
      seed: see `shuffle`; None for the order of the files.
      shuffle_block_size: see `shuffle`.
      epoch: see `shuffle`.
      start_step: the first step, in the epoch.
      repeats: how many neighboring slots have the same record.
      classes: the class of each record; with `shares`.
      shares: the relative frequency of each class; None serves each record once.
      mixed: whether the classes are the parts of a mixture, see `draw_mixed`.

    Returns:
      int64 numbers of records, counted over all files. With `seed` None they are in the order of
      the files, else in that of `shuffle`.
    """
    slots = steps.slots(shard.shard_id, start_step=start_step)
    if seed is None:
        return slots
    first_of_files = np.cumsum([0, *records_per_file[:-1]])
    if shares is None or classes is None:
        order = shuffle(
            steps.num_records,
            seed=seed,
            epoch=epoch,
            shuffle_block_size=shuffle_block_size,
            first_of_files=first_of_files,
        )
    else:  # without the remainder, so that the counts of an epoch are exact
        total = steps.per_epoch * steps.batch_size * steps.num_shards // repeats
        quotas = share_out(total, shares)
        if mixed:
            order = draw_mixed(classes, quotas, seed=seed, epoch=epoch)
        else:
            order = draw_balanced(classes, quotas, seed=seed, epoch=epoch)
            order = order[shuffle(total, seed=seed, epoch=epoch)]
    served: Integers = order[slots // repeats]
    return served
