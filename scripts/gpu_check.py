"""Verifies the claims about GPUs, by tests and measurements, on a machine that has one.

Each part consists of a few commands, which can also be run by hand: the tests that need a GPU, by
name (probe, pixels, devices, memory); compare_throughput.py for several batch sizes (throughput)
and with shares of the hardware decoder (tune); a training step with and without input (training). A
command may take at most eight minutes; if one crashes, the others still run. The file --out has all
results so far. If TensorFlow sees no GPU, DALI is measured alone. --rehearse runs everything
briefly on the CPU.

example: python scripts/gpu_check.py --files='path/train-*' --parts=probe,pixels
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list
from dali_tf_input.processes import describe_end, run_command
from support import machine
from support.flags import FileFlags

_TESTS = ("probe", "pixels", "devices", "memory")
PARTS = (*_TESTS, "throughput", "tune", "training")
FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_PARTS = FLAGS.list("parts", None, f"Of {', '.join(PARTS)}; by default all.")
_OUT = FLAGS.string("out", "gpu.json", "File for the results.")
_REHEARSE = FLAGS.boolean("rehearse", False, "Run everything on the CPU, briefly.")

_HERE = os.path.relpath(Path(__file__).resolve().parent)
_LIMIT = 480  # seconds that a command may take
_LARGEST_MEAN = 3.0  # of 255: nvJPEG's inverse DCT and upsampling differ from libjpeg-turbo's


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
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
    machine.print_lines(about)
    if not _REHEARSE.value and not machine.count_gpus_of_tensorflow():
        print("TensorFlow sees no GPU (docs/install.md): DALI is measured alone.")
        parts = ["alone"]
    report: dict[str, Any] = {**about, "rehearsal": _REHEARSE.value, "parts": {}}
    for part in parts:
        results = report["parts"][part] = []
        for words in list_commands(part, "cpu" if _REHEARSE.value else "gpu"):
            results.append(run(words))
            Path(_OUT.value).write_text(json.dumps(report, indent=2), "utf-8")
    failed = [part for part, results in report["parts"].items() if any(r["code"] for r in results)]
    if _REHEARSE.value:
        print("This was a rehearsal on the CPU: it says nothing about a GPU.")
    print(f"results in {_OUT.value}")
    if failed:
        raise InputError(f"failed, or not measured: {', '.join(failed)}; see {_OUT.value}.")
    return 0


def list_commands(part: str, device: str) -> list[list[str]]:
    """Returns the commands of a part: what follows `python`."""
    dali, files = f"dali_{device}", _FILES.as_arguments()
    briefly = ["--seconds=0.1", "--repeats=1", "--batch_size=8", "--image_size=32"]
    flags = [*files, *(briefly if _REHEARSE.value else ["--seconds=2", "--repeats=3"])]
    compare = [f"{_HERE}/compare_throughput.py", *flags]
    if part in _TESTS:
        file = os.path.normpath(f"{_HERE}/../tests/backends/test_gpu.py")
        tests = [*f"-m pytest -q -p no:cacheprovider -m gpu -k test_{part}".split(), file]
        look = [f"{_HERE}/compare_images.py", *files, f"--most={_LARGEST_MEAN}"]
        return [tests, *([[*look, f"--device={device}"]] if part == "pixels" else [])]
    if part == "alone":
        return [[*compare, f"--backends={dali}_bare"]]
    if part == "throughput":
        sizes = (8,) if _REHEARSE.value else (64, 256, 1024)
        rows = f"tf_data,{dali}_bare,{dali},{dali}_global"
        serial = {sizes[0]: "tf_data_serial,"}  # slow, so measured once
        return [
            [
                *compare,
                f"--backends={serial.get(size, '')}{rows}",
                f"--batch_size={size}",
                f"--warmup_batches={1024 // size}",
            ]
            for size in sizes
        ]
    if part == "tune":
        return [[*compare, "--tune", f"--backends={dali}"]]
    small = ["--network=MobileNet", "--batch_size=4", "--image_size=32", "--steps=20"]
    words = [f"{_HERE}/benchmarks/training.py", *files, f"--backends=tf_data,{dali}"]
    return [[*words, *(small if _REHEARSE.value else [])]]


def run(words: list[str]) -> dict[str, Any]:
    """Runs a command and prints what it says; how it died is a result too."""
    print(f"\n$ python {shlex.join(words)}", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "GPU_TESTS_ON": "cpu" if _REHEARSE.value else "gpu"}
    try:
        words_of_python = [sys.executable, *words]
        code, output, errors = run_command(words_of_python, seconds=_LIMIT, environment=environment)
    except subprocess.TimeoutExpired:
        code, output, errors = 1, "", f"no answer within {_LIMIT} s"
    last = f"DIED: {describe_end(code)}: {errors.strip()[-500:]}" if code else ""
    print("\n".join(filter(None, [output.strip(), last])), flush=True)
    seconds = time.monotonic() - start
    result = {"command": words, "code": code, "seconds": seconds}
    return {**result, "output": output[-20000:], "errors": errors[-20000:]}


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
