"""The machine and software that a measurement was made with."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from dali_tf_input import __version__
from dali_tf_input.cli.machine import ask, ask_driver
from dali_tf_input.processes import run_command

_PACKAGES = {
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "DALI": "nvidia-dali-cuda120",
    "plugin": "nvidia-dali-tf-plugin-cuda120",
    "NumPy": "numpy",
}


def describe() -> dict[str, Any]:
    """Returns this command, date, CPU, cores that this process may use, load, GPUs and versions.

    `cpu_quota` is how many cores' time the system grants, as in a container; None is no limit.
    `load` is the system's load average of the last minute.
    """
    versions = {"Python": platform.python_version()} | dict.fromkeys(_PACKAGES, "none")
    for name, package in _PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(package)
    answer = ask_driver("name")
    return {
        "command": shlex.join(sys.argv),
        "date": now(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(),
        "load": os.getloadavg()[0],
        "gpus": answer[1].strip().splitlines() if answer and answer[0] else [],
        "system": platform.platform(),
        "package": {"version": __version__, "commit": commit()},
        "versions": versions,
    }


def now() -> str:
    """Returns date and time, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def print_lines(about: dict[str, Any]) -> None:
    """Prints what `describe` found, in two lines."""
    gpus = ", ".join(about["gpus"]) or "none"
    quota = about["cpu_quota"]
    limit = f" (time of {quota:g})" if quota and quota < about["cores"] else ""
    print(f"machine   {about['cpu']}, {about['cores']} cores{limit}; GPU: {gpus}")
    print(
        "software  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    )


def describe_hardware(about: dict[str, Any]) -> str:
    """Returns CPU, cores and GPUs."""
    return f"{about['cpu']}, {about['cores']} cores, {', '.join(about['gpus']) or 'no GPU'}"


def describe_in_a_line(about: dict[str, Any]) -> str:
    """Returns machine, main versions and date, for the foot of a plot."""
    versions = about["versions"]
    software = f"TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}"
    return f"{describe_hardware(about)}; {software}, {about['date'][:10]}"


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no control groups of version 2
        return None
    return None if quota == "max" else int(quota) / int(period)


def commit() -> str | None:
    """Returns the commit of the clone that this file is in, "+" if it was edited; None without."""
    words = ["git", "-C", os.path.dirname(__file__)]
    try:
        code, name, _ = run_command([*words, "rev-parse", "--short=12", "HEAD"])
        _, changes, _ = run_command([*words, "status", "--porcelain", "--untracked-files=no"])
    except OSError:  # there is no git
        return None
    return name.strip() + ("+" if changes else "") if code == 0 else None


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
