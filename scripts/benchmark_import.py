"""Times `import dali_tf_input` in fresh processes, beside an empty Python and `import numpy`.

example: python scripts/benchmark_import.py --repeats=21
"""

import subprocess
import sys
import time

from dali_tf_input import Stats
from support import cli

FLAGS = cli.Flags()
_REPEATS = FLAGS.integer("repeats", 11, "How often each is started.", 1)

_STATEMENTS = ("pass", "import numpy", "import dali_tf_input")


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    seconds: dict[str, list[float]] = {statement: [] for statement in _STATEMENTS}
    for _ in range(_REPEATS.value):
        for statement in _STATEMENTS:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            seconds[statement].append(time.perf_counter() - start)
    empty = Stats.of(seconds["pass"]).median
    rows = []
    for statement in _STATEMENTS:
        spread = Stats.of(seconds[statement])
        times = (spread.median, spread.minimum, spread.maximum, spread.median - empty)
        rows.append((statement, *(f"{1000 * value:.0f}" for value in times)))
    cli.print_table(("statement", "ms", "min", "max", "over an empty Python"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
