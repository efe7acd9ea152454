"""Record input of DALI pipelines: records packed by tf.data, or DALI's own reader."""

import math

import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends import reading
from dali_tf_input.backends.dali_reader import define_reader
from dali_tf_input.backends.parsing import parse_record
from dali_tf_input.backends.stream import Stream, draw_uniforms, place_in_batch, seeds_of
from dali_tf_input.backends.tf_augment import draw_rows
from dali_tf_input.backends.tf_images import prepare_mask
from dali_tf_input.backends.tf_mix import draw_mix
from dali_tf_input.random import Stream as RandomStream
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, TfDataOptions
from dali_tf_input.spec.primitives import ROW_SIZE

PACKED = "packed"  # the input of a pipeline that tf.data reads for
_TYPES = {"int64": types.INT64, "int32": types.INT32, "float32": types.FLOAT}


def pack_records(stream: Stream) -> tf.data.Dataset:
    """Returns a dataset of one uint8 vector per image: DALI's dataset takes one tensor per input.

    A vector contains the image, then the values in `_list_tail`. The encoded image is not sliced
    out, because decoders stop at its end, and DALI's slice would copy it byte by byte. Masks are
    cropped here: they are small then, and identical on both backends.
    """
    spec = stream.spec

    @tf.autograph.experimental.do_not_convert
    def pack(key: tf.Tensor, record: tf.Tensor, *beside: tf.Tensor) -> tf.Tensor:
        values = parse_record(record, spec, beside)
        image = values["image"]
        for view, (name, preprocess) in enumerate(spec.image_views.items()):
            uniforms = draw_uniforms(stream, key, view)
            values[f"uniforms of {name}"] = uniforms
            if preprocess.augment:
                seeds = seeds_of(stream, RandomStream.AUGMENT, key, view)
                values[f"rows of {name}"] = draw_rows(preprocess.make_program(), seeds)
        if spec.mask:
            values["mask"] = prepare_mask(values["mask"], uniforms, spec)
        if spec.mix:
            values["mix"] = draw_mix(stream, key)
            place = place_in_batch(stream, key)
            values["partner"] = tf.cast(stream.shard_batch_size - 1 - place, tf.int32)
        values["image"] = tf.shape(image)
        parts = [image if spec.records.stores_pixels else tf.io.decode_raw(image, tf.uint8)]
        parts += [tf.bitcast(values[name], tf.uint8) for name, *_ in _list_tail(spec)]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    records = reading.read_records(stream, TfDataOptions())
    packed = records.map(pack, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if not spec.repeat:  # padded, because DALI drops a partial batch
        num_batches = -(-stream.num_images // stream.shard_batch_size)
        packed = packed.repeat().take(num_batches * stream.shard_batch_size)
    return packed.prefetch(stream.shard_batch_size)


def _list_tail(spec: InputSpec) -> list[tuple[str, tuple[int, ...], str]]:
    """Lists (name, shape, type) of the values after an image; for pixels, also their shape."""
    views = spec.image_views
    tail = [(name, *output) for name, output in spec.outputs.items() if name not in views]
    for name, preprocess in views.items():
        tail.append((f"uniforms of {name}", (preprocess.num_uniforms,), "float32"))
        if preprocess.augment:
            shape = (preprocess.make_program().num_steps, ROW_SIZE)
            tail.append((f"rows of {name}", shape, "float32"))
    if spec.mix:
        tail += [("mix", (6,), "float32"), ("partner", (), "int32")]
    return [*tail, *([("image", (3,), "int32")] if spec.records.stores_pixels else [])]


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
    """Defines the input that `pack_records` feeds; returns its values by name."""
    packed = fn.external_source(name=PACKED, device="cpu", dtype=types.UINT8, ndim=1, batch=False)
    values, size = {"image": packed}, packed.shape()[0]
    after = 0  # bytes that follow
    for name, shape, dtype in reversed(_list_tail(spec)):
        count = math.prod(shape) * tf.as_dtype(dtype).size
        part = packed[size - after - count : size - after if after else size]
        part = fn.reinterpret(part, dtype=_TYPES[dtype])
        values[name] = part if len(shape) == 1 else fn.reshape(part, shape=list(shape))
        after += count
    if spec.records.stores_pixels:
        pixels = packed[0 : size - after]
        values["image"] = fn.reshape(pixels, shape=values["image"], layout="HWC")
    return values
