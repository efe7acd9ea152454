"""A record of what reaches the disk, for tests of what survives a loss of power."""

import os


class Disk:
    """Records what reaches the disk and what is renamed or removed, and judges the order.

    After a loss of power a name may hold any of what was not synced. So what is renamed must have
    been synced, and its new name too before anything that depends on it.
    """

    def __init__(self, monkeypatch):
        self.calls = []  # (what, path)
        self._fsync, self._replace, self._unlink = os.fsync, os.replace, os.unlink
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)
        monkeypatch.setattr(os, "unlink", self.unlink)

    def fsync(self, descriptor):
        self.calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        self._fsync(descriptor)

    def replace(self, source, target):
        for folder, _, names in os.walk(source):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                assert ("sync", os.path.abspath(path)) in self.calls, f"{path} is not on the disk"
        assert ("sync", os.path.abspath(source)) in self.calls, f"{source} is not on the disk"
        self._replace(source, target)
        self.calls.append(("rename", os.path.abspath(target)))

    def unlink(self, path, **more):
        self.calls.append(("unlink", os.path.abspath(path)))
        self._unlink(path, **more)

    def check_is_before(self, first, then):
        """Renames to names that end so are on the disk before others are renamed or removed."""
        changes = [(number, *call) for number, call in enumerate(self.calls) if call[0] != "sync"]
        renames = [change for change in changes if change[1] == "rename"]
        *_, (last, _, path) = (rename for rename in renames if rename[2].endswith(first))
        start = next(n for n, _, path in changes if n > last and path.endswith(then))
        assert ("sync", os.path.dirname(path)) in self.calls[last:start]
