"""The input of DALI pipelines: batches that tf.data reads and packs, or DALI's own reader."""

import math
import os
from collections.abc import Mapping

import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends import reading, tf_native
from dali_tf_input.backends.dali_operator import load_operator
from dali_tf_input.backends.dali_reader import define_reader
from dali_tf_input.backends.locations import find_locations, versions_of
from dali_tf_input.backends.parsing import (
    decode_mask,
    find_size,
    parse_images,
    parse_others,
    parse_sizes,
)
from dali_tf_input.backends.stream import Stream
from dali_tf_input.backends.tf_batch import PARALLEL_BATCHES, draw_rows, draw_uniforms
from dali_tf_input.backends.tf_images import prepare_mask
from dali_tf_input.backends.tf_mix import draw_mix
from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, TfDataOptions
from dali_tf_input.spec.primitives import ROW_SIZE

PACKED = "packed"  # the input of a pipeline that tf.data reads for
_TYPES = {"int64": types.INT64, "int32": types.INT32, "float32": types.FLOAT}


def pack_batches(stream: Stream, *, by_location: bool = False) -> tf.data.Dataset:
    """Reads and packs batches for DALI, whose dataset takes one dense tensor for each.

    Args:
      stream: what to read.
      by_location: whether batches say where in local files their images are, instead of holding
        them.

    Returns:
      A dataset of uint8 (k, size), see native/packed.h; k is less than `stream.shard_batch_size` in
      the last batch of an evaluation only, and the size differs.
    """
    options = TfDataOptions()
    pack = _Packer(stream, options, by_location=by_location)
    packed = reading.map_batches(
        stream,
        options,
        pack,
        num_calls=PARALLEL_BATCHES,
        num_threads=PARALLEL_BATCHES + pack.num_threads,
    )
    return packed.prefetch(PARALLEL_BATCHES)


class _Packer:
    """Packs batches of a stream, given their keys and records."""

    def __init__(self, stream: Stream, options: TfDataOptions, *, by_location: bool) -> None:
        self._stream, self._options, self._by_location = stream, options, by_location
        self.num_threads = len(os.sched_getaffinity(0))
        # Kept, as the reading shares them as long as they exist.
        self._locations = locations = find_locations(stream.spec.records)
        self._files = (locations.names, locations.versions, *locations.where)

    def __call__(
        self,
        keys: tf.Tensor,
        positions: tf.Tensor,
        records: tf.Tensor,
        from_index: tuple[tf.Tensor, ...],
    ) -> tf.Tensor:
        """Returns a packed batch; see `reading.MakeBatch`."""
        spec = self._stream.spec
        packed = self._pack(positions, records, tf.constant([], tf.string))
        batch, images = tf.cond(
            tf.equal(packed.num_refused, 0),
            lambda: (packed.batch, packed.images),
            lambda: self._pack_refused(positions, records),
        )
        values = parse_others(packed.examples, spec, from_index)
        uniforms = None
        for view, name in enumerate(spec.image_views):
            uniforms = draw_uniforms(self._stream, keys, view)
            values[f"uniforms of {name}"] = uniforms
            values[f"rows of {name}"] = draw_rows(self._stream, keys, view)
        if spec.records.stores_pixels:
            sizes = parse_sizes(packed.examples)
            values["sizes of images"] = tf.pad(sizes, [[0, 0], [0, 1]], constant_values=3)
        if spec.mask:
            values["mask"] = self._make_masks(values, images, uniforms)
        if spec.mix:
            size = self._stream.shard_batch_size
            values["mix of the batch"] = tf.repeat(draw_mix(self._stream, keys[0])[None], size, 0)
            values["partners of images"] = tf.range(size - 1, -1, -1)
        return tf_native.fill_packed(batch, self._to_bytes(values, tf.size(keys)))

    def _pack(
        self, positions: tf.Tensor, records: tf.Tensor, images: tf.Tensor
    ) -> tf_native.Packed:
        records_of = self._stream.spec.records
        return tf_native.pack_batch(
            self._files,
            positions,
            records,
            images,
            values_size=sum(size for *_, size in _list_values(self._stream.spec)),
            by_location=self._by_location,
            returns_images=self._stream.spec.mask is not None,  # their sizes are the masks'
            image_keys=records_of.image_keys,
            size_keys=SIZE_KEYS if records_of.stores_pixels else (),
            check_crc=self._options.check_crc,
            num_readers=self._options.num_parallel_reads,
            num_threads=self.num_threads,
        )

    def _pack_refused(
        self, positions: tf.Tensor, records: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Packs a batch whose images TensorFlow finds, as Examples of it are unusual."""
        spec = self._stream.spec
        if spec.has_fixed_order and not spec.records.is_remote:
            records = reading.make_read(self._options, *self._files)(positions)
        images = parse_images(records, spec)
        nothing = tf.constant([], tf.int64), tf.constant([], tf.string)
        return self._pack(*nothing, images).batch, images

    def _make_masks(
        self, values: Mapping[str, tf.Tensor], images: tf.Tensor, uniforms: tf.Tensor
    ) -> tf.Tensor:
        """Crops the masks of a batch, so that they are small, and the same on both backends."""
        spec = self._stream.spec
        if spec.records.stores_pixels:
            sizes = tf.pad(values["sizes of images"][:, :2], [[0, 0], [0, 1]], constant_values=1)
        else:
            size = tf.TensorSpec((3,), tf.int64)
            sizes = tf.map_fn(lambda one: find_size(one, spec), images, fn_output_signature=size)
        return tf.map_fn(
            lambda given: prepare_mask(decode_mask(given[0], given[1]), given[2], given[3], spec),
            (values["mask"], sizes, uniforms, values["rows of image"]),
            fn_output_signature=tf.TensorSpec(spec.preprocess.image_size, tf.int32),
            parallel_iterations=self.num_threads,
        )

    def _to_bytes(self, values: Mapping[str, tf.Tensor], count: tf.Tensor) -> tf.Tensor:
        """Returns the values of each image, uint8 (k, size), as `_list_values` lists them."""
        parts = [
            tf.reshape(tf.bitcast(values[name], tf.uint8), [count, size])
            for name, *_, size in _list_values(self._stream.spec)
        ]
        return tf.concat(parts, 1)


def _list_values(spec: InputSpec) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Lists (name, shape, type, bytes) of the values of an image in a packed batch."""
    views = spec.image_views
    values = [(name, *output) for name, output in spec.outputs.items() if name not in views]
    for name, preprocess in views.items():
        values.append((f"uniforms of {name}", (preprocess.num_uniforms,), "float32"))
        if preprocess.augment:
            shape = (preprocess.make_program().num_ops, ROW_SIZE)
            values.append((f"rows of {name}", shape, "float32"))
    if spec.mix:
        values += [("mix of the batch", (6,), "float32"), ("partners of images", (), "int32")]
    if spec.records.stores_pixels:
        values.append(("sizes of images", (3,), "int64"))
    return [
        (name, shape, dtype, math.prod(shape) * tf.as_dtype(dtype).size)
        for name, shape, dtype in values
    ]


def define_inputs(
    stream: Stream, options: DaliOptions, *, uses_dali_reader: bool
) -> dict[str, DataNode]:
    """Defines what a pipeline reads, by name: outputs, encoded images, and drawn numbers."""
    if not uses_dali_reader:
        return _unpack(stream.spec)
    shape = [stream.spec.preprocess.num_uniforms]
    uniforms = fn.random.uniform(range=[0.0, 1.0], shape=shape)
    return {**define_reader(stream, options), "uniforms of image": uniforms}


def _unpack(spec: InputSpec) -> dict[str, DataNode]:
    """Defines the input that `pack_batches` feeds; returns its values by name."""
    load_operator()
    packed = fn.external_source(name=PACKED, device="cpu", dtype=types.UINT8, ndim=1, batch=True)
    values, start = dict[str, DataNode](), tf_native.PLACE_SIZE
    for name, shape, dtype, size in _list_values(spec):
        value = fn.reinterpret(packed[start : start + size], dtype=_TYPES[dtype])
        values[name] = value if len(shape) == 1 else fn.reshape(value, shape=list(shape))
        start += size
    records = spec.records
    images = fn.dali_tf_input_images(
        packed,
        files=[*records.paths],
        versions=[str(number) for number in versions_of(records).ravel().tolist()],
        values_size=start - tf_native.PLACE_SIZE,
    )
    if records.stores_pixels:
        size = fn.cast(values["sizes of images"], dtype=types.INT32)
        images = fn.reshape(images, shape=size, layout="HWC")
    return {**values, "image": images}
