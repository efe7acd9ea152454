"""Stored objects (S3, GCS, Azure, https), named by URLs: listed, read by ranges, written.

obstore does the work. It finds credentials and endpoints in its usual environment variables.
"""

import asyncio
import concurrent.futures
import datetime
import fnmatch
import functools
import logging
import os
import pathlib
import random
import re
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from dali_tf_input.errors import InputError, check
from dali_tf_input.storage.causes import find_cause
from dali_tf_input.storage.client import gather, library, requests_at_once, run, submit, wait

RETRY_SECONDS = 300.0
_SCHEMES = ("s3", "gs", "az", "http", "https")
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_WILDCARD = re.compile(r"[*?[]")
_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, of Linux
_MOST_GAP = 1 << 14  # bytes between neighboring parts that are read along
_MODIFIED = "modified "  # starts the version of an object whose server has no etags
_CHANGED = "{} changed since it was indexed: index it again."
# obstore retries a failed request for the first seconds; then we do, with pauses that double.
_OBSTORE_SECONDS, _FIRST_PAUSE, _MOST_PAUSE = 2.0, 1.0, 10.0

_logger = logging.getLogger("dali_tf_input")


class ObjectVersion(NamedTuple):
    """The version of an object.

    Attributes:
      size: in bytes.
      etag: without quotes; "modified " and a time if its server has no etags.
    """

    size: int
    etag: str


class ByteRange(NamedTuple):
    """Bytes [start, end) of an object of the version `etag`."""

    url: str
    etag: str
    start: int
    end: int


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of an object."""
    return bool(_URL.match(os.fspath(path)))


def local_path(name: str, path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a local file or folder; "~" is expanded.

    Raises:
      InputError: the argument `name` is a URL, or as `check_path` says.
    """
    check_path(name, path)
    text = os.fspath(path)
    if is_url(text):
        raise InputError(
            f"`{name}` must be a local path, got {text}: name one, and copy it from there."
        )
    return os.path.abspath(os.path.expanduser(text))


def check_path(name: str, path: str | os.PathLike[str] | None) -> None:
    """Raises InputError unless the argument `name` is what a file system or a store can name.

    It is not if it is empty, has a zero byte, no encoding, too long a name, or begins with "~" and
    a user that is not there.
    """
    if path is None:
        return
    text = os.fspath(path)
    check(isinstance(text, str), name, "a path of text", repr(text))
    check(bool(text), name, "a path", "''")
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        data = b"\0"
    is_short = max(map(len, data.split(b"/"))) <= _LONGEST_NAME and len(data) < _LONGEST_PATH
    is_possible = is_short and b"\0" not in data
    rule = f"a path of names that have at most {_LONGEST_NAME} bytes, and no zero byte"
    check(is_possible, name, rule, ascii(text[:100]))
    is_known = not text.startswith("~") or os.path.expanduser(text) != text
    check(is_known, name, "a path of a user that is there", repr(text))


def find_objects(pattern: str, *, retry_seconds: float = RETRY_SECONDS) -> dict[str, ObjectVersion]:
    """Returns the objects that a URL names, which may be a pattern; sorted.

    Raises:
      InputError: they cannot be listed.
    """
    return run(_find(pattern, retry_seconds))


def find_all(patterns: Iterable[str]) -> list[dict[str, ObjectVersion]]:
    """Returns what `find_objects` does of each pattern; they are asked for at the same time."""
    patterns = [*patterns]
    if not patterns:  # no store is used, so that a process may still be forked
        return []
    return run(gather([_find(pattern, RETRY_SECONDS) for pattern in patterns]))


def list_folder(folder: str) -> dict[str, ObjectVersion]:
    """Returns the objects directly in a folder by their base names; none if there is no folder."""
    listed = find_objects(f"{folder.rstrip('/')}/*")
    return {url.rpartition("/")[2]: version for url, version in listed.items()}


def list_below(folder: str) -> dict[str, ObjectVersion]:
    """Returns all objects below a folder, of any depth.

    Raises:
      InputError: they cannot be listed.
    """
    base, pattern = _split(f"{folder.rstrip('/')}/*")
    prefix = pattern[:-1] or None

    async def find() -> list[Any]:
        store = _store(base, RETRY_SECONDS)
        return [meta async for chunk in store.list(prefix=prefix) for meta in chunk]

    objects = run(_retry(folder, find, RETRY_SECONDS, "listed"))
    return {base + meta["path"]: _version_of(meta) for meta in objects}


def find_object_versions(urls: Iterable[str]) -> dict[str, ObjectVersion]:
    """Returns the versions of the objects that exist, from a listing of each folder."""
    remote_urls = {url for url in urls if is_url(url)}
    if not remote_urls:
        return {}
    folders = {
        url if url.startswith("http") else f"{url.rpartition('/')[0]}/*" for url in remote_urls
    }
    listed = {url: version for objects in find_all(folders) for url, version in objects.items()}
    return {url: listed[url] for url in remote_urls & listed.keys()}


def read_parts(
    parts: Sequence[ByteRange], *, retry_seconds: float = RETRY_SECONDS
) -> list[memoryview]:
    """Returns parts of objects, read at the same time; neighboring parts by one request.

    Temporary failures are retried for `retry_seconds`.

    Raises:
      InputError: an object is gone, changed, or cannot be read.
    """
    requests: list[ByteRange] = []
    request_of = [0] * len(parts)  # the number of the request that holds a part
    for number in sorted(range(len(parts)), key=parts.__getitem__):
        part, last = parts[number], requests[-1] if requests else None
        if last and part[:2] == last[:2] and part.start <= last.end + _MOST_GAP:
            requests[-1] = last._replace(end=max(last.end, part.end))
        else:
            requests.append(part)
        request_of[number] = len(requests) - 1
    answers = run(gather([_read(request, retry_seconds) for request in requests]))
    return [
        answers[number][part.start - requests[number].start : part.end - requests[number].start]
        for part, number in zip(parts, request_of, strict=True)
    ]


def read_whole(objects: dict[str, ObjectVersion]) -> list[bytes]:
    """Returns the bytes of small objects."""
    parts = [ByteRange(url, version.etag, 0, version.size) for url, version in objects.items()]
    return [bytes(data) for data in read_parts(parts)]


def read_in_turn(
    parts: Iterable[ByteRange],
    *,
    num_ahead: int,
    retry_seconds: float,
    stopped: threading.Event | None = None,
) -> Iterator[memoryview]:
    """Yields parts of objects in their order, while the next `num_ahead` - 1 are requested.

    Raises:
      InputError: as `read_parts`, or `stopped` is set.
    """
    futures = deque[concurrent.futures.Future[memoryview]]()
    try:
        for part in parts:
            futures.append(submit(_read(part, retry_seconds)))
            if len(futures) == num_ahead:
                yield wait(futures.popleft(), stopped)
        while futures:
            yield wait(futures.popleft(), stopped)
    finally:
        for future in futures:
            future.cancel()


def write(url: str, path: str, *, replaces: str | None = None) -> bool:
    """Uploads a file as an object, atomically; returns whether it was written.

    If `replaces` is an etag, only an object with that etag is replaced; if it is "", the object
    must not exist yet.
    """
    base, key = _split(url)
    errors = library().exceptions
    conflicts = (errors.PreconditionError, errors.AlreadyExistsError, FileNotFoundError)

    async def put() -> bool:
        store = _store(base, RETRY_SECONDS)
        mode: Any = {None: "overwrite", "": "create"}.get(replaces)
        try:
            if replaces:  # S3 and Azure compare the etag, GCS its number of the version
                meta = await store.head_async(key)
                if _version_of(meta).etag != replaces:
                    return False
                mode = {name: meta[name] for name in ("e_tag", "version") if meta[name]}
            # An upload in several parts cannot be conditional.
            in_parts = None if mode == "overwrite" else False
            await store.put_async(key, pathlib.Path(path), mode=mode, use_multipart=in_parts)
        except conflicts:
            return False
        return True

    return run(_retry(url, put, RETRY_SECONDS, "written"))


def delete(url: str) -> None:
    """Removes an object."""
    base, key = _split(url)
    run(_retry(url, lambda: _store(base, RETRY_SECONDS).delete_async(key), RETRY_SECONDS))


_Result = TypeVar("_Result")


async def _read(part: ByteRange, retry_seconds: float) -> memoryview:
    if part.end == part.start:
        return memoryview(b"")
    base, key = _split(part.url)
    options: Any = {"range": (part.start, part.end)}
    # Stores compare only strong etags.
    is_compared = bool(part.etag) and not part.etag.startswith(("W/", _MODIFIED))
    if is_compared:
        options["if_match"] = f'"{part.etag}"'

    async def get() -> memoryview:
        answer = await _store(base, retry_seconds).get_async(key, options=options)
        if not is_compared and _version_of(answer.meta).etag != part.etag:
            raise InputError(_CHANGED.format(part.url))
        data = await answer.bytes_async()
        if len(data) != part.end - part.start:
            raise ConnectionError(f"{len(data):,} bytes came of {part.end - part.start:,}")
        return memoryview(data)

    return await _retry(part.url, get, retry_seconds)


async def _find(pattern: str, retry_seconds: float) -> dict[str, ObjectVersion]:
    base, key = _split(pattern)
    is_pattern = bool(_WILDCARD.search(key)) and not base.startswith("http")

    async def find() -> list[Any]:
        store = _store(base, retry_seconds)
        return await (_list(store, key) if is_pattern else _find_one(store, key))

    objects = await _retry(pattern, find, retry_seconds, "listed")
    if not is_pattern:
        return {pattern: _version_of(objects[0])} if objects else {}
    return {base + meta["path"]: _version_of(meta) for meta in sorted(objects, key=_path_of)}


def _path_of(meta: Any) -> str:
    return str(meta["path"])


async def _find_one(store: Any, key: str) -> list[Any]:
    try:
        return [await store.head_async(key)]
    except FileNotFoundError:
        return []
    except library().exceptions.BaseError:
        if not isinstance(store, library().store.HTTPStore):
            async for _ in store.list(prefix=key):  # its answer says why, a head's cannot
                break
        raise


async def _list(store: Any, pattern: str) -> list[Any]:
    """Returns the objects whose keys match a pattern, in which "*" does not match a slash.

    It lists the matching folders level by level, instead of everything below them.
    """
    *folders, name = pattern.split("/")
    prefixes = [""]
    for folder in folders:
        if _WILDCARD.search(folder):
            listings = await _list_folders(store, prefixes)
            below = [prefix for listing in listings for prefix in listing["common_prefixes"]]
            fits = re.compile(fnmatch.translate(folder)).match
            prefixes = [prefix for prefix in below if fits(prefix.rpartition("/")[2])]
        else:
            prefixes = [f"{prefix}/{folder}" if prefix else folder for prefix in prefixes]
    fits = re.compile(fnmatch.translate(name)).match
    objects = [
        meta for listing in await _list_folders(store, prefixes) for meta in listing["objects"]
    ]
    return [meta for meta in objects if fits(meta["path"].rpartition("/")[2])]


async def _list_folders(store: Any, prefixes: Sequence[str]) -> list[Any]:
    return await gather([_list_folder(store, prefix) for prefix in prefixes])


async def _list_folder(store: Any, prefix: str) -> Any:
    return await store.list_with_delimiter_async(prefix or None)


def _split(url: str) -> tuple[str, str]:
    """Returns the URL of a bucket or a host, and a key in it."""
    match = _URL.match(url)
    assert match
    scheme, bucket, key = match[1].lower(), match[2], match[3]
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise InputError(f"{url}: objects are read from {known}, got {scheme}://.")
    if "@" in bucket:
        raise InputError(
            f"{scheme}://...@{bucket.rpartition('@')[2]}/{key}: a URL with a user name or a"
            " password is not read. Name credentials by environment variables."
        )
    if not bucket or not key:
        raise InputError(f"{url} must name a bucket and an object: {scheme}://BUCKET/NAME.")
    if scheme.startswith("http"):
        if "?" in key:
            place = f"{scheme}://{bucket}/{key.partition('?')[0]}"
            raise InputError(f"{place}?...: URLs with a query, as presigned ones, are not read.")
        key = urllib.parse.unquote(key)  # the library quotes it
    return f"{scheme}://{bucket}/", key


def _store(base: str, retry_seconds: float) -> Any:
    """Returns the client of a bucket or a host; another one when credentials have changed."""
    names = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_FILE")
    settings = (item for item in os.environ.items() if item[0].startswith(names))
    return _make_store(base, retry_seconds, tuple(sorted(settings)))


@functools.lru_cache(64)
def _make_store(base: str, retry_seconds: float, settings: tuple[tuple[str, str], ...]) -> Any:
    variables = dict(settings)
    is_plain = any("http://" in value for value in (base, *variables.values()))
    client: dict[str, Any] = {"allow_http": is_plain}
    for variable in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        if issuers := variables.get(variable):
            try:
                client["root_certificate"] = pathlib.Path(issuers).read_bytes()
            except OSError as error:
                problem = f"{variable} names {issuers}, which cannot be read: {error.strerror}."
                raise InputError(problem) from error
            break
    seconds = datetime.timedelta(seconds=min(retry_seconds, _OBSTORE_SECONDS))
    retries = {"retry_timeout": seconds, "max_retries": 100}
    return library().store.from_url(base, client_options=client, retry_config=retries)


def _version_of(meta: Any) -> ObjectVersion:
    # Azure's listings have etags without quotes, its other answers with them.
    etag = (meta["e_tag"] or "").strip('"')
    return ObjectVersion(meta["size"], etag or f"{_MODIFIED}{meta['last_modified'].isoformat()}")


async def _retry(
    url: str, action: Callable[[], Awaitable[_Result]], retry_seconds: float, verb: str = "read"
) -> _Result:
    """Returns what `action` does, retried after temporary failures for `retry_seconds`.

    Raises:
      InputError: what is wrong with the object at `url`.
    """
    errors = library().exceptions
    start, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            async with requests_at_once():
                return await action()
        except InputError:
            raise
        except errors.PreconditionError:
            raise InputError(_CHANGED.format(url)) from None
        except (errors.BaseError, OSError, ValueError) as error:
            cause, is_temporary = find_cause(url, error)
        seconds = time.monotonic() - start
        if not is_temporary or seconds + pause > retry_seconds:
            tried = f" (tried for {seconds:.1f} s)" if is_temporary else ""
            raise InputError(f"{url} cannot be {verb}{tried}: {cause}.")
        if pause == _FIRST_PAUSE:
            text = "%s cannot be %s: trying again, for %.0f s at most: %s"
            _logger.warning(text, url, verb, retry_seconds, cause)
        await asyncio.sleep(random.uniform(0.5, 1) * pause)
        pause = min(2 * pause, _MOST_PAUSE)
