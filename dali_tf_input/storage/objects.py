"""Objects of a store (S3, GCS, Azure, https), named by URLs: listed, read in parts, written.

The library is obstore; credentials and endpoints are what it finds in its own usual environment
variables. Requests that fail for a while are repeated.
"""

import contextlib
import datetime
import fnmatch
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

from dali_tf_input.errors import InputError

RETRY_SECONDS = 300.0
_SCHEMES = ("s3", "gs", "az", "http", "https")
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
MOST_REQUESTS = 64  # under way in a process
_MOST_GAP = 1 << 14  # bytes between neighbors that are read along
_CHANGED = "{} changed since it was indexed: index it again."
_FIRST_BACKOFF, _MOST_BACKOFF = 0.1, 10.0  # seconds between two tries

# What the words of a store's or the library's errors mean.
_CAUSES = (
    (r"NoSuchBucket|ContainerNotFound|bucket does not exist", "there is no bucket {bucket}"),
    (r"is wrong; expecting '([^']+)'", "the bucket is in region {found}: set AWS_REGION"),
    (r"redirect without LOCATION|Redirect<", "the bucket is in another region: set AWS_REGION"),
    (r"RequestTimeTooSkewed|RequestExpired|NotValidYet", "this machine's clock is wrong: set it"),
    (
        r"InvalidCertificate\(\s*(\w+)",
        "the certificate of {host} is not trusted ({found}): name a file with its issuer's by"
        " AWS_CA_BUNDLE",
    ),
    (r"performing \w+ http://169\.254\.169\.254|metadata\.google", "no credentials{names}"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
        "the store does not take the credentials ({found}){names}",
    ),
    (r"status code: 40[13]", "no permission{names}"),
    (r'"dns error"', "no host {host} is known{names}"),
    (r"ConnectionRefused", "{host} refuses connections{names}"),
)

# A program that ends waits for its threads: its iterators, which it drops then, wait for them.
_ending = Event()
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]
_logger = logging.getLogger("dali_tf_input")


class Status(NamedTuple):
    """The version of an object: its size in bytes and its etag, without quotes."""

    size: int
    etag: str


class Part(NamedTuple):
    """Bytes [start, end) of an object of the version `etag`."""

    url: str
    etag: str
    start: int
    end: int


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of an object."""
    return bool(_URL.match(os.fspath(path)))


def find_objects(pattern: str, *, retry_seconds: float = RETRY_SECONDS) -> dict[str, Status]:
    """Returns the objects that a URL names, which may be a pattern, in one listing; sorted.

    Raises:
      InputError: they cannot be listed.
    """
    scheme, bucket, key = _split(pattern)
    base = f"{scheme}://{bucket}/"
    if scheme.startswith("http") or not re.search(r"[*?[]", key):
        found = _repeat(pattern, lambda: _find_one(base, key), retry_seconds)
    else:
        folder = re.split(r"[*?[]", key, maxsplit=1)[0].rpartition("/")[0]
        found = _repeat(pattern, lambda: _list(base, folder or None, key), retry_seconds)
    return dict(sorted(found))


def find_all(patterns: Iterable[str]) -> list[dict[str, Status]]:
    """Returns what `find_objects` does of each pattern; they are asked for at the same time."""
    patterns = [*patterns]
    run = map if len(patterns) == 1 else _pool(os.getpid()).map
    return [*run(find_objects, patterns)]


def list_folder(folder: str) -> dict[str, Status]:
    """Returns the objects directly in a folder by their base names; none if there is no folder."""
    found = find_objects(f"{folder.rstrip('/')}/*")
    return {url.rpartition("/")[2]: status for url, status in found.items()}


def find_statuses(urls: Iterable[str]) -> dict[str, Status]:
    """Returns the versions of the objects that exist, from a listing of each folder."""
    wanted = {url for url in urls if is_url(url)}
    folders = {url if url.startswith("http") else f"{url.rpartition('/')[0]}/*" for url in wanted}
    found = {url: status for one in find_all(folders) for url, status in one.items()}
    return {url: found[url] for url in wanted & found.keys()}


def read_parts(
    parts: Sequence[Part],
    take: Callable[[memoryview], Any] = bytes,
    *,
    retry_seconds: float = RETRY_SECONDS,
) -> list[Any]:
    """Returns parts of objects, read at the same time; parts that are neighbors by one request.

    Temporary failures are retried for `retry_seconds`. `take` converts the bytes of a part to
    what is returned, in the thread that read them.

    Raises:
      InputError: an object is gone, changed, or cannot be read.
    """
    requests: list[tuple[Part, list[int]]] = []  # what is asked for, and which parts it holds
    for number in sorted(range(len(parts)), key=parts.__getitem__):
        part, (last, numbers) = parts[number], requests[-1] if requests else (None, [])
        if last and part[:2] == last[:2] and last.start <= part.start <= last.end + _MOST_GAP:
            requests[-1] = (last._replace(end=max(last.end, part.end)), [*numbers, number])
        else:
            requests.append((part, [number]))
    failed, found = Event(), [None] * len(parts)

    def read(request: tuple[Part, list[int]]) -> None:
        whole, numbers = request
        data = memoryview(read_part(whole, retry_seconds=retry_seconds, failed=failed))
        for number in numbers:
            _, _, start, end = parts[number]
            found[number] = take(data[start - whole.start : end - whole.start])

    if len(requests) == 1:
        read(requests[0])
    else:
        list(_pool(os.getpid()).map(read, requests))
    return found


def read_whole(objects: dict[str, Status]) -> list[bytes]:
    """Returns the bytes of small objects."""
    return read_parts([Part(url, one.etag, 0, one.size) for url, one in objects.items()])


def write(url: str, path: str, *, replaces: str | None = None) -> bool:
    """Writes a file as an object, whole or not at all; returns whether it did.

    With `replaces`, an etag or "" for none, it replaces only the object of that etag.
    """
    scheme, bucket, key = _split(url)
    errors = _library().exceptions
    taken = (errors.PreconditionError, errors.AlreadyExistsError, FileNotFoundError)

    def put() -> bool:
        store = _store(f"{scheme}://{bucket}/")
        mode: Any = {None: "overwrite", "": "create"}.get(replaces)
        try:
            if replaces:  # S3 and Azure compare the etag, GCS its number of the version
                held = store.head(key)
                mode = {name: held[name] for name in ("e_tag", "version") if held[name]}
            if replaces and _named("", held)[1].etag != replaces:
                return False
            with open(path, "rb") as stream:
                store.put(key, stream, mode=mode)
        except taken:
            return False
        return True

    return bool(_repeat(url, put))


def delete(url: str) -> None:
    """Removes an object."""
    scheme, bucket, key = _split(url)
    _repeat(url, lambda: _store(f"{scheme}://{bucket}/").delete(key))


@functools.cache
def _pool(_: int) -> ThreadPoolExecutor:
    """Returns the threads of a process that wait for objects."""
    return ThreadPoolExecutor(MOST_REQUESTS)


def read_part(
    part: Part, *, retry_seconds: float, failed: Event, stopped: Event | None = None
) -> Any:
    """Returns a buffer with a part; gives up where another one has `failed`, or when `stopped`."""
    stopped = stopped or _ending
    deadline, backoff = time.monotonic() + retry_seconds, _FIRST_BACKOFF
    scheme, bucket, key = _split(part.url)
    options: Any = {"range": (part.start, part.end)}
    is_weak = part.etag.startswith("W/")  # then it matches nothing
    if part.etag and not is_weak:
        options["if_match"] = f'"{part.etag}"'
    while part.end > part.start:
        if stopped.is_set() or _ending.is_set():
            raise InputError(f"{part.url} is no longer read: the run ends.")
        with _explained(part.url, failed):
            try:
                answer = _store(f"{scheme}://{bucket}/").get(key, options=options)
                data = answer.bytes()
                if is_weak and _named("", answer.meta)[1].etag != part.etag:
                    raise InputError(_CHANGED.format(part.url))
                if len(data) == part.end - part.start:
                    return data
                problem = f"{len(data):,} bytes came of {part.end - part.start:,}"
            except _library().exceptions.GenericError as error:
                if not _passes(error):
                    raise
                problem = _cause(part.url, error)
        late = time.monotonic() + backoff > deadline
        if late or failed.is_set() or stopped.wait(backoff):
            failed.set()
            raise InputError(f"{part.url} cannot be read for {retry_seconds:g} s: {problem}.")
        backoff = min(2 * backoff, _MOST_BACKOFF)
    return b""


def _split(url: str) -> tuple[str, str, str]:
    found = _URL.match(url)
    assert found
    scheme, bucket, key = found[1].lower(), found[2], found[3]
    if scheme not in _SCHEMES:
        known = ", ".join(f"{one}://" for one in _SCHEMES)
        raise InputError(f"{url}: objects are read from {known}, got {scheme}://.")
    if not bucket or not key:
        raise InputError(f"{url} must name a bucket and an object: {scheme}://BUCKET/NAME.")
    return scheme, bucket, key


def _library() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise InputError(
            f"URLs need the package obstore: {error}. Install it: pip install obstore (Python 3.11"
            " or later)"
        ) from error
    return obstore


@functools.cache
def _store(base: str) -> Any:
    # The library's own threads receive and decrypt. Fewer of them than cores pass less work around:
    # 0.21 instead of 0.27 ms of CPU time for a read of 110 KB, seen on 2 cores.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(max(1, cores // 4)))
    named = [one for name, one in os.environ.items() if name.startswith(("AWS_", "GOOGLE_"))]
    client: dict[str, Any] = {"allow_http": any("http://" in one for one in (base, *named))}
    if issuers := os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"):
        with open(issuers, "rb") as stream:
            client["root_certificate"] = stream.read()
    return _library().store.from_url(
        base, client_options=client, retry_config={"retry_timeout": datetime.timedelta(seconds=0.5)}
    )


def _find_one(base: str, key: str) -> list[tuple[str, Status]]:
    try:
        return [_named(base, _store(base).head(key))]
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise
        return []
    except _library().exceptions.BaseError as error:
        if not base.startswith("http") and not _passes(error):
            next(iter(_store(base).list(prefix=key)), None)  # its answer says why, a head's cannot
        raise


def _list(base: str, folder: str | None, pattern: str) -> list[tuple[str, Status]]:
    """Returns the objects of a folder whose keys fit a pattern, in which "*" ends at a slash."""
    depth, fits = pattern.count("/"), re.compile(fnmatch.translate(pattern)).match
    pages = _store(base).list(prefix=folder, chunk_size=1000)
    found = (one for page in pages for one in page if one["path"].count("/") == depth)
    return [_named(base, one) for one in found if fits(one["path"])]


def _named(base: str, about: Any) -> tuple[str, Status]:
    # Azure's listings have etags without quotes, its other answers with them.
    return base + about["path"], Status(about["size"], (about["e_tag"] or "").strip('"'))


def _repeat(url: str, action: Callable[[], Any], retry_seconds: float = RETRY_SECONDS) -> Any:
    """Returns what `action` does, retried after temporary failures."""
    deadline, backoff = time.monotonic() + retry_seconds, _FIRST_BACKOFF
    while True:
        with _explained(url):
            try:
                return action()
            except _library().exceptions.GenericError as error:
                late = time.monotonic() + backoff > deadline
                if not _passes(error) or late or _ending.wait(backoff):
                    raise
                if backoff == _FIRST_BACKOFF:
                    text = "%s does not answer: trying again, for %.0f s at most: %s"
                    _logger.warning(text, url, retry_seconds, _cause(url, error))
        backoff = min(2 * backoff, _MOST_BACKOFF)


def _passes(error: Exception) -> bool:
    """Whether another try may succeed."""
    found = re.search(r"status code: (408|429|5..)|HTTP error", str(error))
    return bool(found) and "InvalidCertificate" not in str(error)


def _cause(url: str, error: Exception) -> str:
    """Returns what is wrong, and how to fix it; never the body of an answer."""
    text = str(error)
    scheme, bucket, _ = _split(url)
    prefix = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}.get(scheme)
    names = f": check the environment variables {prefix}*" if prefix else ""
    host = re.search(r"https?://([^/\s]+)", text)
    for pattern, cause in _CAUSES:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            named = {"host": host[1] if host else bucket, "found": found[found.lastindex or 0]}
            return cause.format(bucket=bucket, names=names, **named)
    if isinstance(error, FileNotFoundError):
        return "no such object"
    return re.split(r"\n|: <", text, maxsplit=1)[0].strip().rstrip(":")


@contextlib.contextmanager
def _explained(url: str, failed: Event | None = None) -> Iterator[None]:
    """Turns errors of the store into InputError; sets `failed`."""
    exceptions = _library().exceptions
    try:
        yield
    except (exceptions.BaseError, FileNotFoundError, PermissionError) as error:
        if failed:
            failed.set()
        if isinstance(error, exceptions.PreconditionError):
            raise InputError(_CHANGED.format(url)) from None
        raise InputError(f"{url} cannot be read: {_cause(url, error)}.") from None
