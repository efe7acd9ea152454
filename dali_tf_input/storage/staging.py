"""Writing files whole or not at all: made in a staging folder, renamed when done.

`os.replace` within one file system is atomic, so a reader sees the old file or the new one. A
process that is killed leaves its staging folder behind. The kernel has then released the lock on
the folder, which tells the next run that it may remove it.
"""

import atexit
import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from types import TracebackType

from dali_tf_input.errors import InputError

# Errors of the place that is written to, not of what is read.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

_PREFIX = ".staging-"


def write_whole(path: str, text: str) -> None:
    """Writes a text file as a whole: a reader, or a crash, never sees half of it."""
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{path}.new", path)


class Staging:
    """A hidden folder inside `folder`, locked while in use and removed at the end.

    Raises:
      InputError: `folder` cannot be made or written to, or the disk is full, also later in the
        body. The message ends in `remedy`.
    """

    def __init__(self, folder: str, remedy: str) -> None:
        self.folder = folder
        self._remedy = remedy
        self._path = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}")
        try:
            os.makedirs(folder, exist_ok=True)
            with locked(folder):  # or another run could remove the new folder
                os.mkdir(self._path)
                self._lock = os.open(self._path, os.O_RDONLY)
                _flock(self._lock, fcntl.LOCK_EX)
                for other in glob.glob(os.path.join(glob.escape(folder), _PREFIX + "*")):
                    if other != self._path:
                        _remove_if_abandoned(other)
        except OSError as error:
            raise InputError(
                f"Cannot write to {os.path.abspath(folder)}: {error.strerror}. {remedy}"
            ) from error

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        _flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
            raise InputError(
                f"Cannot write to {os.path.abspath(self.folder)}: {error.strerror}. The files there"
                f" are complete. Free some space, or: {self._remedy[0].lower()}{self._remedy[1:]}"
            ) from error

    def path(self, name: str) -> str:
        """Returns where to make the file that will be called `name`."""
        return os.path.join(self._path, name)

    def commit(self, name: str, target: str | None = None) -> None:
        """Renames the file `name` to `target`, by default its own name in `folder`. Atomic."""
        os.replace(self.path(name), target or os.path.join(self.folder, name))


def private_folder() -> str:
    """Returns this user's folder in the folder for temporary files; no one else may use it.

    Raises:
      InputError: something else has its name, as another user may have arranged.
    """
    path = os.path.join(tempfile.gettempdir(), f"dali_tf_input-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
        status = os.lstat(path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & 0o022:
            raise InputError(
                f"{path} must be a folder that belongs to you and that only you can write. Remove"
                " it, or set TMPDIR to another folder."
            )
        os.chmod(path, 0o700)
    except OSError as error:
        raise InputError(
            f"Cannot write to {path}: {error.strerror}. Set TMPDIR to another folder."
        ) from error
    return path


def make_process_folder(parent: str) -> Staging:
    """Makes a folder in `parent` that is removed when this process ends, or by a later one."""
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(Staging(parent, "Name another folder, or set TMPDIR."))
        atexit.register(_close, stack.pop_all(), os.getpid())
    return staging


def _close(stack: contextlib.ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        stack.close()


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Waits for an exclusive lock on `folder`; the kernel releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _flock(descriptor, fcntl.LOCK_UN)  # a fork of the program may hold it open
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
    """Returns whether the lock was acquired. File systems without locks on folders go without."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True
