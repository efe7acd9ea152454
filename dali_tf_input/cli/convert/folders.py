"""Folders of images as a source, local or in a store: a sub-folder for each class."""

import array
import json
import os
import re
from collections import defaultdict
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.records.class_names import check_class_name
from dali_tf_input.storage.objects import Status, find_objects, is_url

_VALIDATION_NAMES = ("val", "valid", "validation")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def is_folder(source: str) -> bool:
    """Whether a source is a folder; a URL is one that is no pattern and no object."""
    if not is_url(source) or source.startswith("http"):
        return os.path.isdir(source)
    is_pattern = re.search(r"[*?[]", source)
    return source.endswith("/") or not (is_pattern or find_objects(source))


class Tree:
    """The folders below a source, and their files."""

    def __init__(self, source: str) -> None:
        self._folders: dict[str, dict[str, Status]] | None = None
        if is_url(source):
            self._folders = defaultdict(dict)
            for pattern in ("*/*", "*/*/*"):  # classes, or splits of classes
                for url, status in find_objects(f"{source}/{pattern}").items():
                    folder, _, name = url.rpartition("/")
                    self._folders[folder][name] = status

    def folders(self, path: str) -> list[str]:
        """Returns the names of the folders in a folder that are not hidden, sorted."""
        if self._folders is None:
            names = {entry.name for entry in os.scandir(path) if entry.is_dir()}
        else:
            start = f"{path}/"
            below = [folder for folder in self._folders if folder.startswith(start)]
            names = {folder.removeprefix(start).partition("/")[0] for folder in below}
        return sorted(name for name in names if not name.startswith("."))

    def files(self, path: str) -> list[str]:
        """Returns the names in a folder; none if there is no folder."""
        if self._folders is not None:
            return [*self._folders.get(path, {})]
        return os.listdir(path) if os.path.isdir(path) else []

    def status(self, folder: str, name: str) -> Status | None:
        """Returns the version of a stored object."""
        return None if self._folders is None else self._folders[folder][name]


def list_images(
    source: str, catalog: str, *, skip_empty: bool, validation_fraction: float | None
) -> "tuple[list[str], list[array.array[int]], array.array[int]]":
    """Writes a line per image to the file `catalog`, as `records.make_records_of_images` takes it.

    Returns:
      The names of the classes, where the lines of each class start, and those of a split that is
      for validation already.

    Raises:
      InputError: there is no class, a class without an image, or a split that does not fit.
    """
    source = source.rstrip("/") if is_url(source) else source
    tree = Tree(source)
    roots = _find_splits(tree, source)
    root, held_out = roots.get("train", source), roots.get("validation")
    class_names, ignored = _find_classes(tree, root, skip_empty=skip_empty)
    groups, kept_validation = _list_classes(tree, root, class_names, catalog), array.array("Q")
    if held_out:
        if validation_fraction is not None:
            text = f"{held_out} is the validation split: leave out --validation_fraction."
            raise InputError(text)
        held_out_names, more_ignored = _find_classes(tree, held_out, skip_empty=skip_empty)
        ignored += more_ignored
        _check_same_classes(held_out, held_out_names, class_names, may_lack=skip_empty)
        for starts in _list_classes(tree, held_out, class_names, catalog):
            kept_validation += starts
    if ignored:
        files = command.format_count(ignored, "file")
        print(f"ignored: {files} that do not end in {', '.join(_SUFFIXES)}")
    return class_names, groups, kept_validation


def _find_splits(tree: Tree, source: str) -> dict[str, str]:
    """Returns the folders of the splits that `source` holds; none if its folders are classes.

    Raises:
      InputError: there are splits, but not one of training and one of validation.
    """
    names = {*tree.folders(source)}
    if not names or not names <= {"train", *_VALIDATION_NAMES, "test"}:
        return {}
    held_out = sorted(names & {*_VALIDATION_NAMES})
    if "train" not in names or len(held_out) != 1 or "test" in names:
        raise InputError(
            f"{source} holds {', '.join(sorted(names))}: splits are made of a folder train and one"
            f" of {', '.join(_VALIDATION_NAMES)}. Convert others by themselves."
        )
    return {"train": os.path.join(source, "train"), "validation": os.path.join(source, held_out[0])}


def _check_same_classes(
    folder: str, names: list[str], class_names: list[str], *, may_lack: bool
) -> None:
    """Raises InputError unless a split has the classes of training, or fewer if it `may_lack`."""
    for problem, missing, is_allowed in (
        ("holds classes that training does not", {*names} - {*class_names}, False),
        ("lacks classes of training", {*class_names} - {*names}, may_lack),
    ):
        if missing and not is_allowed:
            raise InputError(f"{folder} {problem}: {', '.join(sorted(missing)[:10])}.")


def _find_classes(tree: Tree, root: str, *, skip_empty: bool) -> tuple[list[str], int]:
    """Returns the names of the classes, sorted, and how many files in them are no images."""
    class_names = tree.folders(root)
    for name in class_names:
        check_class_name(name, root)
    others, empty = 0, {}
    for name in class_names:
        files = tree.files(os.path.join(root, name))
        images = sum(map(is_image, files))
        others += len(files) - images
        if not images:
            suffixes = sorted({os.path.splitext(file)[1] or file for file in files})
            empty[name] = f"{name} ({', '.join(suffixes[:5]) or 'empty'})"
    if empty and not skip_empty:
        raise InputError(
            f"{len(empty)} of {len(class_names)} class folders hold no file that ends in"
            f" {', '.join(_SUFFIXES)}: {', '.join(list(empty.values())[:50])}. Convert their"
            " images, or leave these classes out with --skip_unreadable."
        )
    class_names = [name for name in class_names if name not in empty]
    if not class_names:
        text = "put the images of each class into its own"
        no_object = "is no object, and " if is_url(root) else ""
        raise InputError(f"{root} {no_object}has no sub-folders of images: {text}.")
    return class_names, others


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _list_classes(
    tree: Tree, root: str, class_names: list[str], catalog: str
) -> "list[array.array[int]]":
    """Writes a line [features, path, None, status] per image; returns where those of a class start.

    The status is that of a stored object, else None.
    """
    groups = []
    with open(catalog, "ab") as stream:
        for label, class_name in enumerate(class_names):
            folder, starts = os.path.join(root, class_name), array.array("Q")
            features = {"image/class/label": label, "image/class/text": class_name}
            for name in sorted(filter(is_image, tree.files(folder))):
                starts.append(stream.tell())
                line: list[Any] = [features, os.path.join(folder, name), None]
                line.append(tree.status(folder, name))
                stream.write(json.dumps(line).encode() + b"\n")
            groups.append(starts)
    return groups
