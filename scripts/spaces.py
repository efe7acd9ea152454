"""The settings that tune.py may choose from."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import settings
from dali_tf_input import AUTOTUNE, DaliOptions, TfDataOptions
from settings import Setting


def space_of(options: DaliOptions | TfDataOptions, order: str, *, cores: int, fixed: bool) -> dict[str, list[dict[str, Any]]]:
    """Returns the values of each option of a backend, those first that were seen to matter most.

    Args:
      options: the default.
      order: DALI reads "buffer" by itself.
      cores: that this process may use.
      fixed: whether the whole image is resized, so that `fuse` "auto" is "off" on tf.data.
    """
    threads = sorted({max(1, cores // 2), cores, cores + cores // 2, 2 * cores})
    if isinstance(options, TfDataOptions):
        return {
            "plan": [{"fuse": "auto"}, {"fuse": "decode" if fixed else "off"}],
            "threads": [{"num_parallel_calls": number} for number in (AUTOTUNE, *threads)],
            "reads": [{"num_parallel_reads": number} for number in (4, 1, 16)],
            "buffer": [{"read_buffer_bytes": size} for size in (1 << 20, 1 << 18, 1 << 22)],
            "prefetch": [{"prefetch_batches": number} for number in (2, 1, 4, AUTOTUNE)],
        }
    space: dict[str, list[dict[str, Any]]] = {
        "threads": [{"num_threads": number} for number in (None, *threads)],
        "plan": [{"fuse": "auto"}, {"fuse": "off" if options.device == "cpu" else "decode"}],
        "prefetch": [{"prefetch_queue_depth": number} for number in (2, 1, 3, 4)],
    }
    if options.device == "gpu":
        del space["plan"]  # regions were reported to crash some GPUs' decoders: gpu_check.py tries that
        loads = [{"hw_decoder_load": load} for load in (None, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
        space = {"hardware decoder": loads, **space, "memory": [{"memory_hints": True}, {"memory_hints": False}]}
    if order == "buffer":
        modes = (("mmap", False), ("mmap", True), ("plain", False), ("direct", False))
        space["reader"] = [{"read_mode": mode, "read_ahead": ahead} for mode, ahead in modes]
    return space


def change(setting: Setting, values: dict[str, Any]) -> Setting:
    """Returns a setting with other options."""
    return dataclasses.replace(setting, options=dataclasses.replace(setting.options, **values))


def combinations(default: Setting, space: dict[str, list[Any]]) -> Iterator[Setting]:
    """Yields every combination of the values of a backend."""
    for values in itertools.product(*space.values()):
        yield functools.reduce(change, values, default)


def describe(setting: Setting) -> str:
    """Says in what a setting differs from the default of its backend."""
    device = setting.options.device if isinstance(setting.options, DaliOptions) else None
    default = DaliOptions(device=device) if device else TfDataOptions()
    return settings.describe_difference(setting, dataclasses.replace(setting, options=default))
