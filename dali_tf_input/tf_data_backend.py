"""The tf.data backend: the same records and the same pixels as the DALI backend, by TensorFlow's own operations."""

import queue
import socket
import threading
from functools import partial

import tensorflow as tf

from dali_tf_input.manifest import read_index
from dali_tf_input.options import AUTOTUNE, TfDataOptions
from dali_tf_input.order import Position
from dali_tf_input.record_stream import (
    describe_key,
    parse_record,
    random_numbers,
    read_planned,
    read_stretch,
    steps_of,
    weight_of,
)
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.stages import Stage
from dali_tf_input.tf_augment import make_augmentation
from dali_tf_input.tf_images import prepare_image
from dali_tf_input.tfrecord import InputError

_SERVICE_SECONDS = 60  # for a worker's first answer


def build(
    spec: InputSpec,
    options: TfDataOptions,
    *,
    batch_size: int,
    shard: Shard,
    position: Position,
    until: Stage | None = None,
) -> tf.data.Dataset:
    """Builds the dataset of one shard, in the order the data travels.

    Args:
      spec: what comes out.
      options: how it is made.
      batch_size: images in each batch; the shard holds at least as many records, but where `spec.repeat` is False.
      shard: which records are read.
      position: where each iterator starts, for order "global".
      until: None, or the stage after which to stop, to measure it: a dataset of float32 (batch_size,) then.

    Returns:
      A dataset of (image, label): image (batch_size, *spec.preprocess.image_shape), label int64 (batch_size,) or one-hot; and
      with `spec.repeat` False (image, label, sample weight float32 (batch_size,)), one pass. Else it has no end: with order
      "global" each epoch serves whole steps; otherwise each pass over the shard serves every record of it once, and a batch may
      hold the end of one and the start of the next. With `order` "buffer" the files of the shard are read in a new random order
      each pass, `num_parallel_reads` of them at a time, before their records enter the buffer.
    """
    preprocess = spec.preprocess
    if preprocess.apply_orientation:
        raise InputError(
            "TensorFlow reads no EXIF orientation, so the tf.data backend cannot do `apply_orientation`: use DALI "
            "(DaliOptions(device='cpu')), or turn the images once with scripts/make_tfrecords.py --apply_orientation."
        )
    fuse = options.fuse
    if fuse == "auto":
        fuse = "off" if preprocess.resizes_plainly else "decode"
    augment = make_augmentation(preprocess) if preprocess.auto_augment else None
    if options.service is not None and spec.order != "buffer":
        raise InputError(
            f"`service` is for order 'buffer', got {spec.order!r}: the service's workers deal the records among themselves, so "
            "no order can be planned. Use order 'buffer', or TfDataOptions() without a service."
        )
    if options.service is not None:
        _check_service(options.service)
    steps = steps_of(spec, batch_size=batch_size, num_shards=shard.num_shards)
    seed = tf.constant(spec.seed * shard.num_shards + shard.shard_id, tf.int64)

    @tf.autograph.experimental.do_not_convert
    def prepare(key: tf.Tensor, record: tf.Tensor) -> tf.Tensor | tuple[tf.Tensor, ...]:
        if until == "read":
            return tf.cast(tf.strings.length(record), tf.float32)
        encoded, label = parse_record(record, spec.dataset)
        if until == "parse":
            return tf.cast(tf.cast(tf.strings.length(encoded), tf.int64) + label, tf.float32)
        if options.service is not None:
            # Many processes, no common count: no seed could repeat it. And raw operations, as `tf.random.set_seed` would seed the
            # others: each pass begins anew on the workers, and would draw the same.
            numbers = tf.raw_ops.RandomUniform(shape=[preprocess.num_random], dtype=tf.float32, seed=0, seed2=0)
            augment_seed = tf.cast(2**30 * tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, seed=0, seed2=0), tf.int64)
        elif spec.planned:
            epoch, place = describe_key(key, steps, shard)
            numbers, augment_seed = random_numbers(spec, epoch, place)
        else:
            # Numbers in [0, 1) for this image, a function of (seed, shard, position in the stream) alone: a parallel map calls in
            # no fixed order, so a generator with a state would not repeat.
            numbers = tf.random.stateless_uniform((preprocess.num_random,), seed=tf.stack([seed, key]))
            augment_seed = tf.stack([seed, ~key])
        if spec.dataset.label_offset:
            label -= spec.dataset.label_offset
        if spec.one_hot is not None:
            label = tf.one_hot(label, spec.one_hot, *spec.label_values, dtype=tf.float32)

        def augment_this(image: tf.Tensor) -> tf.Tensor:
            return augment(image, augment_seed) if augment else image

        image = prepare_image(encoded, numbers, preprocess, fuse=fuse, augment=augment_this if augment else None, until=until)
        if until is not None:
            return tf.cast(image[0, 0, 0], tf.float32)
        return (image, label) if spec.repeat else (image, label, weight_of(place, steps))

    if spec.planned:
        dataset = read_planned(spec, options, batch_size=batch_size, shard=shard, position=position)
    elif options.service is not None:
        # A record stands alone here, with a key of no meaning: a count would have to be the same on all workers.
        dataset = _read(spec, options, shard).map(lambda record: (tf.constant(0, tf.int64), record))
    else:
        dataset = _read(spec, options, shard).repeat().enumerate()
    if options.num_parallel_calls == 1:
        dataset = dataset.map(prepare)
    else:
        dataset = dataset.map(prepare, num_parallel_calls=options.num_parallel_calls)
    if options.service is not None:
        service = tf.data.experimental.service
        # Each pass is a job of its own, whose stretches of files go to whichever worker is free: each to one.
        mode = service.ShardingPolicy.DYNAMIC
        dataset = dataset.apply(service.distribute(processing_mode=mode, service=options.service)).repeat()
    dataset = dataset.batch(batch_size, drop_remainder=True)
    if not spec.repeat:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps.per_epoch))
    if options.prefetch_batches != 0:
        dataset = dataset.prefetch(options.prefetch_batches)
    tf_options = tf.data.Options()
    if not options.autotune:
        tf_options.autotune.enabled = False
        tf_options.experimental_optimization.map_parallelization = False
    return dataset.with_options(tf_options)


def _check_service(address: str) -> None:
    """Raises InputError where nobody answers, no dispatcher or no worker: TensorFlow would wait without end."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise InputError(
            f"There is no tf.data service at {address}: {error}. Start one: scripts/data_service.py --role=dispatcher, and "
            "workers: scripts/data_service.py --role=worker --dispatcher=HOST:5050"
        ) from error
    answers: queue.SimpleQueue[tf.errors.OpError | None] = queue.SimpleQueue()

    def ask() -> None:
        service = tf.data.experimental.service.distribute("parallel_epochs", address)
        try:
            next(iter(tf.data.Dataset.range(1).apply(service)))
            answers.put(None)
        except tf.errors.OpError as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()  # which can wait for an answer, but not be told to stop
    try:
        failure = answers.get(timeout=_SERVICE_SECONDS)
    except queue.Empty:
        raise InputError(
            f"No worker of the tf.data service at {address} answers this machine within {_SERVICE_SECONDS} s. Start some, with "
            f"an --address by which it reaches them: scripts/data_service.py --role=worker --dispatcher={host}:{port}"
        ) from None
    if failure is not None:
        raise InputError(f"The tf.data service at {address} does not serve this program: {failure.message}") from failure


def _read(spec: InputSpec, options: TfDataOptions, shard: Shard) -> tf.data.Dataset:
    """Returns the serialized records of a shard, once each, in the order that `spec` asks for."""
    files, offsets, counts = _fragments(spec.dataset, shard)
    dataset = tf.data.Dataset.from_tensor_slices((files, tf.constant(offsets, tf.int64), tf.constant(counts, tf.int64)))
    read = partial(read_stretch, read_buffer_bytes=options.read_buffer_bytes)
    if spec.order == "sequential":
        return dataset.flat_map(read)
    seed = None if options.service is not None else spec.seed
    dataset = _shuffle(dataset, len(files), seed)
    if options.num_parallel_reads == 1:
        dataset = dataset.flat_map(read)
    else:
        dataset = dataset.interleave(
            read, cycle_length=options.num_parallel_reads, num_parallel_calls=AUTOTUNE, deterministic=True
        )
    return _shuffle(dataset, spec.buffer_size, seed)


def _shuffle(dataset: tf.data.Dataset, buffer_size: int, seed: int | None) -> tf.data.Dataset:
    """Shuffles, otherwise in each pass; without a seed whatever `tf.random.set_seed` was told."""
    if seed is not None:
        return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True)
    specs = tf.nest.flatten(dataset.element_spec)
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=0,
        seed2=0,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def _fragments(dataset: DatasetSpec, shard: Shard) -> tuple[list[str], list[int], list[int]]:
    """Returns the stretches of records that a shard reads: the file of each, the byte where it starts, how many records it has.

    Where nothing is left out of a file, its part of the shard is one stretch.
    """
    records = shard.records(dataset.num_records)
    files, offsets, counts = [], [], []
    first = 0  # the position, among all records, of the file's first
    for file, index_file, num_records, left_out in zip(
        dataset.files, dataset.index_files, dataset.records_per_file, dataset.left_out_per_file, strict=True
    ):
        start, stop = max(records.start - first, 0), min(records.stop - first, num_records)
        first += num_records
        if start >= stop:
            continue
        if start == 0 and not left_out:
            files.append(file)
            offsets.append(0)
            counts.append(stop)
            continue
        end = None  # the byte where the stretch ends so far
        for offset, size in read_index(index_file)[start:stop]:
            if offset == end:
                counts[-1] += 1
            else:
                files.append(file)
                offsets.append(offset)
                counts.append(1)
            end = offset + size
    return files, offsets, counts
