"""The replicas of a strategy: their devices, and how TensorFlow hands them their batches."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.backends.build import build_dataset
from dali_tf_input.backends.dali_guard import OneDeviceDataset
from dali_tf_input.backends.stream import Stream
from dali_tf_input.errors import InputError
from dali_tf_input.spec.options import DaliOptions, Options, TfDataOptions

_SUPPORTED = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy)
_HOSTS = tf.distribute.MultiWorkerMirroredStrategy


def check_keras(what: str) -> None:
    """Raises InputError unless Keras runs on TensorFlow, which `what` needs."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InputError(
            f"{what} needs Keras on TensorFlow, but it runs on {backend}: set"
            " KERAS_BACKEND=tensorflow before Keras is imported."
        )


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy of the scope in which a model was made; None if there was none."""
    strategy = getattr(model, "distribute_strategy", None)  # Keras on JAX or PyTorch has none
    return strategy if isinstance(strategy, (*_SUPPORTED, _HOSTS)) else None


def scope_of(model: keras.Model) -> Any:
    """Returns a context manager for the scope in which a model was made."""
    strategy = strategy_of(model)
    return strategy.scope() if strategy else contextlib.nullcontext()


def check_strategy(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy | None:
    """Returns `strategy`, or None for TensorFlow's default; refuses unsupported ones."""
    if strategy is None or (isinstance(strategy, _SUPPORTED) and not isinstance(strategy, _HOSTS)):
        return strategy
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return None
    lower = "make_dataset(spec, batch_size=..., shard=Shard(host, num_hosts))"
    if isinstance(strategy, _HOSTS):
        raise InputError(
            "Keras's fit does not work under a MultiWorkerMirroredStrategy, so `load` does not take"
            f" it. Feed a custom loop on each host with {lower}: docs/distributed_training.md."
        )
    raise InputError(
        "`strategy` must be None, a OneDeviceStrategy or a MirroredStrategy (several GPUs), got a"
        f" {type(strategy).__name__}. Feed others with {lower}."
    )


def list_devices(strategy: tf.distribute.Strategy | None, options: Options) -> tuple[str, ...]:
    """Returns the device of each replica, such as "GPU:0"."""
    if strategy is not None:
        return tuple(short_name(device) for device in strategy.extended.worker_devices)
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    # Logical devices are not listed: that would initialize TensorFlow, before memory growth is on.
    return ("GPU:0" if on_gpu and tf.config.get_visible_devices("GPU") else "CPU:0",)


def make_dataset(
    streams: Sequence[Stream],
    strategy: tf.distribute.Strategy | None,
    options: Options,
    devices: Sequence[str],
) -> Any:
    """Makes the dataset of all replicas, of a stream and a device for each."""
    decodes_on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    # DALI's batches are made where they are used; others, and those of an evaluation on a GPU, on
    # the CPU, so that Keras knows their number.
    on_replica = isinstance(options, DaliOptions) and not any(map(is_gpu, devices))
    on_replica = on_replica or (decodes_on_gpu and streams[0].spec.repeat)

    def make_shard(number: int) -> tf.data.Dataset:
        device = devices[number]
        with tf.device(device if on_replica else "CPU:0"):
            device_id = cuda_device_id(device) if decodes_on_gpu else None
            return build_dataset(streams[number], options, device_id)

    if strategy is None:
        return make_shard(0)
    if isinstance(options, DaliOptions) and isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return OneDeviceDataset(make_shard(0))
    return strategy.distribute_datasets_from_function(
        lambda context: make_shard(context.input_pipeline_id),
        input_options(strategy, options, on_replica=on_replica),
    )


def input_options(
    strategy: tf.distribute.Strategy, options: Options, *, on_replica: bool
) -> tf.distribute.InputOptions:
    """Returns the options that give a MirroredStrategy one pipeline per replica."""
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return tf.distribute.InputOptions()  # it allows no other
    return tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=on_replica,
        # Not from DALI: TensorFlow's MultiDeviceIterator would fetch, see backends/dali_guard.py.
        experimental_fetch_to_device=isinstance(options, TfDataOptions),
    )


def cuda_device_id(device: str) -> int:
    """Returns the CUDA number of a TensorFlow GPU, which differs if some GPUs are hidden."""
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) != len(tf.config.list_logical_devices("GPU")):
        raise InputError(
            "DaliOptions(device='gpu') does not work with GPUs that are split into logical devices."
        )
    name: str = visible[int(device.rsplit(":", 1)[1])].name
    return int(name.rsplit(":", 1)[1])


def short_name(device: str) -> str:
    """Returns the type and the number of a device, such as "GPU:0"."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def is_gpu(device: str) -> bool:
    """Returns whether the device of that short name is a GPU."""
    return device.startswith("GPU:")
