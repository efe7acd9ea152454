"""The DALI backend: one DALI pipeline per shard, on the CPU or on one GPU, as a tf.data dataset."""

import functools
import importlib
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import nvidia.dali as dali
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends.dali_images import check_supported, prepare_images
from dali_tf_input.backends.dali_reading import PACKED, define_inputs, pack_records, reads_by_itself
from dali_tf_input.backends.reading import Stream
from dali_tf_input.errors import InputError
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions
from dali_tf_input.spec.preprocess import Preprocess

_GUARDED = "experimental_distribute_dataset"


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

    It also works on another device than the one in `options`, but TensorFlow copies each batch.
    Fixed orders are read by tf.data, in the same order and with the same random numbers as
    `tf_data.build`, and passed to DALI; so is anything beyond an image and an integer. Otherwise
    DALI reads. `device_id` is the CUDA device that decodes; None for `options.device` "cpu". On a
    GPU, where nothing can be mapped, batches are tuples in the order of `spec.outputs`.

    Raises:
      InputError: DALI does not support `spec`, or refuses the pipeline.
    """
    spec, batch_size = stream.spec, stream.batch_size
    check_supported(spec.preprocess)
    outputs = []
    for name, (shape, dtype) in spec.outputs.items():
        if dtype == "string":
            raise InputError(
                f"DALI does not support strings, as `features` '{name}': use TfDataOptions(), or"
                " `record_ids` and dataset.read(id)."
            )
        outputs.append(((batch_size, *shape), tf.as_dtype(dtype)))
    pipeline = build_pipeline(stream, options, device_id)
    dataset = make_dataset(pipeline, outputs, stream, options)
    if not spec.is_structured or options.device == "gpu":
        return dataset
    return dataset.map(lambda *values: spec.arrange(values))


def make_dataset(
    pipeline: dali.Pipeline,
    outputs: list[tuple[tuple[int, ...], tf.DType]],
    stream: Stream,
    options: DaliOptions,
) -> tf.data.Dataset:
    """Returns the dataset of a pipeline whose `outputs` have these (shape, type)."""
    dali_tf = import_plugin()
    guard_strategies()
    packed, on_gpu = None, options.device == "gpu"
    if not reads_by_itself(stream.spec):
        with tf.device("CPU:0"):
            packed = pack_records(stream)
    try:
        # TensorFlow aborts the process (SIGABRT) when a pipeline cannot be built; DALI's Python
        # raises. DALIDataset takes a pipeline's description only.
        pipeline.build()
    except RuntimeError as error:
        raise InputError(f"DALI cannot build the pipeline: {error}") from error
    if on_gpu:
        check_memory(pipeline, packed)
    arguments = {  # all, as DALIDataset's own defaults would override the pipeline's
        "pipeline": pipeline,
        "batch_size": stream.batch_size,
        "num_threads": pipeline.num_threads,
        "device_id": pipeline.device_id,
        "prefetch_queue_depth": options.prefetch_queue_depth,
        "fail_on_device_mismatch": False,
        "output_shapes": tuple(shape for shape, _ in outputs),
        "output_dtypes": tuple(dtype for _, dtype in outputs),
    }
    if packed is None:
        dataset = dali_tf.DALIDataset(**arguments)
    else:
        if on_gpu:
            # DALI's documentation wants inputs on the dataset's device; not tried on a GPU yet.
            packed = packed.apply(tf.data.experimental.copy_to_device(tf.zeros(()).device))
        inputs = {"input_datasets": {PACKED: packed}}
        dataset = dali_tf.experimental.DALIDatasetWithInputs(**inputs, **arguments)
    dataset._pipeline_instance = None  # else it holds a second pipeline, and its memory
    if not stream.spec.repeat:
        # It says that it is infinite. Keras would ask for one batch too many and count it.
        per_epoch = stream.steps.per_epoch
        if not on_gpu:
            return dataset.apply(tf.data.experimental.assert_cardinality(per_epoch))
        # No transformation can follow on a GPU.
        dataset.cardinality = lambda: tf.constant(per_epoch, tf.int64)
    return dataset


def check_memory(pipeline: dali.Pipeline, packed: tf.data.Dataset | None) -> None:
    """Runs a built pipeline once, as TensorFlow would abort where memory does not suffice.

    Other errors are left to the iterator, which names the record. `packed` is what it is fed.
    """
    try:
        if packed is not None:
            batch = list(packed.take(pipeline.max_batch_size).as_numpy_iterator())
            for _ in range(pipeline.input_feed_count(PACKED)):
                pipeline.feed_input(PACKED, batch)
        pipeline.run()
    except RuntimeError as error:
        if re.search("memory|alloc", str(error)):
            text = "See nvidia-smi: who uses it? A smaller batch needs less"
            raise InputError(f"The GPU's memory does not suffice: {error}. {text}.") from error


def guard_strategies() -> None:
    """Makes strategies refuse DALI's datasets, also those that are mapped, batched and so on.

    They would read them through TensorFlow's MultiDeviceIterator, which frees a DALIDataset while a
    thread still reads it: the process dies (SIGSEGV) when an iterator is dropped. No method of a
    dataset is called only on that path, so the strategies' methods do the check.
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
                " load(spec, options, strategy=strategy, batch_size=...)."
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


def build_pipeline(stream: Stream, options: DaliOptions, device_id: int | None) -> dali.Pipeline:
    """Defines the pipeline of one shard, not yet built, whose outputs are what `build` returns."""
    spec = stream.spec

    def define() -> tuple[DataNode, ...]:
        values = define_inputs(stream, options)
        values["image"] = prepare_images(
            values["image"],
            values["uniforms"],
            spec.preprocess,
            decode="none" if spec.records.stores_pixels else options.resolved_decode,
            device=decoder_device(options),
            hints=decoder_hints(spec, options),
        )
        nodes = (values[name] for name in spec.outputs)
        return tuple(node.gpu() if options.device == "gpu" else node for node in nodes)

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
    if options.resolved_decode == "full":  # as libjpeg-turbo does; nvJPEG's regions cannot yet
        hints["jpeg_fancy_upsampling"] = True
    if options.memory_hints and (size := spec.records.largest_image):
        hints["preallocate_height_hint"], hints["preallocate_width_hint"] = size
    return hints


def count_gpus() -> int:
    """Returns how many GPUs DALI sees."""
    return int(dali.backend.GetCUDADeviceCount())
