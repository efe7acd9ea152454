"""The process that goes through TFRecord files for `index.build_index`, one after another.

It is told a file by a line of JSON on stdin and answers with lines of JSON on stdout: {"progress": [records, bytes]} now and
then, at last {"entry": ...}, or {"unreadable": text}, or {"error": [errno, text]} where there is no writing. A
process of its own: decoders are C code, and what they do to it does not touch the program that called `build_index`.
"""

import contextlib
import dataclasses
import json
import os
import sys
from typing import Any, TextIO

from dali_tf_input.checks import Checks, Decode, check_file
from dali_tf_input.staging import WRITE_ERRORS
from dali_tf_input.tfrecord import Fault, InputError


def serve() -> None:
    """Answers tasks until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what decoders print is no answer
    decoders: dict[Checks, Decode] = {}
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # who asked is gone
        for line in sys.stdin:
            task = json.loads(line)
            checks = Checks(**task["checks"])
            if checks.verify == "decode" and checks not in decoders:
                # Imported here because Pillow, DALI's codecs and TensorFlow take seconds, and only this level needs them.
                from PIL import Image

                from dali_tf_input.decoders import make_decode

                Image.MAX_IMAGE_PIXELS = None  # in this process `max_pixels` is the bound
                decoders[checks] = make_decode(checks)
            _answer(answers, _run(task, checks, decoders.get(checks), answers))


def _run(task: dict[str, Any], checks: Checks, decode: Decode | None, answers: TextIO) -> dict[str, Any]:
    file = task["file"]
    try:
        with contextlib.ExitStack() as stack:
            index = stack.enter_context(open(task["index"], "wb"))
            mark = stack.enter_context(open(task["mark"], "wb", buffering=0)) if decode else None
            faults: TextIO | None = None

            def on_fault(fault: Fault) -> None:
                nonlocal faults
                if faults is None:  # most files have none
                    faults = stack.enter_context(open(task["faults"], "w", encoding="utf-8"))
                line = {"file": os.path.basename(file), **dataclasses.asdict(fault)}
                faults.write(json.dumps(line) + "\n")

            def on_progress(records: int, size: int) -> None:
                _answer(answers, {"progress": [records, size]})

            def on_decode(number: int | None) -> None:
                if mark:  # the parent reads it if this process is struck down, or does not come back
                    os.pwrite(mark.fileno(), *((b"\0", 8) if number is None else (number.to_bytes(8, "little") + b"\1", 0)))

            crashing = {int(number): (reason, detail) for number, (reason, detail) in task["crashing"].items()}
            entry = check_file(
                file,
                index,
                checks,
                decode=decode,
                crashing=crashing,
                on_decode=on_decode,
                on_fault=on_fault,
                on_progress=on_progress,
            )
    except InputError as error:
        return {"unreadable": str(error)}
    except OSError as error:
        if error.errno in WRITE_ERRORS:
            return {"error": [error.errno, error.strerror]}
        return {"unreadable": f"{file} cannot be read: {error.strerror or error}"}
    return {"entry": dataclasses.asdict(entry)}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
