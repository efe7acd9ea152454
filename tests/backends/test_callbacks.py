"""Calls from TensorFlow into Python, and how a program ends that is being called."""

import atexit
import contextlib
import threading
import time

import pytest
from conftest import DALI, TF_DATA, at_night, spec_of

from dali_tf_input import Preprocess
from dali_tf_input.backends import callbacks, reading
from dali_tf_input.backends.build import make_dataset


@pytest.fixture
def calls():
    calls = callbacks._Callbacks()
    yield calls
    atexit.unregister(calls._end)


def test_the_end_waits_until_no_more_calls_come(calls, monkeypatch):
    monkeypatch.setattr(callbacks, "_PATIENCE_SECONDS", 60)
    made = []
    call = calls.wrap(made.append)

    def make_calls():
        for number in range(20):
            call(number)
            time.sleep(0.01)

    thread = threading.Thread(target=make_calls)
    thread.start()
    calls._end()
    assert made == [*range(20)]


def test_a_slow_call_is_not_the_last(calls, monkeypatch):
    """It takes longer than the end waits for another one, and another one follows."""
    monkeypatch.setattr(callbacks, "_PATIENCE_SECONDS", 0.2)
    made, began = [], threading.Event()

    @calls.wrap
    def call(number):
        began.set()
        time.sleep(0.5)
        made.append(number)

    def make_calls():
        call(0)
        time.sleep(0.03)
        with contextlib.suppress(RuntimeError):  # it comes too late
            call(1)
        made.append("over")

    thread = threading.Thread(target=make_calls)
    thread.start()
    began.wait()
    calls._end()
    assert (made[0], made[-1]) == (0, "over")


def test_calls_that_go_on_and_on_fail(calls, monkeypatch):
    monkeypatch.setattr(callbacks, "_PATIENCE_SECONDS", 0.2)
    call, failed = calls.wrap(lambda: None), []

    def make_calls():
        while not failed:
            try:
                call()
            except RuntimeError as error:
                failed.append(str(error))

    thread = threading.Thread(target=make_calls)
    thread.start()
    calls._end()
    thread.join()
    assert failed == ["The program ends."]


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))
def test_local_files_need_no_calls(dataset, options, monkeypatch):
    """Of a training in a fixed order: nothing waits for Python, nor Python for it."""

    def refuse(function):
        raise AssertionError(function)

    monkeypatch.setattr(reading, "make_callback", refuse)
    for order in ("global", "sequential"):
        spec = spec_of(dataset, order, Preprocess.for_training(8))
        made = iter(make_dataset(spec, options, batch_size=7, endless=True))
        for _ in range(5):  # also beyond an epoch
            next(made)
    evaluation = spec_of(dataset, "sequential", Preprocess.for_evaluation(8), repeat=False)
    assert sum(1 for _ in make_dataset(evaluation, options, batch_size=7)) == 4
