"""The input cut after each of its stages, to measure what each costs.

A cut pipeline serves one number per image that depends on nothing but the last stage, so that
nothing before that stage can be left out and what follows costs nothing.
"""

from functools import partial
from typing import Any

from dali_tf_input import DaliOptions, InputError, InputSpec, Shard, StartStep, TfDataOptions

STAGES = ("read", "parse", "decode", "resize", "normalize")


def make_dataset(
    stage: str, spec: InputSpec, options: DaliOptions | TfDataOptions, *, batch_size: int
) -> Any:
    """Returns an infinite dataset of float32 (batch_size,), cut after `stage`."""
    shared = {"batch_size": batch_size, "shard": Shard(0, 1)}
    if isinstance(options, TfDataOptions):
        return _make_by_tf_data(stage, spec, options, **shared)
    if stage == "read":  # by tf.data, which reads for DALI
        if not spec.has_fixed_order:
            raise InputError("DALI's own reader reads and parses in one step: there is no 'read'.")
        return _make_by_tf_data(stage, spec, TfDataOptions(), **shared)
    return _make_by_dali(stage, spec, options, **shared)


def _make_by_tf_data(
    stage: str, spec: InputSpec, options: TfDataOptions, *, batch_size: int, shard: Shard
) -> Any:
    import tensorflow as tf

    from dali_tf_input.backends import reading, tf_data, tf_images

    preprocess = spec.preprocess
    decode = options.resolve_decode(resizes_plainly=preprocess.resizes_plainly)

    @tf.autograph.experimental.do_not_convert
    def cut(key: Any, record: Any) -> Any:
        if stage == "read":
            return tf.cast(tf.strings.length(record), tf.float32)
        encoded, label = reading.parse_record(record, spec.dataset)
        if stage == "parse":
            return tf.cast(tf.cast(tf.strings.length(encoded), tf.int64) + label, tf.float32)
        seed = tf.stack([tf.constant(spec.seed, tf.int64), key])
        uniforms = tf.random.stateless_uniform((preprocess.num_uniforms,), seed=seed)
        if stage == "decode":
            whole = partial(tf_images.decode_image, encoded)
            if decode == "full":
                image = whole()
            else:
                part = partial(tf_images.decode_region, encoded, uniforms, preprocess)
                image = tf.cond(tf.io.is_jpeg(encoded), lambda: part()[0], whole)
        else:
            image = tf_images.resample_image(encoded, uniforms, preprocess, decode=decode)
        if stage == "normalize":
            image = tf_images.normalize_image(image, uniforms, preprocess)
        return tf.cast(image[0, 0, 0], tf.float32)

    shared: dict[str, Any] = {"batch_size": batch_size, "shard": shard}
    records = tf_data.read_records(spec, options, start_step=StartStep(), **shared)
    return tf_data.prepare_batches(records, cut, spec, options, **shared)


def _make_by_dali(
    stage: str, spec: InputSpec, options: DaliOptions, *, batch_size: int, shard: Shard
) -> Any:
    import tensorflow as tf
    from nvidia.dali import fn, types

    from dali_tf_input.backends import dali, dali_images

    device_id = 0 if options.device == "gpu" else None
    preprocess, decode = spec.preprocess, options.resolved_decode

    def define() -> Any:
        encoded, labels, _, uniforms = dali.define_inputs(spec, options, shard)
        if stage == "parse":
            number = encoded.shape()[0] + labels[0]
        else:
            device, hints = dali.decoder_device(options), dali.decoder_hints(spec.dataset, options)
            images, region = dali_images.decode_images(
                encoded, uniforms, preprocess, decode=decode, device=device, hints=hints
            )
            if stage != "decode":
                images = dali_images.resize_regions(images, region, preprocess, decode=decode)
            if stage == "normalize":
                images = dali_images.normalize_images(images, uniforms, preprocess)
            number = images[0, 0, 0]
        number = fn.reshape(fn.cast(number, dtype=types.FLOAT), shape=[])
        return (number.gpu() if options.device == "gpu" else number,)

    shared: dict[str, Any] = {"batch_size": batch_size, "shard": shard, "device_id": device_id}
    pipeline = partial(dali.make_pipeline, define, options, seed=spec.seed, **shared)
    served = [((batch_size,), tf.float32)]
    return dali.make_dataset(pipeline, served, spec, options, start_step=StartStep(), **shared)
