"""Writes the README's table about GPUs from what gpu_check.py found; without its file the table says "not yet measured".

usage: gpu_table.py [--file=benchmarks/gpu.json] [--readme=README.md]
"""

import json
import os
from typing import Any

from absl import flags

import console
from dali_tf_input import InputError

_FILE = flags.DEFINE_string("file", "benchmarks/gpu.json", "What gpu_check.py wrote.")
_README = flags.DEFINE_string("readme", "README.md", "The file that holds the table.")

BEGIN, END = "<!-- GPU table: scripts/gpu_table.py -->", "<!-- end of the GPU table -->"
_HEAD = "| row | photos, images/s (min to max) | 1080p, images/s (min to max) |\n| --- | ---: | ---: |\n"
_ROWS = ("tf_data_serial", "tf_data", "dali_gpu_bare", "dali_gpu")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    with open(_README.value, encoding="utf-8") as stream:
        text = stream.read()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{_README.value} has no lines '{BEGIN}' and '{END}' between which the table stands.")
    new = f"{before}{BEGIN}\n{make_table(_FILE.value)}{END}{after}"
    if new != text:
        with open(f"{_README.value}.new", "w", encoding="utf-8") as stream:
            stream.write(new)
        os.replace(f"{_README.value}.new", _README.value)
    print(f"{_README.value}: {'written anew' if new != text else 'unchanged'}")
    return 0


def make_table(file: str) -> str:
    """Returns the text between the two lines.

    Raises:
      InputError: the file is a rehearsal, or none of gpu_check.py's.
    """
    if not os.path.exists(file):
        return _HEAD + "".join(f"| `{row}` | not yet measured | not yet measured |\n" for row in _ROWS)
    try:
        with open(file, encoding="utf-8") as stream:
            report = json.load(stream)
        if report["rehearsal"]:
            raise InputError(f"{file} is a rehearsal on the CPU, not a result: run `make gpu-check` on a machine with a GPU.")
        return describe(report)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file}: this was not written by gpu_check.py: {error!r}") from error


def describe(report: dict[str, Any]) -> str:
    """Returns the table of a report, and what stands under it."""
    parts, versions = report["parts"], report["versions"]
    lines = []
    if "throughput" in parts:
        for row in _ROWS:
            cells = [format_row(parts["throughput"].get(name, {}).get("rows", {}).get(row)) for name in ("photos", "1080p")]
            lines.append(f"| `{row}` | {cells[0]} | {cells[1]} |\n")
        for name in ("photos", "1080p"):
            if "died" in parts["throughput"].get(name, {}):
                words = parts["throughput"][name]["died"].strip().splitlines() or ["no word"]
                lines.append(f"\n{name}: could not be measured: {words[-1]}\n")
    elif "dali_alone" in parts and "images_per_second" in parts["dali_alone"]:
        for name, rate in parts["dali_alone"]["images_per_second"].items():
            lines.append(f"| DALI on the GPU, {name} (TensorFlow sees no GPU) | {rate:,.0f} | not yet measured |\n")
    else:
        lines += [f"| `{row}` | not yet measured | not yet measured |\n" for row in _ROWS]
    checks = [f"{name}: {'passed' if parts[name].get('passed') else failure(parts[name])}" for name in CHECKS if name in parts]
    waits = [f"{name} waits {row['wait']:.0%} of the step" for name, row in parts.get("training", {}).get("rows", {}).items()]
    measured = {name: found["batch_size"] for name, found in parts.get("throughput", {}).items() if "batch_size" in found}
    batches = ", ".join(f"{name} in batches of {size}" for name, size in measured.items())
    about = (
        f"\n{', '.join(report['gpus'])}, {report['cores']} cores of {report['cpu']}, {report['date'][:10]}; Python "
        f"{versions['Python']}, TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}; `make gpu-check`"
        f"{f', {batches}' if batches else ''}. {'; '.join([*checks, *waits])}.\n"
    )
    return _HEAD + "".join(lines) + about


CHECKS = ("probe", "pixels_reader", "pixels_planned", "devices_reader", "devices_planned", "memory")


def failure(part: dict[str, Any]) -> str:
    """Returns how a part failed."""
    return f"died ({part['died']})" if "died" in part else "failed"


def format_row(row: dict[str, Any] | None) -> str:
    """Returns the cell of a row."""
    if row is None:
        return "not yet measured"
    rate = row["images_per_second"]
    return f"{rate['median']:,.0f} ({rate['minimum']:,.0f} to {rate['maximum']:,.0f})"


if __name__ == "__main__":
    console.run(main)
