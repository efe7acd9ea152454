"""The tf.data backend: the same records and pixels as DALI, with TensorFlow's operations."""

import logging
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from dali_tf_input.backends import reading
from dali_tf_input.backends.parsing import parse_record
from dali_tf_input.backends.reading import Stream
from dali_tf_input.backends.tf_augment import make_augmentation
from dali_tf_input.backends.tf_images import check_supported, prepare_image, prepare_mask
from dali_tf_input.backends.tf_native import finish_region, uses_native
from dali_tf_input.errors import InputError
from dali_tf_input.records.records import Records
from dali_tf_input.spec.crops import Region
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import AUTOTUNE, TfDataOptions
from dali_tf_input.spec.order import Shard
from dali_tf_input.spec.preprocess import Preprocess

_logger = logging.getLogger("dali_tf_input")

_SERVICE_SECONDS = 60  # for a worker's first answer


def build(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Builds the dataset of one shard, in the order in which the data moves.

    With order "buffer" the files of the shard are read in a new random order each pass,
    `num_parallel_reads` at a time.

    Raises:
      InputError: this backend does not support `spec`, or the service does not answer.
    """
    check_supported(stream.spec.preprocess)
    records = read_records(stream, options)
    return prepare_batches(records, make_prepare(stream, options), stream, options)


def read_records(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Returns a dataset of (key, record): an int64 number and a serialized Example.

    With `spec.record_ids` the record's own number follows.
    """
    spec, shard = stream.spec, stream.shard
    if options.service is not None:
        if spec.order != "buffer":
            raise InputError(
                f"`service` is for order 'buffer', got {spec.order!r}: the service's workers divide"
                " the records among themselves, so no order can be fixed. Use order 'buffer', or"
                " TfDataOptions() without a service."
            )
        # A count would have to be the same on all workers: the key has no meaning here.
        return _read(spec, options, shard).map(lambda *record: (tf.constant(0, tf.int64), *record))
    if spec.has_fixed_order:
        return reading.read_fixed_order(stream, options)
    records = _read(spec, options, shard).repeat()
    if not spec.record_ids:
        return records.enumerate()
    return records.enumerate().map(lambda key, record: (key, *record))


def make_prepare(stream: Stream, options: TfDataOptions) -> Callable[..., tuple[Any, ...]]:
    """Returns the function that maps (key, record) to what comes out."""
    spec, preprocess = stream.spec, stream.spec.preprocess
    augmentation = make_augmentation(preprocess) if preprocess.auto_augment else None
    decode = options.resolve_decode(resizes_plainly=preprocess.resizes_plainly)
    native = uses_native(options.kernel)
    if options.service is not None:
        native = _ask_service(options, native=native)

    @tf.autograph.experimental.do_not_convert
    def prepare(key: tf.Tensor, record: tf.Tensor, *number: tf.Tensor) -> tuple[Any, ...]:
        values = parse_record(record, spec)
        if options.service is not None:
            # Many processes share no count, so no seed could repeat. Raw operations, because
            # `tf.random.set_seed` would seed the others, and each pass on a worker draw the same.
            draw = partial(tf.raw_ops.RandomUniform, dtype=tf.float32, seed=0, seed2=0)
            uniforms = draw(shape=[preprocess.num_uniforms])
            augment_seed = tf.cast(2**30 * draw(shape=[2]), tf.int64)
        else:
            uniforms, augment_seed = reading.draw_uniforms(stream, key)
        augment = (lambda image: augmentation(image, augment_seed)) if augmentation else None
        values["image"] = prepare_image(
            values["image"], uniforms, preprocess, decode=decode, augment=augment, native=native
        )
        if spec.mask:
            values["mask"] = prepare_mask(values["mask"], uniforms, spec)
        values |= reading.find_weight(stream, key)
        values |= dict(zip(["record_id"], number, strict=False))
        return spec.arrange([values[name] for name in spec.outputs])

    return prepare


def prepare_batches(
    records: tf.data.Dataset, prepare: Callable[..., Any], stream: Stream, options: TfDataOptions
) -> tf.data.Dataset:
    """Maps `prepare` over (key, record), batches and prefetches, as the options say."""
    if options.num_parallel_calls == 1:
        dataset = records.map(prepare)
    else:
        dataset = records.map(prepare, num_parallel_calls=options.num_parallel_calls)
    if options.service is not None:
        # Each pass is a job of its own, whose runs of files go to whichever worker is free.
        dataset = dataset.apply(_distribute(options)).repeat()
    dataset = dataset.batch(stream.batch_size, drop_remainder=True)
    count = tf.data.INFINITE_CARDINALITY if stream.spec.repeat else stream.steps.per_epoch
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    if options.prefetch_batches != 0:
        dataset = dataset.prefetch(options.prefetch_batches)
    tf_options = tf.data.Options()
    if not options.autotune:
        tf_options.autotune.enabled = False
        tf_options.experimental_optimization.map_parallelization = False
    return dataset.with_options(tf_options)


def _distribute(options: TfDataOptions) -> Any:
    service = tf.data.experimental.service
    return service.distribute(service.ShardingPolicy.DYNAMIC, options.service)


def _ask_service(options: TfDataOptions, *, native: bool) -> bool:
    """Returns whether a tf.data service has the compiled operations, if `native` wants them.

    Raises:
      InputError: no dispatcher or no worker answers, for which TensorFlow would wait forever.
    """
    address = options.service or ""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise InputError(
            f"There is no tf.data service at {address}: {error}. Start one: scripts/data_service.py"
            " --role=dispatcher, and workers: scripts/data_service.py --role=worker"
            " --dispatcher=HOST:5050"
        ) from error
    answers: queue.SimpleQueue[tf.errors.OpError | None] = queue.SimpleQueue()
    zeros = tf.zeros(2, tf.float64)
    finish = partial(
        finish_region,
        region=Region(zeros, zeros + 1, zeros, zeros),
        preprocess=Preprocess.for_evaluation(1),
        mirrored=False,
        ratio=1,
    )

    def ask() -> None:
        image = tf.data.Dataset.from_tensors(tf.zeros((1, 1, 3), tf.uint8))
        try:
            # The dispatcher, too, makes the dataset, as it divides the records.
            next(iter((image.map(finish) if native else image).apply(_distribute(options))))
            answers.put(None)
        except tf.errors.OpError as error:
            answers.put(error)

    # In a thread, as the call cannot be interrupted.
    threading.Thread(target=ask, daemon=True).start()
    try:
        failure = answers.get(timeout=_SERVICE_SECONDS)
    except queue.Empty:
        raise InputError(
            f"No worker of the tf.data service at {address} answers this machine within "
            f"{_SERVICE_SECONDS} s. Start workers with an --address that it can reach: "
            f"scripts/data_service.py --role=worker --dispatcher={host}:{port}"
        ) from None
    if failure is None:
        return native
    if not native or not isinstance(failure, tf.errors.NotFoundError):
        raise InputError(
            f"The tf.data service at {address} does not serve this program: {failure.message}"
        ) from failure
    problem = f"The tf.data service at {address} lacks the compiled operations"
    if options.kernel == "native":
        raise InputError(
            f"{problem}: start dispatcher and workers by scripts/data_service.py where this version"
            " was installed with a compiler, or use TfDataOptions(kernel='auto')."
        ) from failure
    _logger.warning("%s: TensorFlow's operations preprocess, which takes longer.", problem)
    return False


def _read(spec: InputSpec, options: TfDataOptions, shard: Shard) -> tf.data.Dataset:
    """Returns the serialized records of a shard, once each, in the order that `spec` asks for.

    With `spec.record_ids` as (record, its number).
    """
    numbers, offsets, counts, firsts = _list_runs(spec.records, shard)
    states = reading.states_of(spec.records)[numbers]
    files = [spec.records.files[number].path for number in numbers]
    runs = (tf.constant(one, tf.int64) for one in (offsets, counts, firsts))
    dataset = tf.data.Dataset.from_tensor_slices((files, states, *runs))

    @tf.autograph.experimental.do_not_convert
    def read(
        file: tf.Tensor, state: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, first: tf.Tensor
    ) -> Any:
        file = file[None]
        if options.service is None:  # its workers cannot call this process
            file = tf.ensure_shape(
                tf.numpy_function(reading.check_states, [file, state[None]], tf.string), (1,)
            )
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=file,
            compression_type="",
            buffer_size=options.read_buffer_bytes,
            byte_offsets=[offset],
        )
        run = tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)
        # In a file that was cut, TensorFlow ends without an error: later records would
        # follow.
        run = run.apply(tf.data.experimental.assert_cardinality(count))
        if not spec.record_ids:
            return run
        return tf.data.Dataset.zip(run, tf.data.Dataset.range(first, first + count))

    if spec.order == "sequential":
        return dataset.flat_map(read)
    seed = None if options.service is not None else spec.seed
    dataset = _shuffle(dataset, len(files), seed)
    if options.num_parallel_reads == 1:
        dataset = dataset.flat_map(read)
    else:
        dataset = dataset.interleave(
            read,
            cycle_length=options.num_parallel_reads,
            num_parallel_calls=AUTOTUNE,
            deterministic=True,
        )
    return _shuffle(dataset, spec.buffer_size, seed)


def _shuffle(dataset: tf.data.Dataset, buffer_size: int, seed: int | None) -> tf.data.Dataset:
    """Shuffles differently in each pass; with seed None, `tf.random.set_seed` has no effect."""
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


def _list_runs(dataset: Records, shard: Shard) -> tuple[list[int], ...]:
    """Returns the runs of a shard: of each its file, first byte, count of records, first record.

    If no record of a file is skipped, its part of the shard is one run.
    """
    records = shard.records(dataset.num_records)
    files, offsets, counts, firsts = [], [], [], []
    before = 0  # records of the files before
    for file, indexed in enumerate(dataset.files):
        num_records, skipped = indexed.num_records, indexed.num_skipped
        start, stop = max(records.start - before, 0), min(records.stop - before, num_records)
        extents = [] if start == 0 and not skipped else dataset.index(file)[start:stop].tolist()
        if start < stop and not extents:
            files.append(file)
            offsets.append(0)
            counts.append(stop)
            firsts.append(before)
        end = None  # the byte where the run ends so far
        for number, (offset, size) in enumerate(extents, before + start):
            if offset == end:
                counts[-1] += 1
            else:
                files.append(file)
                offsets.append(offset)
                counts.append(1)
                firsts.append(number)
            end = offset + size
        before += num_records
    return files, offsets, counts, firsts
