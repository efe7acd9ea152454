"""What a model is fed, and how: frozen descriptions that both backends read.

A `*Spec` and a `Preprocess` say what comes out, the same for every backend; an `*Options` says how fast, and its type is the
choice of the backend. Everything is checked when it is made, in Python, before a pipeline is.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dali_tf_input.index import Path, find_files, index_command, index_files_of, read_index
from dali_tf_input.tfrecord import InputError, decode_example, read_record

Layout = Literal["HWC", "CHW"]
Order = Literal["sequential", "buffer"]
Device = Literal["cpu", "gpu"]

# Mean and standard deviation of ImageNet's training images per RGB channel, in 0..255 units. Source: (0.485, 0.456, 0.406)
# and (0.229, 0.224, 0.225) of the PyTorch and torchvision ImageNet examples, times 255.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

AUTOTUNE = -1  # tf.data.AUTOTUNE, without importing TensorFlow


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """The records there are: made by `from_files`, which checks them.

    Attributes:
      files: paths of the TFRecord files, sorted.
      index_files: path of each file's index.
      records_per_file: how many records each file holds.
      image_key: feature key of the encoded image, a bytes_list of one.
      label_key: feature key of the label, an int64_list of one.
    """

    files: tuple[str, ...]
    index_files: tuple[str, ...]
    records_per_file: tuple[int, ...]
    image_key: str = "image/encoded"
    label_key: str = "image/class/label"

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("`files` must name at least one TFRecord file, got none.")
        for name in ("index_files", "records_per_file"):
            if len(getattr(self, name)) != len(self.files):
                raise InputError(f"`{name}` must have one entry per file, {len(self.files)}, got {len(getattr(self, name))}.")

    @property
    def num_records(self) -> int:
        """How many records all files hold together."""
        return sum(self.records_per_file)

    @classmethod
    def from_files(
        cls,
        files: Path | Sequence[Path],
        *,
        index_dir: Path | None = None,
        image_key: str = "image/encoded",
        label_key: str = "image/class/label",
    ) -> "DatasetSpec":
        """Describes indexed TFRecord files.

        Every index is read and checked against its file, and the first record of each file is parsed to see that it holds
        the two features. Later records are not: where one lacks the label, tf.data stops, but DALI serves any number.

        Args:
          files: a path, a glob pattern or several of them. Index files that a pattern matches are passed over.
          index_dir: the folder of the index files; None means beside each file, as ``<file>.idx``.
          image_key: feature key of the encoded image; TF-slim writes "image/encoded", tfds "image".
          label_key: feature key of the integer label; TF-slim writes "image/class/label", tfds "label".

        Raises:
          InputError: no file matches, an index is missing, stale or of another file, or a record lacks a feature or holds
            another kind of it.
        """
        found = find_files(files)
        index_files = index_files_of(found, index_dir=index_dir)
        missing = [file for file, index_file in zip(found, index_files, strict=True) if not os.path.isfile(index_file)]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(found)} files have no index, the first is {missing[0]}. "
                f"Make it: {index_command(files, index_dir=index_dir)}"
            )
        records_per_file = tuple(len(read_index(file, index_file)) for file, index_file in zip(found, index_files, strict=True))
        for file in found:
            _check_features(file, image_key=image_key, label_key=label_key)
        return cls(
            files=found,
            index_files=index_files,
            records_per_file=records_per_file,
            image_key=image_key,
            label_key=label_key,
        )


@dataclass(frozen=True, kw_only=True)
class ResizeRandomCrop:
    """Resizes the whole image to a fixed size, not keeping its aspect, then takes a region at a random position.

    Each of the (H - h + 1) * (W - w + 1) positions of an h x w crop in the H x W resized image is equally likely.

    Attributes:
      resize: (height, width) in pixels that every image is resized to; not below the image size.
    """

    resize: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.resize) < 1:
            raise InputError(f"`resize` must be at least 1 pixel each way, got {self.resize}.")


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """Resizes the image until its shorter side has a given length, keeping its aspect, then takes its centre.

    The longer side is rounded to whole pixels (half up); where the margin is odd, the larger part of it is cut below or right.

    Attributes:
      resize_shorter: length of the shorter side in pixels; not below the image size.
    """

    resize_shorter: int

    def __post_init__(self) -> None:
        if self.resize_shorter < 1:
            raise InputError(f"`resize_shorter` must be at least 1 pixel, got {self.resize_shorter}.")


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """What happens between an encoded image and what the model sees: decode, `crop`, mirror, (x - `mean`) / `std`.

    Attributes:
      image_size: (height, width) of the output in pixels.
      crop: how that region is chosen.
      mirror_probability: with which probability an image is mirrored left to right, in [0, 1]; 0 and 1 are exact.
      mean: subtracted from each RGB channel, in 0..255 units.
      std: each RGB channel is divided by it, in 0..255 units, above 0.
      layout: axes of one output image, "HWC" (TensorFlow's usual) or "CHW".
      antialias: whether the bilinear resize widens its filter when it shrinks. False, as in `tf.image.resize`, is what
        TF-slim trained with, and it costs less.
    """

    image_size: tuple[int, int]
    crop: ResizeRandomCrop | CenterCrop
    mirror_probability: float
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    layout: Layout = "HWC"
    antialias: bool = False

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise InputError(f"`image_size` must be at least 1 pixel each way, got {self.image_size}.")
        if not 0 <= self.mirror_probability <= 1:
            raise InputError(f"`mirror_probability` must be in [0, 1], got {self.mirror_probability}.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != 3:
                raise InputError(f"`{name}` must have one value for each of R, G and B, got {getattr(self, name)}.")
        if min(self.std) <= 0:
            raise InputError(f"`std` must be above 0 in every channel, got {self.std}.")
        _check_choice("layout", self.layout, get_args(Layout))
        if isinstance(self.crop, ResizeRandomCrop):
            name, (height, width) = "resize", self.crop.resize
        else:
            name, height, width = "resize_shorter", self.crop.resize_shorter, self.crop.resize_shorter
        if height < self.image_size[0] or width < self.image_size[1]:
            raise InputError(
                f"`{name}` must not be below `image_size` {self.image_size}, got {(height, width)}: resize to more or crop less."
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one output image: (height, width, 3) for layout "HWC", (3, height, width) for "CHW"."""
        height, width = self.image_size
        return (height, width, 3) if self.layout == "HWC" else (3, height, width)

    @classmethod
    def for_training(cls, image_size: int = 224, *, layout: Layout = "HWC", antialias: bool = False) -> "Preprocess":
        """Resize to 8/7 of `image_size` (256 for 224), random-position crop, mirror half of the images, normalise.

        The ratio 256 to 224 and the mirror rate are those of AlexNet's and VGG's training on ImageNet.

        Args:
          image_size: height and width of the output in pixels.
          layout: axes of one output image, "HWC" or "CHW".
          antialias: see `Preprocess`.
        """
        resize = _resize_for(image_size)
        return cls(
            image_size=(image_size, image_size),
            crop=ResizeRandomCrop(resize=(resize, resize)),
            mirror_probability=0.5,
            layout=layout,
            antialias=antialias,
        )

    @classmethod
    def for_evaluation(cls, image_size: int = 224, *, layout: Layout = "HWC", antialias: bool = False) -> "Preprocess":
        """Resize the shorter side to 8/7 of `image_size` (256 for 224), centre crop, no mirror, normalise.

        Args:
          image_size: height and width of the output in pixels.
          layout: axes of one output image, "HWC" or "CHW".
          antialias: see `Preprocess`.
        """
        return cls(
            image_size=(image_size, image_size),
            crop=CenterCrop(resize_shorter=_resize_for(image_size)),
            mirror_probability=0.0,
            layout=layout,
            antialias=antialias,
        )


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The whole of what comes out, equal for both backends.

    Attributes:
      dataset: the records there are.
      preprocess: what the model sees of them.
      order: "sequential", the order of the files (evaluation), or "buffer" (training): each next record is drawn at random
        from a buffer of `buffer_size` records, which the next record of the files then fills. DALI reads the files in their
        order; tf.data in a new order each pass, `num_parallel_reads` of them in turn, and so mixes more.
      buffer_size: size of that buffer in records, at least 1, for each pipeline. It holds encoded images: 1024 of
        ImageNet's take 113 MB. The default is DALI's own (`initial_fill`).
      seed: with it order, crops and mirrors come out the same again, in [0, 2**31): on the same backend, with the same
        number of replicas and, for tf.data, the same `num_parallel_reads` and `tf.random.set_seed`.
    """

    dataset: DatasetSpec
    preprocess: Preprocess
    order: Order
    buffer_size: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("order", self.order, get_args(Order))
        if self.buffer_size < 1:
            raise InputError(f"`buffer_size` must be at least 1, got {self.buffer_size}.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"`seed` must be in [0, 2**31), got {self.seed}.")


@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """How the DALI backend works.

    Attributes:
      device: "gpu" decodes with nvJPEG ("mixed") and leaves the batches on the GPU; "cpu" needs no GPU.
      num_threads: CPU threads of each pipeline; None shares the cores of this process among the shards.
      prefetch_queue_depth: batches made ahead, at least 1. The default is DALI's own.
    """

    device: Device
    num_threads: int | None = None
    prefetch_queue_depth: int = 2

    def __post_init__(self) -> None:
        _check_choice("device", self.device, get_args(Device))
        if self.num_threads is not None and self.num_threads < 1:
            raise InputError(f"`num_threads` must be at least 1 or None, got {self.num_threads}.")
        if self.prefetch_queue_depth < 1:
            raise InputError(f"`prefetch_queue_depth` must be at least 1, got {self.prefetch_queue_depth}.")


@dataclass(frozen=True, kw_only=True)
class TfDataOptions:
    """How the tf.data backend works. The defaults are the tuned baseline; AUTOTUNE (-1) leaves a number to tf.data.

    Attributes:
      num_parallel_reads: files read at the same time when `order` is "buffer", at least 1. More hides the latency of slow
        storage; 4 is within noise of 1 and 16 on a warm page cache.
      num_parallel_calls: images decoded at the same time; AUTOTUNE, or at least 1. 1 is a serial map.
      prefetch_batches: batches made ahead; AUTOTUNE, or at least 0. 2 is as fast as AUTOTUNE, which was seen to let the queue
        grow to 3 GB when training paused now and then.
      autotune: False switches off tf.data's tuning and its rewriting of serial maps into parallel ones.
    """

    num_parallel_reads: int = 4
    num_parallel_calls: int = AUTOTUNE
    prefetch_batches: int = 2
    autotune: bool = True

    def __post_init__(self) -> None:
        if self.num_parallel_reads < 1:
            raise InputError(f"`num_parallel_reads` must be at least 1, got {self.num_parallel_reads}.")
        if self.num_parallel_calls < 1 and self.num_parallel_calls != AUTOTUNE:
            raise InputError(f"`num_parallel_calls` must be at least 1 or AUTOTUNE (-1), got {self.num_parallel_calls}.")
        if self.prefetch_batches < 0 and self.prefetch_batches != AUTOTUNE:
            raise InputError(f"`prefetch_batches` must be at least 0 or AUTOTUNE (-1), got {self.prefetch_batches}.")


def _resize_for(image_size: int) -> int:
    return round(image_size * 256 / 224)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_features(file: str, *, image_key: str, label_key: str) -> None:
    """Checks that the first record of `file` holds one image and one integer label under the two keys."""
    try:
        features = decode_example(read_record(file, 0))
    except InputError as error:
        raise InputError(f"The first record of {file} cannot be read: {error}") from error
    for name, key, kind in (("image_key", image_key, "bytes_list"), ("label_key", label_key, "int64_list")):
        if key not in features:
            held = ", ".join(f"'{held}'" for held in sorted(features)) or "no features"
            raise InputError(f"`{name}` '{key}' is not in the first record of {file}, which holds {held}.")
        found_kind, values = features[key]
        if found_kind != kind or len(values) != 1:
            raise InputError(
                f"`{name}` '{key}' must be a {kind} of 1 value, found {found_kind or 'an empty feature'} of {len(values)} "
                f"in the first record of {file}."
            )
