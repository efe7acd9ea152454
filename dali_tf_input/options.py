"""How fast a model is fed: the type of the options is the choice of the backend."""

import dataclasses
import json
import os
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

from dali_tf_input.tfrecord import InputError

Device = Literal["cpu", "gpu"]
Fuse = Literal["auto", "off", "decode"]
ReadMode = Literal["mmap", "plain", "direct"]
TfDataFuse = Literal["auto", "off", "decode", "scaled"]

AUTOTUNE = -1  # tf.data.AUTOTUNE, without importing TensorFlow

_FORMAT = "dali_tf_input options"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """How the DALI backend works.

    Attributes:
      device: "gpu" decodes with nvJPEG ("mixed") and leaves the batches on the GPU; "cpu" needs no GPU.
      num_threads: CPU threads of each pipeline; None shares the cores of this process among the shards.
      prefetch_queue_depth: batches made ahead, at least 1. The default is DALI's own.
      fuse: whether only the region of an image that is needed is decoded. "decode" does, "off" decodes it whole, "auto" takes
        what was measured to be faster: "decode" on the CPU, "off" on a GPU, where decoders were reported to crash over regions.
        The pixels are the same.
      read_mode: how DALI's own reader reads, so for orders that are not planned: "mmap" maps the files, "plain" reads them
        (DALI's documentation recommends it for network file systems), "direct" reads past the page cache (O_DIRECT), for data
        much larger than memory.
      read_ahead: whether "mmap" maps a file with all its pages at once.
      hw_decoder_load: share in [0, 1] of the images that go to the GPU's hardware JPEG decoder, where it has one (A100 and
        later); its multiprocessors decode the others. None leaves it to DALI (0.65). For device "gpu".
      memory_hints: whether the GPU's decoder sets aside memory for the largest image at once, where the manifest knows its size
        (index level "decode"). For device "gpu".
    """

    device: Device
    fuse: Fuse = "auto"
    num_threads: int | None = None
    prefetch_queue_depth: int = 2
    read_mode: ReadMode = "mmap"
    read_ahead: bool = False
    hw_decoder_load: float | None = None
    memory_hints: bool = True

    def __post_init__(self) -> None:
        check_choice("device", self.device, get_args(Device))
        check_choice("fuse", self.fuse, get_args(Fuse))
        if self.num_threads is not None and self.num_threads < 1:
            raise InputError(f"`num_threads` must be at least 1 or None, got {self.num_threads}.")
        if self.prefetch_queue_depth < 1:
            raise InputError(f"`prefetch_queue_depth` must be at least 1, got {self.prefetch_queue_depth}.")
        check_choice("read_mode", self.read_mode, get_args(ReadMode))
        if self.read_ahead and self.read_mode != "mmap":
            raise InputError(f"`read_ahead` is for `read_mode` 'mmap' only, got {self.read_mode!r}.")
        if self.hw_decoder_load is not None and self.device == "cpu":
            raise InputError(f"`hw_decoder_load` is for `device` 'gpu' only, got {self.hw_decoder_load}: leave it None.")
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise InputError(f"`hw_decoder_load` must be in [0, 1] or None, got {self.hw_decoder_load}.")

    @classmethod
    def load(cls, path: str) -> "DaliOptions":
        """Reads options of this backend as `load_options` does; InputError for those of the other one."""
        options = load_options(path)
        if not isinstance(options, cls):
            raise InputError(f"{path} holds {type(options).__name__}, not {cls.__name__}: load it by `load_options`.")
        return options


@dataclass(frozen=True, kw_only=True)
class TfDataOptions:
    """How the tf.data backend works. The defaults are the tuned baseline; AUTOTUNE (-1) leaves a number to tf.data.

    Attributes:
      num_parallel_reads: files read at the same time when `order` is "buffer", at least 1. More hides the latency of slow
        storage; 4 is within noise of 1 and 16 on a warm page cache.
      read_buffer_bytes: what is read of an open file at a time, at least 1 byte. The default is four times tf.data's own, which
        holds two ImageNet records; a stretch of less than 8 records is read with an eighth of it.
      num_parallel_calls: images decoded at the same time; AUTOTUNE, or at least 1. 1 is a serial map.
      prefetch_batches: batches made ahead; AUTOTUNE, or at least 0. 2 is as fast as AUTOTUNE, which was seen to let the queue
        grow to 3 GB when training paused now and then.
      autotune: False switches off tf.data's tuning and its rewriting of serial maps into parallel ones.
      fuse: whether of a JPEG only the region that is needed is decoded. "decode" does, "off" decodes it whole, "auto" takes what
        was measured to be faster: "decode" but where the whole image is resized by plain bilinear interpolation, for which
        TensorFlow has an operation that is much faster than those for a region. The pixels are the same. "scaled" decodes the
        region of a JPEG at 1/2, 1/4 or 1/8 where it has that many times the pixels needed each way and 1.56 times that in all,
        and resizes the rest of the way: for images much larger than the model's. These pixels are others, DALI cannot make
        them, and with `antialias` they are closer to a Lanczos resize than those of the other plans; see the README. It is
        never "auto".
      service: address of a tf.data service, "grpc://host:port": its workers read, decode and preprocess instead of this process
        (`scripts/data_service.py` starts them). For order "buffer": each record once per pass, in an order and with crops that
        no seed repeats. Where a worker dies TensorFlow waits (up to an hour) for it to be started again at its address; what it
        was working on may be left out of that pass. None works here.
    """

    num_parallel_reads: int = 4
    read_buffer_bytes: int = 1 << 20
    num_parallel_calls: int = AUTOTUNE
    prefetch_batches: int = 2
    autotune: bool = True
    fuse: TfDataFuse = "auto"
    service: str | None = None

    def __post_init__(self) -> None:
        check_choice("fuse", self.fuse, get_args(TfDataFuse))
        if self.service is not None and not self.service.startswith("grpc://"):
            raise InputError(f"`service` must be an address like 'grpc://host:5050', got {self.service!r}.")
        if self.num_parallel_reads < 1:
            raise InputError(f"`num_parallel_reads` must be at least 1, got {self.num_parallel_reads}.")
        if self.read_buffer_bytes < 1:
            raise InputError(f"`read_buffer_bytes` must be at least 1, got {self.read_buffer_bytes}.")
        if self.num_parallel_calls < 1 and self.num_parallel_calls != AUTOTUNE:
            raise InputError(f"`num_parallel_calls` must be at least 1 or AUTOTUNE (-1), got {self.num_parallel_calls}.")
        if self.prefetch_batches < 0 and self.prefetch_batches != AUTOTUNE:
            raise InputError(f"`prefetch_batches` must be at least 0 or AUTOTUNE (-1), got {self.prefetch_batches}.")

    @classmethod
    def load(cls, path: str) -> "TfDataOptions":
        """Reads options of this backend as `load_options` does; InputError for those of the other one."""
        options = load_options(path)
        if not isinstance(options, cls):
            raise InputError(f"{path} holds {type(options).__name__}, not {cls.__name__}: load it by `load_options`.")
        return options


_BACKENDS: dict[type[DaliOptions | TfDataOptions], str] = {DaliOptions: "dali", TfDataOptions: "tf_data"}


def save_options(options: DaliOptions | TfDataOptions, path: str, *, about: dict[str, Any] | None = None) -> None:
    """Writes options as JSON, for `load_options`.

    Args:
      options: what is written, every field of it.
      path: the file; written beside it first and then renamed, so that it is never half a file.
      about: further JSON values that say how they were found; not read again.
    """
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "backend": _BACKENDS[type(options)],
        "options": dataclasses.asdict(options),
        "about": about or {},
    }
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=2)
        stream.write("\n")
    os.replace(f"{path}.new", path)


def load_options(path: str) -> DaliOptions | TfDataOptions:
    """Reads options that `save_options` (``scripts/tune.py``) wrote; fields that are not in the file have their defaults.

    Raises:
      InputError: the file is missing, no such file, or holds a field or a value that the options do not have.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
        if (document["format"], document["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"expected {_FORMAT!r}, version {_VERSION}")
        kind = {name: kind for kind, name in _BACKENDS.items()}[document["backend"]]
        values = dict(document["options"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: these are no options: {error!r}. scripts/tune.py --files=GLOB --out=FILE makes some."
        ) from error
    unknown = set(values) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise InputError(f"{path}: {kind.__name__} has no `{min(unknown)}`. Tune again: scripts/tune.py --files=GLOB --out=FILE")
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise InputError(f"{path}: `{name}` cannot be {value!r}.")
    try:
        return kind(**values)
    except (InputError, TypeError) as error:
        raise InputError(f"{path}: {error}") from error


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type; those that a `Literal` allows are checked by the options themselves."""
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (hint if isinstance(hint, type) else str)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Checks that the argument `name` has one of the values in `choices`; raises InputError otherwise."""
    if value not in choices:
        raise InputError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")
