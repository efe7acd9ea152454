"""The process that measures candidates, see `Measurer`."""

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dali_tf_input import DaliOptions, InputError, InputSpec
from dali_tf_input.cli import command
from support import machine, processes
from support.benchmark import measure
from support.flags import FileFlags, WorkFlags
from support.throughput import peers, reference, stages
from support.throughput.candidates import Candidate

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_CORES = FLAGS.integer("cores", None, "How many of the cores to use; by default all.", 1)


def make_batches(candidate: Candidate, spec: InputSpec, batch_size: int) -> Iterator[Any]:
    """Returns an infinite iterator over the batches of a candidate."""
    if candidate.variant in peers.PEERS:  # before TensorFlow is imported: PyTorch crashes beside it
        return peers.make_batches(candidate.variant, spec, batch_size=batch_size)
    import tensorflow as tf

    from dali_tf_input.backends.build import import_dali, make_dataset
    from dali_tf_input.backends.stream import Stream

    options, variant = candidate.options, candidate.variant
    spec = dataclasses.replace(spec, order=candidate.order)
    shared: dict[str, Any] = {"batch_size": batch_size}
    if variant == "by_hand" and isinstance(options, DaliOptions):
        threads = len(os.sched_getaffinity(0))
        return run_pipeline(reference.make_pipeline(spec, num_threads=threads, **shared))
    if variant == "by_hand":
        return iter(reference.make_dataset(spec, **shared))
    if variant == "bare" and isinstance(options, DaliOptions):
        device_id = 0 if options.device == "gpu" else None
        stream = Stream(spec=spec, shard_batch_size=batch_size)
        return run_pipeline(
            import_dali().build_pipeline(stream, options, device_id, uses_dali_reader=True)
        )
    if variant in stages.STAGES:
        return iter(stages.make_dataset(variant, spec, options, **shared))
    batches = iter(make_dataset(spec, options, endless=True, **shared))
    return copy_to_gpu(tf, batches) if variant == "device" else batches


def run_pipeline(pipeline: Any) -> Iterator[Any]:
    """Builds a DALI pipeline and yields its outputs."""
    pipeline.build()
    while True:
        yield pipeline.run()


def copy_to_gpu(tf: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches once they are on the GPU."""
    for batch in batches:
        with tf.device("GPU:0"):
            copies = [tf.identity(part) for part in batch]
        tf.test.experimental.sync_devices()
        yield copies


def read_from_disk() -> int | None:
    """Returns the bytes that this process had read from disks, not memory; None if not known."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(text.partition("read_bytes: ")[2].split()[0])


class Pipelines:
    """The pipeline that was measured last, and how to make another."""

    def __init__(self, spec: InputSpec, batch_size: int) -> None:
        self._spec, self._batch_size = spec, batch_size
        self._candidate: Candidate | None = None
        self._batches: Iterator[Any] = iter(())
        self._first_batch_seconds = 0.0

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        """Measures a window, as `Measurer.measure` says."""
        candidate = Candidate.from_json(task.pop("candidate"))
        if candidate.variant in peers.PEERS:
            try:
                return self._measure(candidate, **task)
            except (InputError, ImportError, RuntimeError) as error:
                return {"error": str(error)}
        if candidate.variant != "by_hand":  # which augments by Keras's layers
            for unused in ("keras", "jax"):  # TensorFlow would import them if it could
                sys.modules.setdefault(unused, None)  # type: ignore[arg-type]
        tf = command.import_tensorflow()
        from dali_tf_input.backends.build import enable_memory_growth
        from dali_tf_input.training.failures import explain

        enable_memory_growth()
        # TensorFlow may see no GPU where DALI does.
        on_gpu = candidate.backend == "dali_gpu" and candidate.variant != "bare"
        try:
            with tf.device("GPU:0" if on_gpu else "CPU:0"):
                return self._measure(candidate, **task)
        except tf.errors.OpError as error:
            spec = dataclasses.replace(self._spec, order=candidate.order)
            context = {"batch_size": self._batch_size, "step": 0}
            return {
                "error": str(explain(error, spec, candidate.options, **context) or error.message)
            }
        except (InputError, RuntimeError) as error:
            return {"error": str(error)}

    def _measure(
        self, candidate: Candidate, seconds: float, warmup_batches: int, fresh: bool
    ) -> dict[str, Any]:
        size, taken, disk = self._batch_size, warmup_batches, read_from_disk()
        if fresh or candidate != self._candidate:
            self._candidate, self._batches = None, iter(())
            start = time.perf_counter()
            self._batches = make_batches(candidate, self._spec, size)
            next(self._batches)
            self._first_batch_seconds = time.perf_counter() - start
            self._candidate = candidate
            # Fills the queues; tf.data's tuning settles.
            settling = measure(
                self._batches, batch_size=size, seconds=seconds / 4, warmup_batches=4
            )
            taken += 1 + 4 + settling.measured_batches
        window = measure(
            self._batches, batch_size=size, seconds=seconds, warmup_batches=warmup_batches
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        details: dict[str, Any] = {
            "first_batch_seconds": self._first_batch_seconds,
            "peak_memory_bytes": peak,
        }
        on_gpu = candidate.backend == "dali_gpu"
        details["gpu_memory_bytes"] = machine.gpu_memory() if on_gpu else 0
        details["images_taken"] = size * (taken + window.measured_batches)
        now = read_from_disk()
        details["disk_bytes"] = None if disk is None or now is None else now - disk
        return {"window": dataclasses.asdict(window), **details}


def main(arguments: list[str]) -> None:
    command.check_no_arguments(arguments)
    if _CORES.value:  # before anything counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _CORES.value])
    spec = _WORK.spec(_FILES, "buffer")
    processes.serve(Pipelines(spec, _WORK.batch_size.value).answer)


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
