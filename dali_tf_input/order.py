"""Which record stands where in an epoch, and which of them a shard serves at each step: arithmetic alone, the same everywhere."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_tf_input.sharding import Shard

Integers = npt.NDArray[np.int64]

_LONGEST_STRETCH = 16  # records: what a reader holds ready of each


@dataclass
class Position:
    """Where training stands, shared by the datasets that read it and whoever counts the steps.

    Every iterator made of a dataset starts here. It is read between `iter` and the first batch: set it before `iter`.

    Attributes:
      step: steps of the global batch done since training began, at least 0.
    """

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of an epoch: global batches of `num_shards` batches each.

    Attributes:
      num_records: records of the dataset, at least 1.
      batch_size: images in a shard's batch, at least 1.
      num_shards: how many shards make a step.
      padded: whether the last step holds the remainder and padding, or the remainder is left out.
    """

    num_records: int
    batch_size: int
    num_shards: int
    padded: bool

    @property
    def per_epoch(self) -> int:
        """How many steps an epoch has, the same for every shard."""
        global_batch_size = self.batch_size * self.num_shards
        return -(-self.num_records // global_batch_size) if self.padded else self.num_records // global_batch_size

    def places(self, shard_id: int, *, start_step: int = 0) -> Integers:
        """Returns the places in the epoch's order that a shard serves from a step on, in turn.

        Step s serves the places [s * g, (s + 1) * g), where g is the global batch size; shard i serves the i-th part of them. So
        what a step serves does not depend on into how many shards it is divided. Places from `num_records` on are padding.
        """
        steps = np.arange(start_step, self.per_epoch, dtype=np.int64)[:, None]
        return ((steps * self.num_shards + shard_id) * self.batch_size + np.arange(self.batch_size, dtype=np.int64)).ravel()


def shuffle(
    num_records: int, *, seed: int, epoch: int, fragment_size: int = 1, first_of_files: Integers | None = None
) -> Integers:
    """Returns the records in the order of an epoch, a function of the arguments alone.

    Records stay together in fragments of `fragment_size` neighbours of one file, whose bounds are other ones each epoch; the
    order of the fragments is random, each equally likely. With fragments of 1 that is so for the records.

    Args:
      num_records: how many there are; record r is the r-th of all files in turn.
      seed: in [0, 2**31).
      epoch: from 0.
      fragment_size: records in a fragment, at least 1; those at the ends of a file have fewer.
      first_of_files: the first record of each file, ascending; needed for fragments of more than 1.

    Returns:
      int64 (num_records,), each record once.
    """
    # Philox's raw output is the same in every version of NumPy, which is not promised of what Generator makes of it.
    raw = np.random.Philox(key=[seed, epoch]).random_raw
    if fragment_size == 1 or first_of_files is None:
        order: Integers = np.argsort(raw(num_records), kind="stable")
        return order
    phase = int(raw(1)[0] % fragment_size)
    lengths = np.diff(np.append(first_of_files, num_records))
    places = np.arange(num_records, dtype=np.int64) - np.repeat(first_of_files, lengths)  # in the file
    starts = (places == 0) | ((places - phase) % fragment_size == 0)
    fragments = np.cumsum(starts) - 1
    fragments_order: Integers = np.argsort(raw(int(fragments[-1]) + 1)[fragments], kind="stable")
    return fragments_order


def find_runs(records: Integers, *, files: npt.NDArray[np.int32], offsets: Integers, ends: Integers, longest: int) -> Integers:
    """Returns where stretches of `records` start that lie one after the other in a file: int64 positions in `records`, ascending.

    Args:
      records: numbers of records.
      files: the file of each record there is.
      offsets: the byte where each starts.
      ends: the byte behind each.
      longest: most records in a stretch.
    """
    before, after = records[:-1], records[1:]
    goes_on = (after == before + 1) & (files[after] == files[before]) & (offsets[after] == ends[before])
    starts = np.concatenate([[0], np.flatnonzero(~goes_on) + 1]).astype(np.int64)
    lengths = np.diff(np.append(starts, len(records)))
    pieces = -(-lengths // longest)
    bounds: Integers = np.repeat(starts, pieces) + longest * (
        np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    )
    return bounds


class Places(NamedTuple):
    """Where each record of a dataset is; 20 bytes a record.

    Attributes:
      files: the number of its file, ascending.
      offsets: the byte in the file where it starts.
      sizes: its bytes.
    """

    files: npt.NDArray[np.int32]
    offsets: Integers
    sizes: Integers

    @classmethod
    def of(cls, index: list[Integers]) -> "Places":
        """Returns the places of the records of an index: (offset, size) of each record of each file, int64 (records, 2)."""
        files = np.repeat(np.arange(len(index), dtype=np.int32), [len(records) for records in index])
        places = np.concatenate(index)
        return cls(files, places[:, 0].copy(), places[:, 1].copy())


def longest_stretch(fragment_size: int) -> int:
    """Returns how many records a stretch that a `Plan` reads has at most."""
    return max(_LONGEST_STRETCH, fragment_size)


class Plan:
    """What one shard reads in each epoch: stretches of records, as (file, byte offset, number of records).

    Memory, beside that of the places: while an epoch is planned about 75 bytes a record for a single shard, 20 for one of 8.
    """

    def __init__(
        self,
        places: Places,
        *,
        steps: Steps,
        shard: Shard,
        seed: int | None,
        fragment_size: int = 1,
    ) -> None:
        """Makes a plan.

        Args:
          places: where the records are.
          steps: the steps of an epoch.
          shard: whose records are read.
          seed: for `shuffle`; None leaves the records in the order of the files.
          fragment_size: for `shuffle`.
        """
        self._files, self._offsets, self._sizes = places
        self._steps, self._shard, self._seed, self._fragment_size = steps, shard, seed, fragment_size

    def records(self, epoch: int, start_step: int = 0) -> Integers:
        """Returns the numbers of the records that the shard serves in an epoch, in turn; padding repeats the last record."""
        total = len(self._files)
        places = np.minimum(self._steps.places(self._shard.shard_id, start_step=start_step), total - 1)
        if self._seed is None:
            return places
        first_of_files = np.flatnonzero(np.diff(self._files, prepend=-1)) if self._fragment_size > 1 else None
        order = shuffle(total, seed=self._seed, epoch=epoch, fragment_size=self._fragment_size, first_of_files=first_of_files)
        served: Integers = order[places]
        return served

    def stretches(self, epoch: int, start_step: int) -> tuple[npt.NDArray[np.int32], Integers, Integers]:
        """Returns what is read: file numbers, byte offsets, numbers of records, one of each for a stretch."""
        records = self.records(int(epoch), int(start_step))
        if not len(records):
            return np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts = find_runs(
            records,
            files=self._files,
            offsets=self._offsets,
            ends=self._offsets + self._sizes,
            longest=longest_stretch(self._fragment_size),
        )
        first = records[starts]
        return self._files[first], self._offsets[first], np.diff(np.append(starts, len(records)))
