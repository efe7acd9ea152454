"""Record reading with tf.data, for both backends and all orders."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from dali_tf_input.backends.callbacks import make_callback
from dali_tf_input.backends.remote import make_remote_read
from dali_tf_input.backends.tf_native import load, uses_native
from dali_tf_input.errors import InputError
from dali_tf_input.random import Integers, seed_of
from dali_tf_input.random import Stream as RandomStream
from dali_tf_input.records.manifest import find_change
from dali_tf_input.records.records import Records
from dali_tf_input.records.tfrecord import read_record
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.spec.plan import Plan, Position, Shard
from dali_tf_input.storage.staging import make_process_folder, private_folder

_STRIDE = 1 << 40  # between the keys of two epochs
MAX_EPOCHS = 1 << 22
_CHUNK, _CHUNK_BYTES = 16, 1 << 22  # most records, and bytes, that a reader reads in one go
_LISTED = 4096  # images that Python lists in a call: half a millisecond
_MOST_COPIED = 8  # sets of records whose indexes are copied for DALI's own reader

# Reads the epoch of the given number, starting at the given step.
ReadEpoch = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one pipeline serves.

    Attributes:
      spec: the batches to produce.
      shard_batch_size: images in each batch of this shard.
      shard: which records are read.
      position: where the next iterator starts.
      endless: whether an iterator goes on with the next epoch where one ends.
    """

    spec: InputSpec
    shard_batch_size: int
    shard: Shard = Shard()
    position: Position = field(default_factory=Position)
    endless: bool = False

    @property
    def num_images(self) -> int:
        """How many images an epoch of this shard has."""
        return self.plan.num_images(self.shard.shard_id)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of an epoch."""
        return self.spec.plan(self.shard_batch_size, num_shards=self.shard.num_shards)


def with_cardinality(dataset: tf.data.Dataset, stream: Stream) -> tf.data.Dataset:
    """Sets the cardinality of `dataset`, unless its first epoch is partial."""
    if stream.endless:
        count = int(tf.data.INFINITE_CARDINALITY)
    elif stream.position.step % stream.plan.steps_per_epoch:  # the first epoch is a part of one
        return dataset
    else:
        count = -(-stream.num_images // stream.shard_batch_size)
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def read_records(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Reads the records of a shard, epoch after epoch, see `join_epochs`.

    Returns:
      A dataset of (key, record). The key is int64, unique to an image in an epoch, and independent
      of the backend and the number of shards; the record is a serialized Example. The values named
      by `spec.beside_records`, int64, follow.
    """
    read = read_planned if stream.spec.has_fixed_order else read_buffer
    return join_epochs(stream, read(stream, options))


def list_batches(stream: Stream) -> tf.data.Dataset:
    """Lists the batches of a shard, epoch after epoch, see `join_epochs`; of a fixed order.

    Returns:
      A dataset of (keys, numbers): the keys of a batch's images, see `read_records`, and the
      numbers of their records; int64 (k,) each.
    """
    list_epoch = list_planned(stream)
    size, has_whole_steps = stream.shard_batch_size, stream.spec.repeat
    return join_epochs(
        stream,
        lambda epoch, step: list_epoch(epoch, step).rebatch(size, drop_remainder=has_whole_steps),
    )


def join_epochs(stream: Stream, read_epoch: ReadEpoch) -> tf.data.Dataset:
    """Joins what is read of each epoch.

    Each iterator serves the next epoch that has not been served yet; if `stream.endless`, also all
    later epochs. With `spec.repeat` False, each iterator serves each record once.
    """
    position, per_epoch = stream.position, stream.plan.steps_per_epoch
    if not stream.spec.repeat:
        start = np.int64(0)
        return tf.data.Dataset.from_tensors((start, start)).flat_map(read_epoch)
    if stream.endless:
        first_epoch, first_step = divmod(position.step, per_epoch)
        epochs = tf.data.Dataset.range(first_epoch, MAX_EPOCHS)
        epochs = epochs.map(
            lambda epoch: (epoch, tf.where(epoch == first_epoch, np.int64(first_step), 0))
        )
        return epochs.flat_map(read_epoch)
    next_epoch = make_callback(lambda: np.int64(position.next_epoch(per_epoch)))

    @tf.autograph.experimental.do_not_convert
    def read_next_epoch(_: tf.Tensor) -> tf.data.Dataset:
        step = tf.ensure_shape(tf.numpy_function(next_epoch, [], tf.int64), ())
        return read_epoch(step // per_epoch, step % per_epoch)

    return tf.data.Dataset.from_tensors(0).flat_map(read_next_epoch)


def list_planned(stream: Stream) -> ReadEpoch:
    """Returns the function that lists an epoch from a step on, in the order of its `Plan`.

    It makes a dataset of (keys, numbers), of many images each: see `list_batches`.
    """
    spec, plan, shard_id = stream.spec, stream.plan, stream.shard.shard_id
    places = find_places(spec.records)
    groups = find_groups(spec) if plan.groups else None
    check = make_callback(check_versions)

    @make_callback
    def list_images(epoch: int, first: int) -> tuple[Integers, Integers]:
        slots = plan.slots(shard_id, int(first), int(first) + _LISTED)
        return int(epoch) * _STRIDE + slots, plan.records(int(epoch), slots)

    @tf.autograph.experimental.do_not_convert
    def list_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        # Before the first record, as files stay open from one epoch to the next.
        unchanged = tf.numpy_function(check, [places.names, places.versions], tf.string)
        with tf.control_dependencies([unchanged]):
            first = step * stream.shard_batch_size

        def list_next(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            listed = tf.numpy_function(list_images, [epoch, start], (tf.int64, tf.int64))
            keys, numbers = (tf.ensure_shape(values, (None,)) for values in listed)
            return keys, numbers if groups is None else tf.gather(groups.records, numbers)

        # Python lists thousands of images in a call.
        return tf.data.Dataset.range(first, plan.num_images(shard_id), _LISTED).map(list_next)

    return list_epoch


def read_planned(stream: Stream, options: TfDataOptions) -> ReadEpoch:
    """Returns the function that reads an epoch from a step on, in the order of its `Plan`."""
    spec = stream.spec
    places = find_places(spec.records)
    if spec.records.is_remote:
        read = make_remote_read(spec.records, options, places.names, *places.where)
    else:
        read = make_read(options, places.names, places.versions, *places.where)
    parallel = options.num_parallel_reads
    # Remote reads wait longer, and neighboring ranges share a request.
    max_chunk = 2 * _CHUNK if spec.records.is_remote else _CHUNK
    chunk = int(np.clip(_CHUNK_BYTES // places.mean_bytes, 1, max_chunk))
    list_epoch = list_planned(stream)

    @tf.autograph.experimental.do_not_convert
    def read_epoch(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        def read_next(keys: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return (keys, read(numbers), *places.beside_all(spec, numbers))

        # A thread reads a few records at a time.
        records = (
            list_epoch(epoch, step)
            .rebatch(chunk)
            .map(read_next, num_parallel_calls=parallel, deterministic=True)
        )
        specs = [tf.TensorSpec((), one.dtype) for one in records.element_spec]
        variant = tf.raw_ops.UnbatchDataset(
            input_dataset=tf.data.experimental.to_variant(records),
            output_types=[one.dtype for one in specs],
            output_shapes=[one.shape for one in specs],
        )
        unbatched = tf.data.experimental.from_variant(variant, tuple(specs))
        # Waiting for storage must not block the decoding threads, of which there is one per core.
        return with_own_threads(unbatched, parallel)

    return read_epoch


def with_own_threads(dataset: tf.data.Dataset, num_threads: int) -> tf.data.Dataset:
    """Has what a dataset does run in threads of its own, which may wait."""
    specs = tf.nest.flatten(dataset.element_spec)
    variant = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_threads=num_threads,
        output_types=[one.dtype for one in specs],
        output_shapes=[one.shape for one in specs],
    )

    # A variant holds the tensors that `dataset` uses, and this function the Python objects.
    @tf.autograph.experimental.do_not_convert
    def read(_: tf.Tensor) -> tf.data.Dataset:
        return tf.data.experimental.from_variant(variant, dataset.element_spec)

    return tf.data.Dataset.from_tensors(0).flat_map(read)


class Places:
    """Where the records are, as tensors that the pipelines of all replicas share.

    TensorFlow never frees a function given to `numpy_function`, nor what the function holds. So
    what has a value per record is a tensor, which datasets hold and which is freed with them.

    Attributes:
      names: the path or URL of each file: string (files,).
      versions: see `versions_of`.
      where: the number of each record's file, int32 (records,), and its offset and size in bytes,
        int64 (records, 2).
      mean_bytes: bytes of a record on average, at least 1.
    """

    def __init__(self, records: Records) -> None:
        self._records, self._beside = records, dict[str, tf.Tensor]()
        with tf.device("CPU:0"):
            self.names, self.versions = (
                tf.constant(records.paths),
                tf.constant(versions_of(records)),
            )
            file_of = tf.repeat(tf.range(len(records.files)), records.counts)
            indexes = [records.index(file) for file in range(len(records.files))]
            self.where = (file_of, tf.constant(np.concatenate(indexes)))
        num_bytes = sum(int(extents[:, 1].sum()) for extents in indexes)
        self.mean_bytes = max(1, num_bytes // max(1, records.num_records))

    def beside(self, name: str) -> tf.Tensor:
        """Returns the values of all records that `InputSpec.beside_records` names."""
        if name not in self._beside:
            values = self._records.ids if name == "record_id" else self._records.labels
            with tf.init_scope(), tf.device("CPU:0"):
                self._beside[name] = tf.constant(values)
        return self._beside[name]

    def beside_all(self, spec: InputSpec, numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns what `spec.beside_records` names of the records of these numbers."""
        return tuple(tf.gather(self.beside(name), numbers) for name in spec.beside_records)


class Groups:
    """The records of a spec, sorted by class or part: int64 (records,), shared as `Places`."""

    def __init__(self, spec: InputSpec) -> None:
        with tf.device("CPU:0"):
            self.records = tf.constant(spec.grouped_records)


_places = weakref.WeakValueDictionary[Records, Places]()
_groups = weakref.WeakValueDictionary[InputSpec, Groups]()
_making = threading.Lock()


def find_places(records: Records) -> Places:
    """Returns the places of records, which all datasets of these records share."""
    with _making:
        places = _places.get(records) or Places(records)
        _places[records] = places
        return places


def find_groups(spec: InputSpec) -> Groups:
    """Returns the groups of a spec, which all its datasets share."""
    with _making:
        groups = _groups.get(spec) or Groups(spec)
        _groups[spec] = groups
        return groups


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
        keys = tf.data.Dataset.from_tensor_slices(slots + epoch * _STRIDE)
        zipped = tf.data.Dataset.zip(keys, encoded)
        return zipped.map(lambda key, record: (key, *record)) if spec.record_ids else zipped

    return read_epoch


def list_runs(stream: Stream) -> tf.data.Dataset:
    """Returns the runs of neighboring records of a shard: file, state, offset, count, first."""
    numbers, offsets, counts, firsts = _list_runs(stream.spec.records, stream.shard)
    versions = versions_of(stream.spec.records)[numbers]
    files = [stream.spec.records.files[number].path for number in numbers]
    runs = (tf.constant(values, tf.int64) for values in (offsets, counts, firsts))
    return tf.data.Dataset.from_tensor_slices((files, versions, *runs))


def interleave(runs: tf.data.Dataset, stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Returns the serialized records of `runs`, interleaving several files.

    With `spec.record_ids` the elements are (record, record id).
    """
    check = make_callback(check_versions)

    @tf.autograph.experimental.do_not_convert
    def read(
        file: tf.Tensor, state: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, first: tf.Tensor
    ) -> Any:
        file = file[None]
        if options.service is None:  # its workers cannot call this process
            file = tf.ensure_shape(tf.numpy_function(check, [file, state[None]], tf.string), (1,))
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


def make_read(
    options: TfDataOptions,
    names: tf.Tensor,
    versions: tf.Tensor,
    file_of: tf.Tensor,
    extents: tf.Tensor,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that reads and checks records by their numbers, int64 (n,).

    See `Places` for the tensors.
    """
    if uses_native(options.kernel):
        native = partial(load().dali_tf_input_read, names, versions, file_of, extents)
        return lambda numbers: tf.ensure_shape(
            native(numbers, check_crc=options.check_crc), (None,)
        )

    @make_callback
    def read_by_name(names: Any, versions: Integers, offsets: Integers) -> Any:
        files = map(os.fsdecode, check_versions(names, versions))
        return np.array([*map(read_record, files, offsets.tolist())], object)

    @tf.autograph.experimental.do_not_convert
    def read_by_python(numbers: tf.Tensor) -> tf.Tensor:
        files = tf.gather(file_of, numbers)
        offsets = tf.gather(extents, numbers)[:, 0]
        given = [tf.gather(names, files), tf.gather(versions, files), offsets]
        return tf.ensure_shape(tf.numpy_function(read_by_name, given, tf.string), (None,))

    return read_by_python


def versions_of(records: Records) -> Integers:
    """Returns each file's size in bytes and modification time in ns when it was indexed.

    The result is int64 (files, 2), with -1 for stored objects.
    """
    if records.is_remote:  # each request names the version that it expects
        return np.full((len(records.files), 2), -1)
    return np.array([(file.size, file.mtime_ns) for file in records.files], np.int64)


def check_versions(names: Any, versions: Integers) -> Any:
    """Returns `names`, bytes (n,); raises InputError if a file changed since it was indexed."""
    for name, (size, mtime) in zip(names, versions.tolist(), strict=True):
        change = find_change(os.fsdecode(name), size, mtime) if size >= 0 else None
        if change:
            raise InputError(f"{change}: index it again.")
    return names


def hold_indexes(records: Records) -> dict[str, str]:
    """Copies the indexes to a folder that is removed when the process ends.

    DALI reads them again for each iterator: a missing index would end the process, and a truncated
    one would lose records without an error.

    Returns:
      The path of the copied index for each file with records in use; DALI rejects empty indexes.
    """
    copies = _copy_indexes(records)
    if not all(map(os.path.exists, copies.values())):  # someone emptied the folder
        _copy_indexes.cache_clear()
        copies = _copy_indexes(records)
    return copies


@lru_cache(_MOST_COPIED)
def _copy_indexes(records: Records) -> dict[str, str]:
    staging = make_process_folder(private_folder())
    copies = {}
    for number, file in enumerate(records.files):
        if not records.counts[number]:
            continue
        copies[file.path] = staging.path(f"{number}.idx")
        # Checked, and in DALI's number format: DALI stops silently at anything else.
        extents = records.index(number).tolist()
        with open(copies[file.path], "wb") as stream:
            stream.writelines(b"%d %d\n" % (offset, size) for offset, size in extents)
    return copies


def draw_uniforms(stream: Stream, key: tf.Tensor, view: int = 0) -> tf.Tensor:
    """Draws the random numbers for a key's image: float32 (num_uniforms,) in [0, 1)."""
    preprocess = [*stream.spec.image_views.values()][view]
    # The numbers of `tf.random.stateless_uniform`, without the operations that scale them.
    return tf.raw_ops.StatelessRandomUniform(
        shape=[preprocess.num_uniforms], seed=seeds_of(stream, RandomStream.CROP, key, view)
    )


def seeds_of(stream: Stream, purpose: RandomStream, key: tf.Tensor, view: int = 0) -> tf.Tensor:
    """Returns the seed of a key's random numbers for a purpose, int64 (2,)."""
    return tf.stack([tf.constant(seed_of(stream.spec.seed, purpose, view), tf.int64), key])


def place_in_batch(stream: Stream, key: tf.Tensor) -> tf.Tensor:
    """Returns the place of a key's image in its batch, from 0: see `Plan`."""
    return key % _STRIDE % stream.shard_batch_size


def _list_runs(records: Records, shard: Shard) -> tuple[list[int], ...]:
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
