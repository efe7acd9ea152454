"""Prediction and serving with the preprocessing that a model was evaluated with."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dali_tf_input.backends import tf_formats, tf_images, tf_native
from dali_tf_input.backends.build import check_gpu, import_dali
from dali_tf_input.backends.tf_views import make_plain, make_views
from dali_tf_input.errors import BatchSize, Count, InputError, Path, check, checked
from dali_tf_input.index.decoders import make_trial_decode
from dali_tf_input.records.checks import MAX_PIXELS, Checks, InvalidRecord
from dali_tf_input.records.class_names import LABELS_NAME
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions, Device, TfDataOptions
from dali_tf_input.spec.preprocess import Preprocess
from dali_tf_input.spec.primitives import ROW_SIZE
from dali_tf_input.storage.objects import local_path
from dali_tf_input.storage.staging import Staging
from dali_tf_input.training.models import check_inputs, check_pixels, names_of, saw_reduced_images
from dali_tf_input.training.strategies import check_keras

__all__ = [
    "denormalize",
    "export_saved_model",
    "export_triton",
    "iterate_batches",
    "make_normalization",
]

_logger = logging.getLogger("dali_tf_input")
_TRITON_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "uint8": "TYPE_UINT8"}


@checked
def iterate_batches(
    images: Sequence[bytes | Path],
    preprocess: Preprocess | InputSpec,
    options: DaliOptions | TfDataOptions | None = None,
    *,
    batch_size: BatchSize = 32,
    on_bad: Callable[[int, str], None] | None = None,
) -> Iterator[tuple[list[int], tf.Tensor]]:
    """Yields preprocessed images in batches; skips those that cannot be decoded.

    Examples:
      >>> for positions, images in serving.iterate_batches(paths, Preprocess.for_evaluation(224)):
      ...     scores = model.predict_on_batch(images)

    Args:
      images: encoded images, or paths of their files.
      preprocess: the preprocessing, without randomness, see `Preprocess.for_evaluation`; or a spec
        that has one, and no `transform` and `views`, which would be left out here.
      options: the backend's options; None selects tf.data. Of `TfDataOptions` those count that say
        how an image is made, `decode` and `kernel`.
      batch_size: images in each batch, at least 1; the last batch may be smaller.
      on_bad: called for each skipped image, with its position in `images` and the reason; None logs
        a warning instead.

    Yields:
      (positions in `images`, `preprocess.dtype` (len(positions), *preprocess.image_shape)).

    Raises:
      InputError: `preprocess` is random, or the backend does not support it.
    """
    preprocess = _find_preprocess(preprocess)
    if isinstance(options, DaliOptions):
        if options.device == "gpu":
            check_gpu(0)
        decode = make_trial_decode(Checks(decoder="dali"))
        prepare = _prepare_by_dali(preprocess, options, batch_size)
    else:
        decode = make_trial_decode(Checks(decoder="tf_data"))
        prepare = _prepare_by_tf(preprocess, options or TfDataOptions())
    positions: list[int] = []
    batch: list[bytes] = []
    for position, image in enumerate(images):
        try:
            encoded = image if isinstance(image, bytes) else _read(image)
            decode(encoded)
        except (InvalidRecord, OSError, ValueError) as error:  # the last one of "a\0b"
            words = str(error)
            if isinstance(error, InvalidRecord):
                words = f"{error.reason}: {error.detail}"
            if on_bad:
                on_bad(position, words)
            else:
                name = f"image {position}" if isinstance(image, bytes) else image
                _logger.warning("%s is skipped: %s", name, words)
            continue
        positions.append(position)
        batch.append(encoded)
        if len(batch) == batch_size:
            yield positions, prepare(batch)
            positions, batch = [], []
    if batch:
        yield positions, prepare(batch)


@checked
def export_saved_model(
    model: keras.Model,
    preprocess: Preprocess | InputSpec,
    folder: Path,
    *,
    max_pixels: Count = MAX_PIXELS,
    compare: bool = True,
) -> None:
    """Writes `model` as a TensorFlow SavedModel that takes and preprocesses encoded images.

    The served model then preprocesses its input exactly as in evaluation. If `fit` trained it in
    this program on classes with names, ``assets.extra/labels.txt`` has them.

    Examples:
      >>> serving.export_saved_model(model, Preprocess.for_evaluation(224), "served/1")

    Args:
      model: a model that takes a batch of `preprocess.image_shape`.
      preprocess: see `iterate_batches`.
      folder: a new folder for the SavedModel. Its signature "serving_default" takes JPEG, PNG, BMP
        or WebP files, string (batch,), and returns the outputs of `model`. Photos are turned
        upright, with TensorFlow's operations. If files are none of these, or have too many pixels,
        its error names their positions.
      max_pixels: the largest height times width that is decoded: a file of a few kilobytes may
        claim to be any size. A photo of a camera that makes more is shrunk before it is sent, or
        the model exported with a larger limit. The default is Pillow's.
      compare: whether `preprocess` must make pixels of the scale, channels and layout that the
        model was trained on in this program by `fit`.

    Raises:
      InputError: `preprocess` is random, or makes other pixels than in training; or `folder` exists
        or is a URL.
    """
    check_keras("export_saved_model")
    preprocess = _find_preprocess(preprocess)
    if not model.built:
        raise InputError("`model` has no variables yet: call it on one batch of images first.")
    check_inputs(model, {"image": preprocess.image_shape})
    if compare:
        check_pixels(model, preprocess)
        if saw_reduced_images(model):
            text = (
                "decode='scaled', which an exported model does not do: its pixels differ a little"
            )
            _logger.warning("The model was trained with %s.", text)
    folder = _new_folder(folder)
    archive = keras.export.ExportArchive()
    archive.track(model)
    # It is loaded where there is no library.
    prepare = _prepare_one_by_tf(preprocess, decode="full")
    signature = tf.TensorSpec(preprocess.image_shape, tf.as_dtype(preprocess.dtype))

    def serve(encoded: tf.Tensor) -> tf.Tensor:
        are_images = tf.map_fn(tf_formats.is_accepted, encoded, fn_output_signature=tf.bool)
        problem = "no JPEG, PNG, BMP or WebP that can be decoded, at these positions:"
        with tf.control_dependencies([_assert_all(are_images, problem)]):
            pixels = tf.map_fn(tf_formats.count_pixels, encoded, fn_output_signature=tf.int64)
        problem = f"images of more than {max_pixels:,} pixels, `max_pixels`, at these positions:"
        with tf.control_dependencies([_assert_all(pixels <= max_pixels, problem)]):
            images = tf.map_fn(prepare, encoded, fn_output_signature=signature)
        return model(images, training=False)

    encoded = tf.TensorSpec((None,), tf.string, name="encoded")
    archive.add_endpoint(name="serve", fn=serve, input_signature=[encoded])
    with Staging(os.path.dirname(folder), "Name another folder.") as staging:
        archive.write_out(staging.path("model"), verbose=False)
        names = names_of(model)
        if names and None not in names:
            extra = os.path.join(staging.path("model"), "assets.extra")
            os.makedirs(extra)
            with open(os.path.join(extra, LABELS_NAME), "xb") as stream:
                stream.write("".join(f"{name}\n" for name in names).encode())
        staging.commit("model", folder)


@checked
def export_triton(
    preprocess: Preprocess | InputSpec,
    folder: Path,
    *,
    device: Device = "gpu",
    max_batch_size: BatchSize = 64,
) -> None:
    """Writes the preprocessing as a model of Triton's DALI backend.

    That is ``<folder>/config.pbtxt`` and ``<folder>/1/model.dali``.

    Examples:
      >>> preprocess = Preprocess.for_evaluation(224)
      >>> serving.export_triton(preprocess, "model_repository/preprocess", device="cpu")

    Args:
      preprocess: see `iterate_batches`.
      folder: a new folder in Triton's model repository; its name is the model's.
      device: "gpu" or "cpu", where Triton runs it. "gpu" needs a GPU on this machine.
      max_batch_size: largest batch that Triton makes, at least 1.

    Raises:
      InputError: `preprocess` is random or not supported by DALI, or `folder` exists.
    """
    preprocess = _find_preprocess(preprocess)
    types = ", ".join(map(repr, _TRITON_TYPES))
    check(preprocess.dtype in _TRITON_TYPES, "dtype", f"one of {types}", repr(preprocess.dtype))
    folder = _new_folder(folder)
    dims = list(preprocess.image_shape)
    config = f"""name: "{os.path.basename(folder)}"
backend: "dali"
max_batch_size: {max_batch_size}
input [ {{ name: "encoded", data_type: TYPE_UINT8, dims: [ -1 ], allow_ragged_batch: true }} ]
output [ {{ name: "images", data_type: {_TRITON_TYPES[preprocess.dtype]}, dims: {dims} }} ]
instance_group [ {{ kind: KIND_{device.upper()} }} ]
"""
    try:
        pipeline = import_dali().define_serving_pipeline(
            preprocess, DaliOptions(device=device), batch_size=max_batch_size
        )
        serialized = pipeline.serialize()
    except RuntimeError as error:
        raise InputError(
            f"DALI cannot define the pipeline here: {error} A pipeline for a GPU needs a machine"
            " with a GPU; or pass device='cpu'."
        ) from error
    with Staging(os.path.dirname(folder), "Name another folder.") as staging:
        model_dir = staging.path("model")
        os.makedirs(os.path.join(model_dir, "1"))
        with open(os.path.join(model_dir, "1", "model.dali"), "wb") as stream:
            stream.write(serialized)
        with open(os.path.join(model_dir, "config.pbtxt"), "w", encoding="utf-8") as text:
            text.write(config)
        staging.commit("model", folder)


def _assert_all(conditions: tf.Tensor, problem: str) -> tf.Operation:
    """Returns an operation that fails with the positions at which a condition does not hold."""
    return tf.Assert(tf.reduce_all(conditions), [problem, tf.where(~conditions)[:, 0]])


def _new_folder(folder: Path) -> str:
    """Returns the absolute path of a folder; raises InputError if it exists, or is a URL."""
    folder = local_path("folder", folder)
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists already: name a new folder.")
    return folder


@checked
def make_normalization(preprocess: Preprocess) -> keras.layers.Layer:
    """Makes the Keras layer that normalizes uint8 images: (x - mean) / std per channel.

    Use it as the first layer of the model. Batches of uint8 then transfer a quarter of the bytes to
    the device.

    Examples:
      >>> layer = serving.make_normalization(Preprocess.for_training(224, dtype="uint8"))

    Raises:
      InputError: the layout is "CHW", and Keras is older than 3.14, which normalizes the last axis
        only.
    """
    version = tuple(map(int, keras.__version__.split(".")[:2]))
    if preprocess.layout == "CHW" and version < (3, 14):
        raise InputError(
            f"Keras {keras.__version__} cannot normalize layout 'CHW': pip install 'keras>=3.14',"
            " which needs Python 3.11, or use layout 'HWC'."
        )
    return keras.layers.Normalization(
        axis=-1 if preprocess.layout == "HWC" else 1,
        mean=preprocess.mean,
        variance=[std**2 for std in preprocess.std],
    )


@checked
def denormalize(images: Any, preprocess: Preprocess) -> npt.NDArray[np.float32]:
    """Converts images from `make_dataset` back to the range 0..255, for display.

    Examples:
      >>> images, labels = train.batch_at(0)
      >>> serving.denormalize(images, train.spec.preprocess).shape
      (8, 224, 224, 3)

    Args:
      images: `preprocess.dtype` (n, *preprocess.image_shape), a tensor or an array.
      preprocess: the preprocessing that produced them.

    Returns:
      float32 (n, height, width, channels), neither rounded nor clipped: with "bicubic" values may
      be outside 0..255.
    """
    try:
        values = np.asarray(images).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"`images` must be an array of numbers: {error}.") from error
    shape = ("n", *preprocess.image_shape)
    holds = values.shape[1:] == preprocess.image_shape and values.ndim == len(shape)
    check(holds, "images", f"of shape {shape}", values.shape)
    if preprocess.layout == "CHW":
        values = values.transpose(0, 2, 3, 1)
    if preprocess.dtype == "uint8":
        return values
    std, mean = (np.array(statistic, np.float32) for statistic in (preprocess.std, preprocess.mean))
    shown: npt.NDArray[np.float32] = values * std + mean
    return shown


def _find_preprocess(given: Preprocess | InputSpec) -> Preprocess:
    """Returns the preprocessing of a spec, or the given one; raises InputError if it is random."""
    preprocess = given
    if isinstance(given, InputSpec):
        left_out = [name for name in ("transform", "views") if getattr(given, name)]
        if left_out:
            raise InputError(
                f"`{left_out[0]}` of the spec is not done here, where images are predicted: make it"
                " a part of the model. Or pass spec.preprocess, to leave it out."
            )
        preprocess = given.preprocess
    assert isinstance(preprocess, Preprocess)
    mirrors = preprocess.mirror_probability not in (0, 1)
    if mirrors or preprocess.augment or preprocess.crop.is_random:
        raise InputError(
            "`preprocess` must not be random, as in Preprocess.for_evaluation: no random crop, no"
            " mirror probability between 0 and 1, no `augment`."
        )
    return preprocess


def _read(path: Path) -> bytes:
    with open(os.path.expanduser(path), "rb") as stream:
        return stream.read()


def _prepare_by_tf(
    preprocess: Preprocess, options: TfDataOptions
) -> Callable[[list[bytes]], tf.Tensor]:
    encoded = tf.TensorSpec((), tf.string)
    decode = options.resolve_decode(resizes_plainly=preprocess.resizes_plainly)
    if tf_native.uses_native(options.kernel) and tf_native.decodes(preprocess.crop):
        prepare = _prepare_one_natively(preprocess, decode=decode)
    else:
        prepare = _prepare_one_by_tf(preprocess, decode=decode)
    prepare_one = tf.function(prepare, input_signature=[encoded], autograph=False)
    return lambda batch: tf.stack([prepare_one(tf.constant(encoded)) for encoded in batch])


def _prepare_one_natively(
    preprocess: Preprocess, *, decode: tf_images.Decode
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function of one encoded image, a scalar string."""
    tf_images.check_supported(preprocess)
    is_gray = preprocess.channels == 1
    view = make_plain(preprocess, changes=False) if is_gray else preprocess
    limits = tf_native.limits_of(view, decode=decode)

    def prepare(encoded: tf.Tensor) -> tf.Tensor:
        uniforms = tf.zeros(preprocess.num_uniforms)
        (image,), _ = make_views(encoded, uniforms, tf.zeros((0, ROW_SIZE)), [view], **limits)
        return tf_images.normalize_image(image, uniforms, preprocess) if is_gray else image

    return prepare


def _prepare_one_by_tf(
    preprocess: Preprocess, *, decode: tf_images.Decode
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function of one encoded image, a scalar string."""
    tf_images.check_supported(preprocess)

    @tf.autograph.experimental.do_not_convert
    def prepare(encoded: tf.Tensor) -> tf.Tensor:
        uniforms = tf.zeros(preprocess.num_uniforms)
        return tf_images.prepare_image(encoded, uniforms, preprocess, decode=decode)

    return prepare


def _prepare_by_dali(
    preprocess: Preprocess, options: DaliOptions, batch_size: int
) -> Callable[[list[bytes]], tf.Tensor]:
    pipeline: Any = import_dali().define_serving_pipeline(
        preprocess, options, batch_size=batch_size
    )
    pipeline.build()

    def prepare(batch: list[bytes]) -> tf.Tensor:
        arrays = [np.frombuffer(encoded, np.uint8) for encoded in batch]
        pipeline.feed_input("encoded", arrays)
        (images,) = pipeline.run()
        return tf.constant((images.as_cpu() if options.device == "gpu" else images).as_array())

    return prepare
