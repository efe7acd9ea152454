"""The machine and software that a measurement was made with."""

import contextlib
import datetime
import gc
import importlib.metadata
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.processes import run_command

_SECONDS = 120  # for an answer
_PACKAGES = {
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "DALI": "nvidia-dali-cuda120",
    "plugin": "nvidia-dali-tf-plugin-cuda120",
    "NumPy": "numpy",
}


def try_code(code: str) -> tuple[bool, str]:
    """Runs Python code; returns whether that worked, and what it printed, or a traceback."""
    gc.disable()  # TensorFlow's import makes many objects, which all stay
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})  # noqa: S102 (of `doctor`, in a process that does nothing else)
    except BaseException:
        return False, traceback.format_exc()
    return True, printed.getvalue()


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


def ask_driver(what: str) -> tuple[bool, str] | None:
    """Asks nvidia-smi for properties of each GPU, in a process that can hang without harm.

    Returns:
      Whether it succeeded, and what it printed; None if there is no nvidia-smi.

    Raises:
      InputError: it gives no answer.
    """
    if not shutil.which("nvidia-smi"):
        return None
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    code, output, errors = _ask(words, "nvidia-smi does not answer", "the driver hangs. ")
    return code == 0, output if code == 0 else errors + output


def count_gpus_of_tensorflow() -> int:
    """Returns how many GPUs TensorFlow sees, asked in another process so that this one holds none.

    Raises:
      InputError: it gives no answer.
    """
    code = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"
    output = _ask([sys.executable, "-c", code], "TensorFlow does not count its GPUs", "")[1]
    match = re.search(r"^gpus (\d+)$", output, re.MULTILINE)
    return int(match[1]) if match else 0


def _ask(words: list[str], what: str, why: str) -> tuple[int, str, str]:
    try:
        return run_command(words, seconds=_SECONDS)
    except subprocess.TimeoutExpired as error:
        text = f"{what} within {_SECONDS} s: {why}See dali-tf-input doctor."
        raise InputError(text) from error


def gpu_memory() -> int:
    """Returns the bytes that are used of the first visible GPU."""
    import pynvml

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"  # a number or a UUID
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    handle = by_index(int(first)) if first.isdecimal() else by_uuid(first)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
