"""Local copies of objects: complete or absent, shared by processes, and beside other files."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import TF_DATA, refused, spec_of, table

import dali_tf_input as dti
from dali_tf_input.backends import remote
from dali_tf_input.storage import copies, objects
from dali_tf_input.storage.copies import check_room, drop_copy, fetch_copies, fetch_copy, find_copy

URL = "s3://bucket/set/train-00000-of-00001"


def put(store, data, url=URL):
    """Writes an object; returns its version."""
    store.put(url.removeprefix("s3://bucket/"), data)
    (version,) = objects.find_objects(url).values()
    return version


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [0, 1, 3 * (8 << 20) + 5])
def test_a_copy_is_complete_and_fetched_once(store, tmp_path, size):
    data = os.urandom(size)
    version = put(store, data)
    assert find_copy(URL, version, str(tmp_path)) is None
    path = fetch_copy(URL, version, str(tmp_path))
    assert Path(path).read_bytes() == data
    reads = store.count("GET")
    assert fetch_copy(URL, version, str(tmp_path)) == find_copy(URL, version, str(tmp_path)) == path
    assert store.count("GET") == reads
    assert len(files_in(tmp_path)) == 1


def test_a_new_version_supersedes_the_old_one(store, tmp_path):
    """Of the same object alone, and when it is complete; files of others stay."""
    other = f"{URL}-other"
    kept = fetch_copy(other, put(store, b"other", other), str(tmp_path))
    old_status = put(store, b"version 1")
    old = fetch_copy(URL, old_status, str(tmp_path))
    (Path(old).parent / f".part-{'0' * 16}").write_text("left by a process that was killed")
    theirs = [tmp_path / "thesis.tex", tmp_path / "dali_tf_input/notes", Path(old).parent / "x"]
    for path in theirs:
        path.write_text("mine")
        os.utime(path, (1, 1))  # the least recently used
    new_status = put(store, b"version 2!")
    assert os.path.exists(old)
    new = fetch_copy(URL, new_status, str(tmp_path))
    assert {tmp_path / name for name in files_in(tmp_path)} == {Path(kept), Path(new), *theirs}
    assert [path.read_text() for path in theirs] == ["mine"] * 3
    with refused("changed since it was indexed"):
        fetch_copy(URL, old_status, str(tmp_path))
    assert Path(new).read_bytes() == b"version 2!"
    assert len(files_in(tmp_path)) == 5  # and nothing half


def test_a_copy_that_is_gone_or_cut_is_fetched_again(store, tmp_path):
    """It then looks as before, so that programs that read it go on."""
    version = put(store, bytes(1000))
    path = fetch_copy(URL, version, str(tmp_path))
    before = os.stat(path)
    for damage in (os.unlink, lambda path: os.truncate(path, 10)):
        damage(path)
        assert fetch_copy(URL, version, str(tmp_path)) == path
        after = os.stat(path)
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    drop_copy(URL, version, str(tmp_path))
    assert find_copy(URL, version, str(tmp_path)) is None
    shutil.rmtree(tmp_path)
    assert fetch_copy(URL, version, str(tmp_path)) == path


def test_room_is_checked_before(store, tmp_path, monkeypatch, caplog):
    urls = [f"{URL}-{number}" for number in range(3)]
    versions = {url: put(store, bytes(1000), url) for url in urls}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: usage._replace(free=2999))
    with refused("cannot hold 3 objects: they need 3,000 bytes, 2,999 are free. Name a folder"):
        fetch_copies(versions, str(tmp_path))
    assert files_in(tmp_path) == set()
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: usage._replace(free=3000))
    paths = fetch_copies(versions, str(tmp_path))
    assert "Copying 3,000 bytes of objects to " in caplog.text
    assert ", where 3,000 bytes are free" in caplog.text
    assert [find_copy(*item, str(tmp_path)) for item in versions.items()] == paths
    assert check_room(versions, str(tmp_path)) == 0


def test_a_folder_that_cannot_be_written(store, tmp_path, monkeypatch):
    version = put(store, bytes(1000))
    (tmp_path / "file").write_text("")
    with refused("`cache_dir` .*/file cannot be written: .* Name another"):
        fetch_copy(URL, version, f"{tmp_path}/file")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with refused("/full cannot be written: No space .* Free some space, or name another"):
        fetch_copy(URL, version, f"{tmp_path}/full")
    assert files_in(tmp_path) == {"file"}
    with refused("`cache_dir` must be a local path, got s3://bucket/cache"):
        copies.resolve_cache_dir("s3://bucket/cache")


def test_threads_fetch_an_object_once(store, tmp_path):
    version = put(store, bytes(1000))
    threads = [
        threading.Thread(target=fetch_copy, args=(URL, version, str(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count("GET") == 1


FETCH = """
import os, sys
from dali_tf_input.storage import copies
from dali_tf_input.storage.objects import ObjectVersion

folder, url, when = sys.argv[1:]

def write(url, version, descriptor, **_):  # of two parts
    os.pwrite(descriptor, b"a" * 500, 0)
    if when == "wait":
        print("half", flush=True)
        input()
    os.pwrite(descriptor, b"b" * 500, 500)

copies.download_to = write
print(copies.fetch_copy(url, ObjectVersion(1000, "version"), folder), flush=True)
"""


def start(folder, when):
    command = [sys.executable, "-c", FETCH, folder, URL, when]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes)


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_share_a_folder(tmp_path, is_killed):
    """One fetches, the other waits for it, or goes on where it was killed; no copy is half."""
    first = start(tmp_path, "wait")
    assert first.stdout.readline() == "half\n"
    second = start(tmp_path, "now")
    if is_killed:
        first.kill()
        first.communicate()
    else:
        first.communicate("go on\n")
    path = second.communicate()[0].strip()
    assert Path(path).read_bytes() == b"a" * 500 + b"b" * 500
    assert {str(tmp_path / name) for name in files_in(tmp_path)} == {path}


@pytest.fixture
def indexed(stored):
    """The pattern of indexed records in the store."""
    dti.build_index("s3://bucket/set/train-*")
    return "s3://bucket/set/train-*"


def test_a_damaged_copy_is_dropped_and_fetched_again(indexed, dataset, tmp_path, caplog):
    """The store's object is read meanwhile; another load then has a good copy."""
    far = dti.Records.from_files(indexed, cache_dir=tmp_path)
    (path, *_) = remote.localize(far).paths
    damaged = bytearray(Path(path).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    Path(path).write_bytes(damaged)
    number = next(number for number in range(5) if sum(far.locate(number)[2:]) > len(damaged) // 2)
    assert far.read(number) == dataset.read(number)
    assert "train-00000-of-00003 in " in caplog.text
    assert " was damaged and is removed" in caplog.text
    assert not os.path.exists(path)
    assert remote.localize(far).paths[0] == path
    assert Path(path).read_bytes() == Path(dataset.paths[0]).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
@table(
    "what, order",
    [("damaged", "global"), ("removed", "buffer")],
    ["damaged", "removed"],
    ["global", "buffer"],
)
def test_a_copy_that_is_damaged_or_removed_while_it_is_read(indexed, tmp_path, order, what):
    """The message names it, and the next run has a good one; the store's object is not blamed."""
    far = dti.Records.from_files(indexed, cache_dir=tmp_path)
    spec = spec_of(far, order, dti.Preprocess(image_size=(16, 16)))

    def run():
        return sum(1 for _ in dti.load(spec, TF_DATA, batch_size=4))

    train = dti.load(spec, TF_DATA, batch_size=4)
    steps = sum(1 for _ in train)
    path = Path(remote.localize(far).paths[0])
    if what == "removed":
        shutil.rmtree(tmp_path)
    else:
        status, damaged = path.stat(), bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    with pytest.raises(dti.InputError) as caught:
        list(train)
    text = str(caught.value)
    if order == "buffer" and what == "damaged":
        assert "a copy in" in text
        assert "remove the folder dali_tf_input there" in text
        shutil.rmtree(tmp_path / "dali_tf_input")
    else:
        assert re.search("the copy of s3://.*train-0.* damaged or removed. Run again", text)
    assert run() == steps


def test_copies_that_others_fetch_again_are_not_changed_files(indexed, tmp_path):
    """A job that runs goes on while another one, or the user, empties the folder."""
    far = dti.Records.from_files(indexed, cache_dir=tmp_path)
    running = remote.localize(far)
    assert running.find_change() is None
    shutil.rmtree(tmp_path)
    assert "cannot be read" in running.find_change()
    time.sleep(0.01)
    remote.localize(dti.Records.from_files(indexed, cache_dir=tmp_path))
    far.read(3)
    assert running.find_change() is None


def test_the_index_step_reads_copies(indexed, store, tmp_path, monkeypatch):
    reports = [dti.build_index(indexed, force=True, cache_dir=tmp_path) for _ in range(2)]
    assert [report.written for report in reports] == [3, 3]
    assert len(files_in(tmp_path)) == 3
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: usage._replace(free=10))
    assert dti.build_index(indexed, force=True, cache_dir=tmp_path).written == 3
    with refused("cannot hold 3 objects: they need .* 10 are free"):
        dti.build_index(indexed, force=True, cache_dir=tmp_path / "other")
