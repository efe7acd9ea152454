"""Preprocessing of images with DALI's operations: the same pixels as `tf_images` makes."""

from collections.abc import Collection
from typing import Any, Literal

import numpy as np
from nvidia.dali import fn, math, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from dali_tf_input.backends.dali_augment import apply_rows
from dali_tf_input.spec.colors import LUMA
from dali_tf_input.spec.crops import Letterbox, Region, Uniforms
from dali_tf_input.spec.preprocess import Preprocess

_INTERPOLATIONS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
_INTERPOLATIONS["nearest"] = types.INTERP_NN
_DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}

Decode = Literal["full", "region", "none"]


def check_supported(preprocess: Preprocess) -> None:
    """Raises InputError for a `preprocess` that this backend does not support."""
    preprocess.check_supported("DALI", dtypes=_DTYPES)


def prepare_images(
    encoded: DataNode,
    uniforms: DataNode,
    preprocess: Preprocess,
    *,
    decode: Decode,
    device: str,
    hints: dict[str, int | float],
    rows: DataNode | None = None,
    decoded: DataNode | None = None,
) -> DataNode:
    """Preprocesses a batch of images as `tf_images.prepare_image` does for a single image.

    `rows` requires a pipeline definition that enables conditionals.

    Args:
      encoded: uint8 (bytes,) each, a JPEG or PNG file, or pixels (height, width, 3); on the CPU.
      uniforms: float32 (preprocess.num_uniforms,) each, on the CPU.
      preprocess: what to do.
      decode: how much of an image is decoded; "none" for pixels.
      device: "cpu", or "mixed" to decode on the GPU and continue there.
      hints: further arguments of the decoder.
      rows: what `preprocess.augment` does, see `dali_augment`.
      decoded: the whole images, if `decode_whole` has decoded them.
    """
    if isinstance(preprocess.crop, Letterbox) and decode == "region":
        decode = "full"
    shared = {"decode": decode, "device": device, "hints": hints, "decoded": decoded}
    images, region = decode_images(encoded, uniforms, preprocess, **shared)
    images = resize_regions(images, region, preprocess, decode=decode)
    if rows is not None:
        program = preprocess.make_program()
        images = apply_rows(_to_uint8(images), rows, program, preprocess.image_size)
    if preprocess.channels == 1:
        images = _to_gray(images)
    return normalize_images(images, uniforms, preprocess)


@do_not_convert  # there is nothing for DALI to convert
def decode_images(
    encoded: DataNode,
    uniforms: DataNode,
    preprocess: Preprocess,
    *,
    decode: Decode,
    device: str,
    hints: dict[str, int | float],
    decoded: DataNode | None = None,
) -> tuple[DataNode, Region]:
    """Decodes images, whole or in part; returns them and the region to resize in each."""
    orientation = preprocess.apply_orientation
    if decode == "none":
        shape = encoded.shape()
    else:
        shape = fn.peek_image_shape(encoded, adjust_orientation=orientation)
    size = fn.cast(shape[0:2], dtype=types.FLOAT64)
    region = find_region(size, uniforms, preprocess)
    if decode == "none":
        return encoded.gpu() if device == "mixed" else encoded, region
    if decoded is not None:
        return decoded, region
    if decode == "full":
        how = {"orientation": orientation, "device": device, "hints": hints}
        return decode_whole(encoded, **how), region
    decoding = {"device": device, "output_type": types.RGB, **hints}
    decoding["adjust_orientation"] = orientation
    first, extent = source_window(size, region, preprocess)
    images = fn.decoders.image_slice(encoded, **_window(first, extent), **decoding)
    return images, region._replace(start=region.start - first)


@do_not_convert
def decode_whole(
    encoded: DataNode, *, orientation: bool, device: str, hints: dict[str, int | float]
) -> DataNode:
    """Decodes images to uint8 RGB, upright by their EXIF orientation if `orientation`."""
    how = {"device": device, "output_type": types.RGB, "adjust_orientation": orientation}
    return fn.decoders.image(encoded, **how, **hints)


@do_not_convert
def resize_regions(
    images: DataNode, region: Region, preprocess: Preprocess, *, decode: Decode
) -> DataNode:
    """Resizes regions to `preprocess.image_size`: float32 in 0..255, or uint8 if only cropped."""
    start, extent = region.start, region.extent
    if preprocess.crop.sampling == "crop_and_pad":
        window = _window(start, extent)
        return fn.slice(images, **window, out_of_bounds_policy="pad", fill_values=[0.0])
    if isinstance(preprocess.crop, Letterbox):
        resized = fn.resize(
            images,
            size=fn.cast(region.resized, dtype=types.FLOAT),
            interp_type=_INTERPOLATIONS[preprocess.interpolation],
            antialias=preprocess.antialias,
            dtype=types.FLOAT,
        )
        padding = {"out_of_bounds_policy": "pad", "fill_values": [preprocess.crop.fill]}
        start = fn.cast(region.corner, dtype=types.INT32)
        return fn.slice(resized, start=start, shape=preprocess.image_size, axes=(0, 1), **padding)
    resizing = {
        "size": preprocess.image_size,
        "interp_type": _INTERPOLATIONS[preprocess.interpolation],
        "antialias": preprocess.antialias,
        "dtype": types.FLOAT,
    }
    if preprocess.crop.sampling == "crop_then_resize":
        if decode != "region":
            images = fn.slice(images, **_window(start, extent))
    else:
        resizing["roi_start"] = fn.cast(start, dtype=types.FLOAT)
        resizing["roi_end"] = fn.cast(start + extent, dtype=types.FLOAT)
    return fn.resize(images, **resizing)


def normalize_images(images: DataNode, uniforms: DataNode, preprocess: Preprocess) -> DataNode:
    """Mirrors, normalizes and casts images (height, width, channels) in 0..255; sets the layout."""
    mirrored = Uniforms.split(uniforms).mirror < preprocess.mirror_probability
    mirror = fn.reshape(fn.cast(mirrored, dtype=types.INT32), shape=[])
    if preprocess.dtype == "uint8":
        images = _to_uint8(fn.flip(images, horizontal=mirror))
        return fn.transpose(images, perm=[2, 0, 1]) if preprocess.layout == "CHW" else images
    return fn.crop_mirror_normalize(
        images,
        mirror=mirror,
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        output_layout=preprocess.layout,
        dtype=_DTYPES[preprocess.dtype],
    )


@do_not_convert
def mix_images(values: dict[str, DataNode], preprocess: Preprocess) -> dict[str, DataNode]:
    """Mixes images and labels of a batch, as `tf_mix.mix_batch`.

    Args:
      values: a dict with the preprocessed images, "image"; their labels, "label"; and, on the CPU,
        "mix of the batch", see `tf_mix.draw_mix`, and "partners of images", the index in the batch
        of each image's partner.
      preprocess: gives the size, layout and type of the images.
    """
    images, labels, partner = values["image"], values["label"], values["partners of images"]
    drawn = values["mix of the batch"]
    part = drawn[5]
    labels = labels * part + fn.permute_batch(labels, indices=partner) * (1.0 - part)
    drawn = drawn.gpu() if images.device == "gpu" else drawn
    height, width = preprocess.image_size
    is_hwc = preprocess.layout == "HWC"
    y, x = (
        types.Constant(np.arange(side, dtype=np.float32).reshape(shape), device=images.device)
        for side, shape in (
            (height, (-1, 1, 1) if is_hwc else (1, -1, 1)),
            (width, (1, -1, 1) if is_hwc else (1, 1, -1)),
        )
    )
    inside = (y >= drawn[1]) & (y < drawn[3]) & (x >= drawn[2]) & (x < drawn[4])
    weight = drawn[0] * (1.0 - fn.cast(inside, dtype=types.FLOAT))
    partners = fn.cast(fn.permute_batch(images, indices=partner), dtype=types.FLOAT)
    mixed = fn.cast(images, dtype=types.FLOAT) * weight + partners * (1.0 - weight)
    if preprocess.dtype == "uint8":
        mixed = _to_uint8(mixed)
    else:
        mixed = fn.cast(mixed, dtype=_DTYPES[preprocess.dtype])
    return {"image": mixed, "label": labels}


@do_not_convert
def _to_gray(images: DataNode) -> DataNode:
    images = fn.cast(images, dtype=types.FLOAT)
    red, green, blue = (
        fn.slice(images, channel, 1, axes=(2,)) * types.Constant(LUMA[channel], dtype=types.FLOAT)
        for channel in range(3)
    )
    return red + green + blue


def _to_uint8(images: DataNode) -> DataNode:
    images = fn.cast(images, dtype=types.FLOAT)
    return fn.cast(math.clamp(math.floor(images + 0.5), 0.0, 255.0), dtype=types.UINT8)


class DaliOps:
    """`crops.Ops` on DALI's data nodes."""

    floor = staticmethod(math.floor)
    exp = staticmethod(math.exp)
    sqrt = staticmethod(math.sqrt)
    minimum = staticmethod(math.min)
    maximum = staticmethod(math.max)

    def constant(self, values: Collection[float]) -> DataNode:
        return types.Constant([float(value) for value in values], dtype=types.FLOAT)

    def where(self, condition: DataNode, values: Any, others: Any) -> DataNode:
        chosen = fn.cast(condition, dtype=types.FLOAT64)
        return values * chosen + others * (1.0 - chosen)

    def max(self, values: DataNode) -> DataNode:
        return fn.reductions.max(fn.cast(values, dtype=types.FLOAT), keep_dims=True)

    def sum(self, values: DataNode) -> DataNode:  # exact for whole numbers; DALI reduces no float64
        return fn.reductions.sum(fn.cast(values, dtype=types.FLOAT), keep_dims=True)

    def concat(self, first: DataNode, second: DataNode) -> DataNode:
        return fn.cat(first, second)


def find_region(size: DataNode, uniforms: DataNode, preprocess: Preprocess) -> Region:
    """Returns where each output lies in its image of `size`, float64 (2,): height and width."""
    ops = DaliOps()
    named = Uniforms.split(fn.cast(uniforms, dtype=types.FLOAT64))
    return preprocess.crop.plan(size, ops.constant(preprocess.image_size), named, ops)


def _window(start: DataNode, extent: DataNode) -> dict[str, Any]:
    """Returns the arguments that crop a region of whole pixels."""
    start, shape = (fn.cast(value, dtype=types.INT32) for value in (start, extent))
    return {"start": start, "shape": shape, "axes": (0, 1)}


def source_window(
    size: DataNode, region: Region, preprocess: Preprocess
) -> tuple[DataNode, DataNode]:
    """Returns the pixels that a region is resampled from, as float64 (2,) start and extent."""
    start, extent = region.start, region.extent
    if preprocess.crop.sampling == "crop_then_resize":
        return start, extent
    if preprocess.crop.sampling == "crop_and_pad":
        first = math.max(start, 0.0)
        return first, math.min(start + extent, size) - first
    step = extent / types.Constant(list(map(float, preprocess.image_size)), dtype=types.FLOAT)
    reach = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    if preprocess.antialias:
        reach = math.max(step, 1.0) * reach
    first = math.max(math.floor(start + step * 0.5 - 0.5 - reach), 0.0)
    end = start + extent - step * 0.5 - 0.5 + reach
    return first, math.min(math.ceil(end), size - 1.0) - first + 1.0
