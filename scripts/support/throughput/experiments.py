"""Other ways of feeding a GPU, which gpu_check.py tries; the best may become defaults."""

import contextlib
from typing import Any
from unittest.mock import patch

from dali_tf_input import DaliOptions, InputSpec

EXPERIMENTS = {
    "prefetch": "a batch ahead behind DALI's dataset",
    "on_cpu": "DALI's dataset on the CPU, its pipeline on the GPU; batches are copied down and up",
    "plain_upsampling": "nvJPEG's plain chroma upsampling, whose pixels differ",
    # Of fixed orders only.
    "prefetch_records": "records ahead on the GPU",
    "fed_on_gpu": "DALI's external source on the GPU, copied back for the decoder",
    "no_tail": "label and random numbers sliced off each image",
}
ANY_ORDER = ("prefetch", "on_cpu", "plain_upsampling")


def make_dataset(name: str, spec: InputSpec, options: DaliOptions, *, batch_size: int) -> Any:
    """Returns an infinite dataset of images and labels, made in another way."""
    import tensorflow as tf
    from nvidia.dali import fn

    from dali_tf_input.backends import dali, dali_reading
    from dali_tf_input.backends.reading import Stream

    stream = Stream(spec=spec, batch_size=batch_size, endless=True)
    tail = 8 + 4 * spec.preprocess.num_uniforms
    copy, unpack = tf.data.experimental.copy_to_device, dali_reading._unpack
    source, hints = fn.external_source, dali.decoder_hints

    def slice_off(*arguments: Any) -> dict[str, Any]:
        values = unpack(*arguments)
        return values | {"image": values["image"][0 : values["image"].shape()[0] - tail]}

    def upsample_plainly(*arguments: Any) -> dict[str, Any]:
        return hints(*arguments) | {"jpeg_fancy_upsampling": False}

    def copy_ahead(device: str) -> Any:
        return lambda records: copy(device)(records).prefetch(2 * batch_size)

    def feed_device(**arguments: Any) -> Any:
        return source(**arguments | {"device": options.device}).cpu()

    ways: dict[str, Any] = {
        "on_cpu": tf.device("CPU:0"),
        "plain_upsampling": patch.object(dali, "decoder_hints", upsample_plainly),
        "prefetch_records": patch.object(tf.data.experimental, "copy_to_device", copy_ahead),
        "fed_on_gpu": patch.object(fn, "external_source", feed_device),
        "no_tail": patch.object(dali_reading, "_unpack", slice_off),
    }
    with ways.get(name, contextlib.nullcontext()):
        dataset = dali.build(stream, options, 0 if options.device == "gpu" else None)
    return dataset.prefetch(1) if name == "prefetch" else dataset
