"""The options of each backend; their type selects the backend."""

import warnings
from dataclasses import dataclass
from typing import Annotated, Literal

from dali_tf_input.errors import Fraction, InputError, Within, check, checked

Device = Literal["cpu", "gpu"]
DaliDecode = Literal["auto", "full", "region"]
ReadMode = Literal["mmap", "plain", "direct"]
TfDataDecode = Literal["auto", "full", "region", "scaled"]
Kernel = Literal["auto", "native", "tensorflow"]

AUTOTUNE = -1  # tf.data.AUTOTUNE, without importing TensorFlow
_OR_AUTOTUNE = " or AUTOTUNE (-1)"


@checked
@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """Options of the DALI backend.

    Examples:
      >>> options = DaliOptions(device="gpu", prefetch_queue_depth=4)

    Attributes:
      device: "gpu" decodes with nvJPEG ("mixed"), and training batches are on the GPU; "cpu" needs
        no GPU.
      decode: how much of an image is decoded. "region" decodes only what the crop needs, "full" the
        whole image. "auto" means "region" on the CPU, where the pixels are the same, and "full" on
        a GPU: there regions have other chroma (plain upsampling), and were reported to crash on
        some cards (nvImageCodec issue 55), though not on an H200 with nvImageCodec 0.9.
      num_threads: CPU threads of each pipeline, at most 1024; None divides this process's cores
        among the shards.
      prefetch_queue_depth: batches prepared ahead, in [1, 1024]. The default is DALI's own.
      read_mode: how DALI's own reader, which fixed orders do not use, accesses files. "mmap" maps
        them; "plain" reads them, as DALI's documentation recommends for network file systems;
        "direct" bypasses the page cache (O_DIRECT), for data much larger than memory.
      read_ahead: whether "mmap" maps all pages of a file at once.
      hw_decoder_load: the fraction of images, in [0, 1], that the GPU's hardware JPEG decoder
        handles, if it has one (A100 and later); the multiprocessors decode the others. None is
        DALI's default, 0.65. For device "gpu" only.
      jpeg_fancy_upsampling: whether the GPU upsamples chroma smoothly, as libjpeg-turbo does.
        False is faster, and its pixels differ: where a JPEG's chroma is subsampled (4:2:0), by
        about 3 of 255 on average. For device "gpu"; regions are always upsampled plainly.
      memory_hints: whether the GPU's decoder allocates memory for the largest image at the start,
        if its size is in the manifest (index level "decode"). For device "gpu".
    """

    device: Device
    decode: DaliDecode = "auto"
    num_threads: Annotated[int, Within(1, 1024)] | None = None
    prefetch_queue_depth: Annotated[int, Within(1, 1024)] = 2
    read_mode: ReadMode = "mmap"
    read_ahead: bool = False
    hw_decoder_load: Fraction | None = None
    jpeg_fancy_upsampling: bool = True
    memory_hints: bool = True

    def __post_init__(self) -> None:
        if self.read_ahead and self.read_mode != "mmap":
            text = "`read_ahead` is for `read_mode` 'mmap' only, got"
            raise InputError(f"{text} {self.read_mode!r}.")
        if self.hw_decoder_load is not None and self.device == "cpu":
            text = f"`hw_decoder_load` is for `device` 'gpu' only, got {self.hw_decoder_load}"
            raise InputError(f"{text}: leave it None.")
        if not self.jpeg_fancy_upsampling and self.device == "cpu":
            raise InputError("`jpeg_fancy_upsampling` is for `device` 'gpu' only: leave it True.")
        if (self.device, self.decode) == ("gpu", "region"):
            text = "decode='region' may crash on some GPUs (nvImageCodec issue 55)"
            warnings.warn(f"{text}: try it first.", stacklevel=4)

    @property
    def backend(self) -> str:
        """The display name of the backend."""
        return f"DALI ({self.device.upper()})"

    @property
    def resolved_decode(self) -> Literal["full", "region"]:
        """`decode`, with "auto" resolved."""
        if self.decode == "auto":
            return "region" if self.device == "cpu" else "full"
        return self.decode


@checked
@dataclass(frozen=True, kw_only=True)
class TfDataOptions:
    """Options of the tf.data backend; AUTOTUNE (-1) lets tf.data choose a number.

    Examples:
      >>> options = TfDataOptions(num_parallel_reads=64)  # for slow storage

    Attributes:
      num_parallel_reads: number of parallel reads, in [1, 1024]; with order "buffer", from as many
        files. More reads hide the latency of slow storage: 16 reads of 5 ms each give 3,200
        records/s. On a warm page cache, 1, 4 and 16 are equally fast within noise.
      read_buffer_bytes: bytes read from an open file at a time, in [1, 2**30], for orders that are
        not fixed. The default is four times tf.data's own and holds several ImageNet records.
      check_crc: whether the CRC of each record of a fixed order is checked as it is read.
      num_parallel_calls: images decoded at the same time; AUTOTUNE, or at least 1. AUTOTUNE is one
        for each of this process's cores, or what tf.data chooses where it makes single images. All
        datasets with the same number share their threads. 1 is a serial map.
      prefetch_batches: number of batches prepared ahead; AUTOTUNE, or at least 0. 2 is as fast as
        AUTOTUNE, whose queue grew to 3 GB when training paused now and then.
      autotune: False turns off tf.data's autotuning and its conversion of serial maps to parallel
        ones.
      decode: how much of a JPEG is decoded. "region" decodes only what the crop needs, "full" the
        whole image. "auto" uses the faster one: "full" if the whole image is resized bilinearly
        without antialias, else "region". The pixels are the same. "scaled", for images much larger
        than the model's input, decodes the region at 1/2, 1/4 or 1/8 of its size if that still
        leaves at least the pixels needed in each direction. Its pixels differ, and DALI cannot
        reproduce them; "auto" never chooses it.
      kernel: which operations resize, crop, mirror and normalize. "native" is this package's own
        operation, a single pass over the image, compiled if the package is installed with a C++
        compiler; on x86-64 with AVX2 it also decodes baseline JPEGs, to the same pixels. Crop
        classes of your own it does not know: TensorFlow's operations do their work. "tensorflow"
        uses TensorFlow's operations. "auto" uses "native" if it is available, else "tensorflow".
        The pixels are the same except for rounding.
      service: address of a tf.data service, "grpc://host:port", whose workers read, decode and
        preprocess; None does that in this process. For order "buffer": each record is served once
        per epoch, in an order and with crops that no seed can reproduce. If a worker dies,
        TensorFlow waits up to an hour for it to be restarted at its address, and its records may be
        missing from that epoch. `dali-tf-input service` starts one.
    """

    num_parallel_reads: Annotated[int, Within(1, 1024)] = 16
    read_buffer_bytes: Annotated[int, Within(1, 1 << 30)] = 1 << 20
    check_crc: bool = True
    num_parallel_calls: Annotated[int, Within(1, 1024, _OR_AUTOTUNE, AUTOTUNE)] = AUTOTUNE
    prefetch_batches: Annotated[int, Within(0, 1 << 16, _OR_AUTOTUNE, AUTOTUNE)] = 2
    autotune: bool = True
    decode: TfDataDecode = "auto"
    kernel: Kernel = "auto"
    service: str | None = None

    def __post_init__(self) -> None:
        holds = self.service is None or self.service.startswith("grpc://")
        check(holds, "service", "an address like 'grpc://host:5050'", repr(self.service))

    @property
    def backend(self) -> str:
        """The display name of the backend."""
        return "tf.data"

    def resolve_decode(self, *, resizes_plainly: bool) -> Literal["full", "region", "scaled"]:
        """Returns `decode`, with "auto" resolved; for `resizes_plainly` see `Preprocess`."""
        if self.decode == "auto":
            return "full" if resizes_plainly else "region"
        return self.decode


Options = DaliOptions | TfDataOptions
