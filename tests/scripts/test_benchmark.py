"""A window of measuring: what is counted in it."""

import dataclasses
import itertools
import multiprocessing
import os
import time

import pytest
from conftest import refused

from support.benchmark import Window, measure, used_cpu_seconds, used_cpu_seconds_of_all


class Clock:
    """A clock that stands still until a batch is taken."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def batches(clock, seconds_per_batch):
    for seconds in seconds_per_batch:
        clock.now += seconds
        yield "batch"


def test_measure_counts_whole_batches_after_the_warmup():
    clock, cpu_clock = Clock(), itertools.count(5.0, 3.0).__next__
    # Two slow warm-up batches, then 0.5 s each: the window of 2.2 s ends with the fifth batch, at
    # 2.5 s.
    stream = batches(clock, itertools.chain([50.0, 50.0], itertools.repeat(0.5)))
    window = measure(
        stream, batch_size=8, seconds=2.2, warmup_batches=2, clock=clock, cpu_clock=cpu_clock
    )
    faults, others = window.page_faults, window.other_cpu_seconds
    expected = Window(measured_batches=5, batch_size=8, seconds=2.5, cpu_seconds=3.0)
    more = {"cores": len(os.sched_getaffinity(0)), "other_cpu_seconds": others}
    assert window == dataclasses.replace(expected, page_faults=faults, **more)
    assert window.page_faults_per_image == faults / 40
    assert window.images == 40
    assert window.images_per_second == 16.0
    assert window.cpu_seconds_per_1000_images == 75.0


def test_measure_is_no_mean_of_rates():
    """One stall must weigh as long as it lasted: 4 batches in 4 s, not the mean of 10, 10, 10 and
    0.27 a second.
    """
    clock = Clock()
    how = {"seconds": 1.0, "warmup_batches": 0, "clock": clock, "cpu_clock": clock}
    window = measure(batches(clock, [0.1, 0.1, 0.1, 3.7]), batch_size=1, **how)
    assert window.images_per_second == pytest.approx(1.0)


def test_measure_takes_one_batch_at_least():
    clock = Clock()
    how = {"seconds": 0.001, "warmup_batches": 0, "clock": clock, "cpu_clock": clock}
    window = measure(batches(clock, [9.0]), batch_size=4, **how)
    assert (window.measured_batches, window.seconds) == (1, 9.0)


def test_batches_that_end_in_the_window():
    with refused("`batches` ended before the window did"):
        measure(iter(["batch"]), batch_size=1, seconds=1e9, warmup_batches=0)


def work_and_wait(connection):
    while time.process_time() < 0.3:
        pass
    connection.send(None)
    connection.recv()


def test_cpu_time_counts_workers():
    ours, theirs = multiprocessing.Pipe()
    before = used_cpu_seconds()
    process = multiprocessing.get_context("spawn").Process(target=work_and_wait, args=(theirs,))
    process.start()
    ours.recv()
    assert used_cpu_seconds() - before > 0.2
    ours.send(None)
    process.join()


def test_other_programs_are_counted():
    """The time that another process has on the cores of this one."""
    clock, cpu = itertools.count(0.0, 1.0).__next__, itertools.count(0.0, 1.5).__next__
    for system, others in ((itertools.count(10.0, 1.8).__next__, 0.3), (lambda: None, None)):
        how = {"seconds": 0.5, "warmup_batches": 0, "clock": clock, "cpu_clock": cpu}
        found = measure(iter(range(9)), batch_size=1, system_clock=system, **how)
        assert found.other_cpu_seconds == (others and pytest.approx(others))
    before = used_cpu_seconds_of_all()
    assert before is None or before <= used_cpu_seconds_of_all()
