"""How DALI gets records: by its own reader, or packed by tf.data for fixed orders."""

import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali import tfrecord as dali_tfrecord
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends import reading
from dali_tf_input.backends.reading import Stream
from dali_tf_input.index.contents import SIDE_KEYS
from dali_tf_input.options import DaliOptions, TfDataOptions
from dali_tf_input.spec import InputSpec

PACKED = "packed"  # the input of a pipeline that tf.data reads for


def pack_records(stream: Stream) -> tf.data.Dataset:
    """Returns a dataset of one uint8 vector per image: DALI's dataset takes one tensor per input.

    The image, then label (8 bytes), sample weight (4 bytes), random numbers (4 bytes each), and for
    pixels their shape (12 bytes). Decoders stop at the end of an image; slicing it out would copy
    it, byte by byte in DALI's slice.
    """
    spec = stream.spec

    @tf.autograph.experimental.do_not_convert
    def pack(key: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
        encoded, label = reading.parse_record(record, spec.dataset)
        epoch, slot = reading.describe_key(key, stream)
        uniforms, _ = reading.draw_uniforms(spec, epoch, slot)
        weight = tf.ones(()) if spec.repeat else reading.weight_of(slot, stream.steps)
        tail = [label, weight, uniforms]
        if spec.dataset.stores_pixels:
            tail.append(tf.shape(encoded))
        else:
            encoded = tf.io.decode_raw(encoded, tf.uint8)
        parts = [encoded, *(tf.bitcast(part, tf.uint8) for part in tail)]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    records = reading.read_fixed_order(stream, TfDataOptions())
    packed = records.map(pack, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return packed.prefetch(stream.batch_size)


def define_inputs(
    stream: Stream, options: DaliOptions
) -> tuple[DataNode, DataNode, DataNode | None, DataNode]:
    """Defines what a pipeline reads: encoded images, labels as stored, weights, random numbers."""
    if stream.spec.has_fixed_order:
        return _unpack(stream.spec)
    encoded, labels = _read(stream, options)
    shape = [stream.spec.preprocess.num_uniforms]
    return encoded, labels, None, fn.random.uniform(range=[0.0, 1.0], shape=shape)


def _unpack(spec: InputSpec) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """Defines the input that `pack_records` packs."""
    packed = fn.external_source(name=PACKED, device="cpu", dtype=types.UINT8, ndim=1, batch=False)
    size = packed.shape()[0]
    end = size - 12 if spec.dataset.stores_pixels else size
    start = end - (12 + 4 * spec.preprocess.num_uniforms)
    labels = fn.reinterpret(packed[start : start + 8], dtype=types.INT64)
    weights = fn.reinterpret(packed[start + 8 : start + 12], dtype=types.FLOAT)
    uniforms = fn.reinterpret(packed[start + 12 : end], dtype=types.FLOAT)
    if spec.dataset.stores_pixels:
        shape = fn.reinterpret(packed[end:size], dtype=types.INT32)
        packed = fn.reshape(packed[0:start], shape=shape, layout="HWC")
    return packed, labels, fn.reshape(weights, shape=[]), uniforms


def _read(stream: Stream, options: DaliOptions) -> tuple[DataNode, DataNode]:
    """Defines the reader of a shard; returns encoded images and labels."""
    spec, shard, dataset = stream.spec, stream.shard, stream.spec.dataset
    number = dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, -1)
    sides = SIDE_KEYS if dataset.stores_pixels else ()
    features = fn.readers.tfrecord(
        path=list(dataset.files),
        index_path=reading.hold_indexes(dataset),
        features={
            dataset.image_key: dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
            **dict.fromkeys((dataset.label_key, *sides), number),
        },
        random_shuffle=spec.order == "buffer",
        initial_fill=spec.buffer_size,
        shard_id=shard.shard_id,
        num_shards=shard.num_shards,
        stick_to_shard=True,
        dont_use_mmap=options.read_mode != "mmap",
        use_o_direct=options.read_mode == "direct",
        read_ahead=options.read_ahead,
        name="reader",
    )
    images = features[dataset.image_key]
    if sides:
        shape = fn.cat(*(features[side] for side in sides), types.Constant([3], dtype=types.INT64))
        images = fn.reshape(images, shape=fn.cast(shape, dtype=types.INT32), layout="HWC")
    return images, features[dataset.label_key]
