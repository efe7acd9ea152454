"""The DALI backend: one DALI pipeline per shard, on the CPU or on one GPU, as a tf.data dataset."""

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import nvidia.dali as dali
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali import tfrecord as dali_tfrecord
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends.dali_images import check_supported, prepare_images
from dali_tf_input.backends.reading import (
    Stream,
    describe_key,
    draw_uniforms,
    hold_indexes,
    parse_record,
    read_fixed_order,
    weight_of,
)
from dali_tf_input.errors import InputError
from dali_tf_input.labels import ClassLabel
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.preprocess import Preprocess
from dali_tf_input.spec import InputSpec

_GUARDED = "experimental_distribute_dataset"
_PACKED = "packed"  # the input of a pipeline that tf.data reads for


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
            " installed TensorFlow and DALI: pip install --no-build-isolation --no-cache-dir"
            " nvidia-dali-tf-plugin-cuda120 (needs g++ and CUDA's headers, see docs/install.md);"
            " or `make install` in a clone. Or use TfDataOptions()."
        ) from error


def build(stream: Stream, options: DaliOptions, device_id: int | None) -> tf.data.Dataset:
    """Builds the dataset of one shard, placed on the current `tf.device`.

    It works on another device than that of `options` too, but then TensorFlow copies each batch.

    Args:
      stream: what it serves, of a `spec`.
      options: how it is made.
      device_id: the CUDA device that decodes; None for `options.device` "cpu".

    Returns:
      What `tf_data.build` says. Fixed orders are read by tf.data, in the same order and with the
      same random numbers, and passed to DALI; otherwise DALI reads.

    Raises:
      InputError: DALI does not support `spec`, or refuses the pipeline.
    """
    spec, batch_size = stream.spec, stream.batch_size
    check_supported(spec.preprocess)
    image_type = tf.as_dtype(spec.preprocess.dtype)
    outputs = [
        ((batch_size, *spec.preprocess.image_shape), image_type),
        ((batch_size, *spec.label.shape), tf.as_dtype(spec.label.dtype)),
    ]
    if not spec.repeat:
        outputs.append(((batch_size,), tf.float32))
    make_pipeline = functools.partial(build_pipeline, stream, options, device_id)
    return make_dataset(make_pipeline, outputs, stream, options, device_id)


def make_dataset(
    make_pipeline: Callable[[], dali.Pipeline],
    outputs: list[tuple[tuple[int, ...], tf.DType]],
    stream: Stream,
    options: DaliOptions,
    device_id: int | None,
) -> tf.data.Dataset:
    """Returns the dataset of a pipeline whose `outputs` have these (shape, type)."""
    dali_tf = import_plugin()
    guard_strategies()
    pipeline = make_pipeline()
    try:
        # TensorFlow aborts the process (SIGABRT) when a pipeline cannot be built; DALI's Python
        # raises. So one is built here and dropped: DALIDataset takes its description only.
        make_pipeline().build()
    except RuntimeError as error:
        raise InputError(f"DALI cannot build the pipeline: {error}") from error
    arguments = {  # all, as DALIDataset's own defaults would override the pipeline's
        "pipeline": pipeline,
        "batch_size": stream.batch_size,
        "num_threads": pipeline.num_threads,
        "device_id": device_id,
        "prefetch_queue_depth": options.prefetch_queue_depth,
        "fail_on_device_mismatch": False,
        "output_shapes": tuple(shape for shape, _ in outputs),
        "output_dtypes": tuple(dtype for _, dtype in outputs),
    }
    if not stream.spec.has_fixed_order:
        return dali_tf.DALIDataset(**arguments)
    with tf.device("CPU:0"):
        packed = _pack_records(stream)
    if options.device == "gpu":
        # DALI's documentation wants inputs on the dataset's own device; not tried on a GPU yet.
        packed = packed.apply(tf.data.experimental.copy_to_device(tf.zeros(()).device))
    dataset = dali_tf.experimental.DALIDatasetWithInputs(
        input_datasets={_PACKED: packed}, **arguments
    )
    if not stream.spec.repeat:
        # It says that it is infinite. Keras would ask for one batch too many and count it.
        per_epoch = stream.steps.per_epoch
        if options.device == "cpu":
            return dataset.apply(tf.data.experimental.assert_cardinality(per_epoch))
        # No transformation can follow on a GPU.
        dataset.cardinality = lambda: tf.constant(per_epoch, tf.int64)
    return dataset


def guard_strategies() -> None:
    """Makes strategies refuse DALI's datasets, also those that are mapped, batched and so on.

    They would read them through TensorFlow's MultiDeviceIterator, which frees a DALIDataset while a
    thread still reads it: the process dies (SIGSEGV) when an iterator is dropped. No method of a
    dataset is called on that way alone, so it is the strategies' methods that check.
    """
    owner = next(one for one in tf.distribute.Strategy.__mro__ if _GUARDED in vars(one))
    distribute, from_function = getattr(owner, _GUARDED), owner.distribute_datasets_from_function
    if hasattr(distribute, "refuses_dali"):
        return

    def refuse(dataset: Any) -> Any:
        if _holds_dali(dataset):
            raise InputError(
                "No strategy may distribute a dataset of DALI's, as Keras does with a model that"
                " was made under a strategy's scope: TensorFlow would crash. Pass the strategy:"
                " distribute(spec, options, strategy=strategy, global_batch_size=...)."
            )
        return dataset

    @functools.wraps(distribute)
    def distribute_dataset(self: Any, dataset: Any, options: Any = None) -> Any:
        by_default = type(self).__name__.startswith("_Default")  # it leaves the dataset as it is
        return distribute(self, dataset if by_default else refuse(dataset), options)

    @functools.wraps(from_function)
    def distribute_function(self: Any, dataset_fn: Any, options: Any = None) -> Any:
        fetches = options is None or options.experimental_fetch_to_device
        checked = (lambda context: refuse(dataset_fn(context))) if fetches else dataset_fn
        return from_function(self, checked, options)

    distribute_dataset.refuses_dali = True  # type: ignore[attr-defined]
    setattr(owner, _GUARDED, distribute_dataset)
    owner.distribute_datasets_from_function = distribute_function


def _holds_dali(dataset: Any) -> bool:
    kinds = type(dataset).__mro__
    if any("nvidia.dali" in str(kind.__module__) for kind in kinds):
        return True
    return isinstance(dataset, tf.data.Dataset) and any(map(_holds_dali, dataset._inputs()))


def _pack_records(stream: Stream) -> tf.data.Dataset:
    """Returns a dataset of one uint8 vector per image: DALI's dataset takes one tensor per input.

    The encoded image, then label (8 bytes), sample weight (4 bytes), random numbers (4 bytes each).
    Decoders stop at the end of an image; slicing it out would copy it, byte by byte in DALI's
    slice.
    """
    spec = stream.spec

    @tf.autograph.experimental.do_not_convert
    def pack(key: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
        encoded, label = parse_record(record, spec.dataset)
        epoch, slot = describe_key(key, stream)
        uniforms, _ = draw_uniforms(spec, epoch, slot)
        weight = tf.ones(()) if spec.repeat else weight_of(slot, stream.steps)
        tail = [tf.bitcast(label, tf.uint8), tf.bitcast(weight, tf.uint8)]
        tail.append(tf.reshape(tf.bitcast(uniforms, tf.uint8), [-1]))
        return tf.concat([tf.io.decode_raw(encoded, tf.uint8), *tail], 0)

    records = read_fixed_order(stream, TfDataOptions())
    packed = records.map(pack, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return packed.prefetch(stream.batch_size)


def define_inputs(
    stream: Stream, options: DaliOptions
) -> tuple[DataNode, DataNode, DataNode | None, DataNode]:
    """Defines what a pipeline reads: encoded images, labels as stored, weights, random numbers."""
    if stream.spec.has_fixed_order:
        return _unpack(stream.spec)
    encoded, labels = _read(stream, options)
    shape = [stream.spec.preprocess.num_uniforms]
    return encoded, labels, None, fn.random.uniform(range=[0.0, 1.0], shape=shape)


def _unpack(spec: InputSpec) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """Defines the input that `_pack_records` packs."""
    packed = fn.external_source(name=_PACKED, device="cpu", dtype=types.UINT8, ndim=1, batch=False)
    size = packed.shape()[0]
    start = size - (12 + 4 * spec.preprocess.num_uniforms)
    labels = fn.reinterpret(packed[start : start + 8], dtype=types.INT64)
    weights = fn.reinterpret(packed[start + 8 : start + 12], dtype=types.FLOAT)
    uniforms = fn.reinterpret(packed[start + 12 : size], dtype=types.FLOAT)
    return packed, labels, fn.reshape(weights, shape=[]), uniforms


def _read(stream: Stream, options: DaliOptions) -> tuple[DataNode, DataNode]:
    """Defines the reader of a shard; returns encoded images and labels."""
    spec, shard, dataset = stream.spec, stream.shard, stream.spec.dataset
    string, int64 = dali_tfrecord.string, dali_tfrecord.int64
    features = fn.readers.tfrecord(
        path=list(dataset.files),
        index_path=hold_indexes(dataset),
        features={
            dataset.image_key: dali_tfrecord.FixedLenFeature((), string, ""),
            dataset.label_key: dali_tfrecord.FixedLenFeature([1], int64, -1),
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


def build_pipeline(stream: Stream, options: DaliOptions, device_id: int | None) -> dali.Pipeline:
    """Defines the pipeline of one shard, not yet built, whose outputs are what `build` returns."""
    spec = stream.spec

    def define() -> tuple[DataNode, ...]:
        encoded, labels, weights, uniforms = define_inputs(stream, options)
        images = prepare_images(
            encoded,
            uniforms,
            spec.preprocess,
            decode=options.resolved_decode,
            device=decoder_device(options),
            hints=decoder_hints(spec, options),
        )
        others = [prepare_labels(labels, spec.label)] + ([] if spec.repeat else [weights])
        return (images, *(node.gpu() if options.device == "gpu" else node for node in others))

    conditionals = spec.preprocess.auto_augment is not None
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
    with warnings.catch_warnings(record=conditionals):  # auto_aug uses names that DALI warns about
        return make(
            batch_size=stream.batch_size,
            num_threads=options.num_threads or max(1, cores // shard.num_shards),
            device_id=device_id,
            seed=stream.spec.seed * shard.num_shards + shard.shard_id,
            prefetch_queue_depth=options.prefetch_queue_depth,
        )


def prepare_labels(labels: DataNode, kind: ClassLabel) -> DataNode:
    """Makes of labels as stored, int64 (1,), what comes out."""
    labels = fn.reshape(labels, shape=[])
    if kind.offset:
        labels = fn.cast(labels - kind.offset, dtype=types.INT64)
    if kind.one_hot is not None:
        on_value, off_value = kind.one_hot_values
        labels = fn.one_hot(
            fn.cast(labels, dtype=types.INT32),
            num_classes=kind.one_hot,
            on_value=on_value,
            off_value=off_value,
            dtype=types.FLOAT,
        )
    return labels


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
    """Returns further arguments of the GPU's decoder; none on the CPU.

    Its hardware's share, and memory for the largest image, whose size the manifest has if the files
    were indexed at level "decode".
    """
    if options.device == "cpu":
        return {}
    load = options.hw_decoder_load
    hints: dict[str, int | float] = {} if load is None else {"hw_decoder_load": load}
    if options.memory_hints and (size := spec.dataset.largest_image):
        hints["preallocate_height_hint"], hints["preallocate_width_hint"] = size
    return hints


def count_gpus() -> int:
    """Returns how many GPUs DALI sees."""
    return int(dali.backend.GetCUDADeviceCount())
