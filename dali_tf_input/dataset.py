"""From a spec to a tf.data dataset: the one place where the backend is chosen."""

import logging
import os
import warnings
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dali_tf_input import tf_data_backend
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.order import Position
from dali_tf_input.preprocess import Preprocess
from dali_tf_input.record_stream import MAX_EPOCHS
from dali_tf_input.sharding import Shard, check_batch
from dali_tf_input.spec import InputSpec
from dali_tf_input.tfrecord import InputError

_logger = logging.getLogger("dali_tf_input")

Options = DaliOptions | TfDataOptions


def make_dataset(
    spec: InputSpec,
    options: Options | None = None,
    *,
    batch_size: int,
    shard: Shard = Shard(0, 1),
    device_id: int | None = None,
    position: Position | None = None,
) -> tf.data.Dataset:
    """Makes the dataset of one shard. For a `tf.distribute` strategy, or a GPU, `distribute.distribute` calls it rightly.

    Args:
      spec: what comes out, the same for both backends.
      options: how; its type is the choice of the backend. None chooses as `choose_options` does.
      batch_size: images in each batch, from 1 to the number of records in the shard (where `spec.repeat` is False: any number).
      shard: which records are read.
      device_id: the CUDA device of a GPU pipeline, in [0, number of GPUs); None is 0. Not for other options.
      position: at which step each iterator starts, with order "global"; None is the first.

    Returns:
      A dataset of (image, label): image `spec.preprocess.dtype` (batch_size, *spec.preprocess.image_shape), label int64
      (batch_size,), or float32 (batch_size, spec.one_hot). With `spec.repeat` False it is one pass over the records with a third
      value, sample weights float32 (batch_size,); else it has no end. With order "global" an epoch is whole steps of all shards,
      in which no record comes twice. With the other orders every pass over the shard serves each of its records once; the
      remainder of a pass that does not fill a batch opens the next pass. Two limits of DALI's dataset: one on a GPU must be made
      and iterated under the `tf.device` of its GPU, and no transformation (`map`, `take`, ...) can follow it; and no strategy may
      distribute it (nor Keras `fit` under one), as TensorFlow's own way of doing so crashes: `distribute.distribute` has another.

    Raises:
      InputError: the batch is larger than the shard, the shard is empty, a GPU is asked for where there is none, or DALI
        refuses the pipeline. All before TensorFlow gets a pipeline.
    """
    options = options or choose_options()
    if spec.order == "global" and batch_size * shard.num_shards > spec.dataset.num_records:
        raise InputError(
            f"`batch_size` {batch_size} in {shard.num_shards} shards is a step of {batch_size * shard.num_shards} records, more "
            f"than the {spec.dataset.num_records} there are: an epoch of order 'global' would have no step."
        )
    if spec.repeat:
        check_batch(batch_size, shard=shard, num_records=spec.dataset.num_records)
    elif batch_size < 1:
        raise InputError(f"`batch_size` must be at least 1, got {batch_size}.")
    position = _check_position(spec, position, batch_size=batch_size, num_shards=shard.num_shards)
    if shard.shard_id == 0:
        _warn_of_sorted_records(spec)
    match options:
        case TfDataOptions():
            _check_no_device_id(device_id)
            return tf_data_backend.build(spec, options, batch_size=batch_size, shard=shard, position=position)
        case DaliOptions(device="cpu"):
            _check_no_device_id(device_id)
        case DaliOptions(device="gpu"):
            device_id = device_id or 0
            check_gpu(device_id)
        case _:
            raise InputError(f"`options` must be a DaliOptions, a TfDataOptions or None, got {options!r}.")
    # Imported here because who trains by tf.data needs no DALI, and must not wait for it.
    from dali_tf_input import dali_backend

    return dali_backend.build(spec, options, batch_size=batch_size, shard=shard, device_id=device_id, position=position)


def make_normalization(preprocess: Preprocess) -> keras.layers.Layer:
    """Makes the Keras layer that does in the model what `dtype` "uint8" leaves undone: (x - mean) / std per RGB channel.

    Put it first. Batches of uint8 are a quarter of the size on their way to the device.
    """
    return keras.layers.Normalization(
        axis=-1 if preprocess.layout == "HWC" else 1,
        mean=preprocess.mean,
        variance=[std**2 for std in preprocess.std],
    )


def denormalise(images: npt.NDArray[Any], preprocess: Preprocess) -> npt.NDArray[np.float32]:
    """Returns images as they can be looked at: what `make_dataset` served, back in 0..255, of any type and layout.

    Args:
      images: `preprocess.dtype` (n, *preprocess.image_shape).
      preprocess: what made them.

    Returns:
      float32 (n, height, width, 3), neither rounded nor cut off: black around an image is 0, and interpolation by "bicubic" may
      leave 0..255.
    """
    values = images.astype(np.float32)
    if preprocess.layout == "CHW":
        values = values.transpose(0, 2, 3, 1)
    if preprocess.dtype == "uint8":
        return values
    shown: npt.NDArray[np.float32] = values * np.array(preprocess.std, np.float32) + np.array(preprocess.mean, np.float32)
    return shown


def choose_options() -> Options:
    """Chooses the backend for this machine: DALI on the GPU where TensorFlow sees one, else tf.data.

    On CPU tf.data is the faster of the two (the README's table). The choice is logged (logger "dali_tf_input", level INFO).
    """
    options: Options
    if tf.config.list_physical_devices("GPU"):
        options, reason = DaliOptions(device="gpu"), "TensorFlow sees a GPU"
    else:
        options, reason = TfDataOptions(), "TensorFlow sees no GPU"
    _logger.info("options=None: %s, so %r.", reason, options)
    return options


def check_gpu(device_id: int) -> None:
    """Checks that TensorFlow and DALI see CUDA device `device_id` and that TensorFlow leaves memory for DALI.

    Raises:
      InputError: it is below 0, one of them does not see it, or TensorFlow's memory growth is off.
    """
    if device_id < 0:
        raise InputError(f"`device_id` must be at least 0, got {device_id}.")
    gpus = tf.config.list_physical_devices("GPU")
    if device_id >= len(gpus):
        raise InputError(
            f"DaliOptions(device='gpu') needs GPU {device_id}, but TensorFlow sees {len(gpus)} GPUs. Use "
            "DaliOptions(device='cpu') or TfDataOptions(); or, where there is a GPU, install TensorFlow with its CUDA "
            "libraries: make install GPU=1"
        )
    from dali_tf_input import dali_backend  # see make_dataset

    if device_id >= dali_backend.count_gpus():
        raise InputError(
            f"DaliOptions(device='gpu') needs GPU {device_id}, but DALI sees {dali_backend.count_gpus()} GPUs. "
            "Check the driver with nvidia-smi, or use DaliOptions(device='cpu')."
        )
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "false":  # TensorFlow heeds it before what a program asks for
        raise InputError(
            "TF_FORCE_GPU_ALLOW_GROWTH=false makes TensorFlow take all memory of a GPU, and leaves none for DALI: "
            "unset TF_FORCE_GPU_ALLOW_GROWTH"
        )
    if not tf.config.experimental.get_memory_growth(gpus[device_id]):
        raise InputError(
            "TensorFlow takes all memory of a GPU unless its memory growth is on, and leaves none for DALI: call "
            "dali_tf_input.distribute.enable_memory_growth() before anything else touches TensorFlow."
        )


def _check_position(spec: InputSpec, position: Position | None, *, batch_size: int, num_shards: int) -> Position:
    position = position or Position()
    if position.step and spec.order != "global":
        raise InputError(
            f"Only order 'global' can start at a step, got step {position.step} with order {spec.order!r}: its order is planned."
        )
    end = MAX_EPOCHS * (spec.dataset.num_records // (batch_size * num_shards)) if spec.order == "global" else 1
    if not isinstance(position.step, int) or not 0 <= position.step < end:
        raise InputError(f"`position` (`start_step`) must be an int in [0, {end}), got {position.step!r}.")
    return position


def _warn_of_sorted_records(spec: InputSpec) -> None:
    """Warns where a buffer is too small to mix records that are stored sorted by label."""
    dataset = spec.dataset
    # Records in no order have a run of one, of two for two classes: longer ones were put there.
    if spec.order != "buffer" or dataset.num_classes is None or dataset.labels_in_a_row is None or dataset.labels_in_a_row < 4:
        return
    in_buffer = min(dataset.num_classes, 1 + spec.buffer_size / dataset.labels_in_a_row)
    if in_buffer < dataset.num_classes / 2:
        warnings.warn(
            f"The records are stored by label, {dataset.labels_in_a_row:,.0f} of one in a row: a buffer of {spec.buffer_size:,} "
            f"holds about {in_buffer:.0f} of the {dataset.num_classes:,} classes, and so do batches. Use order 'global', "
            "or store them shuffled: scripts/make_tfrecords.py.",
            UserWarning,
            stacklevel=3,
        )


def _check_no_device_id(device_id: int | None) -> None:
    if device_id is not None:
        raise InputError(f"`device_id` is for DaliOptions(device='gpu') only, got {device_id}.")
