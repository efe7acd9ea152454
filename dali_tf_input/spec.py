"""What a model is fed: frozen descriptions that both backends read.

A `*Spec` and a `Preprocess` (`preprocess`) say what comes out, the same for every backend; an `*Options` (`options`) says how
fast. Everything is checked when it is made, in Python, before a pipeline is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dali_tf_input.files import Path, absolute, find_files, index_command, index_files_of
from dali_tf_input.manifest import read_entries
from dali_tf_input.options import check_choice
from dali_tf_input.preprocess import Preprocess
from dali_tf_input.summary import KEY_PRESETS, Feature, FileEntry, find_keys, summarise
from dali_tf_input.tfrecord import InputError

Order = Literal["sequential", "buffer", "global"]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """The records there are: made by `from_files`, which checks them.

    Attributes:
      files: absolute paths of the TFRecord files that hold records, sorted.
      index_files: absolute path of each file's index.
      records_per_file: how many records each index holds.
      left_out_per_file: how many faults each index leaves out; those records are not read.
      image_key: feature key of the encoded image, a bytes_list of one.
      label_key: feature key of the label, an int64_list of one.
      label_offset: taken from every label as it is stored, so that classes count from 0.
      label_range: lowest and highest label as they come out, if all files were checked at level "schema" by this key; else None.
      num_classes: how many different labels there are, if known as `label_range` is and below 1000 runs of them; else None.
      labels_in_a_row: how many records of one label stand one after the other, on average; known as `label_range` is.
      largest_image: (height, width) in pixels of the tallest and of the widest image, from level "decode" on; else None. DALI's
        GPU decoder sets aside memory by it.
    """

    files: tuple[str, ...]
    index_files: tuple[str, ...]
    records_per_file: tuple[int, ...]
    left_out_per_file: tuple[int, ...]
    image_key: str
    label_key: str
    label_offset: int = 0
    label_range: tuple[int, int] | None = None
    num_classes: int | None = None
    labels_in_a_row: float | None = None
    largest_image: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")
        for name in ("index_files", "records_per_file", "left_out_per_file"):
            if len(getattr(self, name)) != len(self.files):
                raise InputError(f"`{name}` must have one entry per file, {len(self.files)}, got {len(getattr(self, name))}.")

    @property
    def num_records(self) -> int:
        """How many records all files hold together, without those left out."""
        return sum(self.records_per_file)

    @classmethod
    def from_files(
        cls,
        files: Path | Sequence[Path],
        *,
        index_dir: Path | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        label_offset: int = 0,
    ) -> "DatasetSpec":
        """Describes indexed TFRecord files by what the manifest beside their indexes says of them.

        That every file and every index is still what was indexed is checked here. What each record holds is known as far as the
        indexing looked: at the first record of each file, or at all of them from level "schema" on. Below that level, where a
        later record lacks the label, tf.data stops, but DALI serves any number.

        Args:
          files: a path, a glob pattern or several of them. Index files that a pattern matches are passed over.
          index_dir: the folder of the index files; None means beside each file, as ``<file>.idx``.
          image_key: feature key of the encoded image; None finds TF-slim's "image/encoded" or tfds' "image".
          label_key: feature key of the integer label; None finds TF-slim's "image/class/label" or tfds' "label".
          label_offset: the label of the first class as stored; TF-slim's ImageNet counts from 1. It is taken from every label.

        Raises:
          InputError: no file matches, an index is missing, a file or its index changed since, a record lacks a feature or holds
            another kind of it, or a label is below `label_offset`.
        """
        found = tuple(map(absolute, find_files(files)))  # a program may change its folder before they are read
        index_files = tuple(map(absolute, index_files_of(found, index_dir=index_dir)))
        entries = read_entries(found, index_files, files)
        by_file = dict(zip(found, entries, strict=True))
        summary = summarise(by_file)
        check_command = index_command(files, index_dir=index_dir, arguments=["--verify=schema"])
        if not summary.records:
            raise InputError(f"All {summary.left_out:,} records of these {summary.files:,} files are left out: none is sound.")
        image_key, label_key = _check_keys(
            by_file, summary.features, image_key=image_key, label_key=label_key, check_command=check_command
        )
        labels = [entry.labels if entry.checked_by.get("label_key") == label_key else None for entry in entries if entry.records]
        images = [entry.images if entry.checked_by.get("image_key") == image_key else None for entry in entries if entry.records]
        ranges = [found.range for found in labels if found]
        lowest = min((first for first, _ in ranges), default=label_offset)
        if lowest < label_offset:
            raise InputError(
                f"`label_offset` must be at most the lowest label, {lowest}, got {label_offset}: it is taken from every label, "
                "and classes count from 0."
            )
        label_range, num_classes, labels_in_a_row, largest_image = None, None, None, None
        if all(labels):  # what is known of a part of the files only is not known
            known = [found for found in labels if found]
            num_classes = summary.labels.num_classes if summary.labels else None
            labels_in_a_row = sum(entry.records for entry in entries) / sum(found.changes + 1 for found in known)
            label_range = (lowest - label_offset, max(last for _, last in ranges) - label_offset)
        if all(images):
            sizes = [found.largest_size for found in images if found]
            largest_image = (max(height for height, _ in sizes), max(width for _, width in sizes))
        held = [position for position, entry in enumerate(entries) if entry.records]  # DALI refuses an empty index
        return cls(
            files=tuple(found[position] for position in held),
            index_files=tuple(index_files[position] for position in held),
            records_per_file=tuple(entries[position].records for position in held),
            left_out_per_file=tuple(entries[position].left_out for position in held),
            image_key=image_key,
            label_key=label_key,
            label_offset=label_offset,
            label_range=label_range,
            num_classes=num_classes,
            labels_in_a_row=labels_in_a_row,
            largest_image=largest_image,
        )


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The whole of what comes out, equal for both backends.

    Attributes:
      dataset: the records there are.
      preprocess: what the model sees of them.
      order: "sequential", the order of the files (evaluation); or "global" (training): in each epoch every order of the records
        (with a larger `fragment_size`: of the fragments) is equally likely, the same one on both backends and for any number of
        replicas, a function of (seed, epoch); or "buffer" (training from slow disks): each next record is drawn at random from a
        buffer of `buffer_size` records, which the next record of the files then fills. DALI reads the files in their order;
        tf.data in a new order each pass, `num_parallel_reads` of them in turn, and so mixes more.
      buffer_size: size of that buffer in records, at least 1, for each pipeline. It holds encoded images: 1024 of
        ImageNet's take 113 MB. The default is DALI's own (`initial_fill`).
      seed: with it order, crops and mirrors come out the same again, in [0, 2**31): on the same backend, with the same
        number of replicas and, for tf.data, the same `num_parallel_reads` and `tf.random.set_seed`.
      fragment_size: for order "global" on storage that is slow to seek: that many neighbours in a file stay together, at least 1.
      repeat: False is one pass that serves each record once, for evaluation; order "sequential" only. Batches then hold a third
        value, sample weights float32 (batch,): 0 for the padding that fills the last step, a constant of at least 1 for
        records, chosen so that Keras's mean loss over all batches, by its default reduction, is the mean over the records. Keras
        leaves padding out of `weighted_metrics` only, not out of `metrics`.
      one_hot: number of classes n: labels come out as float32 (n,), 1 at the label and 0 elsewhere; None leaves them int64.
      label_smoothing: that much of the 1 is spread evenly over all classes, in [0, 1); with `one_hot` only.
    """

    dataset: DatasetSpec
    preprocess: Preprocess
    order: Order
    buffer_size: int = 1024
    seed: int = 0
    fragment_size: int = 1
    repeat: bool = True
    one_hot: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice("order", self.order, get_args(Order))
        if self.buffer_size < 1:
            raise InputError(f"`buffer_size` must be at least 1, got {self.buffer_size}.")
        if self.fragment_size < 1:
            raise InputError(f"`fragment_size` must be at least 1, got {self.fragment_size}.")
        if self.fragment_size > 1 and self.order != "global":
            raise InputError(f"`fragment_size` is for order 'global' only, got {self.fragment_size} with {self.order!r}.")
        if not self.repeat and self.order != "sequential":
            raise InputError(f"`repeat` False is for order 'sequential' only, got {self.order!r}: a pass of each record once.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"`seed` must be in [0, 2**31), got {self.seed}.")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"`label_smoothing` must be in [0, 1), got {self.label_smoothing}.")
        if self.one_hot is None:
            if self.label_smoothing:
                raise InputError("`label_smoothing` needs `one_hot`, the number of classes.")
            return
        highest = self.dataset.label_range[1] if self.dataset.label_range else 0
        if not highest < self.one_hot:
            raise InputError(f"`one_hot` must be above the highest label, {highest}, got {self.one_hot}.")

    @property
    def planned(self) -> bool:
        """Whether which record comes at which step is planned (order "global", or one pass), not left to a reader."""
        return self.order == "global" or not self.repeat

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one label: () without `one_hot`, (one_hot,) with it."""
        return () if self.one_hot is None else (self.one_hot,)

    @property
    def label_values(self) -> tuple[float, float]:
        """What a one-hot label holds at the label, and elsewhere."""
        rest = self.label_smoothing / (self.one_hot or 1)
        return 1 - self.label_smoothing + rest, rest


def _check_keys(
    entries: dict[str, FileEntry],
    features: dict[str, Feature],
    *,
    image_key: str | None,
    label_key: str | None,
    check_command: str,
) -> tuple[str, str]:
    """Completes the two keys and checks that the records that were looked at hold one image and one integer label under them."""
    if not features:
        raise InputError(
            f"The first records of these files are no Examples with features. What they are is shown by: {check_command}"
        )
    held = ", ".join(f"'{key}'" for key in features)
    for name, key in (("image_key", image_key), ("label_key", label_key)):
        if key and key not in features:
            raise InputError(f"`{name}` '{key}' is not in the records, which hold {held}.")
    image_key, label_key = find_keys(features, image_key=image_key, label_key=label_key)
    if not image_key or not label_key:
        raise InputError(
            f"The records hold {held}, not the keys of {' or '.join(KEY_PRESETS)}: name the two with `image_key` and `label_key`."
        )
    for name, key, kind in (("image_key", image_key, "bytes_list"), ("label_key", label_key, "int64_list")):
        for file, entry in entries.items():
            if not entry.records:
                continue
            feature = entry.features.get(key)
            if not entry.parsed:
                wrong = f"the first record of {file} is no tf.train.Example"
            elif feature is None or feature.first_without is not None:
                wrong = f"`{name}` '{key}' is not in record {feature.first_without if feature else 0} of {file}"
            elif feature.kinds != (kind,) or feature.lengths != (1, 1):
                kinds = " or ".join(kind or "an empty feature" for kind in feature.kinds)
                wrong = f"`{name}` '{key}' must be {kind} of 1 value, found {kinds} of {feature.lengths[1]} in {file}"
            else:
                continue
            raise InputError(f"{wrong[0].upper()}{wrong[1:]}. All that is wrong is shown by: {check_command}")
    return image_key, label_key
