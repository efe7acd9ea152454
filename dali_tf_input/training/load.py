"""`load`, which makes an input for Keras from a spec, with one pipeline per replica."""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import tensorflow as tf

from dali_tf_input.backends.build import check_input, choose_options
from dali_tf_input.backends.stream import MAX_EPOCHS
from dali_tf_input.errors import InputError, Within, check, checked
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Options
from dali_tf_input.spec.plan import replica_batch_size
from dali_tf_input.training import strategies
from dali_tf_input.training.input import Input
from dali_tf_input.training.schedule import Schedule

_logger = logging.getLogger("dali_tf_input")


@checked
def load(
    spec: InputSpec,
    options: Options | None = None,
    *,
    batch_size: Annotated[int, Within(1)],
    strategy: tf.distribute.Strategy | None = None,
    start_step: int = 0,
    schedule: Mapping[int, Any] | Callable[..., Any] | None = None,
) -> Input:
    """Makes an input for a Keras model, with one pipeline for each replica.

    Each replica has its own pipeline and its own shard of the records, so no record is served twice
    in an epoch. DALI's pipelines run on their replica's device; tf.data's run on the host, which
    sends each batch to its replica ahead of time.

    Examples:
      >>> train = load(InputSpec.for_training("records/train-*", 224), batch_size=8)
      >>> valid = load(InputSpec.for_evaluation("records/validation-*", 224), batch_size=8)
      >>> history = train.fit(model, epochs=2, validation=valid, verbose=0)
      >>> loss = model.evaluate(valid.dataset, verbose=0)
      >>> stages = {30: Preprocess.for_training(160), 60: Preprocess.for_training(224)}
      >>> spec = InputSpec.for_training("records/train-*", 128)  # of the first 30 epochs
      >>> train = load(spec, batch_size=8, schedule=stages)

    Args:
      spec: the batches to produce.
      options: the backend's options; their type selects the backend. None selects DALI on the GPU
        if TensorFlow sees one, else tf.data; the choice is logged and in `Input.options`.
      batch_size: images in a step over all replicas: a multiple of their number, and at most the
        number of records, except for evaluation on one replica. The last step of an evaluation
        is divided evenly.
      strategy: None (or TensorFlow's default strategy), a OneDeviceStrategy, or a
        MirroredStrategy, which then stays in TensorFlow's per-replica mode, even for other
        datasets. For several hosts, use `make_dataset`.
      start_step: the step at which training starts, in batches of `batch_size`; nothing before it
        is read. Not with order "buffer".
      schedule: changes for later epochs: a dict that maps the epoch of each change, counted
        from 0, to a value; or a function that returns the value for an epoch. A value is a
        `Preprocess`, or an `InputSpec` that differs from `spec` only in `preprocess`, `views`,
        `mix`, `transform`, `balance`, `temperature` or `mixture`. `Input.fit` and iteration
        follow it; `Input.dataset` cannot. A model for images of several sizes needs an input
        without a fixed size, ``keras.Input((None, None, 3))``.

    Returns:
      An `Input` with `fit`, `evaluate` and `predict`, and a `dataset` for Keras's own methods. Each
      replica gets images `spec.preprocess.dtype` (batch_size / replicas,
      *spec.preprocess.image_shape) and labels `spec.label.dtype` (batch_size / replicas,
      *spec.label.shape); see `spec.arrange` for further outputs.

    Raises:
      InputError: `spec` is no `InputSpec`, the strategy is not supported, the replicas do not
        divide the batch, the batch is larger than the data, DALI's device is not that of the
        replicas, `start_step` is out of range, a file changed, the backend does not support `spec`,
        or `schedule` changes what cannot change.
    """
    strategy = strategies.check_strategy(strategy)
    is_chosen = options is None
    options = options or choose_options()
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    replica_batch_size(
        batch_size,
        num_replicas=num_replicas,
        num_records=spec.records_per_epoch if spec.repeat or num_replicas > 1 else None,
    )
    end = MAX_EPOCHS * spec.plan(batch_size).steps_per_epoch if spec.repeat else 1
    check(0 <= start_step < end, "start_step", f"in [0, {end:,})", start_step)
    devices = strategies.list_devices(strategy, options)
    if isinstance(options, DaliOptions):
        _check_devices(options, devices)
    stages = Schedule(spec, schedule, batch_size=batch_size)
    for stage in stages.specs:
        check_input(stage, options)
    if is_chosen:
        _say(f"`load` chose {options.backend} for the input; `options` chooses another backend.")
    return Input(
        spec,
        options,
        batch_size=batch_size,
        strategy=strategy,
        devices=devices,
        start_step=start_step,
        schedule=stages,
    )


def _check_devices(options: DaliOptions, devices: tuple[str, ...]) -> None:
    are_gpus = [strategies.is_gpu(device) for device in devices]
    if options.device == "gpu":
        if not all(are_gpus):
            raise InputError(
                "DaliOptions(device='gpu') needs every replica on a GPU, but the replicas are on"
                f" {', '.join(devices)}. Use DaliOptions(device='cpu') or TfDataOptions(); or, if"
                " there is a GPU that TensorFlow does not see, pip install 'tensorflow[and-cuda]'"
            )
    elif any(are_gpus):
        warnings.warn(
            f"{options!r} makes batches on the CPU, and the replicas are on {', '.join(devices)}:"
            " every batch is copied while its step waits. DaliOptions(device='gpu') and"
            " TfDataOptions() do not wait.",
            RuntimeWarning,
            stacklevel=4,  # the caller of `load`, which `checked` wraps
        )


@functools.cache
def _say(text: str) -> None:
    """Logs a message once, at level INFO if that is shown, else as a warning."""
    shown = _logger.isEnabledFor(logging.INFO)
    _logger.log(logging.INFO if shown else logging.WARNING, text)
