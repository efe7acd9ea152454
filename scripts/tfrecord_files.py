"""Writing sets of TFRecord files, in parallel and whole or not at all, for the scripts that make them."""

import glob
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import console
from dali_tf_input import InputError, find_files
from dali_tf_input.tfrecord import FeatureValue, encode_example, frame_record


@dataclass(frozen=True, kw_only=True)
class Split:
    """The images of one split and into how many files they go: `items` are what `write_splits` hands to its function."""

    name: str
    items: Sequence[Any]
    num_files: int

    def paths(self, folder: str) -> list[str]:
        """Returns the paths of the split's files, `<name>-00000-of-00004` and so on."""
        return [os.path.join(folder, f"{self.name}-{i:05d}-of-{self.num_files:05d}") for i in range(self.num_files)]

    def items_of(self, file_id: int) -> Sequence[Any]:
        """Returns the items of file `file_id`, in [0, num_files); the files' sizes differ by one item at most."""
        count = len(self.items)
        return self.items[count * file_id // self.num_files : count * (file_id + 1) // self.num_files]


def image_features(*, encoded: bytes, label: int, text: str, height: int, width: int, filename: str) -> dict[str, FeatureValue]:
    """Returns one image's features under TF-slim's keys; height and width in pixels."""
    return {
        "image/encoded": encoded,
        "image/format": "JPEG",
        "image/class/label": label,
        "image/class/text": text,
        "image/height": height,
        "image/width": width,
        "image/filename": filename,
    }


def write_splits(folder: str, splits: Sequence[Split], features_of: Callable[[Any], dict[str, FeatureValue]]) -> list[str]:
    """Writes every split's files, one process per core, under temporary names; renames them when all are whole.

    Args:
      folder: where the files go; made where it is missing.
      splits: what to write.
      features_of: makes of one item its features; a module-level function, as it runs in other processes.

    Returns:
      The paths written.

    Raises:
      InputError: a split has fewer items than files, or `folder` holds files that would be taken for parts of this set.
    """
    for split in splits:
        if not 1 <= split.num_files <= len(split.items):
            raise InputError(
                f"{len(split.items)} {split.name} images cannot fill {split.num_files} files: ask for 1 to {len(split.items)}."
            )
    paths = [path for split in splits for path in split.paths(folder)]
    _check_folder(folder, paths)
    os.makedirs(folder, exist_ok=True)
    token = secrets.token_hex(4)
    temporary = {path: os.path.join(folder, f".{os.path.basename(path)}.{token}.tmp") for path in paths}
    try:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            tasks = [
                pool.submit(_write_file, temporary[path], split.items_of(file_id), features_of)
                for split in splits
                for file_id, path in enumerate(split.paths(folder))
            ]
            for task in console.progress(as_completed(tasks), what="writing files", total=len(tasks)):
                task.result()
        for path in paths:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            if os.path.exists(path):
                os.unlink(path)
    return paths


def write_labels(folder: str, class_names: Sequence[str]) -> str:
    """Writes `labels.txt`, the name of label i in line i + 1, and returns its path."""
    path = os.path.join(folder, "labels.txt")
    temporary = os.path.join(folder, f".labels.txt.{secrets.token_hex(4)}.tmp")
    with open(temporary, "x", encoding="utf-8") as stream:
        stream.writelines(f"{name}\n" for name in class_names)
    os.replace(temporary, path)
    return path


def print_next_steps(folder: str, paths: Sequence[str]) -> None:
    """Says what was written and what to do with it."""
    size = sum(os.path.getsize(path) for path in paths)
    print(f"{len(find_files(list(paths)))} files, {size / 1e6:,.1f} MB, in {folder}")
    print(f"next: make index DATA='{os.path.join(folder, '*-of-*')}'")


def _write_file(path: str, items: Sequence[Any], features_of: Callable[[Any], dict[str, FeatureValue]]) -> None:
    with open(path, "xb") as stream:
        for item in items:
            stream.write(frame_record(encode_example(features_of(item))))


def _check_folder(folder: str, paths: Sequence[str]) -> None:
    """Refuses a folder with files of another set: a pattern like `train-*` would mix them, an old validation split leak."""
    for name in ("train", "validation"):
        found = [path for path in glob.glob(os.path.join(glob.escape(folder), f"{name}-*-of-*")) if not path.endswith(".idx")]
        others = sorted(set(found) - set(paths))
        if others:
            raise InputError(f"{folder} holds {len(others)} files of another set ({others[0]}, ...): remove them first.")
