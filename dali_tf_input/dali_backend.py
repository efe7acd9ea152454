"""The DALI backend: one DALI pipeline per shard, on the CPU or on one GPU, as a tf.data dataset."""

import os
import warnings
from functools import partial
from typing import Literal

import nvidia.dali as dali
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali import tfrecord as dali_tfrecord
from nvidia.dali.data_node import DataNode

from dali_tf_input.dali_images import prepare_images
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.order import Position
from dali_tf_input.preprocess import Preprocess
from dali_tf_input.record_stream import describe_key, parse_record, random_numbers, read_planned, steps_of, weight_of
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.stages import Stage
from dali_tf_input.tfrecord import InputError

_PACKED = "packed"  # the input of a pipeline that tf.data reads for


def build(
    spec: InputSpec,
    options: DaliOptions,
    *,
    batch_size: int,
    shard: Shard,
    device_id: int | None,
    position: Position,
    until: Stage | None = None,
) -> tf.data.Dataset:
    """Builds the dataset of one shard, placed on the current `tf.device`.

    On another device than that of `options` it works, but TensorFlow copies each batch.

    Args:
      spec: what comes out.
      options: how it is made.
      batch_size: images in each batch; the shard holds at least as many records, but where `spec.repeat` is False.
      shard: which records are read.
      device_id: the CUDA device that decodes; None for `options.device` "cpu".
      position: where each iterator starts, for order "global".
      until: as in `tf_data_backend.build`; DALI's own reader parses too, so "read" is only for what is planned.

    Returns:
      A dataset of what `tf_data_backend.build` says, on the current `tf.device`. What is planned (`spec.planned`) is read by
      tf.data, in the same order with the same random numbers, and handed to DALI; else DALI reads.

    Raises:
      InputError: DALI refuses the pipeline.
    """
    if until == "read":
        return _read_only(spec, batch_size=batch_size, shard=shard, position=position)
    make_pipeline = partial(build_pipeline, spec, options, batch_size=batch_size, shard=shard, device_id=device_id, until=until)
    pipeline = make_pipeline()
    try:
        # TensorFlow ends the process (SIGABRT) when a pipeline cannot be set up; DALI's Python raises. So it is set up here
        # once, and the set-up is dropped again: DALIDataset takes the pipeline's description only and makes its own.
        make_pipeline().build()
    except RuntimeError as error:
        raise InputError(f"DALI cannot set up the pipeline: {error}") from error
    outputs = [
        ((batch_size, *spec.preprocess.image_shape), tf.as_dtype(spec.preprocess.dtype)),
        ((batch_size, *spec.label_shape), tf.int64 if spec.one_hot is None else tf.float32),
    ]
    if not spec.repeat:
        outputs.append(((batch_size,), tf.float32))
    if until is not None:
        outputs = [((batch_size,), tf.float32)]
    arguments = {
        "pipeline": pipeline,
        "batch_size": batch_size,  # DALIDataset's own defaults would override the pipeline's: all of them are passed
        "num_threads": pipeline.num_threads,
        "device_id": device_id,
        "prefetch_queue_depth": options.prefetch_queue_depth,
        "fail_on_device_mismatch": False,
        "output_shapes": tuple(shape for shape, _ in outputs),
        "output_dtypes": tuple(dtype for _, dtype in outputs),
    }
    if not spec.planned:
        return dali_tf.DALIDataset(**arguments)
    with tf.device("CPU:0"):
        packed = _pack_records(spec, batch_size=batch_size, shard=shard, position=position)
    if options.device == "gpu":  # DALI's documentation asks for inputs on the dataset's own device; not seen at work
        packed = packed.apply(tf.data.experimental.copy_to_device(tf.zeros(()).device))
    dataset = dali_tf.experimental.DALIDatasetWithInputs(input_datasets={_PACKED: packed}, **arguments)
    if not spec.repeat:
        # It says that it has no end. Keras would ask for one batch too many then, and count it though it does not come.
        per_epoch = steps_of(spec, batch_size=batch_size, num_shards=shard.num_shards).per_epoch
        if options.device == "cpu":
            return dataset.apply(tf.data.experimental.assert_cardinality(per_epoch))
        dataset.cardinality = lambda: tf.constant(per_epoch, tf.int64)  # no transformation can follow on a GPU
    return dataset


def _read_only(spec: InputSpec, *, batch_size: int, shard: Shard, position: Position) -> tf.data.Dataset:
    """Returns the dataset that is cut after the stage "read"."""
    if not spec.planned:
        raise InputError("`until` 'read' is for orders that tf.data reads: DALI's own reader parses in the same step.")
    records = read_planned(spec, TfDataOptions(), batch_size=batch_size, shard=shard, position=position)
    lengths = records.map(lambda _, record: tf.cast(tf.strings.length(record), tf.float32), num_parallel_calls=tf.data.AUTOTUNE)
    return lengths.batch(batch_size, drop_remainder=True).prefetch(2)


def _pack_records(spec: InputSpec, *, batch_size: int, shard: Shard, position: Position) -> tf.data.Dataset:
    """Returns a dataset of uint8 vectors, one for each image: a DALI dataset takes one tensor of each input.

    The encoded image, then label (8 bytes), sample weight (4 bytes), random numbers (4 bytes each): decoders stop at the end of
    an image, and to cut it out of the vector would cost a copy, which DALI's slice makes byte by byte.
    """
    steps = steps_of(spec, batch_size=batch_size, num_shards=shard.num_shards)

    @tf.autograph.experimental.do_not_convert
    def pack(key: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
        encoded, label = parse_record(record, spec.dataset)
        epoch, place = describe_key(key, steps, shard)
        numbers, _ = random_numbers(spec, epoch, place)
        weight = tf.ones(()) if spec.repeat else weight_of(place, steps)
        parts = [tf.bitcast(label, tf.uint8), tf.bitcast(weight, tf.uint8), tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])]
        return tf.concat([tf.io.decode_raw(encoded, tf.uint8), *parts], 0)

    records = read_planned(spec, TfDataOptions(), batch_size=batch_size, shard=shard, position=position)
    return records.map(pack, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(batch_size)


def _unpack(spec: InputSpec) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """Defines the input of a pipeline, packed by `_pack_records`: encoded images, labels, weights, random numbers."""
    packed = fn.external_source(name=_PACKED, device="cpu", dtype=types.UINT8, ndim=1, batch=False)
    numbers = 4 * spec.preprocess.num_random
    size = packed.shape()[0]
    start = size - (12 + numbers)
    labels = fn.reinterpret(packed[start : start + 8], dtype=types.INT64)
    weights = fn.reshape(fn.reinterpret(packed[start + 8 : start + 12], dtype=types.FLOAT), shape=[])
    return packed, labels, weights, fn.reinterpret(packed[start + 12 : size], dtype=types.FLOAT)


def build_pipeline(
    spec: InputSpec,
    options: DaliOptions,
    *,
    batch_size: int,
    shard: Shard,
    device_id: int | None,
    until: Stage | None = None,
) -> dali.Pipeline:
    """Defines the DALI pipeline of one shard, in the order the data travels; the arguments are those of `build`.

    Returns:
      A pipeline, not yet built, whose outputs are the images and labels that `build` returns.
    """
    preprocess = spec.preprocess

    def define() -> tuple[DataNode, ...]:
        if spec.planned:
            encoded, labels, weights, numbers = _unpack(spec)
        else:
            encoded, labels = _read(spec, options, shard)
            numbers = fn.random.uniform(range=[0.0, 1.0], shape=[preprocess.num_random])
        if until == "parse":
            return (_finish_cut(encoded.shape()[0] + labels[0], options),)
        labels = _finish_labels(labels, spec)
        images = prepare_images(
            encoded,
            numbers,
            preprocess,
            fuse=_choose_fuse(options),
            device="mixed" if options.device == "gpu" else "cpu",
            hints=decoder_hints(spec.dataset, options),
            until=until,
        )
        if until is not None:
            return (_finish_cut(images[0, 0, 0], options),)
        others = [labels] if spec.repeat else [labels, weights]
        return (images, *(node.gpu() if options.device == "gpu" else node for node in others))

    make = dali.pipeline_def(define, enable_conditionals=preprocess.auto_augment is not None)
    with warnings.catch_warnings(record=preprocess.auto_augment is not None):  # auto_aug uses names that DALI warns of
        return make(
            batch_size=batch_size,
            num_threads=options.num_threads or max(1, len(os.sched_getaffinity(0)) // shard.num_shards),
            device_id=device_id,
            seed=spec.seed * shard.num_shards + shard.shard_id,
            prefetch_queue_depth=options.prefetch_queue_depth,
        )


def _finish_cut(node: DataNode, options: DaliOptions) -> DataNode:
    """Makes of one number for each image the output of a pipeline that is cut, float32 ()."""
    node = fn.reshape(fn.cast(node, dtype=types.FLOAT), shape=[])
    return node.gpu() if options.device == "gpu" else node


def _read(spec: InputSpec, options: DaliOptions, shard: Shard) -> tuple[DataNode, DataNode]:
    """Defines the reader of a shard; returns encoded images and labels."""
    dataset = spec.dataset
    features = fn.readers.tfrecord(
        path=list(dataset.files),
        index_path=list(dataset.index_files),
        features={
            dataset.image_key: dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
            dataset.label_key: dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, -1),
        },
        random_shuffle=spec.order == "buffer",
        initial_fill=spec.buffer_size,
        shard_id=shard.shard_id,
        num_shards=shard.num_shards,
        stick_to_shard=True,
        dont_use_mmap=options.read_mode != "mmap",
        use_o_direct=options.read_mode == "direct",
        read_ahead=options.read_ahead,
        name="reader",
    )
    return features[dataset.image_key], features[dataset.label_key]


def _finish_labels(labels: DataNode, spec: InputSpec) -> DataNode:
    """Makes of labels as stored, int64 (1,), those that come out."""
    labels = fn.reshape(labels, shape=[])
    if spec.dataset.label_offset:
        labels = fn.cast(labels - spec.dataset.label_offset, dtype=types.INT64)
    if spec.one_hot is not None:
        on_value, off_value = spec.label_values
        labels = fn.cast(labels, dtype=types.INT32)
        labels = fn.one_hot(labels, num_classes=spec.one_hot, on_value=on_value, off_value=off_value, dtype=types.FLOAT)
    return labels


def _choose_fuse(options: DaliOptions) -> Literal["off", "decode"]:
    if options.fuse == "auto":
        return "decode" if options.device == "cpu" else "off"
    return options.fuse


def define_serving_pipeline(preprocess: Preprocess, options: DaliOptions, *, batch_size: int) -> dali.Pipeline:
    """Defines a pipeline from encoded images, its input "encoded", to preprocessed ones; nothing is left to chance."""
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=options.num_threads or len(os.sched_getaffinity(0)),
        device_id=0 if options.device == "gpu" else None,
        prefetch_queue_depth=1,
        exec_dynamic=False,
    )
    with pipeline:
        images = prepare_images(
            fn.external_source(name="encoded", device="cpu", dtype=types.UINT8, ndim=1),
            types.Constant([0.0] * preprocess.num_random, dtype=types.FLOAT),
            preprocess,
            fuse="off",
            device="mixed" if options.device == "gpu" else "cpu",
            hints={},
        )
        pipeline.set_outputs(images)
    return pipeline


def decoder_hints(dataset: DatasetSpec, options: DaliOptions) -> dict[str, int | float]:
    """Returns the GPU decoder's further arguments: its hardware's share, and memory set aside for the largest image at once.

    How large that is is known from the manifest of files that were indexed at level "decode". On the CPU there are none.
    """
    if options.device == "cpu":
        return {}
    hints: dict[str, int | float] = {}
    if options.hw_decoder_load is not None:
        hints["hw_decoder_load"] = options.hw_decoder_load
    if options.memory_hints and dataset.largest_image is not None:
        hints["preallocate_height_hint"], hints["preallocate_width_hint"] = dataset.largest_image
    return hints


def count_gpus() -> int:
    """Returns how many GPUs DALI sees."""
    count: int = dali.backend.GetCUDADeviceCount()
    return count
