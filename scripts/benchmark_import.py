"""Times `import dali_tf_input` in fresh processes, beside an empty Python and `import numpy`.

usage: benchmark_import.py [--repeats=11]
"""

import subprocess
import sys
import time

from absl import flags

import console
from dali_tf_input import InputError, Spread

_REPEATS = flags.DEFINE_integer("repeats", 11, "How often each is started.")

_STATEMENTS = ("pass", "import numpy", "import dali_tf_input")


def main(arguments: list[str]) -> int:
    if arguments or _REPEATS.value < 1:
        raise InputError("No arguments but --repeats, at least 1.")
    seconds: dict[str, list[float]] = {statement: [] for statement in _STATEMENTS}
    for _ in range(_REPEATS.value):
        for statement in _STATEMENTS:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            seconds[statement].append(time.perf_counter() - start)
    empty = Spread.of(seconds["pass"]).median
    rows = []
    for statement in _STATEMENTS:
        spread = Spread.of(seconds[statement])
        times = (spread.median, spread.minimum, spread.maximum, spread.median - empty)
        rows.append((statement, *(f"{1000 * value:.0f}" for value in times)))
    console.print_table(("statement", "ms", "min", "max", "over an empty Python"), rows)
    return 0


if __name__ == "__main__":
    console.run(main)
