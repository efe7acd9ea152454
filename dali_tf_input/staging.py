"""Writing files whole or not at all: they are made in a folder of their own and moved to their place when they are done.

`os.replace` within one file system is atomic, so whoever reads a file sees the old one or the new one. A process that is killed
leaves its staging folder behind; the kernel has then dropped the lock on it, by which the next run knows that it may be removed.
"""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from types import TracebackType

from dali_tf_input.tfrecord import InputError

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # of the place that is written to, not of what is read

_PREFIX = ".staging-"


class Staging:
    """A hidden folder inside `folder`, locked while it is in use and removed at the end (a context manager).

    Raises:
      InputError: `folder` cannot be made or written to; also later, in the body, when the disk is full. It ends in `remedy`.
    """

    def __init__(self, folder: str, remedy: str) -> None:
        self.folder = folder
        self._remedy = remedy
        self._path = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}")
        try:
            os.makedirs(folder, exist_ok=True)
            with locked(folder):  # or another run could find this one's folder before it is locked, and remove it
                os.mkdir(self._path)
                self._lock = os.open(self._path, os.O_RDONLY)
                _flock(self._lock, fcntl.LOCK_EX)
                for other in glob.glob(os.path.join(glob.escape(folder), _PREFIX + "*")):
                    if other != self._path:
                        _remove_if_abandoned(other)
        except OSError as error:
            raise InputError(f"Cannot write to {os.path.abspath(folder)}: {error.strerror}. {remedy}") from error

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        _flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
            raise InputError(
                f"Cannot write to {os.path.abspath(self.folder)}: {error.strerror}. What stands there is whole. Make room, or: "
                f"{self._remedy[0].lower()}{self._remedy[1:]}"
            ) from error

    def path(self, name: str) -> str:
        """Returns where to make the file that will be called `name`."""
        return os.path.join(self._path, name)

    def place(self, name: str, target: str | None = None) -> None:
        """Moves the file `name` to its place: `target`, or its own name in `folder`. Atomic."""
        os.replace(self.path(name), target or os.path.join(self.folder, name))


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Waits until no other process holds this lock on `folder`; the kernel drops it when a process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _flock(descriptor, fcntl.LOCK_UN)  # the calling program may have forked meanwhile: closing is not enough then
        os.close(descriptor)


def _remove_if_abandoned(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return  # its owner has just removed it
    try:
        if _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, operation: int) -> bool:
    """Returns whether the lock was got. File systems without locks on folders (some network ones) just go without."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True
