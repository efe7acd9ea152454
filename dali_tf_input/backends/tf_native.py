"""Wrappers of the compiled operations in `native/`, which decode and preprocess images."""

import functools
import logging
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec import crops
from dali_tf_input.spec.crops import Crop, Region
from dali_tf_input.spec.options import Kernel
from dali_tf_input.spec.preprocess import Preprocess

LIBRARY = pathlib.Path(__file__).with_name("libdali_tf_input.so.1")

_logger = logging.getLogger("dali_tf_input")
_KERNELS = {"nearest": 0, "bilinear": 1, "bicubic": 2}  # `Kernel` in native/resample.h
_COPY = 3
# `Crop` in native/region.h.
_CROPS: tuple[type[Crop], ...] = (
    crops.NoCrop,
    crops.CenterCrop,
    crops.ResizeRandomCrop,
    crops.RandomResizedCrop,
    crops.RandomCrop,
)


@functools.cache
def load() -> Any:
    """Loads the compiled library; returns the module of its operations.

    Raises:
      InputError: the library was not compiled, or does not work with this TensorFlow.
    """
    problem = f"{LIBRARY} is not there, so it was not compiled"
    if LIBRARY.exists():
        try:
            library = tf.load_op_library(str(LIBRARY))
            assert library.dali_tf_input_prepare
            return library
        except (AttributeError, tf.errors.OpError) as error:
            problem = f"{LIBRARY} does not work with TensorFlow {tf.__version__}: {error}"
    clone = LIBRARY.parents[2]
    compile_it = "with g++ installed, `pip install --force-reinstall --no-deps .` in a clone"
    if (clone / "pyproject.toml").exists():
        compile_it = f"with g++ installed, `pip install --no-deps -e {shlex.quote(str(clone))}`"
        if clone == pathlib.Path.cwd():  # which comes before installed packages
            compile_it += ", or start the program in another folder to use an installed package"
    raise InputError(
        f"kernel='native' cannot be used: {problem}. To compile it: {compile_it}. Or use"
        " TfDataOptions(kernel='tensorflow')."
    )


@functools.cache
def uses_native(kernel: Kernel) -> bool:
    """Returns whether to use the compiled operations; "auto" warns once if it cannot."""
    if kernel == "tensorflow":
        return False
    try:
        load()
    except InputError as error:
        if kernel == "native":
            raise
        _logger.warning("TensorFlow's operations preprocess, which takes longer: %s", error)
        return False
    return True


def finish_region(
    image: tf.Tensor, region: Region, preprocess: Preprocess, mirrored: tf.Tensor
) -> tf.Tensor:
    """Preprocesses a region of an image, uint8 (height, width, 3), for the model."""
    place = tf.concat([region.start, region.extent], 0)
    prepared = load().dali_tf_input_prepare(image, place, mirrored, **_attributes(preprocess))
    return tf.ensure_shape(prepared, preprocess.image_shape)


def augment(
    image: tf.Tensor, rows: tf.Tensor, preprocess: Preprocess, mirrored: tf.Tensor
) -> tf.Tensor:
    """Applies drawn rows to an image after its crop, uint8, and prepares it for the model."""
    prepared = load().dali_tf_input_augment(image, rows, mirrored, **_attributes(preprocess))
    return tf.ensure_shape(prepared, preprocess.image_shape)


def mix(images: tf.Tensor, drawn: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Mixes the images of a batch in pairs, as `tf_mix.draw_mix` says."""
    attributes = _attributes(preprocess)
    del attributes["T"]  # that of the images
    mixed = load().dali_tf_input_mix(images, drawn, **attributes)
    return tf.ensure_shape(mixed, images.shape)


def decodes(crop: Crop) -> bool:
    """Returns whether `decode` supports a crop."""
    return type(crop) in _CROPS


def decode(
    encoded: tf.Tensor, uniforms: tf.Tensor, preprocess: Preprocess, *, whole: bool, maximum: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes a JPEG and preprocesses it for the model.

    Args:
      encoded: a scalar string, the bytes of an image file.
      uniforms: the image's random numbers, float32 (preprocess.num_uniforms,).
      preprocess: the preprocessing, with a crop that `decodes` accepts.
      whole: whether the whole file must be valid, or only the part that is needed.
      maximum: image pixels per output pixel along each axis from which on images are not decoded.

    Returns:
      The image, and whether it was decoded; if not, the image is undefined. Other images that are
      not decoded are not baseline JPEGs, or have errors that libjpeg-turbo would report.
    """
    crop_parameters = describe(preprocess, whole=whole, maximum=maximum)
    prepared, is_done = load().dali_tf_input_decode(
        encoded, uniforms, tf.constant(crop_parameters, tf.float64), **_attributes(preprocess)
    )
    return prepared, is_done


def decode_views(
    encoded: tf.Tensor, uniforms: tf.Tensor, views: Sequence[Preprocess], *, whole: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decodes what several views need of a JPEG.

    Args:
      encoded: a scalar string, the bytes of an image file.
      uniforms: the random numbers of all views, float32.
      views: what is made of it, with crops that `decodes`.
      whole: see `decode`.

    Returns:
      Pixels, uint8 (height, width, 3); the region of each view in them, float64 (views, 4): start
      and extent; and whether the image was decoded, see `decode`.
    """
    numbers: list[float] = [whole]
    for view in views:
        work, (crop, _, _, *rest) = _attributes(view), describe(view, whole=whole, maximum=math.inf)
        numbers += (*view.image_size, work["kernel"], work["antialias"], work["clip"])
        numbers += (view.num_uniforms, crop, *rest)
    made = load().dali_tf_input_decode_views(encoded, uniforms, tf.constant(numbers, tf.float64))
    pixels, regions, is_done = made
    return tf.ensure_shape(pixels, (None, None, 3)), regions, is_done


def describe(preprocess: Preprocess, *, whole: bool, maximum: float) -> tuple[float, ...]:
    """Encodes a preprocessing as numbers for the compiled operation; see native/region.h."""
    crop = preprocess.crop
    numbers: tuple[float, ...] = ()
    if isinstance(crop, crops.CenterCrop):
        numbers = (crop.resize_shorter,)
    elif isinstance(crop, crops.ResizeRandomCrop):
        numbers = crop.resize
    elif isinstance(crop, crops.RandomResizedCrop):
        ratios = crop.aspect_ratio_range
        numbers = (*crop.area_range, *map(math.log, ratios), *ratios)
    return (_CROPS.index(type(crop)), whole, maximum, preprocess.mirror_probability, *numbers)


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
