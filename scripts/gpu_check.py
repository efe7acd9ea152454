"""Verifies the claims about GPUs, by tests and measurements, on a machine that has one.

It takes --minutes at most. The parts come in the order of what they are worth, and each has its own
limit; what does not fit is named as not run, and a later call with --resume runs it. If a command
crashes, the others still run. The file --out has all results so far at any time, also of commands
that were stopped. If TensorFlow sees no GPU, DALI is measured alone. --rehearse runs everything
briefly on the CPU.

example: python scripts/gpu_check.py --files='path/train-*' --parts=probe,throughput
"""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list
from dali_tf_input.processes import describe_end, run_command
from dali_tf_input.records.installing import pip_install
from support import machine
from support.benchmark import keep_earlier, save_json
from support.flags import FileFlags, find_problem_of_dali
from support.processes import run_logged

_HERE = os.path.relpath(Path(__file__).resolve().parent)
_TESTS = os.path.normpath(f"{_HERE}/../tests/backends/test_gpu.py")
_PYTEST = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "-m", "gpu"]
_LARGEST_MEAN = 3.0  # of 255: nvJPEG's inverse DCT and upsampling differ from libjpeg-turbo's
_LEAST_SECONDS = 20  # what is left for a command that is worth starting
_FREE_BYTES = 1 << 30
_REHEARSAL_SECONDS = 1200


class Part(NamedTuple):
    """A part: how many seconds each of its commands may take, and what it answers."""

    seconds: int
    what: str


PARTS = {
    "probe": Part(90, "operations that may crash, each in its own process"),
    "resident": Part(120, "the default order on the GPU: records, pixels, what its inputs cost"),
    "throughput": Part(120, "images/s: global, buffer, bare, tf.data, batches of 64 and 256"),
    "training": Part(150, "a ResNet-50 step, with the input and with one repeated batch"),
    "decoder": Part(120, "shares of the hardware decoder, chroma"),
    "memory": Part(90, "memory over 500 steps, beside TensorFlow's"),
    "pair": Part(60, "two pipelines on one GPU"),
    "tests": Part(240, "pixels, devices and memory: the tests that need a GPU"),
    "replicas": Part(150, "the training step under MirroredStrategy"),
}

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_PARTS = FLAGS.list("parts", None, f"Of {', '.join(PARTS)}; by default all.")
_MINUTES = FLAGS.number("minutes", 15.0, "How long all of it may take.", 0.1)
_RESUME = FLAGS.boolean("resume", False, "Do not run again what --out has as passed.")
_OUT = FLAGS.string("out", "gpu.json", "File for the results.")
_REHEARSE = FLAGS.boolean("rehearse", False, "Run everything on the CPU, briefly.")


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    start = time.monotonic()
    _FILES.dataset()
    parts = check_list("parts", _PARTS.value, list(PARTS))
    if _REHEARSE.value and not _OUT.present:
        raise InputError("A rehearsal is not a result: name another file with --out.")
    command.check_writable(_OUT)
    about = machine.describe()
    if not about["gpus"] and not _REHEARSE.value:
        raise InputError(
            "There is no NVIDIA GPU here (no nvidia-smi, or it shows none). To try this on the CPU:"
            " scripts/gpu_check.py --rehearse --out=rehearsal.json --files=GLOB"
        )
    check_installation()
    machine.print_lines(about)
    if not _REHEARSE.value and not machine.count_gpus_of_tensorflow():
        print("TensorFlow sees no GPU (docs/install.md): DALI is measured alone.")
        parts = ["alone"]
    report = {**about, "rehearsal": _REHEARSE.value, "driver": look_at_driver(), "parts": {}}
    if _RESUME.value:
        report["parts"] = read_earlier(about["gpus"])
    else:
        for path in keep_earlier(_OUT.value):
            print(f"kept      earlier results: {path}")
    try:
        for part in parts:
            run_part(part, report, deadline=start + 60 * _MINUTES.value)
    finally:
        print()
        print("\n".join(summarize(report, parts)))
    return int(any(find_state(report, part) == "failed" for part in parts))


def check_installation() -> None:
    """Raises InputError if something that a later part needs is not there."""
    names = {"pytest": "pytest", "psutil": "psutil", "pynvml": "nvidia-ml-py"}
    missing = [names[name] for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"The parts need {', '.join(missing)}: {pip_install(*missing)}")
    if problem := find_problem_of_dali():
        raise InputError(problem)
    folder = os.path.dirname(_OUT.value) or "."
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES:
        raise InputError(f"{free / 1e6:,.0f} MB are free in {folder}: at least 1 GB is needed.")


def look_at_driver() -> dict[str, Any]:
    """Returns what the driver says of clocks, links, memory and other programs; whether it can
    decode by hardware, for which libnvjpeg opens libnvcuvid.
    """
    code = "import ctypes; ctypes.CDLL('libnvcuvid.so.1')"
    output = run_command(["nvidia-smi", "-q"])[1] if shutil.which("nvidia-smi") else ""
    return {"nvidia-smi -q": output, "libnvcuvid": not run_command([sys.executable, "-c", code])[0]}


def read_earlier(gpus: list[str]) -> dict[str, Any]:
    """Returns the results of the file of an earlier call.

    Raises:
      InputError: the file is of other GPUs, or none that this command wrote.
    """
    path = Path(_OUT.value)
    if not path.exists():
        return {}
    try:
        report = json.loads(path.read_text("utf-8"))
        parts, before = report["parts"], (report["gpus"], report["rehearsal"])
        for result in (result for results in parts.values() for result in results):
            result["command"], result["state"], result["results"]  # what is read later
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"--resume: {path} is not a file of this command"
        raise InputError(f"{text}: name another one with --out.") from error
    if before != (gpus, _REHEARSE.value):
        text = f"--resume: {path} is of other GPUs, or of a rehearsal"
        raise InputError(f"{text}: name another file with --out.")
    return parts


def run_part(part: str, report: dict[str, Any], *, deadline: float) -> None:
    """Runs the commands of a part that have not passed, as far as the time reaches.

    The file has each at once, and before it runs, as "stopped": so it is if this process is killed.
    """
    limit = PARTS[part].seconds if part in PARTS else 120
    if _REHEARSE.value:  # perhaps on a machine that does other things
        limit = _REHEARSAL_SECONDS
    passed = {
        tuple(result["command"]): result
        for result in report["parts"].get(part, [])
        if result["state"] == "passed"
    }
    commands = list_commands(part, "cpu" if _REHEARSE.value else "gpu")
    nothing = {"state": "not run", "results": None}
    results = [passed.get(tuple(words)) or {"command": words, **nothing} for words in commands]
    report["parts"][part] = results
    for place, words in enumerate(commands):
        seconds = min(limit, deadline - time.monotonic())
        if results[place]["state"] == "passed" or seconds < _LEAST_SECONDS:
            continue
        results[place] = {"command": words, **nothing, "state": "stopped"}
        save_json(report, _OUT.value)
        results[place], interrupt = run(words, seconds, is_short=seconds < limit)
        save_json(report, _OUT.value)
        if interrupt:
            raise interrupt


def find_state(report: dict[str, Any], part: str) -> str:
    """Returns "passed" or "failed", or "not run" if a command was not run or was stopped."""
    states = {result["state"] for result in report["parts"].get(part, [])} or {"not run"}
    if "failed" in states:
        return "failed"
    return "passed" if states == {"passed"} else "not run"


def list_commands(part: str, device: str) -> list[list[str]]:
    """Returns the commands of a part: what follows `python`."""
    dali, files = f"dali_{device}", _FILES.as_arguments()
    small = ["--batch_size=8", "--image_size=32"] if _REHEARSE.value else []
    briefly = ["--seconds=0.1", "--repeats=2"] if _REHEARSE.value else []
    windows = briefly or ["--seconds=1.5", "--repeats=5"]
    compare = [f"{_HERE}/compare_throughput.py", *files]
    trial = [f"{_HERE}/benchmarks/device.py", *files, f"--device={device}", *small]
    if part in ("resident", "memory", "pair"):
        steps = ["--steps=20"] if _REHEARSE.value else []
        once = briefly or ["--seconds=1", "--repeats=2"]
        stages = [*compare, "--stages", f"--backends={dali}", *once, *small]
        return [[*trial, f"--trial={part}", *steps], *([stages] if part == "resident" else [])]
    if part in ("probe", "tests"):
        which = "test_probe" if part == "probe" else "not test_probe"
        tests = [*_PYTEST, "-k", which, _TESTS]
        look = [f"{_HERE}/compare_images.py", *files, f"--most={_LARGEST_MEAN}"]
        return [tests, *([[*look, f"--device={device}"]] if part == "tests" else [])]
    if part == "alone":
        return [[*compare, f"--backends={dali}_bare", *windows]]
    if part == "throughput":
        rows = f"--backends=tf_data,{dali},{dali}_buffer,{dali}_bare"
        sizes = [small] if small else [["--batch_size=64"], ["--batch_size=256"]]
        return [[*compare, rows, *windows, "--warmup_batches=8", *size] for size in sizes]
    if part == "decoder":
        tried = "hw_decoder_load,jpeg_fancy_upsampling" if device == "gpu" else "decode"
        once = briefly or ["--seconds=1", "--repeats=3"]
        return [[*compare, "--tune", f"--backends={dali}", f"--only={tried}", *once, *small]]
    words = [f"{_HERE}/benchmarks/training.py", *files]
    words += ["--network=MobileNet", "--steps=20", *small] if _REHEARSE.value else []
    if part == "replicas":
        return [[*words, f"--backends={dali}", "--mirrored"]]
    return [[*words, f"--backends={dali},tf_data"]]


def run(
    words: list[str], seconds: float, *, is_short: bool = False
) -> tuple[dict[str, Any], KeyboardInterrupt | None]:
    """Runs a command and prints what it says; how it died is a result too.

    Args:
      words: what follows `python`.
      seconds: how long it may take.
      is_short: whether that is less than it should have: then running out of it is no failure.

    Returns:
      The result, and what interrupted it.
    """
    print(f"\n$ python {shlex.join(words)}", flush=True)
    environment = {**os.environ, "GPU_TESTS_ON": "cpu" if _REHEARSE.value else "gpu"}
    environment |= {"PYTHONUNBUFFERED": "1", "DALI_NVIMGCODEC_LOG_LEVEL": "3"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        takes_json = words[0].endswith(".py") and "compare_images" not in words[0]
        more = [f"--json={file}"] if takes_json else []
        own = f"results in {file}\n"  # a file that goes

        def show(text: str) -> None:
            print(text.replace(own, ""), end="", flush=True)

        end = run_logged([sys.executable, *words, *more], seconds, environment, show)
        results = None
        with contextlib.suppress(OSError, ValueError):  # none, or half of it
            results = json.loads(file.read_text("utf-8"))
    state = "passed" if end.code == 0 else "failed"
    if end.interrupt or (end.is_late and is_short):
        state = "stopped"
    if state != "passed":
        how = "it hangs" if end.code is None else describe_end(end.code)
        how = f"no end within {seconds:.0f} s" if end.is_late else how
        print(f"{state.upper()}: {how}: {end.errors.strip()[-500:]}", flush=True)
    result = {"command": words, "state": state, "code": end.code, "results": results}
    result |= {
        "seconds": time.monotonic() - start,
        "date": machine.now(),
        "commit": machine.commit(),
    }
    result |= {"output": end.output[-20000:], "errors": end.errors[-20000:]}
    return result, end.interrupt


def summarize(report: dict[str, Any], wanted: list[str]) -> list[str]:
    """Returns what a person wants to know, line by line; the file has all else."""
    parts = report["parts"]
    names = [*dict.fromkeys([*parts, *wanted])]
    by_state = {
        state: [name for name in names if find_state(report, name) == state]
        for state in ("passed", "failed", "not run")
    }
    lines = [f"passed    {', '.join(by_state['passed']) or 'none'}"]
    if failed := by_state["failed"]:
        lines.append(f"failed    {', '.join(failed)}")
    if missing := by_state["not run"]:
        lines.append(f"not run   {', '.join(missing)}: run it again with --resume")
    for result in parts.get("throughput", []):
        if found := result["results"]:
            lines.append(f"speed     batch {found['batch_size']}: {found['conclusion']}")
    for name in ("training", "memory"):
        for result in parts.get(name, []):
            if found := result["results"]:
                lines += [f"{name:<9} {text}" for text in found["conclusions"]]
    if report["rehearsal"]:
        lines.append("This was a rehearsal on the CPU: it says nothing about a GPU.")
    return [*lines, f"results in {_OUT.value}" if parts else "nothing was run"]


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
