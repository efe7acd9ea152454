"""What machine and software a measurement was made with."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

import console
from dali_tf_input import InputError

_SECONDS = 120  # for an answer
_PACKAGES = {
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "DALI": "nvidia-dali-cuda120",
    "plugin": "nvidia-dali-tf-plugin-cuda120",
    "NumPy": "numpy",
}


def describe() -> dict:
    """Returns date, CPU, cores this process may use, GPUs and versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpu_names(),
        "system": platform.platform(),
        "versions": {
            "Python": platform.python_version(),
            **{name: importlib.metadata.version(package) for name, package in _PACKAGES.items()},
        },
    }


def print_lines(about: dict) -> None:
    """Prints what `describe` found, in two lines."""
    print(f"machine   {about['cpu']}, {about['cores']} cores; GPU: {', '.join(about['gpus']) or 'none'}")
    print("software  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()))


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpu_names() -> list[str]:
    """Returns the name of each NVIDIA GPU, without starting CUDA in this process."""
    answer = ask_driver("name")
    return answer[1].strip().splitlines() if answer and answer[0] else []


def ask_driver(what: str) -> tuple[bool, str] | None:
    """Asks nvidia-smi for properties of each GPU; returns whether it went well and what it printed, None if there is none.

    Raises:
      InputError: it gives no answer.
    """
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        code, output, errors = console.call(command, seconds=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"nvidia-smi does not answer within {_SECONDS} s: the driver hangs. See what else does: make doctor"
        ) from error
    return code == 0, output if code == 0 else errors + output


def tensorflow_sees_a_gpu() -> bool:
    """Whether TensorFlow sees a GPU, see `count_gpus_of_tensorflow`."""
    return count_gpus_of_tensorflow() > 0


def count_gpus_of_tensorflow() -> int:
    """Asks TensorFlow in a process of its own, so that this one never holds the GPU; those that are hidden do not count.

    Raises:
      InputError: it gives no answer.
    """
    code = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"
    try:
        _, output, _ = console.call([sys.executable, "-c", code], seconds=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"TensorFlow does not say within {_SECONDS} s which GPUs it sees. What works here? make doctor"
        ) from error
    lines = [line.split() for line in output.splitlines()]
    return next((int(words[1]) for words in lines if words[:1] == ["gpus"]), 0)  # none where TensorFlow does not load


def cpus_allowed(path: str = "/sys/fs/cgroup/cpuset.cpus.effective") -> int | None:
    """Returns how many cores the control group of this process has, written like "0-3,8", or None where that is not known."""
    try:
        with open(path, encoding="ascii") as stream:
            spans = [span.split("-") for span in stream.read().strip().split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    except (OSError, ValueError):
        return None


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Returns how many cores' time the control group of this process has, or None where nothing limits it."""
    try:
        with open(path, encoding="ascii") as stream:
            quota, period = stream.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
