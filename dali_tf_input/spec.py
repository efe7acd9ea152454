"""What a model is fed: frozen descriptions that both backends read.

A `*Spec` and a `Preprocess` say what comes out, the same for every backend; an `*Options` says how
fast. Everything is checked in Python when it is made, before any pipeline exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from dali_tf_input.errors import Count, InputError, Path, Within, check, check_fields, checked
from dali_tf_input.index.contents import (
    REQUIRED,
    Feature,
    FileEntry,
    find_keys,
    merge_images,
    merge_labels,
    name_keys,
    summarize,
)
from dali_tf_input.index.files import absolute, find_files, index_command, index_files_of
from dali_tf_input.index.manifest import find_change, read_entries
from dali_tf_input.labels import ClassLabel
from dali_tf_input.order import Integers, parse_index, read_index
from dali_tf_input.preprocess import Preprocess

Order = Literal["sequential", "buffer", "global"]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """The records there are. Made by `from_files`, which checks them.

    Attributes:
      files: absolute paths of the TFRecord files that hold records, sorted.
      index_files: absolute path of each file's index.
      records_per_file: how many records each index holds.
      skipped_per_file: how many bad records each index skips.
      image_key: feature key of the encoded image, a bytes_list of one value.
      label_key: feature key of the label, an int64_list of one value.
      label_offset: subtracted from every stored label, so that classes count from 0.
      label_range: lowest and highest label that comes out, of the records that the index step
        read: all from level "schema" on, else a sample; None if not known.
      num_classes: how many different labels there are, if all files were checked at level "schema"
        with this key and they form at most 1000 runs; else None.
      largest_image: (height, width) in pixels of the tallest and of the widest image, from level
        "decode" on; else None. DALI's GPU decoder allocates memory for it.
      states: (size in bytes, time of modification in nanoseconds, CRC-32C of the index) of each
        file when it was checked, so that later changes are noticed; () notices none.
    """

    files: tuple[str, ...]
    index_files: tuple[str, ...]
    records_per_file: tuple[int, ...]
    skipped_per_file: tuple[int, ...]
    image_key: str
    label_key: str
    label_offset: int = 0
    label_range: tuple[int, int] | None = None
    num_classes: int | None = None
    largest_image: tuple[int, int] | None = None
    states: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")
        for name in ("index_files", "records_per_file", "skipped_per_file", "states"):
            if len(getattr(self, name)) != len(self.files) and (self.states or name != "states"):
                raise InputError(
                    f"`{name}` must have one entry per file, {len(self.files)}, got "
                    f"{len(getattr(self, name))}."
                )

    @property
    def num_records(self) -> int:
        """How many records all files hold together, without skipped ones."""
        return sum(self.records_per_file)

    def index_text(self, file: int) -> bytes:
        """Reads the index of a file, by its number; raises InputError if it changed."""
        crc = self.states[file][2] if self.states else None
        return read_index(self.index_files[file], crc=crc)

    def index(self, file: int) -> Integers:
        """Returns offset and size in bytes of each record of a file: int64 (records, 2)."""
        text = self.index_text(file)
        return parse_index(text, self.index_files[file], self.records_per_file[file])

    def find_change(self) -> str | None:
        """Returns how the first file that changed differs from what was indexed; None if none."""
        for file, state in zip(self.files, self.states, strict=False):
            change = find_change(file, *state[:2])
            if change:
                return change
        return None

    @classmethod
    @checked
    def from_files(
        cls,
        files: Path | Sequence[Path],
        *,
        index_dir: Path | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        label_offset: int = 0,
    ) -> "DatasetSpec":
        """Describes indexed TFRecord files by the manifest beside their indexes.

        It checks that no file and no index has changed since it was indexed. What each record holds
        is known as far as the index step checked: of a sample of each file, or of all records from
        level "schema" on. Below that level, if another record lacks the label, tf.data stops but
        DALI serves an arbitrary number.

        Args:
          files: a path, a glob pattern or several of them. Index files that match are ignored.
          index_dir: the folder of the index files; None means beside each file, as ``<file>.idx``.
          image_key: feature key of the image; None finds TF-slim's "image/encoded" or tfds'
            "image".
          label_key: feature key of the integer label; None finds TF-slim's "image/class/label" or
            tfds' "label".
          label_offset: the label of the first class as stored, subtracted from every label; 1 for
            TF-slim's ImageNet.

        Raises:
          InputError: no file matches, an index is missing, a file or its index changed, a record
            lacks a feature or holds another kind of it, or a label is below `label_offset`.
        """
        # Absolute: a program may change its folder before the files are read.
        found = tuple(map(absolute, find_files(files)))
        index_files = tuple(map(absolute, index_files_of(found, index_dir=index_dir)))
        entries = dict(zip(found, read_entries(found, index_files, files), strict=True))
        summary = summarize(entries)
        if not summary.records:
            raise InputError(
                f"All {summary.skipped:,} records of these {summary.files:,} files are skipped: the"
                " index has no valid records."
            )
        image_key, label_key = _check_keys(
            entries,
            summary.features,
            image_key=image_key,
            label_key=label_key,
            command=index_command(files, index_dir=index_dir, arguments=["--verify=schema"]),
        )
        held = [file for file in found if entries[file].records]  # DALI refuses an empty index
        labels = [
            entries[file].labels if entries[file].checked_by.get("label_key") == label_key else None
            for file in held
        ]
        # What is known of only some files is not known.
        known = merge_labels([one for one in labels if one]) if all(labels) else None
        found_range = summary.features[label_key].range
        if found_range and found_range[0] < label_offset:
            raise InputError(
                f"`label_offset` must be at most the lowest label, {found_range[0]}, got "
                f"{label_offset}: it is subtracted from every label, and classes count from 0."
            )
        images = [
            entries[file].images if entries[file].checked_by.get("image_key") == image_key else None
            for file in held
        ]
        sized = merge_images([one for one in images if one]) if all(images) else None
        by_file = dict(zip(found, index_files, strict=True))
        return cls(
            files=tuple(held),
            index_files=tuple(by_file[file] for file in held),
            records_per_file=tuple(entries[file].records for file in held),
            states=tuple(
                (entries[file].size, entries[file].mtime_ns, entries[file].index_crc)
                for file in held
            ),
            skipped_per_file=tuple(entries[file].skipped for file in held),
            image_key=image_key,
            label_key=label_key,
            label_offset=label_offset,
            label_range=(
                (found_range[0] - label_offset, found_range[1] - label_offset)
                if found_range
                else None
            ),
            num_classes=known.num_classes if known else None,
            largest_image=sized.largest_size if sized else None,
        )


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """All of what comes out, equal for both backends.

    Attributes:
      dataset: the records there are.
      preprocess: what the model sees of them.
      order: "global" (training): in each epoch every order of the records is equally likely (with
        `shuffle_block_size`, every order of the blocks), the same one on both backends and for any
        number of replicas, a function of (seed, epoch). "buffer" (training from slow disks): each
        next record is drawn at random from a buffer, which the next record of the files then fills;
        DALI reads the files in their order, tf.data in a new order each pass and
        `num_parallel_reads` of them in turn, and so mixes better. "sequential" (evaluation): the
        order of the files.
      buffer_size: records in that buffer, at least 1, for each pipeline. It holds encoded images:
        1024 of ImageNet's take 113 MB. The default is DALI's own (`initial_fill`).
      seed: makes order, crops and mirrors repeatable, in [0, 2**31). Order "buffer" repeats on the
        same backend with the same number of replicas and, for tf.data, the same
        `num_parallel_reads` and `tf.random.set_seed`.
      shuffle_block_size: for order "global" on storage that is slow to seek: this many neighbors in
        a file stay together, at least 1.
      repeat: False is one pass that serves each record once, for evaluation; order "sequential"
        only. Batches then hold a third value, sample weights float32 (batch,). On one replica that
        is a CPU's the last batch is short and all weights are 1. Otherwise padding of weight 0
        fills the last step, and records weigh a constant of at least 1, such that Keras's mean
        loss over all batches, with its default reduction, is the mean over the records.
      one_hot: number of classes n: labels come out as float32 (n,), 1 at the label and 0 elsewhere,
        and all 0 for a label out of range (index level "schema" finds those); None leaves them
        int64.
      label_smoothing: part of the 1 that is spread evenly over all classes, in [0, 1); needs
        `one_hot`.
    """

    dataset: DatasetSpec
    preprocess: Preprocess
    order: Order
    buffer_size: Annotated[int, Within(1, 1 << 30)] = 1024
    seed: int = 0
    shuffle_block_size: Count = 1
    repeat: bool = True
    one_hot: Count | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shuffle_block_size > 1 and self.order != "global":
            raise InputError(
                f"`shuffle_block_size` is for order 'global' only, got {self.shuffle_block_size}"
                f" with {self.order!r}."
            )
        if not self.repeat and self.order != "sequential":
            raise InputError(
                f"`repeat` False is for order 'sequential' only, got {self.order!r}: it is one pass"
                " that serves each record once."
            )
        check(0 <= self.seed < 2**31, "seed", "in [0, 2**31)", self.seed)
        self.label.check(self.dataset.label_range[1] if self.dataset.label_range else 0)

    @property
    def has_fixed_order(self) -> bool:
        """Whether each step's records are fixed: with order "global", or in one pass."""
        return self.order == "global" or not self.repeat

    @property
    def label(self) -> ClassLabel:
        """How labels are stored, and what comes out of them."""
        return ClassLabel(
            key=self.dataset.label_key,
            offset=self.dataset.label_offset,
            one_hot=self.one_hot,
            smoothing=self.label_smoothing,
        )


def _check_keys(
    entries: dict[str, FileEntry],
    features: dict[str, Feature],
    *,
    image_key: str | None,
    label_key: str | None,
    command: str,
) -> tuple[str, str]:
    """Completes the two keys and checks that records hold an image and a label."""
    if not features:
        raise InputError(
            "The first records of these files are not Examples with features. To see what they"
            f" are: {command}"
        )
    held = ", ".join(f"'{key}'" for key in features)
    for name, key in (("image_key", image_key), ("label_key", label_key)):
        if key and key not in features:
            raise InputError(f"`{name}` '{key}' is not in the records, which hold {held}.")
    image_key, label_key = find_keys(features, image_key=image_key, label_key=label_key)
    if not image_key or not label_key:
        raise name_keys(features)
    keys = {"image_key": image_key, "label_key": label_key}
    for _, name, kind in REQUIRED:
        for file, entry in entries.items():
            if entry.records:
                problem = _find_problem(name, keys[name], kind, file, entry)
                if problem:
                    raise InputError(f"{problem}. To see all that is wrong: {command}")
    return image_key, label_key


def _find_problem(name: str, key: str, kind: str, file: str, entry: FileEntry) -> str | None:
    """Returns what is wrong with one feature of a file's records, as far as they were read."""
    feature = entry.features.get(key)
    if not entry.parsed:
        return f"The first record of {file} is not a tf.train.Example"
    if feature is None or feature.first_without is not None:
        record = feature.first_without if feature else 0
        return f"`{name}` '{key}' is not in record {record} of {file}"
    if feature.kinds != (kind,) or feature.lengths != (1, 1):
        kinds = " or ".join(kind or "an empty feature" for kind in feature.kinds)
        return (
            f"`{name}` '{key}' must be {kind} of 1 value, found {kinds} of {feature.lengths[1]} in"
            f" {file}"
        )
    return None
