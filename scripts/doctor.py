"""Says what of this installation works, and how to mend what does not.

usage: doctor.py [--files=GLOB]

Everything that could end a process is tried in another one, so that a crash is a line of the report; after a failure the rest
is tried in a fresh one. A line is ok, a warning or broken, and has the command that mends it. Exit code 1 if one is broken.
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from typing import Literal, NamedTuple

import console
import input_flags
import machine
from dali_tf_input import DatasetSpec, InputError
from dali_tf_input.files import index_command

_SECONDS = 120  # for each try
# The virtual environment is made by make, which believes it to be whole: so it goes first.
_ANEW = "rm -rf .venv && make install"
# How lines of TensorFlow's and DALI's messages begin that follow the one that says what is wrong.
_NO_WORDS = ("[[", "Current pipeline object", "C++ context", "[frame ", "<stack traces")
_OLDEST, _NEWEST = (3, 10), (3, 13)  # Python; see pyproject.toml

_TRY_PLUGIN = "import nvidia.dali.plugin.tf as dali_tf; dali_tf.DALIDataset; print('loads')"
_TRY_PIPELINE = """
import tensorflow as tf, nvidia.dali as dali, nvidia.dali.plugin.tf as dali_tf
from nvidia.dali import fn
device_id = {device_id}
device = "cpu" if device_id is None else "gpu"
pipeline = dali.Pipeline(batch_size=2, num_threads=1, device_id=device_id)
with pipeline:
    pipeline.set_outputs(fn.random.uniform(range=[5.0, 6.0], shape=[3], device=device))
with tf.device(device + ":0"):
    dataset = dali_tf.DALIDataset(pipeline=pipeline, batch_size=2, num_threads=1, device_id=device_id, output_shapes=((2, 3),),
                                  output_dtypes=(tf.float32,))
    (batch,) = next(iter(dataset))
assert batch.shape == (2, 3) and float(tf.reduce_min(batch)) >= 5
assert device in batch.device.lower()
print("serves a batch on the", device.upper())
"""
_TRY_MEMORY_GROWTH = """
from dali_tf_input.distribute import enable_memory_growth
enable_memory_growth()
print("on, as distribute() needs it: TensorFlow leaves memory to DALI")
"""

# Runs the code that each line of its input holds, and answers with a line: [whether it went well, its last word].
_TRIER = """
import contextlib, ctypes, io, json, os, sys, traceback
ctypes.CDLL(None).prctl(1, 9)  # to die with its parent
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for line in sys.stdin:
    printed, works = io.StringIO(), True
    try:
        with contextlib.redirect_stdout(printed):
            exec(json.loads(line), {})
    except BaseException:
        works, printed = False, io.StringIO(traceback.format_exc())
    print(json.dumps([works, printed.getvalue()]), file=answers, flush=True)
"""


class Finding(NamedTuple):
    """One line of the report."""

    state: Literal["ok", "warning", "broken"]
    what: str
    found: str
    mend: str = ""


class Trier:
    """Runs Python code in another process, one piece after the other, and in a fresh one after each that failed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def attempt(self, code: str) -> tuple[bool, str]:
        """Runs code; returns whether it went well, and its last word or what is wrong."""
        if self._process is None:
            self._process = console.start(
                [sys.executable, "-c", _TRIER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},  # jobs may run beside it
            )
        process = self._process
        with contextlib.suppress(BrokenPipeError):  # it died; how is told below
            print(json.dumps(code), file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], _SECONDS)[0]:
            self._kill()
            return False, f"does not answer within {_SECONDS} s"
        answer = process.stdout.readline()
        if not answer:
            return False, self.finish() or "the process ended without a word"
        works, text = json.loads(answer)
        if not works:
            self._kill()
        return works, last_line(text)

    def finish(self) -> str:
        """Ends the process; returns what went wrong as it ended, or nothing."""
        process, self._process = self._process, None
        if process is None:
            return ""
        try:
            process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            console.kill(process)
            return f"does not end within {_SECONDS} s"
        if process.returncode < 0:
            return f"the process died ({signal.Signals(-process.returncode).name})"
        return f"the process ended with exit code {process.returncode}" if process.returncode else ""

    def _kill(self) -> None:
        if self._process is not None:
            console.kill(self._process)
            self._process = None


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
    yield Finding("ok" if fits else "broken", "Python", platform.python_version(), "" if fits else f"{_ANEW} PYTHON=python3.12")
    trier = Trier()
    sees_tensorflow = yield from examine_import("TensorFlow", "tensorflow", trier)
    yield from examine_import("Keras", "keras", trier)
    sees_dali = yield from examine_import("DALI", "nvidia.dali", trier)
    on_gpu = yield from examine_gpus(trier, sees_tensorflow=sees_tensorflow, sees_dali=sees_dali)
    if sees_tensorflow and sees_dali:
        yield from examine_plugin(trier, on_gpu=on_gpu)
    if wrong := trier.finish():
        yield Finding("broken", "ending", f"after all of this: {wrong}", _anew())
    yield from examine_cores()
    if input_flags.FILES.value:
        yield from examine_files(input_flags.FILES.value)


def examine_import(name: str, module: str, trier: Trier) -> Generator[Finding, None, bool]:
    """Tries to import a package; yields a line, and returns whether it works."""
    works, text = trier.attempt(f"import {module}; print({module}.__version__)")
    yield Finding("ok" if works else "broken", name, text, "" if works else _anew())
    return works


def examine_gpus(trier: Trier, *, sees_tensorflow: bool, sees_dali: bool) -> Generator[Finding, None, bool]:
    """Compares the GPUs of the driver with those that TensorFlow and DALI see; returns whether both can use one together."""
    gpus = yield from examine_driver()
    tries = {
        "TensorFlow": (sees_tensorflow, "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"),
        "DALI": (sees_dali, "import nvidia.dali as dali; print(dali.backend.GetCUDADeviceCount())"),
    }
    seen = {name: trier.attempt(code) for name, (imported, code) in tries.items() if imported}
    if not gpus and all(found == (True, "0") for found in seen.values()):
        if gpus is None:
            yield Finding("ok", "GPUs", "none (there is no nvidia-smi): tf.data and DALI's CPU operators are used")
        return False
    most = max((int(text) for works, text in seen.values() if works), default=0)
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    expected = most if hidden and most else len(gpus or ()) or most  # some may be left to others on purpose
    for name, (works, text) in seen.items():
        if works and int(text) == expected:
            remark = f" of {len(gpus)}, those of CUDA_VISIBLE_DEVICES" if gpus and expected < len(gpus) else ""
            yield Finding("ok", f"{name}'s GPUs", text + remark)
        elif works:
            mend = "unset CUDA_VISIBLE_DEVICES" if hidden and not most else f"{_ANEW} GPU=1"
            yield Finding("broken", f"{name}'s GPUs", f"{text} of {expected}", mend)
        else:
            yield Finding("broken", f"{name}'s GPUs", text, f"{_ANEW} GPU=1")
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "false":
        found = "TF_FORCE_GPU_ALLOW_GROWTH=false: TensorFlow takes all of a GPU's memory, and none is left for DALI"
        yield Finding("broken", "memory growth", found, "unset TF_FORCE_GPU_ALLOW_GROWTH")
        return False
    if len(seen) < len(tries) or any(found != (True, str(expected)) for found in seen.values()):
        return False
    works, text = trier.attempt(_TRY_MEMORY_GROWTH)  # before anything touches a GPU: jobs may run on it
    yield Finding("ok" if works else "broken", "memory growth", text, "" if works else f"{_ANEW} GPU=1")
    return works


def examine_driver() -> Generator[Finding, None, list[str] | None]:
    """Asks nvidia-smi for its GPUs; returns a line for each, or None where there is no nvidia-smi."""
    mend = "nvidia-smi    # says what is wrong with the driver; a new one takes a restart of the machine"
    try:
        answer = machine.ask_driver("name,driver_version")
    except InputError as error:
        yield Finding("broken", "driver", str(error).partition(":")[0], mend)
        return []
    if answer is None:
        return None
    works, output = answer
    if not works:
        yield Finding("broken", "driver", last_line(output), mend)
        return []
    gpus = output.strip().splitlines()
    yield Finding("ok", "driver", "; ".join(gpus) or "no GPU")
    return gpus


def examine_plugin(trier: Trier, *, on_gpu: bool) -> Iterator[Finding]:
    """Tries DALI's TensorFlow plugin: its version, loading it, a pipeline on the CPU and, if there is one, on a GPU."""
    versions = {}
    for package in ("nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("broken", "plugin", f"{package} is not installed", _anew())
            return
    dali, plugin = versions.values()
    if dali != plugin:
        yield Finding("broken", "plugin", f"{plugin}, made for another DALI than {dali}", _anew())
        return
    works, text = trier.attempt(_TRY_PLUGIN)
    yield Finding("ok" if works else "broken", "plugin", f"{plugin} {text}", "" if works else _anew())
    if not works:
        return
    for what, device_id in (("pipeline", None), ("GPU pipeline", 0)) if on_gpu else (("pipeline", None),):
        works, text = trier.attempt(_TRY_PIPELINE.format(device_id=device_id))
        yield Finding("ok" if works else "broken", what, text, "" if works else _anew())


def examine_cores() -> Iterator[Finding]:
    """Compares the cores that this process may use with those that there are."""
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, allowed = machine.cpu_quota(), machine.cpus_allowed()
    if usable < min(all_cores, allowed or all_cores):
        found = f"this process may use {usable} of {all_cores}"
        yield Finding(
            "warning", "cores", found, f"taskset -cp 0-{all_cores - 1} $$    # in this shell, before anything is started"
        )
    elif quota and quota < usable:
        found = f"{usable}, of which this container's quota leaves {quota:g}: more threads than that wait for one another"
        yield Finding(
            "warning", "cores", found, f"docker run --cpuset-cpus=0-{max(0, int(quota) - 1)}    # cores instead of a quota"
        )
    else:
        yield Finding("ok", "cores", f"{usable}" + (f" of {all_cores}, all of this container" if usable < all_cores else ""))


def examine_files(files: list[str]) -> Iterator[Finding]:
    """Looks at the health of TFRecord files and their indexes."""
    pattern = files[0] if len(files) == 1 else files
    keys = {flag.name: flag.value for flag in (input_flags.IMAGE_KEY, input_flags.LABEL_KEY, input_flags.LABEL_OFFSET)}
    arguments = [f"--{name}={value}" for name, value in keys.items() if value]
    try:
        dataset = DatasetSpec.from_files(pattern, index_dir=input_flags.INDEX_DIR.value, **keys)
    except (InputError, OSError) as error:
        yield Finding("broken", "records", str(error), mend_records(str(error), files, given_keys=bool(arguments)))
        return
    left_out = sum(dataset.left_out_per_file)
    reports = sorted({os.path.join(os.path.dirname(file), "bad_records.jsonl") for file in dataset.index_files})
    yield Finding(
        "warning" if left_out else "ok",
        "records",
        f"{dataset.num_records:,} in {console.count(len(dataset.files), 'file')}"
        + (f", {left_out:,} left out" if left_out else ""),
        f"head {shlex.join(reports)}    # what is left out, and why" if left_out else "",
    )
    if dataset.label_range is None:
        arguments += ["--verify=schema"] + (["--on_bad=skip"] if left_out else [])
        mend = index_command(pattern, index_dir=input_flags.INDEX_DIR.value, arguments=arguments)
        yield Finding("warning", "labels", "not every record was looked at", mend)
    else:
        low, high = dataset.label_range
        yield Finding("ok", "labels", f"{low} to {high}")


def mend_records(error: str, files: list[str], *, given_keys: bool) -> str:
    """Returns the command that mends what is wrong with records: that which the error names, or the one that shows more."""
    named = re.search(r"(make index |\.venv/bin/python scripts/index_tfrecords\.py ).*", error)
    paths = [os.path.abspath(os.path.expanduser(file)) for file in files]
    if named or "://" in files[0]:
        return named[0] if named else ""  # how a URL is copied is said
    folder = paths[0] if os.path.isdir(paths[0]) else os.path.dirname(paths[0])
    if not any(os.path.exists(path) or glob.glob(path) for path in paths):
        return f"ls {shlex.quote(folder)}    # what is there? then DATA='path/train-*'"
    if folder == paths[0]:
        return f"make doctor DATA={shlex.quote(os.path.join(glob.escape(folder), '*-of-*'))}"
    if " are left out" in error:
        return f"head {shlex.quote(os.path.join(input_flags.INDEX_DIR.value or folder, 'bad_records.jsonl'))}"
    if "_key`" in error or "label_offset`" in error:
        return f"make doctor DATA={shlex.quote(paths[0])}" + ("" if given_keys else " ARGS='--image_key=KEY --label_key=KEY'")
    return f"ls -l {shlex.quote(folder)}"


def _anew() -> str:
    """Returns the command that installs everything anew, with the CUDA libraries where they are installed or there is a GPU."""
    gpu = shutil.which("nvidia-smi") is not None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        gpu = gpu or bool(importlib.metadata.version("nvidia-cudnn-cu12"))
    return f"{_ANEW} GPU=1" if gpu else _ANEW


def last_line(text: str) -> str:
    """Returns the last line that says something."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith(_NO_WORDS)), "no word")


if __name__ == "__main__":
    console.run(main)
