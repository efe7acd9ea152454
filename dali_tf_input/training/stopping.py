"""SIGTERM in a training run: it ends after a step, when its state is saved.

Schedulers of clusters send it before they take a machine away, and SIGKILL some seconds later.
"""

import signal
import threading
from typing import Any

_CODE = 128 + signal.SIGTERM  # of a program that it ends, as shells say it


class StopSignal:
    """Notes SIGTERM while its body runs (a context manager).

    A second one, or one in another thread than the program's first, does what it would without.

    Attributes:
      has_come: whether the signal has come.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before == signal.SIG_DFL or callable(self._before):
                signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self.has_come = True
        signal.signal(signal.SIGTERM, self._before)

    def pass_on(self) -> None:
        """Ends the program, or does what the program itself does on SIGTERM."""
        self.has_come = False
        if callable(self._before):
            self._before(signal.SIGTERM, None)
            signal.signal(signal.SIGTERM, self._note)  # it only took note: training goes on
        else:
            raise SystemExit(_CODE)
