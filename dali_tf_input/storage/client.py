"""The thread that runs obstore's coroutines until exit, and functions that wait for them."""

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from dali_tf_input.errors import InputError

MOST_REQUESTS = 64  # under way in a process
_POLL_SECONDS = 0.2


def library() -> Any:
    """Returns obstore; raises InputError if it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise InputError(
            f"URLs need the package obstore: {error}. Install it: pip install obstore (Python 3.11"
            " or later)"
        ) from error
    return obstore


def close_at_exit() -> None:
    """Makes reads end at exit, before exit handlers that were registered earlier.

    Otherwise a program that exits would wait for its iterators, which wait for their objects.
    """
    atexit.unregister(_close)
    atexit.register(_close)


_Result = TypeVar("_Result")


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows whether a thread of obstore is still in `call_soon_threadsafe`.

    Such a thread hands over a result, and may then wait for the interpreter's lock. If the program
    ends meanwhile, Python ends the thread, and Rust aborts the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = threading.Condition()
        self._inside = 0

    def call_soon_threadsafe(  # type: ignore[override]  # its type needs Python 3.11
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """Does the same, and counts its callers."""
        with self._left:
            self._inside += 1
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def wait_for_threads(self) -> None:
        """Returns when no thread is handing over a result."""
        with self._left:
            self._left.wait_for(lambda: not self._inside)


class _Client:
    """The thread in which obstore's coroutines run."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_closed = False
        self.lock = threading.Lock()
        self.loop = _Loop()
        self.requests = asyncio.Semaphore(MOST_REQUESTS)
        name = "dali_tf_input objects"
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()
        close_at_exit()

    def submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Starts a coroutine."""
        with self.lock:
            if self.is_closed:
                work.close()
                raise InputError("No more objects are read: the program ends.")
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancels the running coroutines and ends the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self.pid != os.getpid():
            return
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            cancelled = asyncio.run_coroutine_threadsafe(cancel_all(), self.loop)
        cancelled.result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.wait_for_threads()


_client_lock = threading.Lock()
_clients: list[_Client] = []  # at most one


def submit(work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
    """Starts a coroutine in the thread; raises InputError after a fork and at exit."""
    if _clients and _clients[0].pid != os.getpid():  # before any lock: the parent may have held it
        work.close()
        raise InputError(
            "This process was forked from one that had used a store, and cannot use its"
            " connections: start processes by 'spawn' or 'forkserver', or use the store only in"
            " forked processes."
        )
    with _client_lock:
        if not _clients:
            _clients.append(_Client())
    return _clients[0].submit(work)


def _close() -> None:
    for client in _clients:
        client.close()


def wait(
    future: concurrent.futures.Future[_Result], stopped: threading.Event | None = None
) -> _Result:
    """Returns the result of a coroutine; cancels it when `stopped` or interrupted."""
    try:
        while stopped:
            if stopped.is_set():
                raise InputError("Objects are no longer read: the run ends.")
            if concurrent.futures.wait([future], _POLL_SECONDS).done:
                break
        return future.result()
    except concurrent.futures.CancelledError:
        raise InputError("Objects are no longer read: the program ends.") from None
    except BaseException:
        future.cancel()
        raise


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of a coroutine."""
    return wait(submit(work))


async def gather(works: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Returns all results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def requests_at_once() -> asyncio.Semaphore:
    """Returns the semaphore that limits the concurrent requests of all coroutines."""
    return _clients[0].requests
