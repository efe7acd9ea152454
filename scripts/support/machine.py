"""The machine and software that a measurement was made with."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from typing import Any

from dali_tf_input.cli.machine import ask, ask_driver

_PACKAGES = {
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "DALI": "nvidia-dali-cuda120",
    "plugin": "nvidia-dali-tf-plugin-cuda120",
    "NumPy": "numpy",
}


def describe() -> dict[str, Any]:
    """Returns this command, date, CPU, cores that this process may use, GPUs and versions."""
    versions = {"Python": platform.python_version()} | dict.fromkeys(_PACKAGES, "none")
    for name, package in _PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(package)
    answer = ask_driver("name")
    return {
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": answer[1].strip().splitlines() if answer and answer[0] else [],
        "system": platform.platform(),
        "versions": versions,
    }


def print_lines(about: dict[str, Any]) -> None:
    """Prints what `describe` found, in two lines."""
    gpus = ", ".join(about["gpus"]) or "none"
    print(f"machine   {about['cpu']}, {about['cores']} cores; GPU: {gpus}")
    print(
        "software  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    )


def describe_in_a_line(about: dict[str, Any]) -> str:
    """Returns machine, main versions and date, for the foot of a plot."""
    gpus = ", ".join(about["gpus"]) or "no GPU"
    versions = about["versions"]
    software = f"TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}"
    return f"{about['cpu']}, {about['cores']} cores, {gpus}; {software}, {about['date'][:10]}"


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        match = re.search(r"^model name\s*: (.+)$", stream.read(), re.MULTILINE)
    return match[1] if match else platform.machine()


def count_gpus_of_tensorflow() -> int:
    """Returns how many GPUs TensorFlow sees, asked in another process so that this one holds none.

    Raises:
      InputError: it gives no answer.
    """
    code = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"
    output = ask([sys.executable, "-c", code], "TensorFlow does not count its GPUs", "")[1]
    match = re.search(r"^gpus (\d+)$", output, re.MULTILINE)
    return int(match[1]) if match else 0


def gpu_memory() -> int:
    """Returns the bytes that are used of the first visible GPU."""
    import pynvml

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"  # a number or a UUID
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    handle = by_index(int(first)) if first.isdecimal() else by_uuid(first)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
