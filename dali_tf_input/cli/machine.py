"""Questions to this machine that can crash or hang, asked in other processes."""

import contextlib
import gc
import io
import shutil
import subprocess
import traceback

from dali_tf_input import InputError
from dali_tf_input.processes import run_command

_SECONDS = 120  # for an answer


def try_code(code: str) -> tuple[bool, str]:
    """Runs Python code; returns whether that worked, and what it printed, or a traceback."""
    gc.disable()  # TensorFlow's import makes many objects, which all stay
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})  # noqa: S102 (of `doctor`, in a process that does nothing else)
    except BaseException:
        return False, traceback.format_exc()
    return True, printed.getvalue()


def ask_driver(what: str) -> tuple[bool, str] | None:
    """Asks nvidia-smi for properties of each GPU, in a process that can hang without harm.

    Returns:
      Whether it succeeded, and what it printed; None if there is no nvidia-smi.

    Raises:
      InputError: it gives no answer.
    """
    if not shutil.which("nvidia-smi"):
        return None
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    code, output, errors = ask(words, "nvidia-smi does not answer", "the driver hangs. ")
    return code == 0, output if code == 0 else errors + output


def ask(words: list[str], what: str, why: str) -> tuple[int, str, str]:
    """Runs a command; returns its exit code, output and errors.

    Raises:
      InputError: it gives no answer.
    """
    try:
        return run_command(words, seconds=_SECONDS)
    except subprocess.TimeoutExpired as error:
        text = f"{what} within {_SECONDS} s: {why}See dali-tf-input doctor."
        raise InputError(text) from error
