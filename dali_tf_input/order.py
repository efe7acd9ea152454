"""Which record comes when: the order of an epoch, and what each shard serves at each step.

Arithmetic only: the same arguments give the same order on every machine and backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from dali_tf_input.errors import InputError
from dali_tf_input.sharding import Shard

Integers = npt.NDArray[np.int64]

_FRAME_SIZE = 16  # bytes of a record without data
_CHANGED = "{} changed since `DatasetSpec.from_files` read it: {}. Make the spec again."


@dataclass
class StartStep:
    """The step at which new iterators start, shared by datasets and the step counter.

    It is read when an iterator's first batch is made: set it before `iter`.

    Attributes:
      step: global steps done since training began, at least 0.
    """

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """The steps of an epoch: global batches of `num_shards` batches each.

    Attributes:
      num_records: records of the dataset, at least 1.
      batch_size: images in a shard's batch, at least 1.
      num_shards: how many shards make a step.
      padded: True pads the remainder to a last step, False leaves it out.
    """

    num_records: int
    batch_size: int
    num_shards: int
    padded: bool

    @property
    def per_epoch(self) -> int:
        """How many steps an epoch has, the same for every shard."""
        global_batch_size = self.batch_size * self.num_shards
        whole, remainder = divmod(self.num_records, global_batch_size)
        return whole + (self.padded and remainder > 0)

    def slots(self, shard_id: int, *, start_step: int = 0) -> Integers:
        """Returns the slots of the epoch's order that a shard serves from a step on, in turn.

        With global batches of g images, step s serves the slots [s * g, (s + 1) * g), and shard i
        serves the i-th part of them: what a step serves does not depend on the number of shards.
        Slots from `num_records` on are padding.
        """
        steps = np.arange(start_step, self.per_epoch, dtype=np.int64)[:, None]
        first = (steps * self.num_shards + shard_id) * self.batch_size
        return (first + np.arange(self.batch_size, dtype=np.int64)).ravel()


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
    together; their bounds differ in each epoch, and those at the ends of a file have fewer. Every
    order of the blocks is equally likely. With blocks of 1 that is every order of the records.

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
    phase = int(raw(1)[0] % shuffle_block_size)
    lengths = np.diff(np.append(first_of_files, num_records))
    in_file = np.arange(num_records, dtype=np.int64) - np.repeat(first_of_files, lengths)
    starts = (in_file == 0) | ((in_file - phase) % shuffle_block_size == 0)
    blocks = np.cumsum(starts) - 1
    block_order: Integers = np.argsort(raw(int(blocks[-1]) + 1)[blocks], kind="stable")
    return block_order


def read_index(index_file: str, *, crc: int | None = None) -> bytes:
    """Reads an index file; InputError if it cannot be read or `crc`, its CRC-32C, changed."""
    try:
        with open(index_file, "rb") as stream:
            text = stream.read()
        if crc is not None and google_crc32c.value(text) != crc:
            raise ValueError(f"its CRC-32C was {crc}")
        return text
    except (OSError, ValueError) as error:
        raise InputError(_CHANGED.format(index_file, error)) from error


def parse_index(text: bytes, index_file: str, num_records: int) -> Integers:
    """Returns offset and size in bytes of each record, in the order of the file: int64 (n, 2).

    Raises:
      InputError: what `read_index` returned is damaged, or holds another number of records.
    """
    try:
        extents = np.array(text.split(), dtype=np.int64).reshape(-1, 2)
        if (extents < (0, _FRAME_SIZE)).any():
            raise ValueError(f"an offset is below 0, or a size below {_FRAME_SIZE}")
        if len(extents) != num_records:
            raise ValueError(f"then {num_records} records, now {len(extents)}")
    except (ValueError, OverflowError) as error:
        raise InputError(_CHANGED.format(index_file, error)) from error
    return extents


def list_records(
    records_per_file: Sequence[int] | Integers,
    *,
    steps: EpochSteps,
    shard: Shard,
    seed: int | None,
    shuffle_block_size: int = 1,
    epoch: int = 0,
    start_step: int = 0,
) -> Integers:
    """Returns the records that a shard serves in an epoch from a step on, in turn.

    Memory while it works: about 75 bytes per record of the dataset for a single shard, 20 for one
    of 8.

    Returns:
      int64 numbers of records, counted over all files; padding repeats the last. With `seed` None
      they are in the order of the files, else in that of `shuffle`.
    """
    slots = np.minimum(steps.slots(shard.shard_id, start_step=start_step), steps.num_records - 1)
    if seed is None:
        return slots
    order = shuffle(
        steps.num_records,
        seed=seed,
        epoch=epoch,
        shuffle_block_size=shuffle_block_size,
        first_of_files=np.cumsum([0, *records_per_file[:-1]]),
    )
    served: Integers = order[slots]
    return served
