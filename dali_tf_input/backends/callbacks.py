"""Calls from TensorFlow's threads into Python, which must be over before Python exits."""

import atexit
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

_MOST_CALLS = 1024  # at the same time
_QUIET_SECONDS = 0.1  # at exit, reading is over when no call has come for so long
_PATIENCE_SECONDS = 2.0  # which takes until the queues are full; calls that come later fail


class _Callbacks:
    """What is being called, and how that ends.

    A thread that calls into Python during shutdown never returns, and TensorFlow waits for its
    threads if an iterator is still alive. So shutdown waits until no more calls come.
    """

    def __init__(self) -> None:
        self._running = threading.Semaphore(_MOST_CALLS)
        self._registered = self._ended = False
        self._calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._registered:
            self._registered = True
            atexit.register(self._end)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            self._calls += 1
            with self._running:
                if self._ended:
                    raise RuntimeError("The program ends.")
                return function(*arguments)

        return call

    def _end(self) -> None:
        start, calls = time.monotonic(), -1
        while calls != self._calls:
            calls = self._calls
            self._ended = time.monotonic() - start > _PATIENCE_SECONDS
            time.sleep(_QUIET_SECONDS)
            for _ in range(_MOST_CALLS):
                self._running.acquire()
            self._running.release(_MOST_CALLS)


_callbacks = _Callbacks()


def make_callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` for `tf.numpy_function`. Python does not exit while it is being called.

    At exit, calls go on until TensorFlow's queues are full. If that takes more than two seconds,
    further calls fail.
    """
    return _callbacks.wrap(function)
