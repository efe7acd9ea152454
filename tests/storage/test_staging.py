"""Files that are whole or not there, also after a loss of power; folders of this user alone."""

import errno
import os
import time

import pytest
from commands import python, succeeds
from conftest import refused, write_dataset
from disk import Disk

from dali_tf_input.storage import staging
from dali_tf_input.storage.staging import Staging, private_folder, replace, write_whole


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_replace(tmp_path, disk):
    """Files and folders: contents, then names, then the folder that holds the names."""
    (tmp_path / "set/deep").mkdir(parents=True)
    (tmp_path / "set/deep/file").write_text("1")
    (tmp_path / "a").write_text("1")
    replace({str(tmp_path / "a"): str(tmp_path / "b"), str(tmp_path / "set"): str(tmp_path / "c")})
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    assert disk.calls[-1] == ("sync", str(tmp_path))


def test_a_file_system_without_sync(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    code = errno.EINVAL
    write_whole(str(tmp_path / "a"), "1")
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(str(tmp_path / "a"), "2")
    assert (tmp_path / "a").read_text() == "1"


def test_the_indexes_are_there_before_their_manifest(tmp_path, disk):
    write_dataset(tmp_path, [3, 3, 3])
    disk.check_is_before(".idx", "index_manifest.json")
    assert disk.calls[-1] == ("sync", str(tmp_path))


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_a_killed_run_left(tmp_path, monkeypatch, has_locks):
    """It goes, unless it is in use, or it may be in use on another host whose locks are unseen.

    A lock is of an open file, and the kernel closes those of a process that was killed.
    """
    hosts = ["here", "there", "here", "there"]
    held, names = [], []
    for number, host in enumerate(hosts):
        monkeypatch.setattr(staging.platform, "node", lambda host=host: host)
        held.append(Staging(str(tmp_path), ""))
        (new,) = {*os.listdir(tmp_path)} - {*names}
        names.append(new)
        if number >= 2:
            os.close(held[-1]._lock)
    monkeypatch.setattr(staging.platform, "node", lambda: "here")
    if not has_locks:  # as if each host had its own
        flock = staging._flock
        theirs = [name for name, host in zip(names, hosts, strict=True) if host == "there"]
        monkeypatch.setattr(
            staging,
            "_flock",
            lambda descriptor, operation: (
                os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) in theirs
                or flock(descriptor, operation)
            ),
        )
    with Staging(str(tmp_path), ""):
        assert {*names} & {*os.listdir(tmp_path)} == {names[0], names[1], names[3]}
    old = time.time() - 40 * 24 * 3600
    os.utime(tmp_path / names[3], (old, old))
    with Staging(str(tmp_path), ""):
        assert {*names} & {*os.listdir(tmp_path)} == {names[0], names[1]}
    for one in held[:2]:
        os.close(one._lock)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dali_tf_input"


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_the_private_folder_is_for_its_user_alone(path, mode):
    if mode:
        path.mkdir()
        path.chmod(mode)
    assert private_folder() == str(path)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["writable", "link", "another user"])
def test_a_folder_that_another_may_have_made_is_refused(path, tmp_path, monkeypatch, what):
    if what == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        path.chmod(0o777 if what == "writable" else 0o700)
    if what == "another user":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with refused("must be a folder that belongs to you and that only you can write. Remove it, or"):
        private_folder()


@pytest.mark.parametrize("cache", ["file", "relative", "read-only"])
def test_without_a_cache_folder(tmp_path, monkeypatch, cache):
    """A new folder of an unpredictable name, which goes with the process."""
    monkeypatch.setenv(
        "XDG_CACHE_HOME", "cache" if cache == "relative" else str(tmp_path / "cache")
    )
    if cache == "file":
        (tmp_path / "cache").write_text("")
    elif cache == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)
    folder = private_folder()
    assert private_folder() == folder
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert not os.path.exists("cache")


def test_the_temporary_folder_goes(tmp_path):
    words = "from dali_tf_input.storage.staging import private_folder as f; print(f())"
    environment = {**os.environ, "XDG_CACHE_HOME": "relative", "TMPDIR": str(tmp_path)}
    process = succeeds(python("-c", words, env=environment))
    assert process.stdout.startswith(f"{tmp_path}/dali_tf_input-")
    assert os.listdir(tmp_path) == []
