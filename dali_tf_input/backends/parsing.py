"""Parsing of records for both backends: image, label, mask, and other features."""

import contextlib
from functools import partial
from typing import Any

import tensorflow as tf

from dali_tf_input.backends.tf_images import decode_image
from dali_tf_input.backends.tf_orientation import find_orientation, turn
from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.records.labels import ClassLabel, Label, MultiHot, Values
from dali_tf_input.records.records import Records
from dali_tf_input.spec.input import InputSpec


def parse_record(
    record: tf.Tensor, spec: InputSpec, from_index: tuple[tf.Tensor, ...] = ()
) -> dict[str, tf.Tensor]:
    """Parses a serialized Example; returns its values by the names of `spec.outputs`.

    `from_index` contains the values of `spec.outputs_of_index`.

    The image is returned as stored: a scalar string if encoded, or uint8 (height, width, 3) if
    stored as pixels. The mask is uint8 (height, width, 1). Class weights are included.
    """
    features = _image_features(spec) | _other_features(spec)
    parsed = tf.io.parse_example(record[None], features)
    image = _find_image(parsed, spec)
    others = _prepare_others(parsed, spec, tuple(value[None] for value in from_index))
    values = {"image": image, **{name: value[0] for name, value in others.items()}}
    if spec.mask:
        values["mask"] = decode_mask(values["mask"], find_size(image, spec))
    return values


def parse_image(record: tf.Tensor, spec: InputSpec) -> tf.Tensor:
    """Returns the image of a serialized Example, as `parse_record`."""
    return _find_image(tf.io.parse_example(record[None], _image_features(spec)), spec)


def parse_images(records: tf.Tensor, spec: InputSpec) -> tf.Tensor:
    """Returns the images of serialized Examples as they are stored, string (k,)."""
    parsed = tf.io.parse_example(records, _image_features(spec))
    images = _select_images(parsed, spec)
    if not spec.records.stores_pixels:
        return images
    sizes = tf.stack([parsed[key] for key in SIZE_KEYS], 1)
    num_bytes = tf.cast(tf.strings.length(images), tf.int64)
    are_sizes = tf.reduce_all((sizes > 0) & (sizes < 1 << 30), 1)  # the product does not wrap
    fits = are_sizes & tf.equal(num_bytes, 3 * tf.reduce_prod(sizes, 1))
    wrong = tf.gather_nd(sizes, tf.where(~fits))
    with _require(tf.reduce_all(fits), "not the pixels of", wrong):
        return tf.identity(images)


def parse_sizes(records: tf.Tensor) -> tf.Tensor:
    """Returns the heights and widths of images that are stored as pixels: int64 (k, 2)."""
    features = dict.fromkeys(SIZE_KEYS, tf.io.FixedLenFeature((), tf.int64))
    parsed = tf.io.parse_example(records, features)
    return tf.stack([parsed[key] for key in SIZE_KEYS], 1)


def parse_others(
    records: tf.Tensor, spec: InputSpec, from_index: tuple[tf.Tensor, ...] = ()
) -> dict[str, tf.Tensor]:
    """Parses what is beside the image in serialized Examples, string (k,).

    Returns:
      The values of `parse_record`, (k, ...) each; a mask as it is stored, see `decode_mask`.
    """
    features = _other_features(spec)
    parsed = tf.io.parse_example(records, features) if features else {}
    return _prepare_others(parsed, spec, from_index)


def _image_features(spec: InputSpec) -> dict[str, Any]:
    dataset = spec.records
    default = "" if dataset.other_image_keys else None
    features = {key: tf.io.FixedLenFeature((), tf.string, default) for key in dataset.image_keys}
    if dataset.stores_pixels:
        features |= dict.fromkeys(SIZE_KEYS, tf.io.FixedLenFeature((), tf.int64))
    return features


def _select_images(parsed: dict[str, tf.Tensor], spec: InputSpec) -> tf.Tensor:
    """Returns the images that were parsed, string (k,): of several keys, the first with one."""
    images = parsed[spec.records.image_key]
    for key in spec.records.other_image_keys:
        images = tf.where(tf.equal(images, ""), parsed[key], images)
    return images


def _find_image(parsed: dict[str, tf.Tensor], spec: InputSpec) -> tf.Tensor:
    """Returns the image of the one Example that was parsed."""
    image = _select_images(parsed, spec)[0]
    if spec.records.stores_pixels:
        size = tf.stack([*(parsed[key][0] for key in SIZE_KEYS), 3])
        image = _reshape_pixels(image, size, "not the pixels of")
    return image


def _other_features(spec: InputSpec) -> dict[str, Any]:
    dataset, label = spec.records, spec.label
    features = {
        key: _stored_as(dataset, key, stored.shape, stored.padding is not None)
        for key, stored in spec.features.items()
    }
    if label and "label" not in spec.outputs_of_index:
        shape = label.shape if isinstance(label, Values) else ()
        varies = isinstance(label, MultiHot)
        features[label.key or ""] = _stored_as(dataset, label.key or "", shape, varies)
    if spec.mask:
        features[spec.mask.key] = tf.io.FixedLenFeature((), tf.string)
    return features


def _stored_as(dataset: Records, key: str, shape: tuple[int, ...], varies: bool) -> Any:
    dtype = tf.as_dtype(dataset.dtype_of(key))
    if varies:
        return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
    return tf.io.FixedLenFeature(shape, dtype)


def _prepare_others(
    parsed: dict[str, Any], spec: InputSpec, from_index: tuple[tf.Tensor, ...]
) -> dict[str, tf.Tensor]:
    """Converts what was parsed to the outputs of k Examples, (k, ...) each."""
    label = spec.label
    values: dict[str, tf.Tensor] = {}
    others = dict(zip(spec.outputs_of_index, from_index, strict=True))
    if "label" in others and isinstance(label, ClassLabel):
        values |= _prepare_class(others.pop("label") - label.offset, label, spec)
    elif label:
        values |= _prepare_label(parsed[label.key or ""], label, spec)
    values |= others
    if spec.mask:
        values["mask"] = parsed[spec.mask.key]
    for key, stored in spec.features.items():
        value = parsed[key]
        if stored.padding is not None:
            size = stored.size or 1
            holds = tf.reduce_all(value.row_lengths() <= size)
            with _require(holds, f"over {size} values in {key}"):
                value = value.to_tensor(stored.padding, shape=(None, size))
        values[key] = tf.reshape(value, (-1, *stored.shape))
    return values


def _prepare_label(value: Any, label: Label, spec: InputSpec) -> dict[str, tf.Tensor]:
    """Converts stored labels to their output, with the weights of their classes if there are."""
    if isinstance(label, Values):
        return {"label": tf.cast(value, tf.float32)}
    if isinstance(label, ClassLabel) and label.vocabulary:
        matches = tf.equal(value[:, None], tf.constant(label.vocabulary))
        is_known = tf.reduce_any(matches, 1)
        # A message must be UTF-8; records may hold anything.
        unknown = tf.strings.substr(tf.gather_nd(value, tf.where(~is_known)), 0, 50)
        shown = tf.strings.unicode_transcode(unknown, "UTF-8", "UTF-8")
        with _require(tf.reduce_all(is_known), "unknown label", shown):
            value = tf.argmax(matches, 1)
    elif label.offset:
        value -= label.offset
    if isinstance(label, MultiHot):
        classes = value.values
        holds = tf.reduce_all((classes >= 0) & (classes < label.num_classes))
        with _require(holds, "a label out of range", classes):
            ones = tf.ones_like(classes, tf.float32)
        zeros = tf.zeros(tf.stack([value.nrows(), label.num_classes]))
        zeros = tf.ensure_shape(zeros, (None, *label.shape))
        places = tf.stack([value.value_rowids(), classes], 1)
        return {"label": tf.tensor_scatter_nd_max(zeros, places, ones)}
    return _prepare_class(value, label, spec)


def _prepare_class(value: tf.Tensor, label: ClassLabel, spec: InputSpec) -> dict[str, tf.Tensor]:
    """Converts classes, from 0, to their output, with their weights if there are."""
    # Always checked: of files that were indexed at level "framing" only a sample is known.
    holds = value >= 0
    if label.num_classes:
        holds &= value < label.num_classes
    wrong = tf.gather_nd(value, tf.where(~holds)) + label.offset
    with _require(tf.reduce_all(holds), "a label out of range", wrong):
        value = tf.identity(value)
    values = {"label": value}
    if table := spec.class_weights():
        inside = tf.clip_by_value(value, 0, len(table) - 1)
        weight = tf.gather(tf.constant(table, tf.float32), inside)
        values["weight"] = tf.where(tf.equal(inside, value), weight, 1.0)
    if label.one_hot:
        one_hot = tf.one_hot(value, label.num_classes, *label.one_hot_values, dtype=tf.float32)
        values["label"] = one_hot
    return values


def _reshape_pixels(data: tf.Tensor, shape: tf.Tensor, problem: str) -> tf.Tensor:
    """Reshapes raw bytes to uint8 of `shape`, int64 (3,); their number must match."""
    pixels = tf.io.decode_raw(data, tf.uint8)
    fits = tf.equal(tf.size(pixels, tf.int64), tf.reduce_prod(tf.maximum(shape, 0)))
    with _require(fits, problem, shape):
        return tf.reshape(pixels, shape)


def _require(
    holds: tf.Tensor, problem: str, *shown: tf.Tensor
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose operations fail unless a condition holds; the error shows values.

    `tf.Assert` would compute the values for an error only, by two functions that it traces for
    each dataset. That takes ten times as long as to trace these few operations.
    """
    data = [f"corrupted record: {problem}", *shown]
    return tf.control_dependencies([tf.raw_ops.Assert(condition=holds, data=data)])


def find_size(image: tf.Tensor, spec: InputSpec) -> tf.Tensor:
    """Returns height, width and orientation of an image as `parse_record` returns it, int64 (3,).

    They are those of the stored image; the orientation is 1 if images are not turned.
    """
    if image.dtype == tf.uint8:
        return tf.concat([tf.shape(image, tf.int64)[:2], [1]], 0)

    def of_jpeg() -> tf.Tensor:
        return tf.io.extract_jpeg_shape(image, tf.int64)[:2]

    def of_png() -> tf.Tensor:  # its header: width and height, big endian, from byte 16 on
        sides = tf.io.decode_raw(tf.strings.substr(image, 16, 8), tf.int32, little_endian=False)
        return tf.reverse(tf.cast(sides, tf.int64), [0])

    def of_others() -> tf.Tensor:
        is_png = tf.equal(tf.strings.substr(image, 1, 3), "PNG")
        decode = partial(decode_image, image, upright=False)
        return tf.cond(is_png, of_png, lambda: tf.shape(decode(), tf.int64)[:2])

    size = tf.ensure_shape(tf.cond(tf.io.is_jpeg(image), of_jpeg, of_others), (2,))
    turns = spec.preprocess.apply_orientation
    orientation = tf.cast(find_orientation(image), tf.int64) if turns else tf.constant(1, tf.int64)
    return tf.concat([size, orientation[None]], 0)


def decode_mask(data: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Decodes a mask, which must be of its stored image's size, and turns it like the image.

    Args:
      data: the mask, a scalar string.
      size: what `find_size` returns for the image.

    Returns:
      uint8 (height, width, 1).
    """
    size, orientation = size[:2], tf.cast(size[2], tf.int32)
    problem = "not the mask of an image of"

    def decode() -> tf.Tensor:
        # A PNG of another bit depth or color type would decode to shades of gray, not to classes.
        holds = tf.equal(tf.strings.substr(data, 24, 2), b"\x08\x00")
        with _require(holds, "mask is not 8-bit gray"):
            mask = tf.io.decode_png(data, channels=1)
        fits = tf.reduce_all(tf.equal(tf.shape(mask, tf.int64)[:2], size))
        with _require(fits, problem, size):
            return tf.identity(mask)

    start = tf.strings.substr(data, 0, tf.minimum(4, tf.strings.length(data)))
    is_png = tf.equal(start, b"\x89PNG")
    shape = tf.concat([size, [1]], 0)
    mask = tf.cond(is_png, decode, lambda: _reshape_pixels(data, shape, problem))
    return turn(mask, orientation)
