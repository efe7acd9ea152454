"""Says what of this installation works, and how to mend what does not.

usage: doctor.py [--files=GLOB]

Everything that could end a process is tried in a process of its own, so that a crash is a line of the report. A line is ok, a
warning or broken, and has the command that mends it. Exit code 1 if one is broken.
"""

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import console
import input_flags
from dali_tf_input import DatasetSpec, InputError, find_files
from dali_tf_input.files import index_command

_SECONDS = 120  # for each try
_OLDEST, _NEWEST = (3, 10), (3, 13)  # Python; see pyproject.toml

_TRY_PLUGIN = "import nvidia.dali.plugin.tf as dali_tf; dali_tf.DALIDataset; print('loads')"
_TRY_PIPELINE = """
import numpy as np, tensorflow as tf, nvidia.dali as dali, nvidia.dali.plugin.tf as dali_tf
from nvidia.dali import fn, types
pipeline = dali.Pipeline(batch_size=2, num_threads=1, device_id=None)
with pipeline:
    pipeline.set_outputs(fn.random.uniform(range=[5.0, 6.0], shape=[3]))
with tf.device("cpu:0"):
    dataset = dali_tf.DALIDataset(pipeline=pipeline, batch_size=2, num_threads=1, device_id=None, output_shapes=((2, 3),),
                                  output_dtypes=(tf.float32,))
(batch,) = next(iter(dataset))
assert batch.shape == (2, 3) and float(tf.reduce_min(batch)) >= 5
print("serves a batch on the CPU")
"""


class Finding(NamedTuple):
    """One line of the report."""

    state: Literal["ok", "warning", "broken"]
    what: str
    found: str
    mend: str = ""


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    findings = list(examine())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<7}  {finding.what:<{width}}  {finding.found}")
        if finding.mend:
            print(f"{'':<7}  {'':<{width}}  -> {finding.mend}")
    broken = sum(finding.state == "broken" for finding in findings)
    warnings = sum(finding.state == "warning" for finding in findings)
    print(f"{console.count(broken, 'thing')} broken, {console.count(warnings, 'warning')}.")
    return 1 if broken else 0


def examine() -> Iterator[Finding]:
    """Yields the lines, in the order in which things build on each other."""
    version = sys.version_info[:2]
    fits = _OLDEST <= version <= _NEWEST
    mend = "" if fits else "make clean install PYTHON=python3.12"
    yield Finding("ok" if fits else "broken", "Python", platform.python_version(), mend)
    sees_tensorflow = yield from examine_import("TensorFlow", "tensorflow")
    yield from examine_import("Keras", "keras")
    sees_dali = yield from examine_import("DALI", "nvidia.dali")
    if sees_tensorflow and sees_dali:
        yield from examine_plugin()
    yield from examine_gpus(sees_tensorflow=sees_tensorflow, sees_dali=sees_dali)
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if usable == all_cores:
        yield Finding("ok", "cores", f"{usable}")
    else:
        yield Finding(
            "warning", "cores", f"this process may use {usable} of {all_cores}", "start it without taskset or a CPU limit"
        )
    if input_flags.FILES.value:
        yield from examine_files(input_flags.FILES.value)


def examine_import(name: str, module: str) -> Iterator[Finding]:
    """Tries to import a package; yields a line, and returns whether it works."""
    works, text = attempt(f"import {module}; print({module}.__version__)")
    yield Finding("ok" if works else "broken", name, text, "" if works else "rm -rf .venv && make install")
    return works


def examine_plugin() -> Iterator[Finding]:
    """Tries DALI's TensorFlow plugin: its version, loading it, a pipeline."""
    versions = {}
    for package in ("nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("broken", "plugin", f"{package} is not installed", "make install")
            return
    dali, plugin = versions.values()
    if dali != plugin:
        yield Finding("broken", "plugin", f"{plugin}, made for another DALI than {dali}", "rm -rf .venv && make install")
        return
    works, text = attempt(_TRY_PLUGIN)
    yield Finding("ok" if works else "broken", "plugin", f"{plugin} {text}", "" if works else "rm -rf .venv && make install")
    if works:
        works, text = attempt(_TRY_PIPELINE)
        yield Finding("ok" if works else "broken", "pipeline", text, "" if works else "rm -rf .venv && make install")


def examine_gpus(*, sees_tensorflow: bool, sees_dali: bool) -> Iterator[Finding]:
    """Compares the GPUs of the driver with those that TensorFlow and DALI see."""
    if not shutil.which("nvidia-smi"):
        yield Finding("ok", "GPUs", "none (there is no nvidia-smi): tf.data and DALI's CPU operators are used")
        return
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        yield Finding(
            "broken", "driver", last_line(process.stdout + process.stderr), "nvidia-smi    # says what is wrong with the driver"
        )
        return
    gpus = process.stdout.strip().splitlines()
    yield Finding("ok", "driver", "; ".join(gpus) or "no GPU")
    tries = {
        "TensorFlow": (sees_tensorflow, "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"),
        "DALI": (sees_dali, "import nvidia.dali as dali; print(dali.backend.GetCUDADeviceCount())"),
    }
    for name, (imported, code) in tries.items():
        if not imported:
            continue
        works, text = attempt(code)
        if works and int(text) == len(gpus):
            yield Finding("ok", f"{name}'s GPUs", text)
        elif works:
            yield Finding(
                "broken", f"{name}'s GPUs", f"{text} of {len(gpus)}", "make install GPU=1, and unset CUDA_VISIBLE_DEVICES"
            )
        else:
            yield Finding("broken", f"{name}'s GPUs", text, "make install GPU=1")


def examine_files(files: list[str]) -> Iterator[Finding]:
    """Looks at the health of TFRecord files and their indexes."""
    try:
        dataset = DatasetSpec.from_files(
            files[0] if len(files) == 1 else files, index_dir=input_flags.INDEX_DIR.value, image_key=input_flags.IMAGE_KEY.value,
            label_key=input_flags.LABEL_KEY.value, label_offset=input_flags.LABEL_OFFSET.value,
        )  # fmt: skip
    except InputError as error:
        yield Finding("broken", "records", str(error))
        return
    left_out = sum(dataset.left_out_per_file)
    yield Finding(
        "warning" if left_out else "ok",
        "records",
        f"{dataset.num_records:,} in {console.count(len(find_files(files)), 'file')}"
        + (f", {left_out:,} left out" if left_out else ""),
        "look at bad_records.jsonl beside the indexes" if left_out else "",
    )
    if dataset.label_range is None:
        pattern = files[0] if len(files) == 1 else files
        mend = index_command(pattern, index_dir=input_flags.INDEX_DIR.value, arguments=["--verify=schema"])
        yield Finding("warning", "labels", "not every record was looked at", mend)
    else:
        low, high = dataset.label_range
        yield Finding("ok", "labels", f"{low} to {high}")


def attempt(code: str) -> tuple[bool, str]:
    """Runs Python code in a process of its own; returns whether it ended well, and its last word or what is wrong."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return False, f"does not answer within {_SECONDS} s"
    if process.returncode < 0:
        return False, f"the process died ({signal.Signals(-process.returncode).name})"
    if process.returncode:
        return False, last_line(process.stderr)
    return True, last_line(process.stdout)


def last_line(text: str) -> str:
    """Returns the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")


if __name__ == "__main__":
    console.run(main)
