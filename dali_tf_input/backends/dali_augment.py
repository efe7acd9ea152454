"""Augmentations with DALI's operations, equivalent to `tf_augment` and native/augment.h."""

from collections.abc import Callable
from typing import Any

import numpy as np
from nvidia.dali import fn, math, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from dali_tf_input.spec.augment import Program
from dali_tf_input.spec.colors import LUMA
from dali_tf_input.spec.primitives import ROW_SIZE, Floats, Primitive

PrimitiveFn = Callable[[DataNode], DataNode]


def apply_rows(
    images: DataNode, rows: DataNode, program: Program, size: tuple[int, int]
) -> DataNode:
    """Applies drawn rows to images, uint8 (height, width, 3), in a pipeline definition.

    Args:
      images: images of the same size, on the CPU or on a GPU.
      rows: float32 (program.num_ops, ROW_SIZE) for each image, on the CPU; see
        `tf_augment.draw_rows`.
      program: the program that the rows were drawn from.
      size: (height, width) of the images.
    """
    for op in range(program.num_ops):
        for is_chosen, operate in list_primitives(rows, program, op, size):
            images = apply_if(is_chosen, operate, images)
    return images


def apply_if(condition: DataNode, operate: PrimitiveFn, images: DataNode) -> DataNode:
    """Applies `operate` to the images for which `condition` is true; returns all images."""
    if condition:
        images = operate(images)
    return images


@do_not_convert
def list_primitives(
    rows: DataNode, program: Program, op: int, size: tuple[int, int]
) -> list[tuple[DataNode, PrimitiveFn]]:
    """Returns the primitives that an operation may be, each with the condition that selects it."""
    row = fn.reshape(fn.slice(rows, op, 1, axes=(0,)), shape=[ROW_SIZE])
    table = program.rows_of_op(op)
    primitives = []
    for primitive in Primitive:
        of_it = table[table[:, 0] == primitive]
        if primitive is not Primitive.NOTHING and len(of_it):
            operate = _make_primitive(primitive, row, of_it, size)
            primitives.append((row[0] == float(primitive), operate))
    return primitives


def _make_primitive(
    primitive: Primitive, row: DataNode, table: Floats, size: tuple[int, int]
) -> PrimitiveFn:
    @do_not_convert
    def operate(images: DataNode) -> DataNode:
        # Arguments of operations are on the CPU, what is computed with is where the images are.
        numbers = row.gpu() if images.device == "gpu" else row
        match primitive:
            case Primitive.COLOR:
                return _color(images, row)
            case Primitive.CONTRAST:
                return _contrast(images, numbers[1])
            case Primitive.SOLARIZE:
                return _choose(_float(images) < numbers[1], images, 255 - images)
            case Primitive.POSTERIZE:
                return images & fn.cast(numbers[1], dtype=types.UINT8)
            case Primitive.ADD:
                return _bytes(_float(images) + _float(images < 128) * numbers[1])
            case Primitive.AUTOCONTRAST:
                return _autocontrast(images)
            case Primitive.EQUALIZE:
                return fn.equalize(images)
            case Primitive.FILTER:
                return _bytes(fn.filter(_float(images), fn.reshape(numbers[1:10], shape=[3, 3])))
            case Primitive.BLUR:
                window = 2 * fn.cast(math.ceil(row[1] * 3.0), dtype=types.INT32) + 1
                return fn.gaussian_blur(images, sigma=row[1], window_size=window)
            case Primitive.WARP:
                return _warp(images, row, table)
            case _:
                return _erase(images, numbers, size, is_noisy=bool(table[:, 10:].any()))

    return operate


def _color(images: DataNode, row: DataNode) -> DataNode:
    matrix = fn.reshape(row[1:13], shape=[3, 4])
    colors = {"M": matrix[0:3, 0:3], "T": fn.reshape(matrix[0:3, 3:4], shape=[3])}
    return _bytes(fn.coord_transform(_float(images), **colors))


def _contrast(images: DataNode, factor: DataNode) -> DataNode:
    means = fn.reductions.mean(_float(images), axes=(0, 1), keep_dims=True)
    weights = _constant(np.array([[LUMA]], np.float32), images)
    mean = fn.reductions.sum(means * weights, axes=(0, 1, 2), keep_dims=True)
    return _bytes(mean + factor * (_float(images) - mean))


def _autocontrast(images: DataNode) -> DataNode:
    low = _float(fn.reductions.min(images, axes=(0, 1), keep_dims=True))
    high = _float(fn.reductions.max(images, axes=(0, 1), keep_dims=True))
    is_flat = _float(high == low)
    scale = (255.0 + is_flat * -254.0) / (high - low + is_flat)
    return _bytes((_float(images) - low) * scale + is_flat * low)


def _warp(images: DataNode, row: DataNode, table: Floats) -> DataNode:
    (fill,), (is_bilinear,) = np.unique(table[:, 7]), np.unique(table[:, 8])
    return fn.warp_affine(
        images,
        matrix=fn.reshape(row[1:7], shape=[2, 3]),
        fill_value=float(fill),
        interp_type=types.INTERP_LINEAR if is_bilinear else types.INTERP_NN,
        inverse_map=True,
    )


def _erase(
    images: DataNode, numbers: DataNode, size: tuple[int, int], *, is_noisy: bool
) -> DataNode:
    height, width = size
    x = _constant(np.arange(width, dtype=np.float32)[None, :, None], images)
    y = _constant(np.arange(height, dtype=np.float32)[:, None, None], images)
    inside = (x >= numbers[2]) & (x < numbers[4]) & (y >= numbers[1]) & (y < numbers[3])
    fill = fn.reshape(numbers[7:10], shape=[1, 1, 3])
    if is_noisy:
        noise = _noise(images, fn.cast(numbers[5], dtype=types.UINT32), size)
        fill = fill + fn.reshape(numbers[10:13], shape=[1, 1, 3]) * noise
    inside = _float(inside)
    return _bytes(_float(images) * (1.0 - inside) + fill * inside)


def _noise(images: DataNode, seed: DataNode, size: tuple[int, int]) -> DataNode:
    height, width = size
    across = 3 * np.arange(width)[None, :, None] + np.arange(3)
    down = 3 * width * np.arange(height)[:, None, None]
    hashed = _constant(across.astype(np.uint32), images) + _constant(down.astype(np.uint32), images)
    hashed = hashed + seed
    for divisor, factor in ((1 << 16, 0x85EBCA6B), (1 << 13, 0xC2B2AE35), (1 << 16, 1)):
        hashed = (hashed ^ (hashed // np.uint32(divisor))) * np.uint32(factor)
    parts = (hashed // np.uint32(1 << shift) for shift in (0, 8, 16, 24))
    total = sum(_float(part & np.uint32(255)) for part in parts)
    return (total - 510.0) / 147.8


def _choose(condition: DataNode, values: DataNode, others: DataNode) -> DataNode:
    chosen = _float(condition)
    return _bytes(_float(values) * chosen + _float(others) * (1.0 - chosen))


def _constant(values: Any, images: DataNode) -> DataNode:
    """Returns a constant that is where the images are."""
    return types.Constant(values, device=images.device)


def _float(images: DataNode) -> DataNode:
    return fn.cast(images, dtype=types.FLOAT)


def _bytes(images: DataNode) -> DataNode:
    return fn.cast(images, dtype=types.UINT8)  # it rounds and saturates
