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

    start = StartStep()
    records = tf_data.read_records(
        spec, options, batch_size=batch_size, shard=shard, start_step=start
    )
    return tf_data.prepare_batches(records, cut, spec, options, batch_size=batch_size, shard=shard)


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
            images, region = dali_images.decode_images(
                encoded,
                uniforms,
                preprocess,
                decode=decode,
                device=dali.decoder_device(options),
                hints=dali.decoder_hints(spec.dataset, options),
            )
            if stage != "decode":
                images = dali_images.resize_regions(images, region, preprocess, decode=decode)
            if stage == "normalize":
                images = dali_images.normalize_images(images, uniforms, preprocess)
            number = images[0, 0, 0]
        number = fn.reshape(fn.cast(number, dtype=types.FLOAT), shape=[])
        return (number.gpu() if options.device == "gpu" else number,)

    pipeline = partial(
        dali.make_pipeline,
        define,
        options,
        batch_size=batch_size,
        shard=shard,
        device_id=device_id,
        seed=spec.seed,
    )
    return dali.make_dataset(
        pipeline,
        [((batch_size,), tf.float32)],
        spec,
        options,
        batch_size=batch_size,
        shard=shard,
        start_step=StartStep(),
        device_id=device_id,
    )
