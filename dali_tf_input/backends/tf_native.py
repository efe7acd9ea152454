"""Wrappers of the compiled operations in `native/`, which decode and preprocess images."""

import ctypes
import functools
import logging
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec import crops
from dali_tf_input.spec.crops import Crop
from dali_tf_input.spec.options import Kernel
from dali_tf_input.spec.preprocess import Preprocess

LIBRARY = pathlib.Path(__file__).with_name("libdali_tf_input.so.1")

_logger = logging.getLogger("dali_tf_input")
_KERNELS = {"nearest": 0, "bilinear": 1, "bicubic": 2}  # `Kernel` in native/resample.h
_COPY = 3
_OPERATIONS = (
    *("batch", "inspect", "finish", "place", "pack", "fill", "list", "check", "uniforms", "read"),
    "augment",
)
PLACE_SIZE = 24  # bytes of `Place` in native/packed.h
_OUTPUTS = ("float32", "float16", "bfloat16", "uint8")  # `Output` in native/resample.h
# `Crop` in native/region.h.
_CROPS: tuple[type[Crop], ...] = (
    crops.NoCrop,
    crops.CenterCrop,
    crops.ResizeRandomCrop,
    crops.RandomResizedCrop,
    crops.RandomCrop,
    crops.CoverCrop,
    crops.Letterbox,
)


@functools.cache
def load_ops() -> Any:
    """Loads the compiled library; returns the module of its operations.

    Raises:
      InputError: the library was not compiled, or does not work with this TensorFlow.
    """
    problem = f"{LIBRARY} is not there, so it was not compiled"
    if LIBRARY.exists():
        try:
            library = tf.load_op_library(str(LIBRARY))
            missing = ctypes.CDLL(str(LIBRARY)).DaliTfInputMissingFunction
            missing.restype = ctypes.c_char_p
            if name := missing():
                raise AttributeError(f"TensorFlow has no {name.decode()}")
            for operation in _OPERATIONS:
                getattr(library, f"dali_tf_input_{operation}")  # else it is of another version
            return library
        except AttributeError as error:
            problem = (
                f"{LIBRARY} does not work with this package and TensorFlow {tf.__version__}:"
                f" {error}"
            )
        except (OSError, tf.errors.OpError) as error:
            problem = f"{LIBRARY} cannot be loaded: {error}"
    clone = LIBRARY.parents[2]
    compile_it = "with g++ installed, `pip install --force-reinstall --no-deps .` in a clone"
    if (clone / "pyproject.toml").exists():
        compile_it = f"with g++ installed, `pip install --no-deps -e {shlex.quote(str(clone))}`"
        if clone == pathlib.Path.cwd():  # which comes before installed packages
            compile_it += ", or start the program in another folder to use an installed package"
    raise InputError(
        f"kernel='native' and DALI need compiled operations: {problem}. To compile them:"
        f" {compile_it}. Or use TfDataOptions(kernel='tensorflow')."
    )


@functools.cache
def uses_native(kernel: Kernel) -> bool:
    """Returns whether to use the compiled operations; "auto" warns once if it cannot."""
    if kernel == "tensorflow":
        return False
    try:
        load_ops()
    except InputError as error:
        if kernel == "native":
            raise
        _logger.warning("TensorFlow's operations preprocess, which takes longer: %s", error)
        return False
    return True


def augment(
    image: tf.Tensor, rows: tf.Tensor, preprocess: Preprocess, mirrored: tf.Tensor
) -> tf.Tensor:
    """Applies drawn rows to an image after its crop, uint8, and prepares it for the model."""
    prepared = load_ops().dali_tf_input_augment(image, rows, mirrored, **_attributes(preprocess))
    return tf.ensure_shape(prepared, preprocess.image_shape)


def paste_images(
    images: tf.Tensor, made: tf.Tensor, indices: tf.Tensor, drawn: tf.Tensor, preprocess: Preprocess
) -> tf.Tensor:
    """Pastes images into a batch, and mixes it in pairs.

    Args:
      images: a batch. Of `make_batch` it must have no other use: its memory becomes the result's.
      made: images of the same kind, (n, ...).
      indices: where they belong in the batch, int64 (n,).
      drawn: how the batch is mixed, see `tf_mix.draw_mix`; float32 (0,) leaves it as it is.
      preprocess: how the images were made.
    """
    attributes = _attributes(preprocess)
    del attributes["T"]  # that of the images
    placed = load_ops().dali_tf_input_place(images, made, indices, drawn, **attributes)
    return tf.ensure_shape(placed, images.shape)


def mix(images: tf.Tensor, drawn: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Mixes the images of a batch in pairs, as `tf_mix.draw_mix` says."""
    return paste_images(images, images[:0], tf.constant([], tf.int64), drawn, preprocess)


def decodes(crop: Crop) -> bool:
    """Returns whether `make_batch` knows a crop."""
    return type(crop) in _CROPS


class Limits(TypedDict):
    """What of an image is decoded, see `make_batch`."""

    whole: bool
    maximum: float


def limits_of(preprocess: Preprocess, *, decode: str) -> Limits:
    """Returns `whole` and `maximum` of `make_batch`, for a value of `TfDataOptions.decode`.

    Images that are to be decoded at a part of their size are left to TensorFlow.
    """
    if isinstance(preprocess.crop, crops.Letterbox):
        decode = "full"  # all of the image is seen
    is_scaled = decode == "scaled" and not preprocess.copies_pixels
    whole = decode == "full" or (is_scaled and preprocess.resizes_plainly)
    return {"whole": whole, "maximum": 2 if is_scaled else math.inf}


class NativeBatch(NamedTuple):
    """What `make_batch` makes.

    Attributes:
      images: those of each view, (k, *preprocess.image_shape).
      examples: the serialized Examples without their images, string (k,).
      sizes: the heights and widths of the images as they are stored, and their orientations, int64
        (k, 3); 0 if refused.
      refused_indices: which images of the batch are refused, int64 (n,); what `images` has there is
        undefined. They are not baseline JPEGs, or have errors that libjpeg-turbo would report, or
        their Examples are unusual: TensorFlow decides.
      refused: the serialized Examples of these images, with them, string (n,).
    """

    images: list[tf.Tensor]
    examples: tf.Tensor
    sizes: tf.Tensor
    refused_indices: tf.Tensor
    refused: tf.Tensor


def make_batch(
    files: Sequence[tf.Tensor],
    positions: tf.Tensor,
    records: tf.Tensor,
    uniforms: tf.Tensor,
    rows: tf.Tensor,
    drawn: tf.Tensor,
    views: Sequence[Preprocess],
    *,
    image_keys: Sequence[str],
    size_keys: Sequence[str],
    whole: bool,
    maximum: float,
    check_crc: bool,
    num_readers: int,
    num_threads: int,
) -> NativeBatch:
    """Reads the records of a batch, decodes their images and preprocesses them for the model.

    Args:
      files: `names`, `versions` and `where` of `locations.RecordLocations`.
      positions: the positions of the records, int64 (k,); or int64 (0,), if `records` has them.
      records: serialized Examples, string (k,); or string (0,).
      uniforms: the images' random numbers, those of all views side by side, float32 (k, u).
      rows: their rows of augmentation, see `tf_augment.draw_rows`, those of all views one after the
        other, float32 (k, r, ROW_SIZE).
      drawn: how the batch is mixed, see `tf_mix.draw_mix`, or float32 (0,). A batch with refused
        images is not mixed: see `paste_images`.
      views: what is made of each image, with crops that `decodes`.
      image_keys: the keys that may have the image; the first that is not empty counts.
      size_keys: the keys of its height and width if it is stored as pixels, or none.
      whole: whether whole files must be valid, or only the parts that are needed.
      maximum: image pixels per output pixel along each axis from which on images are refused.
      check_crc: whether the CRCs of the records that are read are checked.
      num_readers: how many threads read, in [1, 1024]; all batches of the process share them.
      num_threads: the same for decoding, in [1, 1024].
    """
    made = load_ops().dali_tf_input_batch(
        *files,
        positions,
        records,
        uniforms,
        rows,
        drawn,
        describe_views(views, whole=whole, maximum=maximum),
        T=[view.dtype for view in views],
        image_keys=[*image_keys],
        size_keys=[*size_keys],
        check_crc=check_crc,
        num_readers=num_readers,
        num_threads=num_threads,
    )
    images = [
        tf.ensure_shape(images, (None, *view.image_shape))
        for images, view in zip(made.images, views, strict=True)
    ]
    _, examples, sizes, indices, refused = made
    examples, indices, refused = (
        tf.ensure_shape(values, (None,)) for values in (examples, indices, refused)
    )
    return NativeBatch(images, examples, tf.ensure_shape(sizes, (None, 3)), indices, refused)


def inspect(
    encoded: tf.Tensor, size: tf.Tensor, uniforms: tf.Tensor, described: tf.Tensor
) -> tf.Tensor:
    """Says how TensorFlow is to decode an image.

    Args:
      encoded: the image, a scalar string.
      size: its height and width as it is stored, int32 (2,), if it is a JPEG that may be decoded in
        part or at a part of its size; else zeros.
      uniforms: its random numbers, float32 (u,).
      described: what is made of it, from `describe_views`.

    Returns:
      int32 (8,): the decoder, 0 to 3 for a JPEG at 1 / 2^n of its size, 4 for another format, 5 for
      a PNG of 16 bits; the orientation; `size`; and the window to decode: top, left, height, width.
    """
    return tf.ensure_shape(
        load_ops().dali_tf_input_inspect(encoded, size, uniforms, described), (8,)
    )


def finish(
    image: tf.Tensor,
    plan: tf.Tensor,
    uniforms: tf.Tensor,
    rows: tf.Tensor,
    views: Sequence[Preprocess],
    described: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Makes the views of an image that was decoded as `inspect` says.

    Args:
      image: uint8 (height, width, 3), what was decoded.
      plan: what `inspect` returns.
      uniforms: as for `inspect`.
      rows: the rows of augmentation of all views, float32 (r, ROW_SIZE).
      views: what is made of it.
      described: as for `inspect`.

    Returns:
      The views, `view.image_shape` each; and the image's height, width and orientation as it is
      stored, int64 (3,).
    """
    types = [view.dtype for view in views]
    made = load_ops().dali_tf_input_finish(image, plan, uniforms, rows, described, T=types)
    images = [
        tf.ensure_shape(image, view.image_shape)
        for image, view in zip(made.views, views, strict=True)
    ]
    return images, tf.ensure_shape(made.size, (3,))


class Packed(NamedTuple):
    """What `pack_batch` makes.

    Attributes:
      batch: a row for each image, uint8 (k, size), see native/packed.h; no row if one is refused.
      examples: the serialized Examples, without their images unless these are refused, string (k,).
      num_refused: of how many Examples TensorFlow must find the image, as they are unusual; int64.
      images: the images of the Examples, string (k,), if they were asked for.
    """

    batch: tf.Tensor
    examples: tf.Tensor
    num_refused: tf.Tensor
    images: tf.Tensor


def pack_batch(
    files: Sequence[tf.Tensor],
    positions: tf.Tensor,
    records: tf.Tensor,
    images: tf.Tensor,
    *,
    values_size: int,
    by_location: bool,
    returns_images: bool,
    image_keys: Sequence[str],
    size_keys: Sequence[str],
    check_crc: bool,
    num_readers: int,
    num_threads: int,
) -> Packed:
    """Packs a batch for DALI; `fill_packed` completes it.

    Args:
      files: as for `make_batch`.
      positions: the positions of the records, int64 (k,); or int64 (0,).
      records: serialized Examples, string (k,); or string (0,).
      images: the images themselves, string (k,); or string (0,).
      values_size: how many bytes the values of an image take.
      by_location: whether it says where in their files the images of `positions` are, instead of
        holding them.
      returns_images: whether to return the images of `positions` or `records`, too.
      image_keys: as for `make_batch`.
      size_keys: as for `make_batch`.
      check_crc: as for `make_batch`.
      num_readers: as for `make_batch`.
      num_threads: as for `make_batch`.
    """
    batch, examples, num_refused, returned = load_ops().dali_tf_input_pack(
        *files,
        positions,
        records,
        images,
        np.array([values_size, by_location, returns_images], np.int64),
        image_keys=[*image_keys],
        size_keys=[*size_keys],
        check_crc=check_crc,
        num_readers=num_readers,
        num_threads=num_threads,
    )
    return Packed(
        tf.ensure_shape(batch, (None, None)),
        tf.ensure_shape(examples, (None,)),
        tf.ensure_shape(num_refused, ()),
        tf.ensure_shape(returned, (None,)),
    )


def fill_packed(batch: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Fills values, uint8 (k, values_size), into a packed batch, which must have no other use."""
    return tf.ensure_shape(load_ops().dali_tf_input_fill(batch, values), (None, None))


def list_images(
    plan: Sequence[tf.Tensor], epoch: tf.Tensor, first: tf.Tensor, count: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Lists images of a shard, from one on, fewer at the end of an epoch.

    Args:
      plan: what `Plan.to_numbers` returns.
      epoch: int64.
      first: the number of the first image in the epoch, int64.
      count: how many images.

    Returns:
      The keys of the images, see `reading.read_records`, and the positions of their records, which
      with groups are counted as by `Plan.positions`; int64 (k,) each.
    """
    keys, positions = load_ops().dali_tf_input_list(*plan, epoch, first, np.int64(count))
    return tf.ensure_shape(keys, (None,)), tf.ensure_shape(positions, (None,))


def check_files(names: tf.Tensor, versions: tf.Tensor) -> tf.Tensor:
    """Checks that files are those that were indexed, see `RecordLocations`; returns a number."""
    return tf.ensure_shape(load_ops().dali_tf_input_check(names, versions), ())


def draw_uniforms(keys: tf.Tensor, seed: int, count: int) -> tf.Tensor:
    """Draws `count` numbers in [0, 1) for each of the keys, int64 (k,): float32 (k, count).

    They are those of ``tf.random.stateless_uniform((count,), (seed, key))``.
    """
    drawn = load_ops().dali_tf_input_uniforms(keys, np.int64(seed), np.int64(count))
    return tf.ensure_shape(drawn, (None, count))


def describe_views(views: Sequence[Preprocess], *, whole: bool, maximum: float) -> tf.Tensor:
    """Encodes what is made of each image for the compiled operations, see `make_batch`."""
    numbers = [float(whole), maximum, float(views[0].apply_orientation)]
    for view in views:
        work = _attributes(view)
        flags = [work[name] for name in ("kernel", "antialias", "clip", "chw")]
        numbers += [*view.image_size, *flags, _OUTPUTS.index(view.dtype), *work["mean"]]
        numbers += [*work["scale"], view.num_uniforms, view.make_program().num_ops]
        numbers += describe_crop(view)
    return tf.constant(numbers, tf.float64)


def describe_crop(preprocess: Preprocess) -> tuple[float, ...]:
    """Encodes a crop and the mirror as numbers for the compiled operation; see native/region.h."""
    crop = preprocess.crop
    numbers: tuple[float, ...] = ()
    if isinstance(crop, crops.CenterCrop):
        numbers = (crop.resize_shorter,)
    elif isinstance(crop, crops.ResizeRandomCrop):
        numbers = crop.resize
    elif isinstance(crop, crops.CoverCrop):
        numbers = (*crop.cover_of(preprocess.image_size), crop.is_random)
    elif isinstance(crop, crops.Letterbox):
        numbers = (crop.fill,)
    elif isinstance(crop, crops.RandomResizedCrop):
        ratios = crop.aspect_ratio_range
        numbers = (*crop.area_range, *map(math.log, ratios), *ratios)
    return (_CROPS.index(type(crop)), preprocess.mirror_probability, *numbers)


def _attributes(preprocess: Preprocess) -> dict[str, Any]:
    sampling = preprocess.crop.sampling
    normalizes = preprocess.dtype != "uint8" and preprocess.channels == 3
    mean, std = (preprocess.mean, preprocess.std) if normalizes else ((0.0,) * 3, (1.0,) * 3)
    return {
        "height": preprocess.image_size[0],
        "width": preprocess.image_size[1],
        "kernel": _COPY if sampling == "crop_and_pad" else _KERNELS[preprocess.interpolation],
        "antialias": preprocess.antialias,
        "clip": sampling == "crop_then_resize",
        "chw": preprocess.layout == "CHW",
        "mean": mean,
        "scale": [1 / value for value in std],
        "T": preprocess.dtype,
    }
