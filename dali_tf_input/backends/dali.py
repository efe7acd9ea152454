"""The DALI backend: one DALI pipeline per shard, on the CPU or on one GPU, as a tf.data dataset."""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import nvidia.dali as dali
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends import tf_native
from dali_tf_input.backends.dali_guard import guard_strategies
from dali_tf_input.backends.dali_images import (
    check_supported,
    decode_whole,
    mix_images,
    prepare_images,
)
from dali_tf_input.backends.dali_operator import load_operator
from dali_tf_input.backends.dali_reader import can_use_dali_reader
from dali_tf_input.backends.dali_reading import PACKED, define_inputs, pack_batches
from dali_tf_input.backends.stream import Stream, with_cardinality
from dali_tf_input.errors import InputError
from dali_tf_input.records.installing import plugin_command
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions
from dali_tf_input.spec.plan import StepCursor
from dali_tf_input.spec.preprocess import Preprocess

_AHEAD = 2  # batches that are ready on the CPU, and as many on the GPU


def import_plugin() -> Any:
    """Imports DALI's TensorFlow plugin, which only datasets need.

    Raises:
      InputError: it is missing, or was compiled for another TensorFlow or DALI.
    """
    try:
        return importlib.import_module("nvidia.dali.plugin.tf")
    except (ImportError, OSError) as error:
        raise InputError(
            f"DaliOptions needs DALI's TensorFlow plugin: {error}. It is compiled against the"
            f" installed TensorFlow and DALI: {plugin_command()} (needs g++ and CUDA's headers, see"
            " docs/install.md); or `make install` in a clone. Or use TfDataOptions()."
        ) from error


def check_spec(spec: InputSpec, options: DaliOptions) -> None:
    """Raises InputError for a spec that DALI does not support, or what it needs is not compiled."""
    if not can_use_dali_reader(spec, options):
        tf_native.load_ops()
        load_operator()
    for preprocess in spec.image_views.values():
        check_supported(preprocess)
    if spec.transform:
        raise InputError(
            "DALI does not support `transform`: make it a layer of the model, or use"
            " TfDataOptions()."
        )
    for name, (_, dtype) in spec.outputs.items():
        if dtype == "string":
            raise InputError(
                f"DALI does not support strings, as `features` '{name}': use TfDataOptions(), or"
                " `record_ids` and records.read(id)."
            )


def build(stream: Stream, options: DaliOptions, device_id: int | None) -> tf.data.Dataset:
    """Builds the dataset of one shard on the current `tf.device`.

    tf.data reads and packs the records, in the same order and with the same random numbers as
    `tf_data.build`, and passes them to DALI. The exception is order "buffer" on a GPU with images
    and integer labels, which DALI's own reader reads. `device_id` is the CUDA device that decodes;
    None if `options.device` is "cpu".

    A dataset for a GPU lies there if it is endless, so that its batches never come back to the CPU.
    There it cannot be mapped, and says that it never ends. So the others lie on the CPU: those
    whose elements are dictionaries, and those that end, as Keras would believe them. For training,
    their batches are copied to the GPU ahead of time.

    Raises:
      InputError: DALI rejects the pipeline.
    """
    spec = stream.spec
    uses_dali_reader = can_use_dali_reader(spec, options)
    size = stream.shard_batch_size if spec.repeat else None  # the last batch may be partial
    outputs = [((size, *shape), tf.as_dtype(dtype)) for shape, dtype in spec.outputs.values()]
    define = functools.partial(
        build_pipeline, stream, options, device_id, uses_dali_reader=uses_dali_reader
    )
    is_on_gpu = options.device == "gpu" and stream.endless and not spec.is_structured
    dataset = make_dataset(
        define, outputs, stream, options, uses_dali_reader=uses_dali_reader, is_on_gpu=is_on_gpu
    )
    if is_on_gpu or uses_dali_reader:
        return dataset
    with _outside_the_gpu(options):
        if spec.is_structured:
            dataset = dataset.map(
                lambda *values: spec.arrange(dict(zip(spec.outputs, values, strict=True)))
            )
        dataset = with_cardinality(dataset, stream)
        if options.device == "cpu" or not spec.repeat:
            return dataset
        dataset = dataset.prefetch(_AHEAD)
    return dataset.apply(tf.data.experimental.prefetch_to_device(tf.zeros(()).device, _AHEAD))


def _outside_the_gpu(options: DaliOptions) -> contextlib.AbstractContextManager[None]:
    """Returns the device scope of a dataset that is on the CPU, also if its pipeline is not."""
    return tf.device("CPU:0") if options.device == "gpu" else contextlib.nullcontext()


def make_dataset(
    define: Callable[[], dali.Pipeline],
    outputs: Sequence[tuple[tuple[int | None, ...], tf.DType]],
    stream: Stream,
    options: DaliOptions,
    *,
    uses_dali_reader: bool,
    is_on_gpu: bool = False,
) -> tf.data.Dataset:
    """Returns the dataset of a pipeline; `outputs` has the (shape, type) of each output.

    `define` returns an unbuilt pipeline. It uses DALI's own reader, and lies on the current
    `tf.device`; or tf.data feeds it, and it lies there if `is_on_gpu`, otherwise on the CPU.
    """
    dali_tf = import_plugin()
    guard_strategies((dali_tf.DALIDataset, dali_tf.experimental.DALIDatasetWithInputs))
    packed = trial = None
    runs = options.device == "gpu"
    # What a dataset on the GPU is fed crosses the bus twice: it should be small.
    by_location = is_on_gpu and stream.spec.has_fixed_order and not stream.spec.records.is_remote
    with tf.device("CPU:0"):
        if not uses_dali_reader:
            packed = pack_batches(stream, by_location=by_location)
        if not uses_dali_reader and runs:  # an iterator takes an epoch: the trial's takes another
            cursor = StepCursor(stream.cursor.step)
            tried = dataclasses.replace(stream, cursor=cursor)
            trial = pack_batches(tried, by_location=by_location)
    pipeline = define()
    check_pipeline(pipeline, trial, runs=runs)
    if runs:  # it keeps the memory that it ran in, and the dataset needs only its definition
        pipeline = define()
    arguments = {  # all, as DALIDataset's own defaults would override the pipeline's
        "pipeline": pipeline,
        "batch_size": stream.shard_batch_size,
        "num_threads": pipeline.num_threads,
        "device_id": pipeline.device_id,
        "prefetch_queue_depth": options.prefetch_queue_depth,
        "fail_on_device_mismatch": False,
        "output_shapes": tuple(shape for shape, _ in outputs),
        "output_dtypes": tuple(dtype for _, dtype in outputs),
    }
    if packed is None:
        return dali_tf.DALIDataset(**arguments)
    if is_on_gpu:
        packed = packed.apply(tf.data.experimental.copy_to_device(tf.zeros(()).device))
    inputs = {"input_datasets": {PACKED: dali_tf.experimental.Input(packed, batch=True)}}
    with contextlib.nullcontext() if is_on_gpu else _outside_the_gpu(options):
        return dali_tf.experimental.DALIDatasetWithInputs(**inputs, **arguments)


def check_pipeline(pipeline: dali.Pipeline, packed: tf.data.Dataset | None, *, runs: bool) -> None:
    """Builds a pipeline, and optionally runs it once: TensorFlow would abort on its errors.

    Args:
      pipeline: an unbuilt pipeline.
      packed: the dataset that feeds it; None if it uses DALI's own reader.
      runs: whether to run it once.

    Raises:
      InputError: DALI rejects the pipeline, or the GPU does not have enough memory. Errors in
        records are left to the iterator.
    """
    try:
        pipeline.build()
    except RuntimeError as error:
        raise InputError(f"DALI cannot build the pipeline: {error}") from error
    if not runs:
        return
    try:
        if packed is not None:
            for batch in packed.take(1).as_numpy_iterator():
                for _ in range(pipeline.input_feed_count(PACKED)):
                    pipeline.feed_input(PACKED, batch)
        pipeline.run()
    except tf.errors.OpError:
        pass
    except RuntimeError as error:
        if re.search("memory|alloc", str(error)):
            text = "See nvidia-smi: who uses it? A smaller batch needs less"
            raise InputError(f"The GPU's memory does not suffice: {error}. {text}.") from error


def build_pipeline(
    stream: Stream, options: DaliOptions, device_id: int | None, *, uses_dali_reader: bool
) -> dali.Pipeline:
    """Defines the pipeline of one shard, with the outputs of `build`, without building it."""
    spec = stream.spec

    def define() -> tuple[DataNode, ...]:
        values = define_inputs(stream, options, uses_dali_reader=uses_dali_reader)
        encoded, decoded = values["image"], None
        decode = "none" if spec.records.stores_pixels else options.resolved_decode
        device, hints = decoder_device(options), decoder_hints(spec, options)
        decoding: dict[str, Any] = {"device": device, "hints": hints}
        if spec.views and decode != "none":
            decode, orientation = "full", spec.preprocess.apply_orientation
            decoded = decode_whole(encoded, orientation=orientation, **decoding)
        for name, preprocess in spec.image_views.items():
            values[name] = prepare_images(
                encoded,
                values[f"uniforms of {name}"],
                preprocess,
                rows=values.get(f"rows of {name}"),
                decoded=decoded,
                decode=decode,
                **decoding,
            )
        if spec.mix:
            values |= mix_images(values, spec.preprocess)
        nodes = (values[name] for name in spec.outputs)
        return tuple(node.gpu() if options.device == "gpu" else node for node in nodes)

    conditionals = any(preprocess.augment for preprocess in spec.image_views.values())
    return make_pipeline(define, stream, options, device_id, conditionals=conditionals)


def make_pipeline(
    define: Callable[[], tuple[DataNode, ...]],
    stream: Stream,
    options: DaliOptions,
    device_id: int | None,
    *,
    conditionals: bool = False,
) -> dali.Pipeline:
    """Makes a pipeline, not yet built, of the outputs that `define` defines."""
    shard, cores = stream.shard, len(os.sched_getaffinity(0))
    make = dali.pipeline_def(define, enable_conditionals=conditionals)
    return make(
        batch_size=stream.shard_batch_size,
        num_threads=options.num_threads or max(1, cores // shard.num_shards),
        device_id=device_id,
        seed=stream.spec.seed * shard.num_shards + shard.shard_id,  # of DALI's own reader
        prefetch_queue_depth=options.prefetch_queue_depth,
    )


def define_serving_pipeline(
    preprocess: Preprocess, options: DaliOptions, *, batch_size: int
) -> dali.Pipeline:
    """Defines a pipeline from encoded images, its input "encoded", to preprocessed ones."""
    check_supported(preprocess)
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
            types.Constant([0.0] * preprocess.num_uniforms, dtype=types.FLOAT),
            preprocess,
            decode="full",
            device=decoder_device(options),
            hints={},
        )
        pipeline.set_outputs(images)
    return pipeline


def decoder_device(options: DaliOptions) -> str:
    """Returns the decoder's device: "mixed" decodes on the GPU."""
    return "mixed" if options.device == "gpu" else "cpu"


def decoder_hints(spec: InputSpec, options: DaliOptions) -> dict[str, int | float]:
    """Returns additional arguments for the GPU's decoder; none on the CPU.

    They set the load of the hardware decoder and preallocate memory for the largest image. Its size
    is in the manifest only if the files were indexed at level "decode".
    """
    if options.device == "cpu":
        return {}
    load = options.hw_decoder_load
    hints: dict[str, int | float] = {} if load is None else {"hw_decoder_load": load}
    if options.resolved_decode == "full":  # as libjpeg-turbo does; nvJPEG's regions cannot yet
        hints["jpeg_fancy_upsampling"] = options.jpeg_fancy_upsampling
    if options.memory_hints and (size := spec.records.largest_image):
        hints["preallocate_height_hint"], hints["preallocate_width_hint"] = size
    return hints


def count_gpus() -> int:
    """Returns how many GPUs DALI sees."""
    return int(dali.backend.GetCUDADeviceCount())
