"""The input cut after each of its stages, to measure what each costs.

A cut pipeline serves one number per image that depends on nothing but the last stage, so that
nothing before that stage can be left out and what follows costs nothing.
"""

from functools import partial
from typing import Any

from dali_tf_input import DaliOptions, InputError, InputSpec, TfDataOptions

STAGES = ("read", "parse", "decode", "resize", "normalize")
TF_DATA_STAGES = STAGES[:2]


def make_dataset(
    stage: str, spec: InputSpec, options: DaliOptions | TfDataOptions, *, batch_size: int
) -> Any:
    """Returns an infinite dataset of float32 (batch_size,), cut after `stage`."""
    from dali_tf_input.backends import dali_reader
    from dali_tf_input.backends.stream import Stream

    stream = Stream(spec=spec, shard_batch_size=batch_size, endless=True)
    if isinstance(options, TfDataOptions):
        return _make_by_tf_data(stage, stream, options)
    if stage == "read":  # by tf.data, which reads for DALI
        if dali_reader.can_use_dali_reader(spec, options):
            raise InputError("DALI's own reader reads and parses in one step: there is no 'read'.")
        return _make_by_tf_data(stage, stream, TfDataOptions())
    return _make_by_dali(stage, stream, options)


def _make_by_tf_data(stage: str, stream: Any, options: TfDataOptions) -> Any:
    """Cuts after "read" or "parse"; on tf.data one operation does the rest."""
    import tensorflow as tf

    from dali_tf_input.backends import tf_data
    from dali_tf_input.backends.parsing import parse_record

    @tf.autograph.experimental.do_not_convert
    def cut(_: Any, record: Any) -> Any:
        if stage == "read":
            return tf.cast(tf.strings.length(record), tf.float32)
        values = parse_record(record, stream.spec)
        label = tf.cast(values["label"], tf.float32)
        return tf.cast(tf.strings.length(values["image"]), tf.float32) + label

    records = tf_data.read_records(stream, options)
    return tf_data.prepare_batches(records, cut, stream, options)


def _make_by_dali(stage: str, stream: Any, options: DaliOptions) -> Any:
    import tensorflow as tf
    from nvidia.dali import fn, types

    from dali_tf_input.backends import dali, dali_images, dali_reader, dali_reading

    device_id = 0 if options.device == "gpu" else None
    spec, preprocess = stream.spec, stream.spec.preprocess
    decode, uses_dali_reader = (
        options.resolved_decode,
        dali_reader.can_use_dali_reader(spec, options),
    )

    def define() -> Any:
        values = dali_reading.define_inputs(stream, options, uses_dali_reader=uses_dali_reader)
        encoded, uniforms = values["image"], values["uniforms of image"]
        if stage == "parse":
            number = encoded.shape()[0] + fn.reshape(values["label"], shape=[])
        else:
            device, hints = dali.decoder_device(options), dali.decoder_hints(spec, options)
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

    make = partial(dali.make_pipeline, define, stream, options, device_id)
    outputs = [((stream.shard_batch_size,), tf.float32)]
    return dali.make_dataset(make, outputs, stream, options, uses_dali_reader=uses_dali_reader)
