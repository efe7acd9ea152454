"""Feeding `tf.distribute`: one pipeline per replica, disjoint shards, batches on the replica's own device."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dali_tf_input.dataset import Options, choose_options, make_dataset
from dali_tf_input.failures import Stopped, explain
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.order import Position
from dali_tf_input.sharding import Shard, replica_batch_size, steps_per_epoch
from dali_tf_input.spec import InputSpec
from dali_tf_input.tfrecord import InputError


class Distributed(NamedTuple):
    """What `distribute` returns; ``dataset, steps, *_ = distribute(...)`` unpacks it.

    Attributes:
      dataset: what Keras `fit` or a custom loop iterates: a `tf.data.Dataset`, or under a strategy a
        `tf.distribute.DistributedDataset`; without end.
      steps_per_epoch: how many global batches one pass over the records fills; with `spec.repeat` False rounded up.
      options: the options used, the chosen ones where None was given.
      devices: on which device the first batch of each replica was, by replica.
      position: where each new iterator of the dataset starts, with order "global"; `resume.Resume` keeps it.
      spec: what comes out.
      global_batch_size: images in a step.
    """

    dataset: Any
    steps_per_epoch: int
    options: Options
    devices: tuple[str, ...]
    position: Position
    spec: InputSpec
    global_batch_size: int

    @contextlib.contextmanager
    def explain_errors(self, model: keras.Model | None = None, *others: "Distributed") -> Iterator[None]:
        """Names the record, where one stops what iterates the dataset: ``with train.explain_errors(model): model.fit(...)``.

        Args:
          model: the Keras model that is trained, by whose optimizer the steps are counted; compiled. Without it more records
            have to be looked at.
          *others: further inputs that are iterated, that of validation say.

        Raises:
          BadRecordError: (an InputError) a record cannot be read or decoded; the text holds its file, its number and the command
            that leaves it out.
          InputError: the input stopped, but no record was found: those that a plan leads to, or all within a minute.
        """
        start, done = self.position.step, _count_steps(model)
        try:
            yield
        except tf.errors.OpError as error:
            counted = _count_steps(model)
            step = None if done is None or counted is None else start + counted - done
            inputs = [Stopped(self.spec, self.options, step, self.global_batch_size)]
            inputs += [Stopped(other.spec, other.options, None, other.global_batch_size) for other in others]
            found = explain(error, inputs)
            if found is None:
                raise
            raise found from error


def _count_steps(model: keras.Model | None) -> int | None:
    """Returns how many steps the model's optimizer has made; None where there is none."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return None if iterations is None else int(iterations.numpy())


def enable_memory_growth() -> int:
    """Makes TensorFlow take GPU memory as it needs it, so that some is left for DALI. Does nothing without a GPU.

    Returns:
      How many GPUs there are.

    Raises:
      InputError: TensorFlow has set up its devices already: call this first.
    """
    gpus = tf.config.list_physical_devices("GPU")
    try:
        for gpu in gpus:
            if not tf.config.experimental.get_memory_growth(gpu):  # a second call, in a notebook say, is no mistake
                tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise InputError(
            "enable_memory_growth() came too late: call it before a strategy, a model or a tensor is made."
        ) from error
    return len(gpus)


def distribute(
    spec: InputSpec,
    options: Options | None = None,
    *,
    strategy: tf.distribute.Strategy | None = None,
    global_batch_size: int,
    start_step: int = 0,
) -> Distributed:
    """Feeds a strategy's replicas, or plain TensorFlow, by the backend that `options` names.

    There is one pipeline for each replica, with its own shard of the records, so no record is served twice in a pass. DALI's
    live on their replica's device (on the host where `options` say CPU and the replicas are GPUs); tf.data's live on the
    host, which sends each batch to its replica ahead of time. The first batch is taken once, to see on which devices it
    arrives; what was read for it is read again.

    Args:
      spec: what comes out.
      options: how; None chooses as `dataset.choose_options` does, and the result says which.
      strategy: None (or TensorFlow's default strategy), a OneDeviceStrategy, a MirroredStrategy, or a
        MultiWorkerMirroredStrategy for a custom loop. TensorFlow keeps a MirroredStrategy in per-replica mode from here on, also
        for other datasets.
      global_batch_size: images in a step over all replicas, a multiple of their number, at most the number of records (where
        `spec.repeat` is False: any multiple).
      start_step: the step of training at which iterators start, with order "global"; nothing of the steps before it is read.

    Returns:
      The dataset, `steps_per_epoch`, the options, the devices, the position. Per replica: image `spec.preprocess.dtype`
      (global_batch_size / replicas, *spec.preprocess.image_shape), label int64 (global_batch_size / replicas,) or one-hot; with
      `spec.repeat` False also sample weights float32 (global_batch_size / replicas,).
      An epoch of order "global" is num_records // global_batch_size steps, in which no record comes twice; the remainder, other
      records each time, is left out of it. With "buffer" and "sequential" the remainder opens the next epoch. With `spec.repeat`
      False there is one pass of num_records / global_batch_size steps, rounded up, in which each record comes once: compile the
      model with `weighted_metrics`, as Keras's `metrics` count padding too.

    Raises:
      InputError: the strategy is of another type, the replicas do not divide the batch, the batch is larger than the data,
        DALI's device is not that of the replicas, `make_dataset` refuses, or the first batch cannot be made.
    """
    strategy = _check_strategy(strategy)
    options = options or choose_options()
    num_records = spec.dataset.num_records
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    batch_size = replica_batch_size(
        global_batch_size, num_replicas=num_replicas, num_records=num_records if spec.repeat else None
    )
    steps = -(-num_records // global_batch_size) if not spec.repeat else steps_per_epoch(num_records, global_batch_size)
    position = Position(start_step)
    devices = _replica_devices(strategy, options)
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    if on_gpu and not all(_is_gpu(device) for device in devices):
        raise InputError(
            f"DaliOptions(device='gpu') needs every replica on a GPU, but the replicas are on {', '.join(devices)}. "
            "Use DaliOptions(device='cpu') or TfDataOptions(); or, where there is a GPU that TensorFlow does not see: "
            "make install GPU=1"
        )
    on_replica = on_gpu or (isinstance(options, DaliOptions) and not any(_is_gpu(device) for device in devices))
    several_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def make_shard(shard: Shard) -> tf.data.Dataset:
        device = devices[0 if several_workers else shard.shard_id]
        with tf.device(device if on_replica else "CPU:0"):
            return make_dataset(
                spec,
                options,
                batch_size=batch_size,
                shard=shard,
                device_id=_cuda_device_id(device) if on_gpu else None,
                position=position,
            )

    dataset: Any
    if strategy is None:
        dataset = make_shard(Shard(0, 1))
    elif several_workers:
        dataset = _make_worker_dataset(strategy, options, make_shard, local_replicas=len(devices))
    elif isinstance(strategy, tf.distribute.OneDeviceStrategy) and isinstance(options, DaliOptions):
        dataset = _OneDeviceDataset(make_shard(Shard(0, 1)))
    else:
        dataset = strategy.distribute_datasets_from_function(
            lambda context: make_shard(Shard(context.input_pipeline_id, context.num_input_pipelines)),
            _input_options(strategy, options, on_replica=on_replica),
        )
    try:
        found = first_batch_devices(dataset, strategy)
    except InputError as error:
        if isinstance(error.__cause__, tf.errors.OpError):
            bad = explain(error.__cause__, [Stopped(spec, options, start_step, global_batch_size)])
            raise (bad or error) from error.__cause__
        raise
    if strategy is not None and found != devices:
        warnings.warn(
            f"The first batch arrived on {', '.join(found)}, the replicas are on {', '.join(devices)}: every batch is copied "
            f"while its step waits. With {options!r} that costs speed; DaliOptions(device='gpu') and TfDataOptions() do not.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Distributed(
        dataset=dataset,
        steps_per_epoch=steps,
        options=options,
        devices=found,
        position=position,
        spec=spec,
        global_batch_size=global_batch_size,
    )


class _WorkerDataset:
    """The batches of one worker, for a custom loop: each goes to `strategy.run` as it is."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self.element_spec = dataset.element_spec

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def __repr__(self) -> str:  # Keras shows it when it refuses the type
        return (
            "<batches of one worker, for a custom loop: Keras's fit and evaluate do not work under MultiWorkerMirroredStrategy. "
            "scripts/train.py --strategy=multi_worker shows such a loop>"
        )


def _make_worker_dataset(
    strategy: tf.distribute.Strategy,
    options: Options,
    make_shard: Callable[[Shard], tf.data.Dataset],
    *,
    local_replicas: int,
) -> Any:
    """Makes the dataset of this process under a MultiWorkerMirroredStrategy: a shard for each of its replicas."""
    resolver = strategy.cluster_resolver
    num_workers = strategy.num_replicas_in_sync // local_replicas
    if local_replicas == 1:
        # With one replica in a process nothing is left to distribute. TensorFlow's own way would be its MultiDeviceIterator.
        chiefs = len(resolver.cluster_spec().as_dict().get("chief", [])) if resolver.task_type == "worker" else 0
        return _WorkerDataset(make_shard(Shard(chiefs + resolver.task_id, num_workers)))  # a chief is the first of the workers
    if isinstance(options, DaliOptions):
        raise InputError(
            f"DALI feeds one replica in each process under MultiWorkerMirroredStrategy, this one has {local_replicas}: start "
            "one process for each GPU (CUDA_VISIBLE_DEVICES), or use TfDataOptions()."
        )

    def make_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        first = context.input_pipeline_id * local_replicas
        shards = [make_shard(Shard(first + number, strategy.num_replicas_in_sync)) for number in range(local_replicas)]
        # A worker's replicas are dealt its batches in turn.
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(local_replicas).repeat())

    return strategy.distribute_datasets_from_function(make_worker)


def first_batch_devices(dataset: Any, strategy: tf.distribute.Strategy | None) -> tuple[str, ...]:
    """Takes one batch from a new iterator of `dataset` and returns the device of each replica's images, as "GPU:0".

    Raises:
      InputError: the batch cannot be made, or a replica's images and labels are on different devices.
    """
    try:
        images, labels, *_ = next(iter(dataset))
    except tf.errors.OpError as error:
        raise InputError(f"The first batch cannot be made: {error.message}") from error
    replica_images = strategy.experimental_local_results(images) if strategy else (images,)
    replica_labels = strategy.experimental_local_results(labels) if strategy else (labels,)
    for image, label in zip(replica_images, replica_labels, strict=True):
        if image.device != label.device:
            raise InputError(f"A replica's images are on {image.device}, but their labels on {label.device}.")
    return tuple(_short_name(image.device) for image in replica_images)


def _check_strategy(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy | None:
    """Returns `strategy`, None for TensorFlow's default one; raises InputError for one that is not served."""
    served = tf.distribute.OneDeviceStrategy | tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy
    if strategy is None or isinstance(strategy, served):
        return strategy
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return None
    nearest = {
        "TPUStrategy": "TPUs are fed from the host: TfDataOptions() and strategy.distribute_datasets_from_function(...) over "
        "dataset.make_dataset(spec, TfDataOptions(), ...)",
        "ParameterServerStrategy": "for several hosts use tf.distribute.MultiWorkerMirroredStrategy()",
        "CentralStorageStrategy": "for several GPUs of one host use tf.distribute.MirroredStrategy()",
    }
    name = type(strategy).__name__.removesuffix("V1").removesuffix("V2")
    raise InputError(
        "`strategy` must be None, a OneDeviceStrategy, a MirroredStrategy or a MultiWorkerMirroredStrategy, got a "
        f"{type(strategy).__name__}: {nearest.get(name, nearest['CentralStorageStrategy'])}."
    )


def _replica_devices(strategy: tf.distribute.Strategy | None, options: Options) -> tuple[str, ...]:
    """Returns the device of each replica, as "GPU:0", in the order of the replicas."""
    if strategy is not None:
        return tuple(_short_name(device) for device in strategy.extended.worker_devices)
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    return ("GPU:0" if on_gpu and tf.config.list_logical_devices("GPU") else "CPU:0",)


def _input_options(strategy: tf.distribute.Strategy, options: Options, *, on_replica: bool) -> tf.distribute.InputOptions:
    """Returns the InputOptions that place each pipeline, and get a MirroredStrategy to make one for each replica."""
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return tf.distribute.InputOptions()  # it allows no other
    return tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=on_replica,
        # Never for DALI: TensorFlow's MultiDeviceIterator, which fetches, frees a DALIDataset while a thread still reads it,
        # and the process dies (SIGSEGV) as soon as an iterator goes. Seen with TensorFlow 2.21 and DALI 2.4.
        experimental_fetch_to_device=isinstance(options, TfDataOptions),
    )


class _OneDeviceDataset(tf.data.Dataset, tf.distribute.DistributedDataset):
    """A DALI dataset that counts as distributed already, so that Keras iterates it as it is, where it was placed.

    Left to itself TensorFlow's OneDeviceStrategy would read it through its MultiDeviceIterator (see `_input_options`).
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def cardinality(self) -> tf.Tensor:
        return self._dataset.cardinality()


def _cuda_device_id(device: str) -> int:
    """Returns the CUDA device of TensorFlow's logical `device`, "GPU:0": not the same where some GPUs are hidden from it."""
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) != len(tf.config.list_logical_devices("GPU")):
        raise InputError("DaliOptions(device='gpu') does not work with GPUs that are split into logical devices.")
    name: str = visible[int(device.rsplit(":", 1)[1])].name
    return int(name.rsplit(":", 1)[1])


def _short_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def _is_gpu(device: str) -> bool:
    return device.startswith("GPU:")
