"""Runs a converter's work by an executor, perhaps on other machines."""

import base64
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from dali_tf_input import InputError, __version__
from dali_tf_input.cli import processes
from dali_tf_input.index.workers import explain_executor

_CODE = """
from dali_tf_input.cli import processes
from dali_tf_input.cli.convert import elsewhere
processes.serve(elsewhere.answer)
"""
_KEPT_SECONDS = 60  # that a process waits for the next chunk
_LONGEST_CHUNK = 3600  # seconds

_local = threading.local()


def submit(
    executor: Executor, work: Callable[[list[Any]], list[Any]], items: list[Any]
) -> Callable[[], list[Any]]:
    """Submits work; returns a function that waits for its result or raises InputError."""
    future = executor.submit(_run_apart, work, __version__, items)

    def wait() -> list[Any]:
        try:
            return future.result()
        except InputError:
            raise
        except Exception as error:  # of the executor's own kinds
            raise explain_executor(error, _name(items)) from error

    return wait


def _run_apart(work: Callable[[list[Any]], list[Any]], version: str, items: list[Any]) -> list[Any]:
    """Returns `work(items)`, computed in a separate process because a decoder may crash."""
    if version != __version__:
        text = f"A worker has dali_tf_input {__version__}, this program {version}"
        raise InputError(f"{text}: install the same version everywhere.")
    if not hasattr(_local, "worker"):
        _local.worker = processes.JsonWorker(
            processes.with_same_path(_CODE),
            environment={"CUDA_VISIBLE_DEVICES": ""},  # TensorFlow would take a GPU's memory
        )
    question = base64.b64encode(pickle.dumps((work, items))).decode()
    try:
        try:
            reply = _local.worker.ask(question, seconds=_LONGEST_CHUNK)
        except processes.WorkerDied:  # it waited for too long, perhaps
            reply = _local.worker.ask(question, seconds=_LONGEST_CHUNK)
    except processes.WorkerDied as error:
        raise InputError(f"At {_name(items)}, or soon after it: {error}") from error
    results: list[Any]
    results, problem = pickle.loads(base64.b64decode(reply))  # noqa: S301 (of our own process)
    if problem:
        raise InputError(problem)
    return results


def _name(items: list[Any]) -> str:
    """Returns the path in the first item."""
    return next((str(part) for part in items[0] if isinstance(part, str)), str(items[0]))


def answer(question: str) -> str:
    """Does what `_run_apart` asks for, in the process that it starts."""
    signal.alarm(0)
    work, items = pickle.loads(base64.b64decode(question))  # noqa: S301 (of our own process)
    reply: Any = ([], None)
    try:
        reply = (work(items), None)
    except InputError as error:
        reply = ([], str(error))
    signal.alarm(_KEPT_SECONDS)
    return base64.b64encode(pickle.dumps(reply)).decode()
