"""The DALI backend: one DALI pipeline per shard, on the CPU or on one GPU, as a tf.data dataset."""

import os
import warnings
from typing import Literal

import nvidia.dali as dali
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali import tfrecord as dali_tfrecord
from nvidia.dali.data_node import DataNode

from dali_tf_input.dali_images import prepare_images
from dali_tf_input.options import DaliOptions
from dali_tf_input.preprocess import Preprocess
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.tfrecord import InputError


def build(spec: InputSpec, options: DaliOptions, *, batch_size: int, shard: Shard, device_id: int | None) -> tf.data.Dataset:
    """Builds the dataset of one shard, placed on the current `tf.device`.

    On another device than that of `options` it works, but TensorFlow copies each batch.

    Args:
      spec: what comes out.
      options: how it is made.
      batch_size: images in each batch; the shard holds at least as many records.
      shard: which records are read.
      device_id: the CUDA device that decodes; None for `options.device` "cpu".

    Returns:
      A dataset without end of (image, label): image (batch_size, *spec.preprocess.image_shape), label int64
      (batch_size,) or one-hot, both on the current `tf.device`. Each pass over the shard serves every record of it once; a batch
      may hold the end of one and the start of the next.

    Raises:
      InputError: DALI refuses the pipeline.
    """
    pipeline = build_pipeline(spec, options, batch_size=batch_size, shard=shard, device_id=device_id)
    try:
        # TensorFlow ends the process (SIGABRT) when a pipeline cannot be set up; DALI's Python raises. So it is set up here
        # once, and the set-up is dropped again: DALIDataset takes the pipeline's description only and makes its own.
        build_pipeline(spec, options, batch_size=batch_size, shard=shard, device_id=device_id).build()
    except RuntimeError as error:
        raise InputError(f"DALI cannot set up the pipeline: {error}") from error
    return dali_tf.DALIDataset(
        pipeline=pipeline,
        batch_size=batch_size,  # DALIDataset's own defaults would override the pipeline's: all of them are passed
        num_threads=pipeline.num_threads,
        device_id=device_id,
        prefetch_queue_depth=options.prefetch_queue_depth,
        fail_on_device_mismatch=False,
        output_shapes=((batch_size, *spec.preprocess.image_shape), (batch_size, *spec.label_shape)),
        output_dtypes=(tf.as_dtype(spec.preprocess.dtype), tf.int64 if spec.one_hot is None else tf.float32),
    )


def build_pipeline(
    spec: InputSpec, options: DaliOptions, *, batch_size: int, shard: Shard, device_id: int | None
) -> dali.Pipeline:
    """Defines the DALI pipeline of one shard, in the order the data travels; the arguments are those of `build`.

    Returns:
      A pipeline, not yet built, whose outputs are the images and labels that `build` returns.
    """
    preprocess = spec.preprocess

    def define() -> tuple[DataNode, DataNode]:
        encoded, labels = _read(spec, options, shard)
        numbers = fn.random.uniform(range=[0.0, 1.0], shape=[preprocess.num_random])
        images = prepare_images(
            encoded,
            numbers,
            preprocess,
            fuse=_choose_fuse(options),
            device="mixed" if options.device == "gpu" else "cpu",
            hints=decoder_memory_hints(spec.dataset, options),
        )
        return images, labels

    make = dali.pipeline_def(define, enable_conditionals=preprocess.auto_augment is not None)
    with warnings.catch_warnings(record=preprocess.auto_augment is not None):  # auto_aug uses names that DALI warns of
        return make(
            batch_size=batch_size,
            num_threads=options.num_threads or max(1, len(os.sched_getaffinity(0)) // shard.num_shards),
            device_id=device_id,
            seed=spec.seed * shard.num_shards + shard.shard_id,
            prefetch_queue_depth=options.prefetch_queue_depth,
        )


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
        name="reader",
    )
    labels = fn.reshape(features[dataset.label_key], shape=[])
    if dataset.label_offset:
        labels = fn.cast(labels - dataset.label_offset, dtype=types.INT64)
    if spec.one_hot is not None:
        on_value, off_value = spec.label_values
        labels = fn.cast(labels, dtype=types.INT32)
        labels = fn.one_hot(labels, num_classes=spec.one_hot, on_value=on_value, off_value=off_value, dtype=types.FLOAT)
    return features[dataset.image_key], labels.gpu() if options.device == "gpu" else labels


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


def decoder_memory_hints(dataset: DatasetSpec, options: DaliOptions) -> dict[str, int]:
    """Returns the GPU decoder's arguments that set aside memory for the largest image at once, not when it comes.

    Known from the manifest of files that were indexed at level "decode"; none otherwise, and none on the CPU.
    """
    if options.device == "cpu" or dataset.largest_image is None:
        return {}
    height, width = dataset.largest_image
    return {"preallocate_height_hint": height, "preallocate_width_hint": width}


def count_gpus() -> int:
    """Returns how many GPUs DALI sees."""
    count: int = dali.backend.GetCUDADeviceCount()
    return count
