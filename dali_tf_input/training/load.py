"""Feeding `tf.distribute`: one pipeline per replica, each with a shard of the records."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dali_tf_input.backends.build import choose_options, make_dataset
from dali_tf_input.errors import Count, InputError, checked
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options
from dali_tf_input.spec.order import EpochSteps, Shard, StartStep, replica_batch_size
from dali_tf_input.training import strategies
from dali_tf_input.training.epochs import Padded, add, end_epochs
from dali_tf_input.training.failures import FailedInput, explain
from dali_tf_input.training.input import Input


def enable_memory_growth() -> int:
    """Makes TensorFlow take GPU memory only as needed, which leaves some for DALI.

    Returns:
      How many GPUs there are.

    Raises:
      InputError: TensorFlow has initialized its devices already: call this first.
    """
    gpus = tf.config.list_physical_devices("GPU")
    try:
        for gpu in gpus:
            # A second call, in a notebook for example, is fine.
            if not tf.config.experimental.get_memory_growth(gpu):
                tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise InputError(
            "enable_memory_growth() came too late: call it before a strategy, a model or a tensor"
            " is made."
        ) from error
    return len(gpus)


@checked
def load(
    spec: InputSpec,
    options: Options | None = None,
    *,
    strategy: tf.distribute.Strategy | None = None,
    batch_size: Count,
    start_step: int = 0,
) -> Input:
    """Feeds the replicas of a strategy, or plain TensorFlow, with the backend of `options`.

    Each replica has its own pipeline and its own shard of the records, so no record is served twice
    in a pass. DALI's pipelines run on their replica's device (on the host if `options` say CPU and
    the replicas are GPUs). tf.data's run on the host, which sends each batch to its replica ahead
    of time. The first batch is taken once, to see on which devices it arrives; its records are read
    again.

    Args:
      spec: what comes out.
      options: how; None chooses as `choose_options` does, and the result says which.
      strategy: None (or TensorFlow's default strategy), a OneDeviceStrategy, a MirroredStrategy, or
        a MultiWorkerMirroredStrategy for a custom loop. A MirroredStrategy remains in TensorFlow's
        per-replica mode afterwards, also for other datasets.
      batch_size: images in a step over all replicas: a multiple of their number, and at most
        the number of records unless `spec.repeat` is False.
      start_step: the training step at which iterators start, with order "global"; nothing before it
        is read.

    Returns:
      The dataset and what belongs to it. Each replica gets images `spec.preprocess.dtype`
      (batch_size / replicas, *spec.preprocess.image_shape) and labels `spec.label.dtype`
      (batch_size / replicas, *spec.label.shape); with `spec.repeat` False also sample
      weights float32 (batch_size / replicas,). With more they are arranged as
      `spec.arrange` says. With order "global" an epoch is num_records //
      batch_size steps in which no record comes twice; the remainder, other records each
      time, is left out. With "buffer" and "sequential" the remainder opens the next epoch. With
      `spec.repeat` False there is one pass of num_records / batch_size steps, rounded up; on
      several replicas, or a GPU, padding fills the last.

    Raises:
      InputError: the strategy is of another type, the replicas do not divide the batch, the batch
        is larger than the data, DALI's device is not that of the replicas, `make_dataset` refuses,
        or the first batch cannot be made.
    """
    strategy = strategies.check_strategy(strategy)
    options = options or choose_options()
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    batch_size = replica_batch_size(
        batch_size,
        num_replicas=num_replicas,
        num_records=spec.records.num_records if spec.repeat else None,
    )
    steps = EpochSteps(
        num_records=spec.records.num_records,
        batch_size=batch_size,
        num_shards=num_replicas,
        padded=not spec.repeat,
    )
    start = StartStep(start_step)
    devices = strategies.list_devices(strategy, options)
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    if on_gpu and not all(strategies.is_gpu(device) for device in devices):
        raise InputError(
            "DaliOptions(device='gpu') needs every replica on a GPU, but the replicas are on"
            f" {', '.join(devices)}. Use DaliOptions(device='cpu') or TfDataOptions(); or, if there"
            " is a GPU that TensorFlow does not see, pip install 'tensorflow[and-cuda]'"
        )
    on_replica = on_gpu or (
        isinstance(options, DaliOptions)
        and not any(strategies.is_gpu(device) for device in devices)
    )
    several_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def make_shard(shard: Shard) -> tf.data.Dataset:
        device = devices[0 if several_workers else shard.shard_id]
        with tf.device(device if on_replica else "CPU:0"):
            return make_dataset(
                spec,
                options,
                batch_size=batch_size,
                shard=shard,
                device_id=strategies.cuda_device_id(device) if on_gpu else None,
                start_step=start,
            )

    dataset: Any
    if strategy is None:
        dataset = make_shard(Shard(0, 1))
    elif several_workers:
        dataset = _make_worker_dataset(strategy, options, make_shard, local_replicas=len(devices))
    elif isinstance(strategy, tf.distribute.OneDeviceStrategy) and isinstance(options, DaliOptions):
        dataset = strategies.OneDeviceDataset(make_shard(Shard(0, 1)))
    else:
        dataset = strategy.distribute_datasets_from_function(
            lambda context: make_shard(
                Shard(context.input_pipeline_id, context.num_input_pipelines)
            ),
            strategies.input_options(strategy, options, on_replica=on_replica),
        )
    try:
        found = first_batch_devices(dataset, strategy)
    except InputError as error:
        if isinstance(error.__cause__, tf.errors.OpError):
            failed = FailedInput(spec, options, start_step, batch_size)
            raise (explain(error.__cause__, [failed]) or error) from error.__cause__
        raise
    if strategy is not None and found != devices:
        warnings.warn(
            f"The first batch arrived on {', '.join(found)}, the replicas are on"
            f" {', '.join(devices)}: every batch is copied while its step waits. {options!r} is"
            " slow here; DaliOptions(device='gpu') and TfDataOptions() are not.",
            RuntimeWarning,
            stacklevel=3,  # the caller of `load`, which `checked` wraps
        )
    if spec.repeat and not several_workers:
        dataset = end_epochs(
            dataset,
            steps_per_epoch=steps.per_epoch,
            start_step=start,
            fixed_order=spec.has_fixed_order,
            on_gpu=on_gpu,
        )
    elif num_replicas > 1 and not several_workers and spec.records.num_records % batch_size:
        dataset = add(Padded, dataset)
    return Input(
        dataset=dataset,
        steps_per_epoch=steps.per_epoch,
        options=options,
        devices=found,
        start_step=start,
        spec=spec,
        batch_size=batch_size,
        strategy=strategy,
    )


class _WorkerDataset:
    """The batches of one worker, for a custom loop that passes them to `strategy.run`."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self.element_spec = dataset.element_spec

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def __repr__(self) -> str:  # Keras shows it when it refuses the type
        return (
            "<batches of one worker, for a custom loop: Keras's fit and evaluate do not work under "
            "MultiWorkerMirroredStrategy. docs/distributed_training.md shows such a loop>"
        )


def _make_worker_dataset(
    strategy: tf.distribute.Strategy,
    options: Options,
    make_shard: Callable[[Shard], tf.data.Dataset],
    *,
    local_replicas: int,
) -> Any:
    """Makes the dataset of one worker process: a shard for each of its replicas."""
    resolver = strategy.cluster_resolver
    num_workers = strategy.num_replicas_in_sync // local_replicas
    if local_replicas == 1:
        # Nothing is left to distribute, and TensorFlow's own way would be its MultiDeviceIterator.
        chiefs = 0
        if resolver.task_type == "worker":  # a chief is the first of the workers
            chiefs = len(resolver.cluster_spec().as_dict().get("chief", []))
        return _WorkerDataset(make_shard(Shard(chiefs + resolver.task_id, num_workers)))
    if isinstance(options, DaliOptions):
        raise InputError(
            "DALI feeds one replica per process under MultiWorkerMirroredStrategy, this process"
            f" has {local_replicas}: start one process per GPU (CUDA_VISIBLE_DEVICES), or use"
            " TfDataOptions()."
        )

    def make_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        first = context.input_pipeline_id * local_replicas
        count = strategy.num_replicas_in_sync
        shards = [make_shard(Shard(first + one, count)) for one in range(local_replicas)]
        # The replicas of a worker get its batches in turn.
        turns = tf.data.Dataset.range(local_replicas).repeat()
        return tf.data.Dataset.choose_from_datasets(shards, turns)

    return strategy.distribute_datasets_from_function(make_worker)


def first_batch_devices(dataset: Any, strategy: tf.distribute.Strategy | None) -> tuple[str, ...]:
    """Takes one batch and returns the device of each replica's images, such as "GPU:0"."""
    try:
        batch = tf.nest.flatten(next(iter(dataset)))
    except tf.errors.OpError as error:
        raise InputError(f"The first batch cannot be made: {error.message}") from error
    values = [strategy.experimental_local_results(one) if strategy else (one,) for one in batch]
    devices = [[strategies.short_name(part.device) for part in parts] for parts in values]
    if any(found != devices[0] for found in devices):
        raise InputError(f"A replica's values are on several devices: {devices}.")
    return tuple(devices[0])
