"""Images per second of anything that yields batches, over a counted window after a warm-up."""

import datetime
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dali_tf_input.errors import Count, InputError, Within, check, checked


@dataclass(frozen=True, kw_only=True)
class Window:
    """One measured window: `measured_batches` of `batch_size` images each, taken in `seconds`.

    `other_cpu_seconds` is the time that other programs had on the `cores` that this process may
    use; None if it is not known.
    """

    measured_batches: int
    batch_size: int
    seconds: float
    cpu_seconds: float
    page_faults: int = 0
    cores: int = 1
    other_cpu_seconds: float | None = None

    @property
    def images(self) -> int:
        """How many images the window held."""
        return self.measured_batches * self.batch_size

    @property
    def images_per_second(self) -> float:
        """Images over seconds of the whole window; never a mean of rates."""
        return self.images / self.seconds

    @property
    def cpu_seconds_per_1000_images(self) -> float:
        """CPU time of this process, user and system, all threads, in seconds per 1000 images."""
        return 1000 * self.cpu_seconds / self.images

    @property
    def page_faults_per_image(self) -> float:
        """Pages that the system had to find for this process, most of them of fresh memory."""
        return self.page_faults / self.images


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Median, smallest and largest of repeated measurements."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> "Stats":
        """Returns the statistics of at least one value."""
        return cls(median=statistics.median(values), minimum=min(values), maximum=max(values))


def used_cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that its `multiprocessing` started."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel, see proc(5)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def used_cpu_seconds_of_all() -> float | None:
    """Returns the CPU time of all programs on the cores of this process, since the system started.

    That includes what a hypervisor took ("steal"). None if the system does not say.
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in lines if line.split()[0] in names]
    if len(rows) < len(names):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal, see proc_stat(5)
    ticks = sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK")


@checked
def measure(
    batches: Iterator[Any],
    *,
    batch_size: Count,
    seconds: float,
    warmup_batches: Annotated[int, Within(0)],
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = used_cpu_seconds,
    system_clock: Callable[[], float | None] = used_cpu_seconds_of_all,
) -> Window:
    """Takes batches until `seconds` have passed and returns the counted window.

    Args:
      batches: an iterator that does not end within the window.
      batch_size: images in each batch, at least 1.
      seconds: how long the window lasts at least, above 0; it ends with the first batch at or after
        it.
      warmup_batches: batches taken before the clock starts, at least 0. Take more than the queues
        of the pipeline hold: batches that were made before the window would count as free.
      clock: returns the wall time in seconds.
      cpu_clock: returns the CPU time of this process and its workers in seconds.
      system_clock: returns the CPU time of all programs in seconds, or None.

    Raises:
      InputError: an argument is out of range, or `batches` ended.
    """
    check(seconds > 0, "seconds", "above 0", seconds)
    try:
        for _ in range(warmup_batches):
            next(batches)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start, cpu_start, system_start = clock(), cpu_clock(), system_clock()
        measured_batches, elapsed = 0, 0.0
        while elapsed < seconds:
            next(batches)
            measured_batches += 1
            elapsed = clock() - start
    except StopIteration as error:
        text = "`batches` ended before the window did: measure a dataset that repeats."
        raise InputError(text) from error
    cpu_seconds, system_end = cpu_clock() - cpu_start, system_clock()
    others = None
    if system_start is not None and system_end is not None:
        others = max(0.0, system_end - system_start - cpu_seconds)
    return Window(
        measured_batches=measured_batches,
        batch_size=batch_size,
        seconds=elapsed,
        cpu_seconds=cpu_seconds,
        cores=len(os.sched_getaffinity(0)),
        other_cpu_seconds=others,
        page_faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    )


def save_json(report: Any, path: str) -> None:
    """Writes a report; the file is whole at any time. A link or a device stays what it is."""
    text, path = json.dumps(report, indent=2) + "\n", os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, "utf-8")
        return
    part = Path(f"{path}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


def keep_earlier(*paths: str | None) -> list[Path]:
    """Renames files that would be overwritten, by the time of the first; returns the new names."""
    files = [Path(path) for path in paths if path and os.path.isfile(path)]
    if not files:
        return []
    time_of_first = datetime.datetime.fromtimestamp(files[0].stat().st_mtime)
    when = time_of_first.strftime("%Y-%m-%dT%H-%M-%S")
    return [one.replace(one.with_name(f"{one.stem}-{when}{one.suffix}")) for one in files]


def format_stats(stats: Stats) -> str:
    """Returns "median (minimum to maximum)"."""
    return f"{stats.median:.2f} ({stats.minimum:.2f} to {stats.maximum:.2f})"
