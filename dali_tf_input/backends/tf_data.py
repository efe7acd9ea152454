"""The tf.data backend: the same records and pixels as DALI, with TensorFlow's operations."""

import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from dali_tf_input.backends import buffer, reading
from dali_tf_input.backends.parsing import parse_record
from dali_tf_input.backends.stream import Stream, draw_uniforms, seeds_of, with_cardinality
from dali_tf_input.backends.tf_augment import draw_rows
from dali_tf_input.backends.tf_batch import make_batches, makes_batches
from dali_tf_input.backends.tf_images import decode_image, prepare_image, prepare_mask
from dali_tf_input.backends.tf_mix import draw_mix, mix_batch
from dali_tf_input.errors import InputError
from dali_tf_input.random import Purpose
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.spec.preprocess import Preprocess

_SERVICE_SECONDS = 60  # for a worker's first answer


def build(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Builds the dataset of one shard: reads, preprocesses and batches its records.

    Raises:
      InputError: the service does not answer.
    """
    if makes_batches(stream.spec, options):
        views = stream.spec.image_views.values()
        transforms = [check_transform(stream.spec.transform, view) for view in views]
        return finish(make_batches(stream, options, transforms), stream, options)
    records = read_records(stream, options)
    return prepare_batches(records, make_prepare(stream, options), stream, options)


def read_records(stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Returns a dataset of (key, record): an int64 number and a serialized Example.

    What `spec.outputs_of_index` names follows.
    """
    if options.service is None:
        return reading.read_records(stream, options)
    check_service(stream.spec, options)
    runs = buffer.list_runs(stream)
    records = buffer.interleave(buffer.shuffle(runs, len(runs), (0, 0)), stream, options)
    records = buffer.shuffle(records, stream.spec.buffer_size, (0, 0))

    @tf.autograph.experimental.do_not_convert
    def add_key(*record: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(1e6 * tf.timestamp(), tf.int64), *record)  # many processes share no count

    return records.map(add_key)


def make_prepare(stream: Stream, options: TfDataOptions) -> Callable[..., Any]:
    """Returns the function that maps (key, record) to an element, or to the values to mix."""
    spec = stream.spec
    transforms = {
        name: check_transform(spec.transform, preprocess)
        for name, preprocess in spec.image_views.items()
    }

    def draw_rows_of(view: int, key: tf.Tensor) -> tf.Tensor | None:
        preprocess = [*spec.image_views.values()][view]
        if not preprocess.augment:
            return None
        seeds = seeds_of(stream, Purpose.AUGMENT, key, view)
        return draw_rows(preprocess.make_program(), seeds)

    def prepare_view(view: int, key: tf.Tensor, image: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        name, preprocess = [*spec.image_views.items()][view]
        transform = transforms[name]
        seeds_of_transform = seeds_of(stream, Purpose.TRANSFORM, key, view)
        return prepare_image(
            image,
            uniforms,
            preprocess,
            rows=draw_rows_of(view, key),
            transform=(lambda image: transform(image, seeds_of_transform)) if transform else None,
            decode=options.resolve_decode(resizes_plainly=preprocess.resizes_plainly),
        )

    @tf.autograph.experimental.do_not_convert
    def prepare(key: tf.Tensor, record: tf.Tensor, *from_index: tf.Tensor) -> Any:
        values = parse_record(record, spec, from_index)
        image, views = values.pop("image"), spec.image_views
        uniforms = [draw_uniforms(stream, key, view) for view in range(len(views))]
        if spec.views:
            image = decode_image(image, upright=spec.preprocess.apply_orientation)
        for view, name in enumerate(views):
            values[name] = prepare_view(view, key, image, uniforms[view])
        if spec.mask:
            values["mask"] = prepare_mask(values["mask"], uniforms[0], draw_rows_of(0, key), spec)
        if spec.mix:
            return {**values, "mix": draw_mix(stream, key)}
        return spec.arrange(values)

    return prepare


def check_transform(
    function: Callable[..., Any] | None, preprocess: Preprocess
) -> Callable[..., tf.Tensor] | None:
    """Traces `spec.transform`, if there is one, for images of `preprocess.image_size`.

    Raises:
      InputError: it fails, or returns an image of another type or shape.
    """
    if function is None:
        return None
    image = tf.TensorSpec((*preprocess.image_size, 3), tf.uint8)
    try:
        transform = tf.function(function)
        made = transform.get_concrete_function(image, tf.TensorSpec((2,), tf.int64))
    except Exception as error:  # whatever a user's function raises
        raise InputError(f"`transform` fails: {type(error).__name__}: {error}") from error
    outputs = made.structured_outputs
    is_tensor = tf.is_tensor(outputs)
    is_same = is_tensor and outputs.dtype == image.dtype
    if not is_same or not outputs.shape.is_compatible_with(image.shape):
        shown = f"{outputs.dtype.name} {outputs.shape}" if is_tensor else repr(outputs)
        raise InputError(
            f"`transform` must return an image like the one it gets, uint8 {image.shape}, got"
            f" {shown}."
        )
    return made


def prepare_batches(
    records: tf.data.Dataset, prepare: Callable[..., Any], stream: Stream, options: TfDataOptions
) -> tf.data.Dataset:
    """Maps `prepare` over (key, record), batches and prefetches, according to `options`."""
    if options.num_parallel_calls == 1:
        dataset = records.map(prepare)
    else:
        dataset = records.map(prepare, num_parallel_calls=options.num_parallel_calls)
    if options.service is not None:
        # Each epoch is a job of its own, whose runs of files go to whichever worker is free.
        service = tf.data.experimental.service
        dataset = dataset.apply(service.distribute(service.ShardingPolicy.DYNAMIC, options.service))
        dataset = dataset.batch(stream.shard_batch_size, drop_remainder=True)
        dataset = dataset.take(stream.plan.steps_per_epoch)
        dataset = dataset.repeat() if stream.endless else dataset
    else:
        dataset = dataset.batch(stream.shard_batch_size, drop_remainder=stream.spec.repeat)
    if stream.spec.mix:
        mix = partial(mix_batch, spec=stream.spec)
        dataset = dataset.map(mix, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return finish(dataset, stream, options)


def finish(dataset: tf.data.Dataset, stream: Stream, options: TfDataOptions) -> tf.data.Dataset:
    """Prefetches batches and sets what else concerns the dataset as a whole."""
    dataset = with_cardinality(dataset, stream)
    if options.prefetch_batches != 0:
        dataset = dataset.prefetch(options.prefetch_batches)
    tf_options = tf.data.Options()
    if not options.autotune:
        tf_options.autotune.enabled = False
        tf_options.experimental_optimization.map_parallelization = False
    return dataset.with_options(tf_options)


def check_service(spec: InputSpec, options: TfDataOptions) -> None:
    """Raises InputError unless a tf.data service answers, for which TensorFlow waits forever."""
    address = options.service or ""
    if options.kernel == "native":
        raise InputError(
            "A tf.data service works with TensorFlow's operations: use kernel='auto', got 'native'."
        )
    if spec.mix:
        text = "`mix` works without a service only, whose batches have no step. Use TfDataOptions()"
        raise InputError(f"{text}.")
    if spec.order != "buffer":
        raise InputError(
            f"`service` is for order 'buffer', got {spec.order!r}: the service's workers divide"
            " the records among themselves, so no order can be fixed. Use order 'buffer', or"
            " TfDataOptions() without a service."
        )
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    start = "Start one: dali-tf-input service --role="
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise InputError(
            f"There is no tf.data service at {address}: {error}. {start}dispatcher, and workers:"
            f" {start[11:]}worker --dispatcher=HOST:5050"
        ) from error
    service = tf.data.experimental.service
    ask = service.distribute(service.ShardingPolicy.OFF, address)
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait_for_answer() -> None:
        try:
            next(iter(tf.data.Dataset.range(1).apply(ask)))
            answers.put("")
        except tf.errors.OpError as error:
            answers.put(f": {error.message}")

    # In a thread, as the call cannot be interrupted.
    threading.Thread(target=wait_for_answer, daemon=True).start()
    try:
        problem = answers.get(timeout=_SERVICE_SECONDS)
    except queue.Empty:
        problem = f" within {_SERVICE_SECONDS} s."
    if problem:
        raise InputError(
            f"No worker of the tf.data service at {address} answers{problem} Start workers with an"
            f" --address that this machine can reach: {start[11:]}worker --dispatcher={host}:{port}"
        )
