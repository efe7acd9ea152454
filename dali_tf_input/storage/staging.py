"""Atomic file writes: files are created in a staging folder and renamed when complete.

`os.replace` within one file system is atomic, so a reader sees the old file or the new one. Our
`replace` also survives a power loss: contents reach the disk before names do. A process that is
killed leaves its staging folder behind, but the kernel releases the folder's lock. A later run that
finds the folder unlocked removes it.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from dali_tf_input.errors import InputError

# Errors of the place that is written to, not of what is read.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

# Locks may not be visible to other hosts, so the staging folder of another host counts as abandoned
# only after this time.
_SECONDS_ELSEWHERE = 30 * 24 * 3600


def replace(targets: Mapping[str, str]) -> None:
    """Renames files or folders, each atomically; `targets` maps old paths to new ones.

    After a power loss a new path is either complete or what it was before. When this returns, the
    new paths are on the disk, so later writes and removals cannot reach the disk before them.
    """
    for source in targets:
        for folder, _, names in os.walk(source):
            for name in names:
                _sync(os.path.join(folder, name))
            _sync(folder)
        if not os.path.isdir(source):
            _sync(source)
    for source, target in targets.items():
        os.replace(source, target)
    for folder in {os.path.dirname(target) or "." for target in targets.values()}:
        _sync(folder)


def _sync(path: str) -> None:
    """Waits until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)


def write_whole(path: str, text: str) -> None:
    """Writes a text file as a whole: a reader, or a crash, never sees half of it."""
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        stream.write(text)
    replace({f"{path}.new": path})


class Staging:
    """A hidden folder inside `folder`, locked while in use and removed at the end.

    Raises:
      InputError: `folder` cannot be made or written to, or the disk is full, also later in the
        body. The message ends in `remedy`.
    """

    def __init__(self, folder: str, remedy: str) -> None:
        self.folder = folder
        self._remedy = remedy
        self._path = os.path.join(folder, f"{_prefix()}{secrets.token_hex(8)}")
        try:
            os.makedirs(folder, exist_ok=True)
            with locked(folder):  # or another run could remove the new folder
                os.mkdir(self._path)
                self._lock = os.open(self._path, os.O_RDONLY)
                _flock(self._lock, fcntl.LOCK_EX)
                for other in glob.glob(os.path.join(glob.escape(folder), ".staging-*")):
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
        """Returns the staging path of the file that will be named `name`."""
        return os.path.join(self._path, name)

    def commit(self, name: str, target: str | None = None) -> None:
        """Renames `name` to `target`, by default its own name in `folder`, as `replace` does."""
        replace({self.path(name): target or os.path.join(self.folder, name)})


def private_folder() -> str:
    """Returns a folder that no one but this user may use.

    It is in the user's cache folder, ``$XDG_CACHE_HOME`` or ``~/.cache``. If that cannot be
    written, it is a new folder for temporary files, removed when the process ends.

    Raises:
      InputError: the folder belongs to someone else, or others may write to it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(cache, "dali_tf_input")
    try:
        if not os.path.isabs(cache):
            return _temporary_folder()
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & 0o022:
            raise InputError(
                f"{path} must be a folder that belongs to you and that only you can write. Remove"
                " it, or set XDG_CACHE_HOME to another folder."
            )
        os.chmod(path, 0o700)
    except OSError:
        return _temporary_folder()
    return path if os.access(path, os.W_OK) else _temporary_folder()


@functools.cache
def _temporary_folder() -> str:
    try:
        folder = tempfile.mkdtemp(prefix="dali_tf_input-")
    except OSError as error:
        text = f"Cannot write to {tempfile.gettempdir()}: {error.strerror}."
        raise InputError(f"{text} Set TMPDIR to another folder.") from error
    stack = contextlib.ExitStack()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(_close, stack, os.getpid())
    return folder


def make_process_folder(parent: str) -> Staging:
    """Makes a folder in `parent` that is removed when this process ends, or by a later one."""
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(Staging(parent, "Set XDG_CACHE_HOME to another folder."))
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


def host_hash() -> str:
    """Returns a hash that tells this host's files from another's, in a folder that both use."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _prefix() -> str:
    """Returns how the names of this host's staging folders start."""
    return f".staging-{host_hash()}-"


@contextlib.contextmanager
def locked_if_free(path: str) -> Iterator[bool]:
    """Tries to lock a file, created if needed; yields whether nobody else holds the lock.

    Raises:
      InputError: it is no file, or may not be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        text = f"{path} cannot be locked: {error.strerror}"
        raise InputError(f"{text}. Remove it, or name another folder.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False
    except OSError:  # no locks on this file system
        is_free = True
    try:
        yield is_free
    finally:
        _flock(descriptor, fcntl.LOCK_UN)  # a fork of the program may hold it open
        os.close(descriptor)


def _remove_if_abandoned(path: str) -> None:
    if not os.path.basename(path).startswith(_prefix()):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime < _SECONDS_ELSEWHERE:
                return
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
    """Returns whether the lock was acquired; some file systems cannot lock folders."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True
