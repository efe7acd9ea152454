"""From a spec to a tf.data dataset: the one place where the backend is chosen."""

import importlib
import logging
import os
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dali_tf_input.backends import tf_data
from dali_tf_input.backends.reading import MAX_EPOCHS, Stream
from dali_tf_input.backends.remote import fetch_all, localize
from dali_tf_input.errors import BatchSize, InputError, check, checked
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options, TfDataOptions
from dali_tf_input.spec.order import Shard, StartStep, check_batch

_logger = logging.getLogger("dali_tf_input")


@checked
def make_dataset(
    spec: InputSpec,
    options: Options | None = None,
    *,
    batch_size: BatchSize,
    shard: Shard = Shard(0, 1),
    device_id: int | None = None,
    start_step: StartStep | None = None,
) -> tf.data.Dataset:
    """Makes the dataset of one shard. Prefer `load`: it sets device and shard.

    Args:
      spec: what comes out, the same for both backends.
      options: how; its type is the choice of the backend. None chooses as `choose_options` does.
      batch_size: images in each batch, from 1 to the number of records in the shard; any number if
        `spec.repeat` is False.
      shard: which records are read.
      device_id: the CUDA device of a GPU pipeline, in [0, number of GPUs); None is 0. Only with
        ``DaliOptions(device="gpu")``.
      start_step: at which step each iterator starts, with order "global"; None is the first.

    Returns:
      A dataset of (image, label): image `spec.preprocess.dtype` (batch_size,
      *spec.preprocess.image_shape), label `spec.label.dtype` (batch_size, *spec.label.shape). With
      `spec.repeat` False it is one pass, with sample weights as a third value (see `InputSpec`).
      Otherwise it is infinite. `spec.arrange` says what comes out where there is more. With order
      "global" an epoch is whole steps of all shards, in which no record comes twice. With the other
      orders every pass over the shard serves each of its records once; the remainder that does not
      fill a batch opens the next pass.

      DALI's dataset has two limits. On a GPU it must be made and iterated under the `tf.device` of
      its GPU, no transformation (`map`, `take`, ...) can follow it, and instead of dictionaries
      it yields tuples in order of `spec.outputs`: `spec.arrange` converts them. And no strategy
      may distribute it (nor Keras `fit` under one), because TensorFlow's way of doing so crashes:
      this is an InputError. Use `load` instead.

    Raises:
      InputError: the batch is larger than the shard, the shard is empty, a GPU is asked for where
        there is none, or the backend does not support `spec`. All before TensorFlow gets a
        pipeline.
    """
    options = options or choose_options()
    change = spec.records.find_change()
    if change:
        raise InputError(f"{change}. Make the spec again: Records.from_files(...)")
    num_records, num_shards = spec.records.num_records, shard.num_shards
    if spec.order == "global" and batch_size * num_shards > num_records:
        raise InputError(
            f"`batch_size` {batch_size} in {num_shards} shards is a step of"
            f" {batch_size * num_shards} records, more than the {num_records} there are: an epoch"
            " of order 'global' would have no step."
        )
    if spec.repeat:
        check_batch(batch_size, shard=shard, num_records=num_records)
    if spec.records.is_remote:
        local = localize if spec.has_fixed_order else fetch_all
        spec = replace(spec, records=local(spec.records))
    start_step = start_step or StartStep()
    _check_start_step(spec, start_step.step, batch_size * num_shards)
    stream = Stream(spec=spec, batch_size=batch_size, shard=shard, start_step=start_step)
    if isinstance(options, DaliOptions) and options.device == "gpu":
        check_gpu(device_id or 0)
        return import_dali().build(stream, options, device_id or 0)
    if device_id is not None:
        raise InputError(f"`device_id` is for DaliOptions(device='gpu') only, got {device_id}.")
    if isinstance(options, DaliOptions):
        dataset = import_dali().build(stream, options, None)
    else:
        dataset = tf_data.build(stream, options)
    return dataset if spec.repeat or num_shards > 1 else dataset.map(_drop_padding)


def import_dali() -> Any:
    """Imports the DALI backend, which need not be installed to use tf.data.

    Raises:
      InputError: DALI or its TensorFlow plugin is missing or broken.
    """
    try:
        return importlib.import_module("dali_tf_input.backends.dali")
    except ImportError as error:
        raise InputError(
            f"DaliOptions needs NVIDIA DALI: {error}. Install it: pip install nvidia-dali-cuda120,"
            " then the plugin (docs/install.md). Or use TfDataOptions()."
        ) from error


def choose_options() -> Options:
    """Chooses the backend for this machine: DALI on the GPU if TensorFlow sees one, else tf.data.

    On the CPU tf.data is the faster of the two (docs/benchmarks.md). The choice is logged (logger
    "dali_tf_input", level INFO).
    """
    options: Options
    if tf.config.list_physical_devices("GPU"):
        options, reason = DaliOptions(device="gpu"), "TensorFlow sees a GPU"
    else:
        options, reason = TfDataOptions(), "TensorFlow sees no GPU"
    _logger.info("options=None: %s, so %r.", reason, options)
    return options


def check_gpu(device_id: int) -> None:
    """Checks that TensorFlow and DALI see CUDA device `device_id`, and that DALI gets memory there.

    Raises:
      InputError: `device_id` is below 0, one of them does not see it, or TensorFlow's memory growth
        is off.
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
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "false":  # overrides what a program asks for
        raise InputError(
            "TF_FORCE_GPU_ALLOW_GROWTH=false makes TensorFlow take all memory of a GPU and leaves"
            " none for DALI: unset TF_FORCE_GPU_ALLOW_GROWTH"
        )
    if not tf.config.experimental.get_memory_growth(gpus[device_id]):
        raise InputError(
            "TensorFlow takes all memory of a GPU unless its memory growth is on, and leaves none"
            " for DALI: call dali_tf_input.enable_memory_growth() before anything else uses"
            " TensorFlow."
        )


def _check_start_step(spec: InputSpec, step: int, batch_size: int) -> None:
    if step and spec.order != "global":
        raise InputError(
            f"Only order 'global' can start at a step, got step {step} with order {spec.order!r},"
            " whose order is not fixed."
        )
    per_epoch = spec.records.num_records // batch_size
    end = MAX_EPOCHS * per_epoch if spec.order == "global" else 1
    holds = isinstance(step, int) and 0 <= step < end
    check(holds, "start_step", f"an int in [0, {end})", repr(step))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _drop_padding(*batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Leaves out the images of weight 0; the others weigh 1, as there is no padding to outweigh."""
    count = tf.math.count_nonzero(batch[-1])
    *values, weights = tf.nest.map_structure(lambda value: value[:count], batch)
    return (*values, tf.ones_like(weights))
