"""Measures one way of feeding TensorFlow, in a process of its own; compare_throughput.py starts it and tells it when.

usage: measure_throughput.py --files=GLOB --backend=NAME [--batch_size=64]

Prints a line of JSON when the first batch is there. Then, for each line `SECONDS WARMUP_BATCHES` on standard input, measures a
window and prints it as a line of JSON. Ends with its standard input.
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

import by_hand
import console
from backends import BATCH_SIZE, ROWS, options_of, training_spec
from dali_tf_input import DaliOptions, InputError, InputSpec, Shard, measure

_BACKEND = flags.DEFINE_enum("backend", None, list(ROWS), "What to measure.", required=True)


def make_batches(spec: InputSpec, *, backend: str, batch_size: int) -> Iterator[Any]:
    """Returns an iterator without end over the batches of a backend."""
    tf = console.import_tensorflow()
    options = options_of(backend)
    if backend == "tf_data_by_hand":
        return iter(by_hand.make_dataset(tf, spec, batch_size=batch_size))
    if backend == "dali_cpu_by_hand":
        return run_bare(by_hand.make_pipeline(spec, batch_size=batch_size, num_threads=len(os.sched_getaffinity(0))))
    from dali_tf_input.distribute import distribute

    if backend.endswith("_bare"):
        return bare_batches(spec, options, batch_size=batch_size)
    return iter(distribute(spec, options, global_batch_size=batch_size).dataset)


def bare_batches(spec: InputSpec, options: DaliOptions, *, batch_size: int) -> Iterator[Any]:
    """Returns an iterator over the outputs of the same DALI pipeline without TensorFlow."""
    from dali_tf_input import dali_backend

    device_id = 0 if options.device == "gpu" else None
    pipeline = dali_backend.build_pipeline(spec, options, batch_size=batch_size, shard=Shard(0, 1), device_id=device_id)
    return run_bare(pipeline)


def run_bare(pipeline: Any) -> Iterator[Any]:
    """Builds a DALI pipeline and yields its outputs."""
    pipeline.build()
    while True:
        yield pipeline.run()


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    console.die_with_parent()  # compare_throughput.py may die while this process is stopped
    spec = training_spec(_BACKEND.value)
    console.import_tensorflow()
    from dali_tf_input.distribute import enable_memory_growth

    enable_memory_growth()
    start = time.perf_counter()
    batches = make_batches(spec, backend=_BACKEND.value, batch_size=BATCH_SIZE.value)
    next(batches)
    _answer({"first_batch_seconds": time.perf_counter() - start})
    for line in sys.stdin:
        seconds, warmup_batches = line.split()
        window = measure(batches, batch_size=BATCH_SIZE.value, seconds=float(seconds), warmup_batches=int(warmup_batches))
        peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes; Linux counts in KiB
        _answer({**dataclasses.asdict(window), "peak_memory_bytes": peak_memory})
    return 0


def _answer(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    console.run(main)
