"""A folder of whole objects on a local disk, shared by the processes of a machine."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from dali_tf_input.errors import InputError, Path, Within, checked
from dali_tf_input.storage.objects import MOST_REQUESTS, RETRY_SECONDS, Part, Status, read_part
from dali_tf_input.storage.staging import locked

_PART = ".part"  # an object that is being downloaded
# Requests for one object at a time, and their sizes; what many objects hold together.
_REQUESTS, _PART_BYTES, _MOST_BYTES = 4, 1 << 23, 3 << 24
_TOUCH_SECONDS = 60  # between notes that a file is in use


@checked
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where objects are kept.

    Those least recently used go first. A file is named by its object's URL and version, is as long
    as the object, and appears when complete. One process downloads an object, others wait.

    Attributes:
      folder: on a local disk; made if there is none.
      max_bytes: the most that the folder takes.
      retry_seconds: how long to retry an object whose store does not answer.
    """

    folder: str
    max_bytes: Annotated[int, Within(1)]
    retry_seconds: Annotated[float, Within(0)] = RETRY_SECONDS

    def find(self, url: str, status: Status) -> str | None:
        """Returns the file of an object, which now counts as used; None if it is not here."""
        path = self._path(url, status)
        try:
            if os.stat(path).st_size != status.size:
                return None
        except OSError:
            return None
        if time.monotonic() > _touched().get(path, 0) + _TOUCH_SECONDS:
            _touched()[path] = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(path)
        return path

    def fetch(self, url: str, status: Status, **download: Any) -> str:
        """Returns the file of an object, downloaded if it is not here.

        `download` are further arguments of `download_to`.

        Raises:
          InputError: the object cannot be read, or the folder cannot hold it.
        """
        path = self._path(url, status)
        while not self.find(url, status):
            try:
                os.makedirs(self.folder, exist_ok=True)
                descriptor = os.open(path + _PART, os.O_CREAT | os.O_RDWR, 0o644)
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process may download it
                with contextlib.suppress(FileNotFoundError):
                    if _is_at(descriptor, path):
                        self._download(url, status, descriptor, path, **download)
            finally:
                os.close(descriptor)
        return path

    def _download(
        self, url: str, status: Status, descriptor: int, path: str, **download: Any
    ) -> None:
        try:
            with locked(self.folder):
                self._make_room(status.size, url)
                if status.size:
                    os.posix_fallocate(descriptor, 0, status.size)
            download.setdefault("retry_seconds", self.retry_seconds)
            download_to(url, status, descriptor, **download)
            os.replace(path + _PART, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(path + _PART)
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise

    def _make_room(self, size: int, url: str) -> None:
        """Removes files until another `size` bytes fit."""
        held = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    held.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = size + sum(one for _, one, _ in held)
        for _, one, path in sorted(held):
            if total <= self.max_bytes:
                return
            if not path.endswith(_PART) or _is_abandoned(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= one
        if total > self.max_bytes:
            raise InputError(
                f"`cache_bytes` {self.max_bytes:,} cannot hold {url} of {size:,} bytes beside what"
                " is being downloaded: raise it."
            )

    def _path(self, url: str, status: Status) -> str:
        version = hashlib.sha256(f"{url}\n{status.etag}".encode()).hexdigest()[:20]
        return os.path.join(self.folder, f"{version}-{url.rpartition('/')[2]}")

    def _unwritable(self, error: OSError) -> InputError:
        text = f"`cache_dir` {self.folder} cannot be written: {error.strerror}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return InputError(f"{text}. {'Lower `cache_bytes`, or n' if full else 'N'}ame another.")


def make_cache(
    folder: Path | None, max_bytes: int | None, retry_seconds: float = RETRY_SECONDS
) -> Cache | None:
    """Returns the cache that two arguments describe, if they do."""
    if folder is None and max_bytes is None:
        return None
    if folder is None or max_bytes is None:
        raise InputError("`cache_dir` and `cache_bytes` need each other.")
    path = os.path.abspath(os.path.expanduser(folder))
    return Cache(folder=path, max_bytes=max_bytes, retry_seconds=retry_seconds)


@contextlib.contextmanager
def local_copy(
    path: str, status: Status | None, cache: Cache | None, **download: Any
) -> Iterator[str]:
    """Gives the file at `path`; if it is an object, the cache's copy of it, or a temporary one."""
    if status is None:
        yield path
        return
    with contextlib.ExitStack() as stack:
        stream: Any = None
        while cache and not stream:
            with contextlib.suppress(FileNotFoundError):  # another object took its place
                stream = stack.enter_context(open(cache.fetch(path, status, **download), "rb"))
        if not cache:
            stream = stack.enter_context(tempfile.TemporaryFile())
            try:
                os.posix_fallocate(stream.fileno(), 0, max(1, status.size))
                os.ftruncate(stream.fileno(), status.size)
            except OSError as error:
                text = f"There is no room for {path}, {status.size:,} bytes, in"
                folder = tempfile.gettempdir()
                raise InputError(f"{text} {folder}: {error.strerror}. Set TMPDIR.") from error
            download_to(path, status, stream.fileno(), **download)
        yield f"/proc/self/fd/{stream.fileno()}"  # it stays, whatever happens to its name


def download_to(
    url: str,
    status: Status,
    descriptor: int,
    *,
    retry_seconds: float = RETRY_SECONDS,
    at_once: int = 1,
    stopped: threading.Event | None = None,
) -> None:
    """Writes an object to an open file; ends early if `stopped`.

    It holds 32 MiB of the object. Of many that are downloaded `at_once` it holds 48 MiB together.

    Raises:
      InputError: as `read_parts`.
      OSError: the file cannot be written.
    """
    failed = threading.Event()
    requests = min(_REQUESTS, max(1, MOST_REQUESTS // at_once))
    size = min(_PART_BYTES, _MOST_BYTES // (at_once * requests))

    def fetch(start: int) -> None:
        part = Part(url, status.etag, start, min(start + size, status.size))
        data = read_part(part, retry_seconds=retry_seconds, failed=failed, stopped=stopped)
        os.pwrite(descriptor, data, start)

    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(fetch, range(0, status.size, size)))


@functools.cache
def _touched() -> dict[str, float]:
    return {}


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file still is the one that is being made at `path`."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path + _PART))


def _is_abandoned(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
