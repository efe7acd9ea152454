"""Checks this installation, and says how to fix what does not work.

usage: dali-tf-input doctor [flags] [--files=FILE_OR_PATTERN]

Everything that could crash runs in another process, so that a crash is only a line of the report.
Each line is ok, a warning, or broken; what can be fixed has the command that fixes it. With --files
it checks these files and their indexes too. The exit code is 1 if something is broken.

example: dali-tf-input doctor --files='path/train-*'
"""

import collections
import contextlib
import glob
import os
import platform
import re
import shlex
import sys
from collections.abc import Generator, Iterator
from typing import Literal, NamedTuple

from dali_tf_input import InputError, InputSpec, __version__
from dali_tf_input.cli import command, machine
from dali_tf_input.cli.flags import FileFlags
from dali_tf_input.processes import Child, ChildDiedError
from dali_tf_input.records.installing import DALI, PLUGIN, pip_install, plugin_command, version_of
from dali_tf_input.records.paths import index_command, program, python_command
from dali_tf_input.storage import objects

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)

_SECONDS = 120  # for each try
_STORE_SECONDS = 5  # for the answer of a store
# Prefixes of lines that follow the informative line in TensorFlow's and DALI's messages.
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
shared = dict(batch_size=2, num_threads=1, device_id=device_id)
with tf.device(device + ":0"):
    dataset = dali_tf.DALIDataset(pipeline=pipeline, output_shapes=((2, 3),),
                                  output_dtypes=(tf.float32,), **shared)
    (batch,) = next(iter(dataset))
assert batch.shape == (2, 3) and float(tf.reduce_min(batch)) >= 5
assert device in batch.device.lower()
print("serves a batch on the", device.upper())
"""
_TRY_MEMORY_GROWTH = """from dali_tf_input.backends.build import enable_memory_growth
enable_memory_growth()
print("on, as load() needs it: TensorFlow leaves memory to DALI")"""
_TRY_OPERATOR = """from dali_tf_input.backends.dali_operator import load_operator
load_operator(); print("compiled for this DALI")"""
_TRY_KERNEL = "from dali_tf_input.backends.tf_native import load_ops; load_ops(); print('native')"
_TRY_ENGINES = """import ctypes, pynvml
pynvml.nvmlInit(); pynvml.nvmlDeviceGetJpgUtilization(pynvml.nvmlDeviceGetHandleByIndex(0))
ctypes.CDLL('libnvcuvid.so.1'); print('its engines and its library are there')"""
_COUNT_GPUS = {
    "TensorFlow": "import tensorflow; print(len(tensorflow.config.list_physical_devices('GPU')))",
    "DALI": "import nvidia.dali as dali; print(dali.backend.GetCUDADeviceCount())",
}

_PACKAGES = {  # module and package
    "TensorFlow": ("tensorflow", "tensorflow"),
    "Keras": ("keras", "keras"),
    "DALI": ("nvidia.dali", DALI),
}


class Finding(NamedTuple):
    """One line of the report."""

    state: Literal["ok", "warning", "broken"]
    what: str
    found: str
    fix: str = ""


class Trier:
    """Runs Python code in another process, and in a fresh one after each piece that failed."""

    def __init__(self) -> None:
        # Other jobs may use the GPUs: take little of their memory.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        self._child = Child(environment=environment)

    def attempt(self, code: str) -> tuple[bool, str]:
        """Runs code; returns whether it worked, and its last line or what is wrong."""
        try:
            works, text = self._child.call(machine.try_code, code, seconds=_SECONDS)
        except ChildDiedError as error:
            works, text = False, f"no answer within {_SECONDS} s"
            if error.cause != "timeout":
                text = f"the process died ({str(error).partition(':')[0]})"
        if not works:
            self.close()
        return works, last_line(text)

    def __enter__(self) -> "Trier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def main(arguments: list[str]) -> int:
    """Prints the report; returns the exit code."""
    command.check_no_arguments(arguments)
    command.refuse_useless(((not _FILES.files.value, _FILES.all, "without --files"),))
    states: collections.Counter[str] = collections.Counter()
    for finding in examine():
        states[finding.state] += 1
        print(f"{finding.state:<7}  {finding.what:<21}  {finding.found}", flush=True)
        if finding.fix:
            print(f"{'':<7}  {'':<21}  -> {finding.fix}")
    broken, warnings = states["broken"], states["warning"]
    problems = command.format_count(broken, "problem") if broken else "No problems found"
    print(f"{problems}, {command.format_count(warnings, 'warning')}.")
    return 1 if broken else 0


def check(what: str, works: bool, found: str, fix: str) -> Finding:
    """Returns ok, or broken with a fix."""
    return Finding("ok", what, found) if works else Finding("broken", what, found, fix)


def examine() -> Iterator[Finding]:
    """Yields the lines, in the order in which things build on each other."""
    yield Finding("ok", "dali_tf_input", __version__)
    fits = _OLDEST <= sys.version_info[:2] <= _NEWEST
    yield check("Python", fits, platform.python_version(), "use Python 3.10 to 3.13")
    works = {}
    trier = Trier()
    with trier:
        for name, (module, package) in _PACKAGES.items():
            works[name], text = trier.attempt(f"import {module}; print({module}.__version__)")
            # Containers of NVIDIA's have it by another name.
            if name == "DALI" and not works[name] and version_of(DALI) is None:
                text = "not installed: tf.data alone works (DaliOptions needs it)"
                yield Finding("warning", name, text, pip_install(DALI))
            else:
                yield check(name, works[name], text, reinstall(package))
        imported = [name for name in _COUNT_GPUS if works[name]]
        if works["TensorFlow"]:
            compiled, text = trier.attempt(_TRY_KERNEL)
            yield Finding("ok", "kernel", text) if compiled else _explain_kernel(text)
        on_gpu = yield from examine_gpus(trier, imported)
        if len(imported) == 2:
            yield from examine_plugin(trier, on_gpu=on_gpu)
    yield from examine_cores()
    if _FILES.files.value:
        yield from examine_files(_FILES.files.value)


def _explain_kernel(text: str) -> Finding:
    """Returns the line for the compiled operations, by the error that says how to compile them."""
    problem, _, fix = text.rpartition("compiled operations: ")[2].partition(" To compile them: ")
    return Finding("warning", "kernel", problem, fix.partition(". Or use ")[0])


def examine_gpus(trier: Trier, imported: list[str]) -> Generator[Finding, None, bool]:
    """Compares the GPUs of the driver with those that TensorFlow and DALI see.

    Returns whether TensorFlow and DALI can use a GPU together.
    """
    gpus = yield from examine_driver()
    seen = {name: trier.attempt(_COUNT_GPUS[name]) for name in imported}
    if not gpus and all(result == (True, "0") for result in seen.values()):
        if gpus is None:
            message = "none (there is no nvidia-smi): tf.data and DALI's CPU operators are used"
            yield Finding("ok", "GPUs", message)
        return False
    max_seen = max((int(text) for works, text in seen.values() if works), default=0)
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    # Some may be hidden on purpose.
    expected = max_seen if hidden and max_seen else len(gpus or ()) or max_seen
    gpu_install = reinstall("tensorflow[and-cuda]", DALI)
    for name, (works, text) in seen.items():
        fix = gpu_install
        if works and int(text) != expected:
            fix = "unset CUDA_VISIBLE_DEVICES" if hidden and not max_seen else gpu_install
            works, text = False, f"{text} of {expected}"
        elif works and gpus and expected < len(gpus):
            text += f" of {len(gpus)}, those of CUDA_VISIBLE_DEVICES"
        yield check(f"{name}'s GPUs", works, text, fix)
    if gpus:  # nvJPEG silently does without the decoder
        works, text = trier.attempt(_TRY_ENGINES)
        fix = "" if works else "in a container: docker run -e NVIDIA_DRIVER_CAPABILITIES=all ..."
        if "No module named" in text:
            text, fix = "unknown", pip_install("nvidia-ml-py")
        if "Not Supported" in text:
            text, fix = "this GPU has none (A100, H100 and later do): decoded by CUDA cores", ""
        yield Finding("ok" if works else "warning", "hardware JPEG decoder", text, fix)
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "false":
        message = "TF_FORCE_GPU_ALLOW_GROWTH=false: TensorFlow takes all memory of a GPU"
        yield check("memory growth", False, message, "unset TF_FORCE_GPU_ALLOW_GROWTH")
        return False
    if len(seen) < 2 or any(result != (True, str(expected)) for result in seen.values()):
        return False
    works, text = trier.attempt(_TRY_MEMORY_GROWTH)
    yield check("memory growth", works, text, gpu_install)
    return works


def examine_driver() -> Generator[Finding, None, list[str] | None]:
    """Asks nvidia-smi for its GPUs; returns a line for each, or None if there is no nvidia-smi."""
    fix = "nvidia-smi    # says what is wrong with the driver; a new one needs a reboot"
    try:
        answer = machine.ask_driver("name,driver_version,memory.used,memory.total,mig.mode.current")
    except InputError as error:
        answer = (False, str(error).partition(":")[0])
    if answer is None:
        return None
    works, output = answer
    gpus = output.strip().splitlines() if works else []
    if any(int(gpu.split(", ")[1].split(".")[0]) < 525 for gpu in gpus):
        works, output = False, f"{gpus[0]}: CUDA 12 needs driver 525 or newer"
    yield check("driver", works, ("; ".join(gpus) or "no GPU") if works else last_line(output), fix)
    return gpus


def examine_plugin(trier: Trier, *, on_gpu: bool) -> Iterator[Finding]:
    """Tries DALI's TensorFlow plugin: its version, loading it, a pipeline on CPU and GPU."""
    dali, plugin = version_of(DALI), version_of(PLUGIN)
    if plugin is None:
        text = "not installed: tf.data alone works (DaliOptions needs it)"
        yield Finding("warning", "plugin", text, _install_plugin())
        return
    if dali != plugin:
        text = f"{plugin}, compiled for another DALI than {dali}"
        yield check("plugin", False, text, _install_plugin())
        return
    works, text = trier.attempt(_TRY_PLUGIN)
    yield check("plugin", works, f"{plugin} {text}", _install_plugin())
    if works:
        compiled, text = trier.attempt(_TRY_OPERATOR)
        compile_it = f"{python_command()} -m dali_tf_input.backends.dali_operator"
        state: Literal["ok", "warning"] = "ok" if compiled else "warning"
        yield Finding(state, "operator of DALI", text, "" if compiled else compile_it)
    tries = {"pipeline": None} | ({"GPU pipeline": 0} if on_gpu else {})
    for what, device_id in tries.items() if works else ():
        works, text = trier.attempt(_TRY_PIPELINE.format(device_id=device_id))
        yield check(what, works, text, _install_plugin())


def examine_cores() -> Iterator[Finding]:
    """Compares the cores that this process may use with those of the machine and the container."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, allowed = cpu_quota(), cpus_allowed()
    if usable < min(total, allowed or total):
        text = f"this process may use {usable} of {total}"
        fix = f"taskset -cp 0-{total - 1} $$    # in this shell, before anything is started"
        yield Finding("warning", "cores", text, fix)
    elif quota and quota < usable:
        text = f"{usable}, but the container's quota leaves {quota:g}: threads wait for each other"
        last = max(0, int(quota) - 1)
        fix = f"docker run --cpuset-cpus=0-{last}    # cores instead of a quota"
        yield Finding("warning", "cores", text, fix)
    else:
        remark = f" of {total}, all of this container" if usable < total else ""
        yield Finding("ok", "cores", f"{usable}{remark}")


def cpus_allowed(path: str = "/sys/fs/cgroup/cpuset.cpus.effective") -> int | None:
    """Returns how many cores this control group has, from text like "0-3,8"; None if unknown."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as stream:
        spans = [span.split("-") for span in stream.read().strip().split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    return None


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Returns how many cores' time this control group has; None if it is not limited."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as stream:
        quota, period = map(int, stream.read().split())  # "max" is no number
        return quota / period
    return None


def examine_files(files: list[str]) -> Iterator[Finding]:
    """Checks TFRecord files and their indexes."""
    try:
        for url in filter(objects.is_url, files):
            objects.find_objects(url, retry_seconds=_STORE_SECONDS)
        dataset = _FILES.dataset(files)
    except (InputError, OSError) as error:
        yield check("records", False, str(error), fix_records(str(error), files))
        return
    skipped = dataset.num_skipped
    count = f"{dataset.num_records:,} in {command.format_count(len(dataset.files), 'file')}"
    if skipped:
        folders = sorted({os.path.dirname(file.index_file) for file in dataset.files})
        reports = shlex.join(os.path.join(folder, "bad_records.jsonl") for folder in folders)
        fix = f"head {reports}    # what is skipped, and why"
        yield Finding("warning", "records", f"{count}, {skipped:,} skipped", fix)
    else:
        yield Finding("ok", "records", count)
    try:
        spec = InputSpec.for_evaluation(dataset, label=_FILES.label())
    except InputError:
        yield Finding("ok", "labels", "not one integer: InputSpec(label=...) says what they are")
        return
    low, high = spec.label_range or (None, None)
    if spec.class_counts is None:
        keys = (_FILES.image_key, _FILES.label_key, _FILES.label_offset)
        arguments = [f"--{flag.name}={flag.value}" for flag in keys if flag.value]
        arguments += ["--verify=schema", *(["--on_bad=skip"] if skipped else [])]
        pattern = files[0] if len(files) == 1 else files
        fix = index_command(pattern, index_dir=_FILES.index_dir.value, arguments=arguments)
        known = f"{low} to {high}, " if spec.label_range else ""
        yield Finding("warning", "labels", f"{known}not every record was checked", fix)
    else:
        yield Finding("ok", "labels", f"{low} to {high}")


def fix_records(error: str, files: list[str]) -> str:
    """Returns the command that fixes what is wrong with records, or that shows more."""
    match = re.search(r"(\S*python\S* -m dali_tf_input|dali-tf-input) index .*", error)
    if match or objects.is_url(files[0]):
        return match[0] if match else ""
    paths = [os.path.abspath(os.path.expanduser(file)) for file in files]
    folder = paths[0] if os.path.isdir(paths[0]) else os.path.dirname(paths[0])
    quoted = shlex.quote(folder)
    if not any(os.path.exists(path) or glob.glob(path) for path in paths):
        return f"ls {quoted}    # what is there? then --files='path/train-*'"
    if folder == paths[0]:
        pattern = os.path.join(glob.escape(folder), "*-of-*")
        return f"{program()} doctor --files={shlex.quote(pattern)}"
    if " are skipped" in error:
        listed = os.path.join(_FILES.index_dir.value or folder, "bad_records.jsonl")
        return f"head {shlex.quote(listed)}"
    if "_key`" in error or "`label." in error:
        keys = "--image_key=KEY --label_key=KEY"
        return f"{program()} doctor --files={shlex.quote(paths[0])} {keys}"
    return f"ls -l {quoted}"


def reinstall(*packages: str) -> str:
    """Returns the command that installs packages again, in the environment that this runs in."""
    return pip_install(*packages, flags="--force-reinstall ")


def _install_plugin() -> str:
    """Returns the command that compiles DALI's TensorFlow plugin, which pip does not do alone.

    `make install` finds out by itself that it does not load, in an environment that it made.
    """
    if stamps := glob.glob(os.path.join(glob.escape(sys.prefix), ".installed*")):
        clone = shlex.quote(os.path.dirname(sys.prefix))
        gpu = " GPU=1" if any("gpu" in os.path.basename(stamp) for stamp in stamps) else ""
        return f"cd {clone} && rm -f .venv/.installed* && make install{gpu}"
    return f"{plugin_command()}    # needs g++ and CUDA's headers: docs/install.md"


def last_line(text: str) -> str:
    """Returns the last line that says something."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith(_NO_WORDS)), "no message")
