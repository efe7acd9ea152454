"""Local copies of index files that are in a store, refreshed from it and uploaded to it."""

import hashlib
import json
import os
from collections.abc import Sequence

from dali_tf_input.errors import InputError
from dali_tf_input.records.paths import BAD_RECORDS_NAME, INDEX_SUFFIX, MANIFEST_NAME
from dali_tf_input.storage import objects
from dali_tf_input.storage.objects import is_url
from dali_tf_input.storage.staging import host_hash, locked, private_folder, replace, write_whole

_ETAGS_NAME = ".etags.json"  # of what a cache holds, by name


def local_folder(folder: str) -> str:
    """Returns the local folder of the index files: `folder`, or its cache if it is in a store."""
    if not is_url(folder):
        return folder
    name = hashlib.sha256(folder.rstrip("/").encode()).hexdigest()[:20]
    # Other hosts may share the user's folder, and not see the locks.
    return os.path.join(private_folder(), f"index-{host_hash()}-{name}")


def refresh(folder: str) -> None:
    """Brings the cache of a folder in a store up to date; does nothing for a local folder."""
    cache = local_folder(folder)
    if cache == folder:
        return
    listed = objects.list_folder(folder)
    versions = {name: version for name, version in listed.items() if _is_index(name)}
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
        with locked(cache):
            old_etags = _read_etags(cache)
            for name in filter(_is_index, set(os.listdir(cache)) - versions.keys()):
                os.unlink(os.path.join(cache, name))
            new = {
                name: version
                for name, version in versions.items()
                if old_etags.get(name) != version.etag
            }
            data = objects.read_whole({f"{folder}/{name}": new[name] for name in new})
            for name, content in zip(new, data, strict=True):
                with open(os.path.join(cache, f"{name}.new"), "wb") as stream:
                    stream.write(content)
            paths = [os.path.join(cache, name) for name in new]
            replace({f"{path}.new": path for path in paths})
            _write_etags(cache, {name: version.etag for name, version in versions.items()})
    except OSError as error:
        raise InputError(
            f"Cannot write to {cache}: {error.strerror}. Set XDG_CACHE_HOME to another folder."
        ) from error


def find_local(index_files: Sequence[str]) -> tuple[str, ...]:
    """Returns local paths of the index files, after refreshing the copies of those in a store."""
    for folder in {os.path.dirname(index_file) for index_file in index_files}:
        refresh(folder)
    split = map(os.path.split, index_files)
    return tuple(os.path.join(local_folder(folder), name) for folder, name in split)


def upload(folder: str, names: list[str]) -> bool:
    """Uploads index files from the cache to its store, in order; deletes those that are gone.

    Returns whether the last one, the manifest, was written: it is not if another run has written
    one since the cache was refreshed.
    """
    cache = local_folder(folder)
    old_etags = _read_etags(cache)
    # Until all are uploaded, the cache's versions of these files count as outdated.
    _write_etags(cache, {name: etag for name, etag in old_etags.items() if name not in names})
    for name in names:
        replaces = old_etags.get(name, "") if name == MANIFEST_NAME else None
        path = os.path.join(cache, name)
        if not os.path.exists(path):
            if name in old_etags:
                objects.delete(f"{folder}/{name}")
        elif not objects.write(f"{folder}/{name}", path, replaces=replaces):
            return False
    listed = objects.list_folder(folder)
    etags = {name: listed[name].etag for name in names if name in listed}
    _write_etags(cache, {name: etag for name, etag in old_etags.items() if name in listed} | etags)
    return True


def _is_index(name: str) -> bool:
    return name in (MANIFEST_NAME, BAD_RECORDS_NAME) or name.endswith(INDEX_SUFFIX)


def _read_etags(cache: str) -> dict[str, str]:
    try:
        with open(os.path.join(cache, _ETAGS_NAME), encoding="utf-8") as stream:
            return dict(json.load(stream))
    except (OSError, ValueError):
        return {}


def _write_etags(cache: str, etags: dict[str, str]) -> None:
    write_whole(os.path.join(cache, _ETAGS_NAME), json.dumps(etags))
