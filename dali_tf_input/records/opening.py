"""The steps of `Records.from_files`: finding indexed files and checking their manifests."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dali_tf_input.errors import InputError, Path, check
from dali_tf_input.records import contents
from dali_tf_input.records.checks import Checks, find_keys, unknown_keys_error
from dali_tf_input.records.contents import FileEntry
from dali_tf_input.records.index_cache import find_local
from dali_tf_input.records.indexed_file import IndexedFile
from dali_tf_input.records.manifest import Manifest, StoredNames, read_entries
from dali_tf_input.records.paths import absolute, find_versions, index_command, index_files_of
from dali_tf_input.storage.copies import resolve_cache_dir


def read_fields(
    files: Path | Sequence[Path],
    *,
    index_dir: Path | None,
    image_key: str | None,
    cache_dir: Path | None,
) -> dict[str, Any]:
    """Returns the fields of a `Records`, see `Records.from_files`."""
    # Absolute, as a program may change its folder.
    versions = {absolute(file): version for file, version in find_versions(files).items()}
    is_remote = {version is not None for version in versions.values()}
    check(len(is_remote) == 1, "files", "all local, or all in a store", files)
    index_files = tuple(map(absolute, index_files_of([*versions], index_dir=index_dir)))
    index_files = find_local(index_files)
    entries = read_entries(versions, index_files, files, index_dir)
    summary = contents.summarize(dict(zip(versions, entries, strict=True)))
    command = index_command(files, index_dir=index_dir, arguments=["--verify=schema"])
    if not summary.records:
        raise InputError(
            f"All {summary.skipped:,} records of these {summary.files:,} files are skipped: the"
            " index has no valid records."
        )
    if not summary.features:
        raise InputError(
            "The first records of these files are not Examples with features. To see what they"
            f" are: {command}"
        )
    for file, entry in zip(versions, entries, strict=True):
        if entry.records and not entry.parsed:
            text = f"The first record of {file} is not a tf.train.Example"
            raise InputError(f"{text}. To see all that is wrong: {command}")
    image_key, _ = find_keys(summary.features, image_key=image_key, label_key=None)
    if not image_key:
        raise unknown_keys_error(summary.features)
    indexed = [
        IndexedFile(
            path=path,
            index_file=index_file,
            num_records=entry.records,
            skipped=entry.skipped_numbers or contents.pack_integers([]),
            size=entry.size,
            mtime_ns=entry.mtime_ns,
            index_crc=entry.index_crc,
            framing_crc=entry.framing_crc,
            etag=entry.etag,
            labels=entry.labels,
        )
        for path, index_file, entry in zip(versions, index_files, entries, strict=True)
        if entry.records  # DALI refuses an empty index
    ]
    images = [
        entry.images
        for entry in entries
        if entry.images and entry.checked_by.get("image_key") == image_key
    ]
    largest = contents.merge_images(images) if len(images) == len(indexed) else None
    label_keys = {(entry.checked_by.get("label") or {}).get("key") for entry in entries}
    check_labels_agree(dict(zip(versions, entries, strict=True)), files, index_dir)
    vocabulary = (entries[0].checked_by.get("label") or {}).get("vocabulary")
    stored_names: StoredNames = {}
    for folder in {os.path.dirname(index_file) for index_file in index_files}:
        stored_names |= Manifest.read(folder).names
    return {
        "files": tuple(indexed),
        "image_key": image_key,
        "largest_image": largest.largest_size if largest else None,
        "index_dir": None if index_dir is None else absolute(os.fspath(index_dir)),
        "cache_dir": resolve_cache_dir(cache_dir) if is_remote == {True} else None,
        "features": summary.features,
        "label_vocabulary": tuple(vocabulary) if vocabulary and len(label_keys) == 1 else None,
        "stored_names": stored_names,
        "label_key": label_keys.pop() if len(label_keys) == 1 else None,
    }


def check_labels_agree(
    entries: Mapping[str, FileEntry], patterns: Path | Sequence[Path], index_dir: Path | None
) -> None:
    """Raises InputError if equal stored labels of two files mean other classes.

    That is: the files were indexed with the same key, and other names or another first label.
    """
    first: dict[str, tuple[str, Checks]] = {}  # by key
    for file, entry in entries.items():
        label = entry.checked_by.get("label")
        if not label or not label.get("key") or label.get("kind") == "values":
            continue
        checks = Checks.from_json({"verify": entry.verified, **entry.checked_by})
        other_file, other = first.setdefault(label["key"], (file, checks))
        for name, flag in (("vocabulary", "--vocabulary"), ("offset", "--label_offset")):
            mine, theirs = (getattr(one.label, name, None) for one in (checks, other))
            if mine != theirs:
                command = index_command(patterns, index_dir=index_dir, arguments=other.to_flags())
                raise InputError(
                    f"{other_file} and {file} were indexed with other labels, {flag} {theirs!r} and"
                    f" {mine!r}, so that equal numbers would mean other classes. Index all files"
                    f" with what is right for them, such as: {command}"
                )
