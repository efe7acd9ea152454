"""Where the replicas of a strategy are, and what its input must be like."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec.options import DaliOptions, Options, TfDataOptions


def check_keras(what: str) -> None:
    """Raises InputError unless Keras runs on TensorFlow, which `what` needs."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InputError(
            f"{what} needs Keras on TensorFlow, but it runs on {backend}: set"
            " KERAS_BACKEND=tensorflow before Keras is imported."
        )


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy of the scope in which a model was made; None is none."""
    strategy = getattr(model, "distribute_strategy", None)  # Keras on JAX or PyTorch has none
    return None if type(strategy).__name__.startswith("_Default") else strategy


def scope_of(model: keras.Model) -> Any:
    """Returns the scope in which a model was made, to be entered."""
    strategy = strategy_of(model)
    return strategy.scope() if strategy else contextlib.nullcontext()


def check_strategy(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy | None:
    """Returns `strategy`, or None for TensorFlow's default; refuses unsupported ones."""
    multi = tf.distribute.MultiWorkerMirroredStrategy
    supported = tf.distribute.OneDeviceStrategy | tf.distribute.MirroredStrategy | multi
    if strategy is None or isinstance(strategy, supported):
        return strategy
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return None
    raise InputError(
        "`strategy` must be None, a OneDeviceStrategy, a MirroredStrategy (several GPUs) or a"
        f" MultiWorkerMirroredStrategy (several hosts), got a {type(strategy).__name__}. TPUs are"
        " fed from their host: strategy.distribute_datasets_from_function(...) with make_dataset."
    )


def list_devices(strategy: tf.distribute.Strategy | None, options: Options) -> tuple[str, ...]:
    """Returns the device of each replica, such as "GPU:0"."""
    if strategy is not None:
        return tuple(short_name(device) for device in strategy.extended.worker_devices)
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    return ("GPU:0" if on_gpu and tf.config.list_logical_devices("GPU") else "CPU:0",)


def input_options(
    strategy: tf.distribute.Strategy, options: Options, *, on_replica: bool
) -> tf.distribute.InputOptions:
    """Returns the options that give a MirroredStrategy one pipeline per replica."""
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return tf.distribute.InputOptions()  # it allows no other
    return tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=on_replica,
        # Never for DALI: fetching uses TensorFlow's MultiDeviceIterator, which frees a DALIDataset
        # while a thread still reads it: the process crashes (SIGSEGV) when an iterator is dropped.
        # Seen with TensorFlow 2.21 and DALI 2.4.
        experimental_fetch_to_device=isinstance(options, TfDataOptions),
    )


class OneDeviceDataset(tf.data.Dataset, tf.distribute.DistributedDataset):
    """A DALI dataset that counts as distributed, so that Keras iterates it where it is.

    OneDeviceStrategy would read it through its MultiDeviceIterator; see `input_options`.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """The types and shapes of its elements."""
        return self._dataset.element_spec

    def cardinality(self) -> tf.Tensor:
        """Returns the number of its batches."""
        return self._dataset.cardinality()


def cuda_device_id(device: str) -> int:
    """Returns the CUDA device of TensorFlow's "GPU:0", which differs if GPUs are hidden from it."""
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
