"""Construction of tf.data datasets from a spec, with the backend that the options select."""

import importlib
import os
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dali_tf_input.backends import tf_data, tf_images
from dali_tf_input.backends.remote import fetch_all, localize
from dali_tf_input.backends.stream import MAX_EPOCHS, Stream
from dali_tf_input.errors import BatchSize, InputError, check, checked
from dali_tf_input.records.installing import DALI, pip_install
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options, TfDataOptions
from dali_tf_input.spec.plan import Shard, StepCursor, check_step


@checked
def make_dataset(
    spec: InputSpec,
    options: Options | None = None,
    *,
    batch_size: BatchSize,
    shard: Shard = Shard(0, 1),
    device_id: int | None = None,
    start_step: int = 0,
    endless: bool = False,
) -> tf.data.Dataset:
    """Makes the plain dataset of one shard, for a custom loop, several hosts, or JAX.

    Prefer `load`, which feeds all replicas of a strategy, where it applies.

    Examples:
      >>> spec = InputSpec.for_training("records/train-*", 224)
      >>> dataset = make_dataset(spec, batch_size=4, shard=Shard(0, 2))  # the first of two hosts
      >>> for epoch in range(3):
      ...     for images, labels in dataset:  # the next epoch of this shard
      ...         pass

    Args:
      spec: the batches to produce, the same on both backends.
      options: the backend's options; their type selects the backend. None selects DALI on a GPU if
        TensorFlow sees one, else tf.data.
      batch_size: images in each batch of this shard. Training needs at least `batch_size *
        shard.num_shards` records.
      shard: which records are read.
      device_id: the CUDA device of a GPU pipeline, in [0, number of GPUs); None is 0. Only with
        ``DaliOptions(device="gpu")``.
      start_step: the step at which the first iterator starts, at least 0; each step has `batch_size
        * shard.num_shards` records. With order "buffer" it must be the first step of an epoch.
      endless: whether an iterator continues into the next epoch, without restarting the pipeline.

    Returns:
      A dataset of (image, label): image `spec.preprocess.dtype` (batch_size,
      *spec.preprocess.image_shape), label `spec.label.dtype` (batch_size, *spec.label.shape);
      `spec.arrange` describes the elements if there are more outputs.

      The dataset is one epoch long and contains no record twice. Records that do not fill a step
      across all shards are dropped. Each new iterator serves the next epoch. `repeat()` never ends
      and starts a pipeline for each epoch; `endless` starts only one. With `spec.repeat` False
      every iterator serves the same epoch, each record once, and the last batch may be partial.

      On a GPU, DALI's dataset must be created and iterated under the `tf.device` of its GPU: its
      batches are there. With `endless` it lies there, too, and cannot be transformed (`map`,
      `take`, ...), unless its elements are dictionaries. So it does with order "buffer", integer
      labels, and neither augmentations nor further outputs, which DALI's own reader reads: then it
      never ends, and records that do not fill a batch start the next epoch. Otherwise batches cross
      the CPU, the cardinality is unknown, and transformations run on the CPU. With `spec.repeat`
      False the batches are on the CPU, and the cardinality is known. DALI's datasets cannot be
      distributed by a strategy (or by Keras's `fit` under one), because TensorFlow would
      crash: this raises InputError.

    Raises:
      InputError: an argument is out of range, there are not enough records for a step, the
        requested GPU does not exist, the backend does not support `spec`, or the call is inside a
        tf.function. All are raised before TensorFlow gets a pipeline.
    """
    stream = Stream(
        spec=spec,
        shard_batch_size=batch_size,
        shard=shard,
        cursor=StepCursor(start_step),
        endless=endless,
    )
    return build_dataset(stream, options or choose_options(), device_id)


def build_dataset(stream: Stream, options: Options, device_id: int | None) -> tf.data.Dataset:
    """Makes the dataset of one shard, see `make_dataset`."""
    spec, num_shards = stream.spec, stream.shard.num_shards
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    if tf.inside_function():
        raise InputError(
            "A dataset cannot be made inside a tf.function: make it before, and pass it in."
        )
    if device_id is not None and not on_gpu:
        raise InputError(f"`device_id` is for DaliOptions(device='gpu') only, got {device_id}.")
    check_input(spec, options, device_id=device_id or 0)
    if spec.repeat:
        num_records = spec.records_per_epoch
        check_step(stream.shard_batch_size, num_shards=num_shards, num_records=num_records)
    if spec.records.is_remote:
        local = localize if spec.has_fixed_order else fetch_all
        stream = replace(stream, spec=replace(spec, records=local(spec.records)))
    _check_cursor(stream)
    if not isinstance(options, DaliOptions):
        return tf_data.build(stream, options)
    return import_dali().build(stream, options, (device_id or 0) if on_gpu else None)


def check_input(spec: InputSpec, options: Options, *, device_id: int = 0) -> None:
    """Checks what can be checked before there is a pipeline.

    Raises:
      InputError: a file changed, the backend does not support `spec` or is not installed, or there
        is no such GPU.
    """
    change = spec.records.find_change()
    if change:
        raise InputError(f"{change}. Make the spec again: Records.from_files(...)")
    if not isinstance(options, DaliOptions):
        for preprocess in spec.image_views.values():
            tf_images.check_supported(preprocess)
        return
    dali = import_dali()
    dali.import_plugin()
    dali.check_spec(spec, options)
    if options.device == "gpu":
        check_gpu(device_id)


def import_dali() -> Any:
    """Imports the DALI backend, which need not be installed to use tf.data.

    Raises:
      InputError: DALI or its TensorFlow plugin is missing or broken.
    """
    try:
        return importlib.import_module("dali_tf_input.backends.dali")
    except ImportError as error:
        raise InputError(
            f"DaliOptions needs NVIDIA DALI: {error}. Install it: {pip_install(DALI)}, then the"
            " plugin (docs/install.md). Or use TfDataOptions()."
        ) from error


def choose_options() -> Options:
    """Chooses the backend for this machine: DALI on the GPU if TensorFlow sees one, else tf.data.

    On the CPU tf.data is the faster of the two (docs/speed.md).
    """
    if tf.config.list_physical_devices("GPU"):
        return DaliOptions(device="gpu")
    return TfDataOptions()


def check_gpu(device_id: int) -> None:
    """Checks that TensorFlow and DALI see CUDA device `device_id`, and that DALI gets memory there.

    Raises:
      InputError: `device_id` is negative, TensorFlow or DALI does not see it, or TensorFlow's
        memory growth cannot be turned on.
    """
    check(device_id >= 0, "device_id", "at least 0", device_id)
    gpus = tf.config.list_physical_devices("GPU")
    if device_id >= len(gpus):
        raise InputError(
            f"DaliOptions(device='gpu') needs GPU {device_id}, but TensorFlow sees {len(gpus)}"
            " GPUs. Use DaliOptions(device='cpu') or TfDataOptions(); or, if there is a GPU,"
            " install TensorFlow with its CUDA libraries: pip install 'tensorflow[and-cuda]'"
        )
    dali_gpus = import_dali().count_gpus()
    if device_id >= dali_gpus:
        raise InputError(
            f"DaliOptions(device='gpu') needs GPU {device_id}, but DALI sees {dali_gpus} GPUs."
            " Check the driver with nvidia-smi, or use DaliOptions(device='cpu')."
        )
    enable_memory_growth()


def enable_memory_growth() -> None:
    """Makes TensorFlow take GPU memory only as needed, which leaves some for DALI.

    Raises:
      InputError: it is too late, as TensorFlow has initialized its devices, or forbidden.
    """
    name, set_growth = "TF_FORCE_GPU_ALLOW_GROWTH", "tf.config.experimental.set_memory_growth"
    forced = os.environ.get(name)  # overrides what a program asks for
    if forced == "false":
        raise InputError(
            f"{name}=false makes TensorFlow take all memory of a GPU and leaves none for DALI:"
            f" unset {name}"
        )
    growth = tf.config.experimental
    try:
        for gpu in tf.config.list_physical_devices("GPU"):
            if forced != "true" and not growth.get_memory_growth(gpu):
                growth.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise InputError(
            "TensorFlow takes all memory of a GPU unless its memory growth is on, and leaves none"
            " for DALI. It is too late to turn it on: a strategy, a model or a tensor was made"
            f" before. Start the program with {name}=true, or call {set_growth}(gpu, True) for each"
            " GPU first."
        ) from error


def _check_cursor(stream: Stream) -> None:
    spec, step, per_epoch = stream.spec, stream.cursor.step, stream.plan.steps_per_epoch
    if step % per_epoch and not spec.has_fixed_order:
        raise InputError(
            f"Order 'buffer' can start at the first step of an epoch only, one in {per_epoch}, got"
            f" step {step}: use order 'global'."
        )
    end = MAX_EPOCHS * per_epoch if spec.repeat else 1
    check(0 <= step < end, "start_step", f"in [0, {end})", step)
