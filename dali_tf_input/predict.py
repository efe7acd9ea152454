"""From encoded images to predictions: by the preprocessing that a model was evaluated with, here or where it is served."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

from dali_tf_input.checks import BadImage, Checks
from dali_tf_input.dataset import check_gpu
from dali_tf_input.decoders import make_decode
from dali_tf_input.files import Path
from dali_tf_input.options import DaliOptions, Device, TfDataOptions, check_choice
from dali_tf_input.preprocess import CenterCrop, NoCrop, Preprocess
from dali_tf_input.staging import Staging
from dali_tf_input.tf_images import prepare_image
from dali_tf_input.tfrecord import InputError

_TRITON_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "uint8": "TYPE_UINT8"}


def iterate_batches(
    images: Sequence[bytes | Path],
    preprocess: Preprocess,
    options: DaliOptions | TfDataOptions | None = None,
    *,
    batch_size: int = 32,
    on_bad: Callable[[int, str], None] | None = None,
) -> Iterator[tuple[list[int], tf.Tensor]]:
    """Yields images, preprocessed, in batches; leaves out those that cannot be decoded.

    Args:
      images: encoded images, or paths of their files.
      preprocess: what to do, without chance: `CenterCrop` or `NoCrop`, mirror_probability 0 or 1.
      options: which backend; None is tf.data.
      batch_size: images in each batch, at least 1; the last batch holds the rest.
      on_bad: called with the position in `images` and the reason of each that is left out.

    Yields:
      (positions in `images`, `preprocess.dtype` (len(positions), *preprocess.image_shape)).

    Raises:
      InputError: `preprocess` is random, or the backend cannot do it.
    """
    _check_certain(preprocess)
    if batch_size < 1:
        raise InputError(f"`batch_size` must be at least 1, got {batch_size}.")
    by_dali = isinstance(options, DaliOptions)
    if isinstance(options, DaliOptions) and options.device == "gpu":
        check_gpu(0)
    decode = make_decode(Checks(decoder="dali" if by_dali else "tf_data"))
    prepare = (
        _prepare_by_dali(preprocess, options, batch_size) if isinstance(options, DaliOptions) else _prepare_by_tf(preprocess)
    )
    positions: list[int] = []
    batch: list[bytes] = []
    for position, image in enumerate(images):
        try:
            encoded = image if isinstance(image, bytes) else _read(image)
            decode(encoded)
        except (BadImage, OSError) as error:
            if on_bad:
                on_bad(position, f"{error.reason}: {error.detail}" if isinstance(error, BadImage) else str(error))
            continue
        positions.append(position)
        batch.append(encoded)
        if len(batch) == batch_size:
            yield positions, prepare(batch)
            positions, batch = [], []
    if batch:
        yield positions, prepare(batch)


def export_saved_model(model: keras.Model, preprocess: Preprocess, folder: Path) -> None:
    """Writes `model` as a TensorFlow SavedModel that takes encoded images, its preprocessing inside.

    A served model that is fed bytes cannot be fed otherwise than the one that was evaluated.

    Args:
      model: takes a batch of `preprocess.image_shape`.
      preprocess: see `iterate_batches`.
      folder: where the SavedModel goes. Its signature "serving_default" takes string (batch,), JPEG or PNG, and returns what
        `model` does.

    Raises:
      InputError: `preprocess` is random.
    """
    _check_certain(preprocess)
    archive = keras.export.ExportArchive()
    archive.track(model)
    prepare = _one_by_tf(preprocess)
    signature = tf.TensorSpec(preprocess.image_shape, tf.as_dtype(preprocess.dtype))

    def serve(encoded: tf.Tensor) -> tf.Tensor:
        return model(tf.map_fn(prepare, encoded, fn_output_signature=signature), training=False)

    archive.add_endpoint(name="serve", fn=serve, input_signature=[tf.TensorSpec((None,), tf.string, name="encoded")])
    archive.write_out(os.fspath(folder), verbose=False)


def export_triton(preprocess: Preprocess, folder: Path, *, device: Device = "gpu", max_batch_size: int = 64) -> None:
    """Writes the preprocessing as a model of Triton's DALI backend: ``<folder>/config.pbtxt`` and ``<folder>/1/model.dali``.

    Args:
      preprocess: see `iterate_batches`.
      folder: a new folder in Triton's model repository; its name is the model's.
      device: "gpu" or "cpu", where Triton runs it; "gpu" can be written on a machine with a GPU only.
      max_batch_size: largest batch that Triton makes, at least 1.

    Raises:
      InputError: `preprocess` is random or DALI cannot do it, or `folder` exists.
    """
    _check_certain(preprocess)
    check_choice("device", device, get_args(Device))
    if max_batch_size < 1:
        raise InputError(f"`max_batch_size` must be at least 1, got {max_batch_size}.")
    if preprocess.dtype not in _TRITON_TYPES:
        raise InputError(f"DALI makes no `dtype` '{preprocess.dtype}': use one of {', '.join(_TRITON_TYPES)}.")
    folder = os.path.abspath(folder)
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists already: name a new folder.")
    kind = "GPU" if device == "gpu" else "CPU"
    config = f"""name: "{os.path.basename(folder)}"
backend: "dali"
max_batch_size: {max_batch_size}
input [ {{ name: "encoded", data_type: TYPE_UINT8, dims: [ -1 ], allow_ragged_batch: true }} ]
output [ {{ name: "images", data_type: {_TRITON_TYPES[preprocess.dtype]}, dims: {list(preprocess.image_shape)} }} ]
instance_group [ {{ kind: KIND_{kind} }} ]
"""
    try:
        serialized = _define_pipeline(preprocess, DaliOptions(device=device), max_batch_size).serialize()
    except RuntimeError as error:
        raise InputError(
            f"DALI cannot define the pipeline here: {error} To write one for a GPU takes a machine with a GPU; or pass "
            "device='cpu'."
        ) from error
    with Staging(os.path.dirname(folder), "Name another folder.") as staging:
        made = staging.path("model")
        os.makedirs(os.path.join(made, "1"))
        with open(os.path.join(made, "1", "model.dali"), "wb") as stream:
            stream.write(serialized)
        with open(os.path.join(made, "config.pbtxt"), "w", encoding="utf-8") as text:
            text.write(config)
        staging.place("model", folder)


def _check_certain(preprocess: Preprocess) -> None:
    mirrors = preprocess.mirror_probability not in (0, 1)
    if mirrors or preprocess.auto_augment or not isinstance(preprocess.crop, CenterCrop | NoCrop):
        raise InputError(
            "`preprocess` must leave nothing to chance, as Preprocess.for_evaluation does: CenterCrop or NoCrop, no mirror, no "
            "`auto_augment`."
        )


def _read(path: Path) -> bytes:
    with open(os.path.expanduser(path), "rb") as stream:
        return stream.read()


def _prepare_by_tf(preprocess: Preprocess) -> Callable[[list[bytes]], tf.Tensor]:
    one = tf.function(_one_by_tf(preprocess), input_signature=[tf.TensorSpec((), tf.string)])
    return lambda batch: tf.stack([one(tf.constant(encoded)) for encoded in batch])


def _one_by_tf(preprocess: Preprocess) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function of one encoded image, a scalar string."""
    if preprocess.apply_orientation:
        raise InputError("TensorFlow reads no EXIF orientation: use DaliOptions, or turn the images first.")

    @tf.autograph.experimental.do_not_convert
    def prepare(encoded: tf.Tensor) -> tf.Tensor:
        return prepare_image(encoded, tf.zeros(preprocess.num_random), preprocess)

    return prepare


def _prepare_by_dali(preprocess: Preprocess, options: DaliOptions, batch_size: int) -> Callable[[list[bytes]], tf.Tensor]:
    pipeline = _define_pipeline(preprocess, options, batch_size)
    pipeline.build()

    def prepare(batch: list[bytes]) -> tf.Tensor:
        pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8) for encoded in batch])
        (images,) = pipeline.run()
        return tf.constant((images.as_cpu() if options.device == "gpu" else images).as_array())

    return prepare


def _define_pipeline(preprocess: Preprocess, options: DaliOptions, batch_size: int) -> Any:
    """Returns a DALI pipeline, not yet built, from a batch of encoded images, its input "encoded", to `preprocess`ed ones."""
    # Imported here because who predicts by TensorFlow needs no DALI.
    from dali_tf_input import dali_backend

    return dali_backend.define_serving_pipeline(preprocess, options, batch_size=batch_size)
