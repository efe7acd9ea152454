"""Folders of images as a source, local or in a store: a sub-folder for each class."""

import bisect
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from dali_tf_input import InputError
from dali_tf_input.cli.convert.listing import (
    SPLITS,
    LeftOut,
    Listed,
    SplitName,
    check_names_differ,
    extend_names,
)
from dali_tf_input.records.class_names import check_class_name
from dali_tf_input.storage.objects import ObjectVersion, find_objects, is_url, list_below

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Images of formats that are not read here.
_OTHER_SUFFIXES = (".heic", ".heif", ".avif", ".jxl", ".dng", ".nef", ".cr2", ".arw", ".psd")
_FIRST_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")


def is_folder(source: str) -> bool:
    """Whether a source is a folder; a URL is one that is no pattern and no object."""
    if not is_url(source) or source.startswith("http"):
        return os.path.isdir(source)
    is_pattern = re.search(r"[*?[]", source)
    return source.endswith("/") or not (is_pattern or find_objects(source))


class Tree:
    """The folders and files below a source."""

    def __init__(self, source: str) -> None:
        self.source = source.rstrip("/")
        self._objects: dict[str, ObjectVersion] | None = None
        self._sorted: list[str] = []  # the paths of objects, so that those of a folder are found
        if is_url(source):
            start = len(self.source) + 1
            objects = list_below(self.source).items()
            self._objects = {url[start:]: version for url, version in objects}
            self._sorted = sorted(self._objects)

    def path(self, below: str) -> str:
        """Returns the path, or URL, of what is below the source."""
        return os.path.join(self.source, below) if below else self.source

    def list_names(self, folder: str) -> tuple[list[str], list[str]]:
        """Returns the names of the folders, and of the files, directly in a folder, sorted."""
        if self._objects is None:
            entries = sorted(os.scandir(self.path(folder)), key=lambda entry: entry.name)
            names = [entry.name for entry in entries if entry.is_dir()]
            return names, [entry.name for entry in entries if not entry.is_dir()]
        below = [path[len(folder) + bool(folder) :] for path in self._below(folder)]
        names = sorted({path.partition("/")[0] for path in below if "/" in path})
        return names, [path for path in below if "/" not in path]

    def walk(self, folder: str) -> Iterator[tuple[str, ObjectVersion | None]]:
        """Yields all files below a folder, by their paths below the source, and their versions."""
        if self._objects is not None:
            for path in self._below(folder):
                yield path, self._objects[path]
        else:
            for path in self._walk(folder, ()):
                yield path, None

    def _below(self, folder: str) -> list[str]:
        """Returns the paths of the objects below a folder, sorted."""
        if not folder:
            return self._sorted
        first = bisect.bisect_left(self._sorted, f"{folder}/")
        last = bisect.bisect_left(self._sorted, f"{folder}0")  # the character after a slash
        return self._sorted[first:last]

    def _walk(self, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        status = os.stat(self.path(folder))
        own = (status.st_dev, status.st_ino)
        if own in above:  # a link to a folder that it is in
            return
        folders, files = self.list_names(folder)
        yield from (os.path.join(folder, name) for name in files)
        for name in folders:
            yield from self._walk(os.path.join(folder, name), (*above, own))


def list_images(
    source: str,
    catalog: str,
    left_out: LeftOut,
    *,
    labels: Sequence[str] | None = None,
    labels_grow: bool = False,
    class_depth: int | None = None,
    skip_empty: bool = False,
) -> Listed:
    """Writes a line per image to the file `catalog`, as `records.make_records_of_images` takes it.

    Images of all depths below a class folder are of that class. A source may hold the splits, each
    with class folders of its own.

    Args:
      source: the folder.
      catalog: a new file.
      left_out: lists the other files.
      labels: the names of the classes in their order; None sorts those that are found.
      labels_grow: whether classes that are not in `labels` come after them.
      class_depth: how many levels of folders make a class.
      skip_empty: whether a class may have no images; its number stays its own.

    Raises:
      InputError: there is no class; or a class without an image, or one that is not in `labels`; or
        images that are in no class; or it is not clear which folders are the classes.
    """
    tree = Tree(source)
    roots = _find_splits(tree)
    if "" not in roots:  # beside the splits; else the classes' own folder, which is looked at below
        _check_loose(tree, "", left_out)
    classes = {root: _find_classes(tree, root, class_depth or 1, left_out) for root in roots}
    names = _number_classes(tree, classes, labels, grow=labels_grow)
    listed, seen = Listed(labels=names), dict.fromkeys(names, 0)
    numbers = {name: number for number, name in enumerate(names)}
    deep = folders_with_images = 0  # those whose images all lie in folders of their own
    with open(catalog, "ab") as stream:
        for root, split in roots.items():
            for name in classes[root]:
                folder = os.path.join(root, name)
                number, count, has_direct = numbers[name], 0, False
                for path, version in tree.walk(folder):
                    if not _is_image(tree, path, version, left_out):
                        continue
                    features = {"image/class/label": number, "image/class/text": name}
                    listed.add(split, number, stream.tell())
                    line: list[Any] = [features, tree.path(path), None, version]
                    stream.write(json.dumps(line).encode() + b"\n")
                    has_direct |= os.path.dirname(path) == folder
                    count += 1
                seen[name] += count
                folders_with_images += count > 0
                deep += count > 0 and not has_direct
    _check_classes(tree, classes, seen, skip_empty=skip_empty)
    _check_splits(tree, roots, listed, left_out)
    if not class_depth and deep == folders_with_images:
        raise InputError(
            f"The images of all {deep} classes of {tree.source} lie in folders of their own, as"
            f" {_first_image(catalog)}. Which folders are the classes? --class_depth=1: the outer"
            " ones; --class_depth=2: the inner ones."
        )
    return listed


def _find_splits(tree: Tree) -> dict[str, SplitName]:
    """Returns the folders that hold classes, and the split of each.

    Raises:
      InputError: there are splits beside other folders, or two folders of one split.
    """
    folders = [name for name in tree.list_names("")[0] if not name.startswith(".")]
    splits = {name: SPLITS[name.lower()] for name in folders if name.lower() in SPLITS}
    others = [name for name in folders if name not in splits]
    if not splits or (len(splits) == 1 and others):  # a class may be called so
        return {"": None}
    if others:
        raise InputError(
            f"{tree.source} holds the splits {', '.join(splits)}, and beside them"
            f" {', '.join(others[:10])}: move those into the splits, or out of the folder."
        )
    by_split: dict[str, str] = {}
    for name, split in splits.items():
        if split in by_split:
            both = f"{by_split[split]} and {name}"
            raise InputError(f"{tree.source} holds {both}, both of which are the {split} split.")
        by_split[split] = name
    if [*by_split] == ["train"]:
        return {by_split["train"]: None}
    if "train" not in by_split:
        raise InputError(
            f"{tree.source} holds {', '.join(splits)}, and no folder train: convert each by itself,"
            " with --split, and with --labels so that classes have the numbers of training."
        )
    order = ("train", "validation", "test")
    return {by_split[split]: split for split in order if split in by_split}


def _find_classes(tree: Tree, root: str, depth: int, left_out: LeftOut) -> list[str]:
    """Returns the names of the classes in a folder; lists the files that are in no class."""
    found, level = list[str](), [""]
    for number in range(depth):
        below = []
        for name in level:
            folder = os.path.join(root, name) if name else root
            folders = _check_loose(tree, folder, left_out)
            below += [f"{name}/{child}" if name else child for child in folders]
        level = below
        found = below if number == depth - 1 else found
    for name in found:
        check_class_name(name, tree.path(root))
    check_names_differ(((name, tree.path(root)) for name in found), tree.path(root))
    return found


def _check_loose(tree: Tree, folder: str, left_out: LeftOut) -> list[str]:
    """Returns the folders in a folder; lists those that are hidden, and the files.

    Raises:
      InputError: some of these files are images.
    """
    folders, files = tree.list_names(folder)
    paths = [os.path.join(folder, name) for name in files]
    loose = [tree.path(path) for path in paths if _is_image(tree, path, None, left_out)]
    if loose:
        raise InputError(
            f"{len(loose):,} images are in no class folder, such as {loose[0]}: move each"
            " into the folder of its class."
        )
    for name in folders:
        if name.startswith("."):
            left_out.add(tree.path(os.path.join(folder, name)), "hidden", is_image=False)
    return [name for name in folders if not name.startswith(".")]


def _number_classes(
    tree: Tree, classes: dict[str, list[str]], labels: Sequence[str] | None, *, grow: bool
) -> list[str]:
    """Returns the names of all classes in their order."""
    names = sorted({name for found in classes.values() for name in found})
    if not names:
        no_object = "is no object, and " if is_url(tree.source) else ""
        raise InputError(
            f"{tree.source} {no_object}has no sub-folders of images: put the images of each class"
            " into its own."
        )
    if labels is not None:
        return extend_names(names, labels, tree.source, grow=grow)
    first, *rest = classes
    for root in rest:
        new = sorted({*classes[root]} - {*classes[first]})
        if new:
            raise InputError(
                f"{tree.path(root)} holds classes that training does not: {', '.join(new[:10])}. If"
                " they are to have numbers of their own, name all classes with --labels=FILE."
            )
    return names


def _check_classes(
    tree: Tree, classes: dict[str, list[str]], seen: dict[str, int], *, skip_empty: bool
) -> None:
    """Raises InputError if a class that has a folder has no image."""
    found = {name for names in classes.values() for name in names}
    empty = [name for name in seen if name in found and not seen[name]]
    if len(empty) == len(found):
        raise InputError(f"{tree.source}: none of the {len(found)} class folders holds an image.")
    if empty and not skip_empty:
        raise InputError(
            f"{len(empty)} of {len(found)} class folders hold no image: {', '.join(empty[:50])}."
            " Convert their images, or keep their numbers without records: --skip_unreadable"
        )


def _check_splits(
    tree: Tree, roots: dict[str, SplitName], listed: Listed, left_out: LeftOut
) -> None:
    """Raises InputError if a split has no image, or training none of a class of another split."""
    for root, split in roots.items():
        # Where images were left out, `write_splits` tells how many, and whether that is too many.
        if not left_out.num_images and not any(own == split for own, _ in listed.starts):
            raise InputError(
                f"{tree.path(root)} holds no image: put the images of the split there, or remove"
                " the folder."
            )
    trained = {number for split, number in listed.starts if split in ("train", None)}
    unknown = sorted({number for _, number in listed.starts} - trained)
    if unknown and listed.labels:
        names = ", ".join(listed.labels[number] for number in unknown[:10])
        first = tree.path(next(iter(roots)))
        raise InputError(
            f"{first} has no image of {names}, which other splits have: a model cannot learn them."
            " Add images for training, or move these classes away."
        )


def _is_image(tree: Tree, path: str, version: ObjectVersion | None, left_out: LeftOut) -> bool:
    """Whether a file is an image, by its name, or else by its first bytes; lists it if not."""
    name, whole = os.path.basename(path), tree.path(path)
    if any(part.startswith(".") for part in path.split("/")):
        left_out.add(whole, "hidden", is_image=False)
        return False
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _SUFFIXES:
        return True
    if suffix in _OTHER_SUFFIXES:
        left_out.add(whole, f"images of this format are not read ({suffix})", is_image=True)
        return False
    if is_url(tree.source):
        left_out.add(whole, "no suffix of an image", is_image=False)
        return False
    try:
        with open(whole, "rb") as stream:
            first = stream.read(16)
    except OSError as error:
        left_out.add(whole, f"cannot be read: {error.strerror}", is_image=True, kind="unreadable")
        return False
    if first.startswith(_FIRST_BYTES) or (first[:4] == b"RIFF" and first[8:12] == b"WEBP"):
        return True
    left_out.add(whole, "not an image", is_image=False)
    return False


def _first_image(catalog: str) -> str:
    with open(catalog, "rb") as stream:
        return str(json.loads(stream.readline())[1])
