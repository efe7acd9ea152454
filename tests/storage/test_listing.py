"""What is listed, refused and ended, on an object store in memory."""

import os
import subprocess
import sys

import pytest
from conftest import refused

from dali_tf_input.storage import objects
from dali_tf_input.storage.objects import ByteRange, ObjectVersion, find_objects, read_parts

KEYS = ["a/x/1", "a/x/2", "a/y/1", "a/y/z/1", "b/x/1", "1", "a/1", "a/[1]"]


@pytest.mark.parametrize(
    ("pattern", "keys", "listed"),
    [
        ("a/*", ["a/1", "a/[1]"], ["a"]),
        ("*", ["1"], [None]),
        ("a/x/?", ["a/x/1", "a/x/2"], ["a/x"]),
        ("a/*/1", ["a/x/1", "a/y/1"], ["a", "a/x", "a/y"]),
        ("*/x/[2-9]", ["a/x/2"], [None, "a/x", "b/x"]),
        ("a/x*/1", ["a/x/1"], ["a", "a/x"]),
        ("none/*", [], ["none"]),
        ("a/x/1", ["a/x/1"], []),
    ],
)
def test_only_folders_that_fit_are_listed(store, pattern, keys, listed):
    """Never what is below them: a folder may have a million objects two levels deeper."""
    for key in KEYS:
        store.put(key, b"abc")
    urls = [f"s3://bucket/{key}" for key in keys]
    assert [*find_objects(f"s3://bucket/{pattern}")] == urls
    assert [key for method, key in store.seen if method == "LIST"] == listed


def test_read_parts(store):
    """In the order of the arguments, whether they overlap, touch, or are far apart."""
    data = os.urandom(1 << 18)
    store.put("a", data)
    (version,) = find_objects("s3://bucket/a").values()
    places = [(5, 9), (0, 3), (200_000, 200_010), (7, 7), (2, 90_000), (200_005, 200_020)]
    parts = [ByteRange("s3://bucket/a", version.etag, *place) for place in places]
    assert read_parts(parts) == [data[start:end] for start, end in places]
    store.put("a", data)
    with refused("s3://bucket/a changed since it was indexed"):
        read_parts(parts)


def test_an_error_names_the_object_that_failed(store):
    store.put("a", b"abc")
    (version,) = find_objects("s3://bucket/a").values()
    parts = [ByteRange(f"s3://bucket/{name}", version.etag, 0, 3) for name in ("a", "gone", "a")]
    with refused("^s3://bucket/gone cannot be read: no such object"):
        read_parts(parts)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/a?X-Signature=secret", r"https://host/a\?...: URLs with a query"),
        ("https://me:secret@host/a", "https://...@host/a: a URL with a user name or a password"),
        ("s3://key:secret@bucket/a", "s3://...@bucket/a: a URL with a user name or a password"),
        ("s3://bucket/a//b", "s3://bucket/a//b cannot be listed: .*empty path segment"),
        ("s3://bucket/a/../b", "cannot be listed: .*illegal character sequence"),
    ],
)
def test_names_that_are_refused(store, url, message):
    with refused(message) as caught:
        find_objects(url)
    assert "secret" not in str(caught.value)


def test_a_url_may_be_quoted():
    assert objects._split("https://host/a%20b/c") == ("https://host/", "a b/c")


def test_a_server_without_etags(store, monkeypatch):
    """The time of the last change is the version."""
    store.put("a", b"abc")
    about = {**store.head("a"), "e_tag": None}
    version = objects._version_of(about)
    assert version == ObjectVersion(3, f"modified {about['last_modified'].isoformat()}")
    monkeypatch.setattr(objects, "_version_of", lambda _: version)
    assert read_parts([ByteRange("s3://bucket/a", version.etag, 0, 3)]) == [b"abc"]
    with refused("changed since it was indexed"):
        read_parts([ByteRange("s3://bucket/a", "modified 2001", 0, 3)])


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_a_missing_file_of_certificates(monkeypatch, variable):
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/none/bundle")
    objects._make_store.cache_clear()
    with refused(f"{variable} names /none/bundle, which cannot be read: No such file"):
        find_objects("https://localhost/a", retry_seconds=0)


PROGRAM = """
import os, sys
from obstore.store import MemoryStore
from dali_tf_input import InputError
from dali_tf_input.storage import client, objects

async def find_one(store, key):
    await store.put_async(key, b"abc")
    return [await store.head_async(key)]

objects._store, objects._find_one = lambda *_: MemoryStore(), find_one
if sys.argv[1] != "nobody reads":
    objects.find_objects("s3://bucket/a")
if sys.argv[1] == "another thread reads":  # and holds the lock
    client._clients[0].lock.acquire()
child = os.fork()
if child and client._clients and client._clients[0].lock.locked():
    client._clients[0].lock.release()
try:
    text = str([*objects.find_objects("s3://bucket/a")])
except InputError as error:
    text = str(error)
os.write(1, f"{text}\\n".encode())  # as a whole: two processes write
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("first", ["parent reads", "another thread reads", "nobody reads"])
def test_a_forked_child_does_not_hang(first):
    """It reads if its parent has not; else it is told why it cannot. Both end."""
    command = [sys.executable, "-c", PROGRAM, first]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = sorted(process.stdout.splitlines())
    if first == "nobody reads":
        assert lines == ["['s3://bucket/a']"] * 2
    else:
        assert lines[1] == "['s3://bucket/a']"
        assert "start processes by 'spawn' or 'forkserver'" in lines[0]
    assert process.stderr == ""
