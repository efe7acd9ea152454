"""Calls from TensorFlow's threads into Python, which must be over before Python exits."""

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_MOST_CALLS = 1024  # at the same time
_PAUSE_SECONDS, _QUIET_PAUSES = 0.02, 5  # reading is over when nothing happens in so many pauses
_PATIENCE_SECONDS = 2.0


class _Callbacks:
    """What is being called, and how that ends.

    A thread that calls into Python during shutdown never returns, and TensorFlow waits for its
    threads if an iterator is still alive. So shutdown waits until the queues are full and all
    threads rest. After _PATIENCE_SECONDS calls fail; after as long without a call, shutdown goes
    on, as what still runs may be others' threads.
    """

    def __init__(self) -> None:
        self._running = threading.Semaphore(_MOST_CALLS)
        self._registered = self._ended = False
        self._changes = 0  # calls that began, and that ended

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._registered:
            self._registered = True
            atexit.register(self._end)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            self._changes += 1
            try:
                with self._running:
                    if self._ended:
                        raise RuntimeError("The program ends.")
                    return function(*arguments)
            finally:
                self._changes += 1

        return call

    def _end(self) -> None:
        start = last = time.monotonic()
        changes, quiet = self._changes, 0
        while quiet < _QUIET_PAUSES and time.monotonic() - last < _PATIENCE_SECONDS:
            self._ended = time.monotonic() - start > _PATIENCE_SECONDS
            time.sleep(_PAUSE_SECONDS)
            for _ in range(_MOST_CALLS):  # waits for those that run
                self._running.acquire()
            self._running.release(_MOST_CALLS)
            quiet = 0 if _other_threads_run() else quiet + 1
            if changes != self._changes:
                changes, last, quiet = self._changes, time.monotonic(), 0


def _other_threads_run() -> bool:
    """Returns whether another thread runs, or waits for a processor or a disk."""
    own = str(threading.get_native_id())
    for thread in set(os.listdir("/proc/self/task")) - {own}:
        with (
            contextlib.suppress(OSError),  # it has ended
            open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as status,
        ):
            if status.read().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


_callbacks = _Callbacks()


def make_callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` for `tf.numpy_function`. Python does not exit while it is being called.

    At exit, calls go on until TensorFlow's queues are full. If that takes more than two seconds,
    further calls fail.
    """
    return _callbacks.wrap(function)
