"""The private folder of a user, which another user must not be able to prepare."""

import os

import pytest
from conftest import refused

from dali_tf_input.storage.staging import private_folder


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"dali_tf_input-{os.getuid()}"


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_the_private_folder_is_for_its_user_alone(path, mode):
    if mode:
        path.mkdir()
        path.chmod(mode)
    assert private_folder() == str(path)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["writable", "link", "file", "another user"])
def test_a_folder_that_another_may_have_made_is_refused(path, tmp_path, monkeypatch, what):
    if what == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o777 if what == "writable" else 0o700)
    if what == "another user":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        path.rename(tmp_path / f"dali_tf_input-{uid + 1}")
    with refused("must be a folder that belongs to you and that only you can write. Remove it, or"):
        private_folder()
