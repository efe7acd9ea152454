"""Checks and measures everything that is claimed about GPUs, on a machine that has one; writes it to one JSON file.

usage: gpu_check.py --files=GLOB [--out=benchmarks/gpu.json] [--parts=probe,memory,...] [--seconds=2] [--repeats=3]
                    [--rehearse]

First what may crash, in a process of its own: decoding only regions on the GPU. Then pixels and labels against the CPU's,
devices of the tensors, memory over 20 evaluations; then images/s of photos and 1080p, with the hardware decoder's share swept;
last a training step with and without input. A run with --parts adds to what the file holds already. --rehearse does all of it
on the CPU, briefly, to see that it runs; its file is no result. `scripts/gpu_table.py` writes the README's table from the file.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags

import backends
import console
import input_flags
import machine
import settings
import sweep
from dali_tf_input import DaliOptions, InputError, Spread

_OUT = flags.DEFINE_string("out", "benchmarks/gpu.json", "File for everything that is found.")
_PARTS = flags.DEFINE_list("parts", None, "Some of the parts only; the file keeps what it holds of the others.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Length of each measured window in seconds, above 0.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measured windows of each row, at least 1.")
_REHEARSE = flags.DEFINE_boolean("rehearse", False, "Run everything on the CPU, briefly.")

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LIMIT = 400  # seconds that a part may take
# Orders apart: DALI's own reader, and what tf.data reads and hands to it, which may fail without the other.
_CHECKS = ("probe", "pixels_reader", "pixels_planned", "devices_reader", "devices_planned", "memory")
_MEASUREMENTS = ("throughput", "hw_decoder_load", "training")
_ALONE = "dali_alone"  # where TensorFlow does not see the GPU
_LOADS = (None, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_BATCHES = (64, 128, 256, 512)
_FULL_HD = (1080, 1920)


class Records(NamedTuple):
    """What is fed: the arguments that name its files, and how many records it has at least."""

    arguments: list[str]
    number: int


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    if _SECONDS.value <= 0 or _REPEATS.value < 1:
        raise InputError(f"`seconds` must be above 0 and `repeats` at least 1, got {_SECONDS.value} and {_REPEATS.value}.")
    unknown = [part for part in _PARTS.value or () if part not in (*_CHECKS, *_MEASUREMENTS, _ALONE)]
    if unknown or _PARTS.value == []:
        raise InputError(
            f"`parts` must be of {', '.join((*_CHECKS, *_MEASUREMENTS, _ALONE))}, got {', '.join(unknown) or 'none'}."
        )
    if _REHEARSE.value and _OUT.value == _OUT.default:
        raise InputError("A rehearsal is no result: name another file with --out.")
    dataset = input_flags.dataset_spec(input_flags.FILES.value)
    about = machine.describe()
    if not about["gpus"] and not _REHEARSE.value:
        raise InputError(
            "There is no NVIDIA GPU here (no nvidia-smi, or it shows none). To try this on the CPU: "
            "scripts/gpu_check.py --rehearse --out=rehearsal.json --files=GLOB"
        )
    if _OUT.value == _OUT.default:
        os.makedirs(os.path.dirname(_OUT.value), exist_ok=True)
    console.check_writable(_OUT.value, flag="out", suffix=".json")
    machine.print_lines(about)
    sees_gpu = _REHEARSE.value or machine.tensorflow_sees_a_gpu()
    if not sees_gpu:
        print("TensorFlow does not see the GPU (make install GPU=1): DALI is measured by itself, and its dataset on the CPU.")
    report = read_report(about)
    report |= {"command": shlex.join(sys.argv), **about, "rehearsal": _REHEARSE.value, "tensorflow_sees_gpu": sees_gpu}
    report.setdefault("parts", {})
    wanted = _PARTS.value or [*_CHECKS, *_MEASUREMENTS]
    if not sees_gpu:
        if _PARTS.value:
            print(f"Of the parts only {_ALONE} works here.")
        wanted = [_ALONE]
    with tempfile.TemporaryDirectory() as folder:
        data = {"photos": Records(input_flags.as_arguments(input_flags.FILES.value), dataset.num_records)}
        if {"throughput", "hw_decoder_load"} & set(wanted) and dataset.num_records < _BATCHES[-1] and not _REHEARSE.value:
            print(f"These are {dataset.num_records:,} records: photos are measured in batches of that many at most.")
        for part in wanted:
            start = time.monotonic()
            if part in ("throughput", "hw_decoder_load") and "1080p" not in data:  # after the checks, which need none of it
                at_least = 16 if _REHEARSE.value else 2 * _BATCHES[-1]
                data["1080p"] = Records([f"--files={sweep.resized(dataset, _FULL_HD, folder, at_least=at_least)}"], at_least)
            if part == "throughput":
                found = {name: measure_rows(records, folder) for name, records in data.items()}
            elif part == "hw_decoder_load":
                found = {name: sweep_loads(records, folder) for name, records in data.items()}
            else:
                found = run_part(part)
            report["parts"][part] = found
            print(f"{part:<16} {describe(part, found)}  ({console.format_seconds(time.monotonic() - start)})", flush=True)
            write_report(report)  # after each part: what was found is kept, whatever comes
    if _REHEARSE.value:
        print("This was a rehearsal on the CPU: it says nothing of a GPU.")
    else:
        print("\n".join(targets(report)))
    print(f"results in {_OUT.value}")
    failed = [part for part in wanted if part != "probe" and not went_well(report["parts"][part])]
    if failed:
        print(f"error: not as it should be, or not measured: {', '.join(failed)}; see {_OUT.value}.", file=sys.stderr)
    return 1 if failed else 0


def went_well(found: Any) -> bool:
    """Whether a part, and all that belongs to it, passed or was measured."""
    if isinstance(found, list):
        return bool(found) and all("failed" not in row for row in found)
    if "passed" in found or "died" in found:
        return bool(found.get("passed"))
    return bool(found) and all(went_well(one) if isinstance(one, list) else "died" not in one for one in found.values())


def read_report(about: dict[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run on this machine found, where only some parts are run."""
    if not _PARTS.value or not os.path.exists(_OUT.value):
        return {}
    try:
        with open(_OUT.value, encoding="utf-8") as stream:
            report = json.load(stream)
        if report["rehearsal"] != _REHEARSE.value:
            raise ValueError("one is a rehearsal, the other is not")
        if any(report[what] != about[what] for what in ("gpus", "cpu", "cores", "versions")):
            raise ValueError("it was made on another machine, or with other versions")
        return report
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{_OUT.value} is no result of gpu_check.py to add to: {error}. Name another --out.") from error


def write_report(report: dict[str, Any]) -> None:
    """Writes the file as a whole."""
    with open(f"{_OUT.value}.new", "w", encoding="utf-8") as stream:
        json.dump(report, stream, indent=2)
        stream.write("\n")
    os.replace(f"{_OUT.value}.new", _OUT.value)


def run_part(part: str) -> dict[str, Any]:
    """Runs a part of gpu_parts.py; what it died of is a finding too."""
    command = [sys.executable, os.path.join(_FOLDER, "gpu_parts.py"), f"--part={part}", f"--seconds={_SECONDS.value}"]
    command += [f"--device={'cpu' if _REHEARSE.value else 'gpu'}", *input_flags.as_arguments(input_flags.FILES.value)]
    try:
        code, output, errors = console.call(command, seconds=_LIMIT)
    except subprocess.TimeoutExpired:
        return {"passed": False, "died": f"no answer within {_LIMIT} s"}
    if code < 0:
        return {"passed": False, "died": signal.Signals(-code).name, "stderr": errors[-2000:]}
    if code:
        return {"passed": False, "died": f"exit code {code}", "stderr": errors[-2000:]}
    return json.loads(output.splitlines()[-1])


def measure_rows(records: Records, folder: str) -> dict[str, Any]:
    """Measures the rows that are compared, each in a process of its own, in turn."""
    device = "cpu" if _REHEARSE.value else "gpu"
    rows = ["tf_data_serial", "tf_data", f"dali_{device}_bare", f"dali_{device}"]
    path = os.path.join(folder, "rows.json")
    command = [sys.executable, os.path.join(_FOLDER, "compare_throughput.py"), f"--backends={','.join(rows)}", f"--json={path}"]
    batch_size = min(8 if _REHEARSE.value else 256, records.number)
    command += [f"--batch_size={batch_size}", f"--seconds={_SECONDS.value}", f"--repeats={_REPEATS.value}"]
    limit = _LIMIT + 4 * (_SECONDS.value * (_REPEATS.value + 1) + 30)
    try:
        code, _, errors = console.call([*command, *records.arguments], seconds=limit)
    except subprocess.TimeoutExpired:
        return {"died": f"no answer within {limit:.0f} s"}
    if code:
        return {"died": f"exit code {code}: {errors[-2000:].strip() or 'no word'}"}
    with open(path, encoding="utf-8") as stream:
        report = json.load(stream)
    return {"batch_size": report["batch_size"], "rows": report["rows"], "windows": report["windows"]}


def sweep_loads(records: Records, folder: str) -> list[dict[str, Any]]:
    """Measures the dataset over the hardware decoder's share and the batch."""
    loads = (None,) if _REHEARSE.value else _LOADS
    found = []
    for batch_size in sorted({min(batch_size, records.number) for batch_size in ((8,) if _REHEARSE.value else _BATCHES)}):
        with settings.Worker(os.path.join(folder, "log"), files=records.arguments, batch_size=batch_size) as worker:
            for load in loads:
                options = DaliOptions(device="cpu" if _REHEARSE.value else "gpu", hw_decoder_load=load)
                row: dict[str, Any] = {"batch_size": batch_size, "hw_decoder_load": load}
                try:
                    windows = [worker.measure(settings.Setting(options, "buffer"), seconds=_SECONDS.value) for _ in range(2)]
                    row["images_per_second"] = [settings.images_per_second(window) for window in windows]
                except (settings.SettingError, InputError) as error:
                    row["failed"] = str(error)
                found.append(row)
    return found


def describe(part: str, found: Any) -> str:
    """Returns what was found of a part in a few words."""
    if part == "throughput":
        return "; ".join(f"{name}: {describe_rows(one)}" for name, one in found.items())
    if part == "hw_decoder_load":
        return "; ".join(f"{name}: {describe_best(rows)}" for name, rows in found.items())
    if "died" in found:
        return f"DIED: {found['died']}"
    if part == _ALONE:
        return ", ".join(f"{name} {rate:,.0f} images/s" for name, rate in found["images_per_second"].items())
    if part == "training":
        rows = found["rows"].items()
        return "; ".join(f"{name}: waits {row['wait']:.0%}, {row['images_per_second']:,.0f} images/s" for name, row in rows)
    return "as it should be" if found["passed"] else "NOT as it should be"


def describe_rows(found: dict[str, Any]) -> str:
    """Returns the rates of the rows."""
    if "died" in found:
        return f"DIED: {found['died'].splitlines()[-1]}"
    return ", ".join(f"{name} {row['images_per_second']['median']:,.0f}" for name, row in found["rows"].items())


def describe_best(rows: list[dict[str, Any]]) -> str:
    """Returns the fastest of the sweep."""
    measured = [row for row in rows if "images_per_second" in row]
    if not measured:
        return f"all failed, the first: {rows[0]['failed']}"
    best = max(measured, key=lambda row: max(row["images_per_second"]))
    refused = len(rows) - len(measured)
    load = "DALI's own share" if best["hw_decoder_load"] is None else f"a share of {best['hw_decoder_load']}"
    rest = f"; {refused} of {len(rows)} FAILED" if refused else ""
    return f"best {max(best['images_per_second']):,.0f} images/s, batch {best['batch_size']}, {load}{rest}"


def targets(report: dict[str, Any]) -> list[str]:
    """Returns a line for each target, met or not; by photos, at the batch that was measured."""
    rows = report["parts"].get("throughput", {}).get("photos", {})
    if "windows" not in rows:
        return ["not measured     3 times tf_data, 0.95 of the bare pipe.run(), 6.13 times serial tf.data"]
    lines = []
    for made, reference, target, what in (
        ("dali_gpu", "tf_data", 3.0, f"times tf_data on {report['cores']} cores"),
        ("dali_gpu", "dali_gpu_bare", 0.95, "of the bare pipe.run()"),
        ("dali_gpu", "tf_data_serial", 6.13, "times serial tf.data (the 2018 example's figure)"),
    ):
        spread = Spread.of(backends.ratios(rows["windows"][made], rows["windows"][reference]))
        met = "met" if spread.median >= target else "MISSED"
        spread_text = f"{spread.minimum:.2f} to {spread.maximum:.2f}"
        lines.append(f"{met:<16} {made}: {spread.median:.2f} {what}, target {target:g} ({spread_text})")
    return lines


if __name__ == "__main__":
    console.run(main)
