"""What machine and software a measurement was made with."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess

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


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpu_names() -> list[str]:
    """Returns the name of each NVIDIA GPU, without starting CUDA in this process."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip().splitlines() if process.returncode == 0 else []
