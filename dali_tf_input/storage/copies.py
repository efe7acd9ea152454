"""Complete local copies of stored objects, in a folder that several processes may share.

A copy is at ``<cache_dir>/dali_tf_input/<hash of the URL>/<hash of the version>-<name>``. It gets
that name when it is complete. Files of any other name, or in any other place, are left alone.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dali_tf_input.errors import InputError, Path
from dali_tf_input.storage.client import MOST_REQUESTS
from dali_tf_input.storage.objects import (
    RETRY_SECONDS,
    ByteRange,
    ObjectVersion,
    local_path,
    read_in_turn,
)
from dali_tf_input.storage.staging import locked, replace

_FOLDER = "dali_tf_input"
_OURS = re.compile(r"[0-9a-f]{20}-.*|\.part-[0-9a-f]{16}", re.DOTALL)
_MOST_NAME = 100  # characters of an object's name that a copy's name ends with
# All copies have this modification time (in 2001), so that one that is fetched again looks the same
# to the programs that read it.
_MTIME_NS = 10**18
_COPIES_AT_ONCE = 8
# Concurrent requests for one object; bytes of a request; bytes in memory for all objects.
_REQUESTS, _PART_BYTES, _MOST_BYTES = 4, 1 << 23, 3 << 24

_logger = logging.getLogger("dali_tf_input")


def resolve_cache_dir(cache_dir: Path | None) -> str | None:
    """Returns the absolute path of a folder for copies; raises InputError for a URL."""
    return None if cache_dir is None else local_path("cache_dir", cache_dir)


def find_copy(url: str, version: ObjectVersion, cache_dir: str) -> str | None:
    """Returns the path of an object's copy; None if it is missing or has the wrong size."""
    path = _path_of(url, version, cache_dir)
    try:
        return path if os.stat(path).st_size == version.size else None
    except OSError:
        return None


def drop_copy(url: str, version: ObjectVersion, cache_dir: str) -> None:
    """Removes a damaged copy, so that it is fetched again."""
    with contextlib.suppress(OSError):
        os.unlink(_path_of(url, version, cache_dir))
        _logger.warning("The copy of %s in %s was damaged and is removed.", url, cache_dir)


def check_room(objects: Mapping[str, ObjectVersion], cache_dir: str) -> int:
    """Returns how many bytes of objects have no copy yet.

    Raises:
      InputError: they do not fit on the disk.
    """
    missing = [
        version for url, version in objects.items() if not find_copy(url, version, cache_dir)
    ]
    needed = sum(version.size for version in missing)
    if not missing:
        return 0
    try:
        os.makedirs(cache_dir, exist_ok=True)
        free = shutil.disk_usage(cache_dir).free
    except OSError as error:
        raise _explain(error, cache_dir) from error
    if needed > free:
        raise InputError(
            f"`cache_dir` {cache_dir} cannot hold {len(missing):,} objects: they need {needed:,}"
            f" bytes, {free:,} are free. Name a folder on a larger disk, or none."
        )
    return needed


def fetch_copies(
    objects: Mapping[str, ObjectVersion], cache_dir: str, *, retry_seconds: float = RETRY_SECONDS
) -> list[str]:
    """Returns the paths of copies of all objects, after fetching those that are missing.

    Raises:
      InputError: they do not fit on the disk, or an object cannot be read.
    """
    needed = check_room(objects, cache_dir)
    if needed > 0:
        free = shutil.disk_usage(cache_dir).free
        text = "Copying %s bytes of objects to %s, where %s bytes are free."
        _logger.warning(text, f"{needed:,}", cache_dir, f"{free:,}")
    stopped = threading.Event()
    download: dict[str, Any] = {"at_once": _COPIES_AT_ONCE, "stopped": stopped}

    def fetch(item: tuple[str, ObjectVersion]) -> str:
        return fetch_copy(*item, cache_dir, retry_seconds=retry_seconds, **download)

    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        try:
            return list(pool.map(fetch, objects.items()))
        except BaseException:
            stopped.set()
            raise


def fetch_copy(url: str, version: ObjectVersion, cache_dir: str, **download: Any) -> str:
    """Returns the path of the copy of an object, after fetching it if it is missing.

    Older versions of the object are then removed. `download` are further arguments of
    `download_to`.

    Raises:
      InputError: the object cannot be read, or the folder cannot be written.
    """
    path = _path_of(url, version, cache_dir)
    folder = os.path.dirname(path)
    if find_copy(url, version, cache_dir):
        return path
    try:
        os.makedirs(folder, exist_ok=True)
        with locked(folder):  # another process may be fetching it
            if not find_copy(url, version, cache_dir):
                _fetch(url, version, path, **download)
                _remove_all_but(path)
    except OSError as error:
        if not find_copy(url, version, cache_dir):  # nor has another process made one
            raise _explain(error, cache_dir) from error
    return path


def _fetch(url: str, version: ObjectVersion, path: str, **download: Any) -> None:
    part = os.path.join(os.path.dirname(path), f".part-{secrets.token_hex(8)}")
    try:
        with open(part, "xb", buffering=0) as stream:
            if version.size:
                os.posix_fallocate(stream.fileno(), 0, version.size)
            download_to(url, version, stream.fileno(), **download)
        os.utime(part, ns=(_MTIME_NS, _MTIME_NS))
        replace({part: path})
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _remove_all_but(path: str) -> None:
    """Removes copies of older versions, and partial copies that a killed process left."""
    folder, current_name = os.path.split(path)
    for name in os.listdir(folder):
        if name != current_name and _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _path_of(url: str, version: ObjectVersion, cache_dir: str) -> str:
    url_hash, etag_hash = (
        hashlib.sha256(text.encode()).hexdigest()[:20] for text in (url, version.etag)
    )
    name = f"{etag_hash}-{url.rpartition('/')[2][-_MOST_NAME:]}"
    return os.path.join(cache_dir, _FOLDER, url_hash, name)


def _explain(error: OSError, cache_dir: str) -> InputError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way = "Free some space, or name another." if is_full else "Name another."
    return InputError(f"`cache_dir` {cache_dir} cannot be written: {error.strerror}. {way}")


@contextlib.contextmanager
def local_copy(
    path: str, version: ObjectVersion | None, cache_dir: str | None, **download: Any
) -> Iterator[str]:
    """Yields a local path: `path` itself, or that of a cached or temporary copy."""
    if version is None:
        yield path
    elif cache_dir is not None:
        yield fetch_copy(path, version, cache_dir, **download)
    else:
        with tempfile.TemporaryFile() as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, max(1, version.size))
                os.ftruncate(stream.fileno(), version.size)
            except OSError as error:
                text = f"There is no room for {path}, {version.size:,} bytes, in"
                folder = tempfile.gettempdir()
                raise InputError(f"{text} {folder}: {error.strerror}. Set TMPDIR.") from error
            download_to(path, version, stream.fileno(), **download)
            yield f"/proc/self/fd/{stream.fileno()}"


def download_to(
    url: str,
    version: ObjectVersion,
    descriptor: int,
    *,
    retry_seconds: float = RETRY_SECONDS,
    at_once: int = 1,
    stopped: threading.Event | None = None,
) -> None:
    """Writes an object to an open file, in pieces.

    Up to 32 MiB of the object are in memory; if `at_once` objects are downloaded concurrently, up
    to 48 MiB in total.

    Raises:
      InputError: as for `read_parts`, or `stopped` is set.
      OSError: the file cannot be written.
    """
    num_ahead = min(_REQUESTS, max(1, MOST_REQUESTS // at_once))
    size = min(_PART_BYTES, _MOST_BYTES // (at_once * num_ahead))
    starts = range(0, version.size, size)
    parts = (
        ByteRange(url, version.etag, start, min(start + size, version.size)) for start in starts
    )
    reads = read_in_turn(parts, num_ahead=num_ahead, retry_seconds=retry_seconds, stopped=stopped)
    for start, data in zip(starts, reads, strict=True):
        os.pwrite(descriptor, data, start)
