"""The process that checks TFRecord files for `build_index`, one after another.

It gets a file as a line of JSON on stdin and answers with lines of JSON on stdout: {"progress":
[records, bytes]} now and then, and finally {"entry": ...}, {"unreadable": text}, or {"error":
[errno, text]} if writing fails. It is a separate process because decoders are C code: if a damaged
image crashes it, the program that called `build_index` survives. Callers that decode nothing may
call `check_task` in their own process.
"""

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any, TextIO

import msgspec

from dali_tf_input.errors import InputError
from dali_tf_input.index.scan import check_file
from dali_tf_input.records.schema import PIXELS_KEY, BadImage, Checks, TrialDecode
from dali_tf_input.records.tfrecord import BadRecord
from dali_tf_input.storage.copies import local_copy
from dali_tf_input.storage.objects import Status
from dali_tf_input.storage.staging import WRITE_ERRORS

IDLE_STATUS = 3  # exit status of a process that got no task for a while
_IDLE_SECONDS = 30


def serve() -> None:
    """Answers tasks until stdin ends, or none comes for 30 s."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # decoders print: keep that out of the answers
    decoders: dict[Checks, TrialDecode] = {}
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0]:
            line = sys.stdin.readline()  # a task comes when the one before is answered
            if not line:
                return
            task = json.loads(line)
            checks = Checks.from_json(task["checks"])
            encoded = checks.image_key != PIXELS_KEY or checks.mask_key
            if checks.verify == "decode" and encoded and checks not in decoders:
                # Imported here because Pillow, DALI's codecs and TensorFlow take seconds, and only
                # this level needs them.
                from PIL import Image

                from dali_tf_input.index.decoders import make_trial_decode_of_worker

                Image.MAX_IMAGE_PIXELS = None  # in this process `max_pixels` is the limit
                try:
                    decoders[checks] = make_trial_decode_of_worker(checks)
                except InputError as error:  # a decoder is not installed
                    _answer(answers, {"unreadable": str(error)})
                    continue
            on_progress = functools.partial(_tell_progress, answers)
            _answer(answers, check_task(task, checks, decoders.get(checks), on_progress))
        sys.exit(IDLE_STATUS)


def check_task(
    task: dict[str, Any],
    checks: Checks,
    decode: TrialDecode | None,
    on_progress: Callable[[int, int], None],
    **download: Any,
) -> dict[str, Any]:
    """Checks a file; returns the answer. `download`: further arguments of `local_copy`."""
    file = task["file"]
    crashing = {int(number): tuple(why) for number, why in task["crashing"].items()}
    try:
        with contextlib.ExitStack() as stack:
            index = stack.enter_context(open(task["index"], "wb"))
            mark = stack.enter_context(open(task["mark"], "wb", buffering=0)) if decode else None
            if decode:
                journal = _Journal(task["mark"] + ".decoded", decode, crashing)
                decode = stack.enter_context(journal)
                stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            bad_records: TextIO | None = None

            def on_bad_record(bad: BadRecord) -> None:
                nonlocal bad_records
                if bad_records is None:  # most files have none
                    path = task["bad_records"]
                    bad_records = stack.enter_context(open(path, "w", encoding="utf-8"))
                line = {"file": os.path.basename(file), **dataclasses.asdict(bad)}
                bad_records.write(json.dumps(line) + "\n")

            def on_decode(number: int) -> None:
                if mark:  # the parent reads it if this process crashes
                    journal.number = number
                    os.pwrite(mark.fileno(), number.to_bytes(8, "little"), 0)
                    signal.setitimer(signal.ITIMER_REAL, task["longest_decode"])  # SIGALRM ends it

            status = Status(*task["status"]) if task["status"] else None
            entry = check_file(
                stack.enter_context(local_copy(file, status, task["cache_dir"], **download)),
                index,
                checks,
                name=file,
                decode=decode,
                crashing=crashing,
                on_decode=on_decode,
                on_bad_record=on_bad_record,
                on_progress=on_progress,
            )
            if status:
                entry = dataclasses.replace(entry, mtime_ns=0, etag=status.etag)
    except InputError as error:
        return {"unreadable": str(error)}
    except OSError as error:
        if error.errno in WRITE_ERRORS:
            return {"error": [error.errno, error.strerror]}
        return {"unreadable": f"{file} cannot be read: {error.strerror or error}"}
    return {"entry": msgspec.to_builtins(entry)}


class _Journal:
    """Decodes images, and stores the outcomes in a file (a context manager).

    If a record crashes the process, the next process reuses the stored outcomes. `number` is the
    record whose images are decoded next. Outcomes of `crashing` records are ignored, because these
    records are not decoded again.
    """

    def __init__(self, path: str, decode: TrialDecode, crashing: Collection[int]) -> None:
        self._decode, self._crashing = decode, crashing
        self._written = open(path, "ab", buffering=0)  # noqa: SIM115 (closed in `__exit__`)
        self._outcomes = open(path, "rb")  # noqa: SIM115
        self.number = 0

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._written.close()
        self._outcomes.close()

    def __call__(self, encoded: bytes) -> tuple[str, int, int]:
        outcome = self._next_outcome()
        if outcome is None:
            try:
                outcome = self._decode(encoded)
            except BadImage as bad:
                outcome = {"reason": bad.reason, "detail": bad.detail}
            self._written.write(json.dumps([self.number, outcome]).encode() + b"\n")
            self._outcomes.seek(0, os.SEEK_END)
        if isinstance(outcome, dict):
            raise BadImage(**outcome)
        return tuple(outcome)

    def _next_outcome(self) -> Any:
        while line := self._outcomes.readline():
            with contextlib.suppress(ValueError):  # a line that was cut off
                number, outcome = json.loads(line)
                if number not in self._crashing:
                    return outcome
        return None


def _tell_progress(answers: TextIO, records: int, size: int) -> None:
    _answer(answers, {"progress": [records, size]})


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
