"""The plan of an epoch: which slots a shard serves at each step, and which record fills a slot.

Pure arithmetic: the same arguments give the same order on every machine and backend. Each slot is
computed by itself, so a plan of any number of records needs no memory, and any step can be the
first.
"""

import functools
import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from dali_tf_input.errors import MAX_BATCH_SIZE, Count, InputError, Within, check, checked
from dali_tf_input.random import Integers, Purpose, hash_words, permute


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


@dataclass(frozen=True)
class Groups:
    """The classes of balanced records, or the parts of a mixture, and how often each is served.

    Attributes:
      sizes: how many records each group has, at least 1.
      shares: the relative share of each group in an epoch.
      are_parts: whether they are the parts of a mixture. Parts alternate evenly, and a part is
        served completely before it starts over in a new order, however many epochs that takes.
        Classes come in random order, and in each epoch the records of a class occur equally often,
        to within one.
    """

    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    are_parts: bool = False

    def quotas(self, total: int) -> Integers:
        """Returns how many of `total` records come from each group: int64 (groups,)."""
        return apportion_total(total, self.shares)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which record is served at which step of an epoch, by which shard.

    An epoch has a slot for each record, in the order in which they are served. With global batches
    of g images, step s serves the slots [s * g, (s + 1) * g), and shard i the i-th part of them, so
    the images of a step do not depend on the number of shards.

    Attributes:
      num_slots: how many slots an epoch has, including a remainder that does not fill a step.
      shard_batch_size: images in a shard's batch, at least 1.
      num_shards: how many shards make a step.
      keep_remainder: True serves the remainder as a last, shorter step; False drops it.
      seed: in [0, 2**31); None serves the records in the order of the files.
      block_size: how many neighboring records stay together, at least 1.
      repeats: how many neighboring slots have the same record.
      groups: classes or parts that are served in proportions of their own; None serves each record
        once.
    """

    num_slots: int
    shard_batch_size: int
    num_shards: int = 1
    keep_remainder: bool = False
    seed: int | None = None
    block_size: int = 1
    repeats: int = 1
    groups: Groups | None = None

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has, the same for every shard."""
        return self._num_full_steps + (self.keep_remainder and self._remainder > 0)

    def num_images(self, shard_id: int) -> int:
        """Returns how many images a shard serves in an epoch."""
        images = self._num_full_steps * self.shard_batch_size
        return images + (self._share_of_remainder(shard_id)[1] if self.keep_remainder else 0)

    def slots(self, shard_id: int, first: int = 0, end: int | None = None) -> Integers:
        """Returns the slots of a shard's images [first, end) of an epoch, in order: int64 (n,).

        A shorter last step is divided evenly, with at most one image more in the first shards,
        because TensorFlow's convolutions on a CPU may fail on an empty batch.
        """
        num_images = self.num_images(shard_id)
        images = np.arange(first, num_images if end is None else min(end, num_images))
        step, place = np.divmod(images, self.shard_batch_size)
        slots: Integers = (step * self.num_shards + shard_id) * self.shard_batch_size + place
        in_remainder = step >= self._num_full_steps
        start = self._share_of_remainder(shard_id)[0] - self._num_full_steps * self.shard_batch_size
        slots[in_remainder] = images[in_remainder] + start
        return slots

    def slots_of_step(self, step: int) -> Integers:
        """Returns the slots of all shards at a step of the epoch, in order."""
        size = self.shard_batch_size * self.num_shards
        end = self.num_slots if self.keep_remainder else self._num_full_steps * size
        return np.arange(step * size, min((step + 1) * size, end))

    def positions(self, epoch: int, slots: Integers) -> Integers:
        """Returns the position of the record that fills each of the slots of an epoch: int64 (n,).

        Positions count from 0 over all files in their order; with `groups`, over all groups in
        their order, see `InputSpec.grouped_records`.
        """
        if self.seed is None:
            return slots
        places = slots // self.repeats
        if self.groups:
            return self._positions_in_groups(epoch, places, self.groups)
        num_records = self.num_slots
        size = min(self.block_size, num_records)
        num_blocks = num_records // size
        in_block = places < num_blocks * size
        key = hash_words(self.seed, Purpose.ORDER, epoch)
        blocks = permute(np.where(in_block, places // size, 0), num_blocks, key)
        positions = np.where(in_block, blocks * size + places % size, places)
        if size == 1:
            return positions
        # The blocks lie on a ring of all records and begin anywhere, so their bounds differ in each
        # epoch, and so do the records that do not fill a block, which come last.
        start = hash_words(self.seed, Purpose.BLOCKS, epoch) % np.uint64(num_records)
        return (positions + int(start)) % num_records

    def _positions_in_groups(self, epoch: int, places: Integers, groups: Groups) -> Integers:
        """Returns the positions that fill places of an epoch, counted group by group."""
        total = self._num_places  # so that the counts of an epoch are exact
        quotas, sizes = groups.quotas(total), np.array(groups.sizes, np.int64)
        assert self.seed is not None
        if groups.are_parts:
            group, served = spread_evenly(places, quotas)
            served += epoch * quotas[group]
            pass_number, purpose = served // sizes[group], Purpose.PART
        else:
            order = permute(places, total, hash_words(self.seed, Purpose.ORDER, epoch))
            ends = np.cumsum(quotas)
            group = np.searchsorted(ends, order, side="right")
            served = order - (ends - quotas)[group]
            pass_number, purpose = np.full(len(places), epoch), Purpose.CLASS
        keys = hash_words(self.seed, purpose, group, pass_number)
        members = permute(served % sizes[group], sizes[group], keys)
        return (np.cumsum(sizes) - sizes)[group] + members

    def to_numbers(self, shard_id: int) -> tuple[Integers, Integers, Integers]:
        """Returns a shard's plan for the operation that computes the same: backends/native/plan.h.

        Returns:
          Its numbers, int64 (11,); the sizes and quotas of the groups, int64 (groups, 2); and the
          pairs of `pair_parts`, int64 (pairs, 4).
        """
        groups, pairs, kind = np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64), 0
        if self.groups:
            quotas = self.groups.quotas(self._num_places)
            groups = np.stack([np.array(self.groups.sizes, np.int64), quotas], 1)
            kind = 2 if self.groups.are_parts else 1
            if self.groups.are_parts:
                pairs = np.array(pair_parts(quotas), np.int64).reshape(-1, 4)
        numbers = [
            *(self.num_slots, self.shard_batch_size, self.num_shards, shard_id),
            *(self.num_images(shard_id), self._share_of_remainder(shard_id)[0]),
            *(-1 if self.seed is None else self.seed, self.block_size, self.repeats),
            *(kind, self._num_places if self.groups else 0),
        ]
        return np.array(numbers, np.int64), groups, pairs

    @property
    def _num_places(self) -> int:
        """How many records are drawn for an epoch, without those that do not fill a step."""
        images = self.steps_per_epoch * self.shard_batch_size * self.num_shards
        return images // self.repeats

    @functools.cached_property
    def _num_full_steps(self) -> int:
        return self.num_slots // (self.shard_batch_size * self.num_shards)

    @property
    def _remainder(self) -> int:
        return self.num_slots % (self.shard_batch_size * self.num_shards)

    def _share_of_remainder(self, shard_id: int) -> tuple[int, int]:
        """Returns the first slot of a shard in the last, shorter step, and how many it has."""
        each, more = divmod(self._remainder, self.num_shards)
        start = self.num_slots - self._remainder + shard_id * each + min(shard_id, more)
        return start, each + (shard_id < more)


def spread_evenly(places: Integers, quotas: Integers) -> tuple[Integers, Integers]:
    """Divides the places of an epoch among parts, so that each stretch has all parts' shares.

    A part and the others alternate like the pixels of a straight line: with quotas p and q, the
    first t places hold round(t * p / (p + q)) of the part. Parts are paired as in a Huffman tree,
    which keeps the number of roundings small. In a stretch of the epoch, a part differs from its
    exact share by less than one record with two parts, by less than three with any number.

    Args:
      places: int64 (n,), in [0, sum of `quotas`).
      quotas: int64 (parts,).

    Returns:
      The part of each place, and how many places of that part come before it: int64 (n,) each.
    """
    pairs = pair_parts(quotas)
    root = len(quotas) + len(pairs) - 1 if pairs else int(np.flatnonzero(quotas)[0])
    part, before = np.full(len(places), root), places.copy()
    for number in reversed(range(len(pairs))):  # parents were made after their children
        (first_quota, first_node, second_quota, second_node) = pairs[number]
        node = len(quotas) + number
        here = np.flatnonzero(part == node)
        quota, here_before = first_quota + second_quota, before[here]
        counts, next_counts = (
            (place * first_quota + quota // 2) // quota for place in (here_before, here_before + 1)
        )
        is_first = next_counts > counts
        part[here] = np.where(is_first, first_node, second_node)
        before[here] = np.where(is_first, counts, here_before - counts)
    return part, before


def pair_parts(quotas: Integers) -> list[tuple[int, int, int, int]]:
    """Pairs parts, and pairs of them, as in a Huffman tree: always the two with the lowest quotas.

    Returns:
      For each pair the quota and the number of its first, then of its second. Pair i has the number
      len(quotas) + i; the last one holds all parts.
    """
    nodes = [(int(quota), number) for number, quota in enumerate(quotas) if quota]
    heapq.heapify(nodes)
    pairs = []
    for node in range(len(quotas), len(quotas) + len(nodes) - 1):
        first, second = heapq.heappop(nodes), heapq.heappop(nodes)
        pairs.append((*first, *second))
        heapq.heappush(nodes, (first[0] + second[0], node))
    return pairs


def apportion_total(total: int, shares: Sequence[float]) -> Integers:
    """Splits `total` into integers proportional to `shares`, by the largest-remainder method."""
    exact = total * np.array(shares) / np.sum(shares)
    parts: Integers = np.floor(exact).astype(np.int64)
    largest = np.argsort(parts - exact, kind="stable")[: total - int(parts.sum())]
    parts[largest] += 1
    return parts


class StepCursor:
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


def check_step(batch_size: int, *, num_shards: int, num_records: int) -> None:
    """Raises InputError if there are not enough records for a step of all shards."""
    part = f" in each of {num_shards} shards" if num_shards > 1 else ""
    rule = f"at most {num_records // num_shards:,}{part}, as there are {num_records:,} records"
    check(batch_size * num_shards <= num_records, "batch_size", rule, batch_size)


@checked
def replica_batch_size(
    batch_size: Annotated[int, Within(1)], *, num_replicas: int, num_records: int | None
) -> int:
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
