"""Measures one setting after the other in a process of its own; settings.py starts it and tells it what.

usage: measure_settings.py --files=GLOB [--cores=N] [--order=global] [--batch_size=64] [...]

Prints an empty JSON object when TensorFlow is there. Then, for each line of JSON on standard input, which is a
`settings.Setting` and the length of a window, makes that pipeline, measures a window, drops the pipeline and prints a line of
JSON. Ends with its standard input.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from absl import flags

import console
import settings
from backends import BATCH_SIZE
from dali_tf_input import DaliOptions, InputError, InputSpec, Shard, TfDataOptions, Window, measure
from dali_tf_input.order import Position

_CORES = flags.DEFINE_integer("cores", None, "How many of the cores to use; by default all that this process may use.")

_WARM = 0.25  # of a window is measured before it, and not counted: tf.data's tuning settles


def make_batches(spec: InputSpec, options: DaliOptions | TfDataOptions, until: str | None, *, batch_size: int) -> Iterator[Any]:
    """Returns an iterator over the batches of the pipeline, cut after a stage, or over those on the replica's device."""
    from dali_tf_input import dali_backend, tf_data_backend  # DALI after TensorFlow, whose chatter is held back

    shared = {"batch_size": batch_size, "shard": Shard(0, 1), "position": Position()}
    cut = None if until == "device" else until
    if isinstance(options, TfDataOptions):
        dataset = tf_data_backend.build(spec, options, until=cut, **shared)
    else:
        device_id = 0 if options.device == "gpu" else None
        dataset = dali_backend.build(spec, options, device_id=device_id, until=cut, **shared)
    return copy_batches(iter(dataset)) if until == "device" else iter(dataset)


def copy_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches once they are on the GPU."""
    tf = console.import_tensorflow()
    for images, labels in batches:
        with tf.device("GPU:0"):
            copies = tf.identity(images), tf.identity(labels)
        tf.test.experimental.sync_devices()
        yield copies


def measure_setting(setting: settings.Setting, spec: InputSpec, *, seconds: float) -> dict[str, Any]:
    """Measures a window of one setting."""
    spec = dataclasses.replace(spec, order=setting.order, preprocess=dataclasses.replace(spec.preprocess, **setting.preprocess))
    options = setting.options
    on_gpu = isinstance(options, DaliOptions) and options.device == "gpu"
    tf = console.import_tensorflow()
    with tf.device("GPU:0" if on_gpu else "CPU:0"):  # else TensorFlow puts a dataset of DALI's on a GPU where there is one
        start = time.perf_counter()
        batches = make_batches(spec, options, setting.until, batch_size=BATCH_SIZE.value)
        next(batches)
        first_batch_seconds = time.perf_counter() - start
        queue = options.prefetch_queue_depth if isinstance(options, DaliOptions) else max(2, options.prefetch_batches)
        measure(batches, batch_size=BATCH_SIZE.value, seconds=_WARM * seconds, warmup_batches=queue)
        window: Window = measure(batches, batch_size=BATCH_SIZE.value, seconds=seconds, warmup_batches=0)
    return {
        **dataclasses.asdict(window),
        "first_batch_seconds": first_batch_seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
    }


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    console.die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what DALI prints is no answer
    if _CORES.value:  # before anything counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _CORES.value])
    spec = settings.training_spec()
    tf = console.import_tensorflow()
    from dali_tf_input.distribute import enable_memory_growth
    from dali_tf_input.failures import Stopped, explain

    enable_memory_growth()
    answer: dict[str, Any] = {}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        setting = settings.Setting.from_json(task["setting"])
        try:
            answer = measure_setting(setting, spec, seconds=task["seconds"])
        except tf.errors.OpError as error:
            bad = explain(error, [Stopped(spec, setting.options, None, BATCH_SIZE.value)])
            answer = {"error": str(bad or error.message)}
        except (InputError, RuntimeError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    console.run(main)
