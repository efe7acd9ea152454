"""The training input as an experienced user writes it by hand, for TensorFlow and for DALI.

What the package is measured against: decode the whole image, resize the whole image, crop, mirror,
normalize. The same work, and nothing of the package but the numbers of the spec (and the DCT).
"""

from typing import Any

import dali_tf_input as dti


def _refuse(crop: Any) -> dti.InputError:
    name = type(crop).__name__
    return dti.InputError(f"{name} is not written by hand: leave out the by_hand rows.")


def _make_layer(augmentation: Any) -> Any:
    """Returns Keras's layer for an augmentation."""
    from keras import layers

    match augmentation:
        case dti.augment.RandAugment(num_ops=num_ops, magnitude=magnitude):
            return layers.RandAugment((0, 255), num_ops=num_ops, factor=magnitude / 30)
        case dti.augment.RandomErasing(p=p, area_range=area_range):
            return layers.RandomErasing(factor=p, scale=area_range, value_range=(0, 255))
        case _:
            name = type(augmentation).__name__
            raise dti.InputError(f"{name} is not written by hand: leave out the by_hand rows.")


def make_dataset(spec: dti.InputSpec, *, batch_size: int) -> Any:
    """Returns an infinite dataset of images (batch_size, height, width, 3) and int64 labels."""
    import tensorflow as tf

    preprocess = spec.preprocess
    crop, size, shape = preprocess.crop, preprocess.image_size, preprocess.image_shape
    resizing = {"method": preprocess.interpolation, "antialias": preprocess.antialias}
    boxes = {"bounding_boxes": tf.zeros((1, 0, 4)), "use_image_if_no_bounding_boxes": True}
    # Constants of the full shape, because broadcasting over the channels is slow in TensorFlow.
    mean = tf.broadcast_to(preprocess.mean, shape)
    std = tf.broadcast_to(preprocess.std, shape)
    assert spec.label
    image_key, label_key = spec.records.image_key, spec.label.key
    keys = {image_key: tf.string, label_key: tf.int64}
    wanted = {key: tf.io.FixedLenFeature([], kind) for key, kind in keys.items()}

    def resize_and_crop(image: Any) -> Any:
        match crop:
            case dti.ResizeRandomCrop(resize=resize):
                return tf.image.random_crop(tf.image.resize(image, resize, **resizing), shape)
            case dti.RandomCrop():
                padded = tf.maximum(size, tf.shape(image)[:2])
                image = tf.image.resize_with_crop_or_pad(image, padded[0], padded[1])
                return tf.cast(tf.image.random_crop(image, shape), tf.float32)
            case dti.RandomResizedCrop():
                begin, extent, _ = tf.image.sample_distorted_bounding_box(
                    tf.shape(image),
                    area_range=crop.area_range,
                    aspect_ratio_range=crop.aspect_ratio_range,
                    max_attempts=crop.num_attempts,
                    **boxes,
                )
                return tf.image.resize(tf.slice(image, begin, extent), size, **resizing)
            case _:
                raise _refuse(crop)

    layers = [*map(_make_layer, preprocess.augment)]

    @tf.autograph.experimental.do_not_convert
    def prepare(record: Any) -> Any:
        features = tf.io.parse_single_example(record, wanted)
        image = tf.io.decode_jpeg(features[image_key], channels=3, dct_method="INTEGER_ACCURATE")
        image = resize_and_crop(image)
        for layer in layers:
            image = layer(tf.ensure_shape(image, shape), training=True)
        image = tf.image.random_flip_left_right(image)
        if preprocess.dtype == "uint8":
            image = tf.cast(tf.round(image), tf.uint8)
        else:
            image = tf.cast((image - mean) / std, preprocess.dtype)
        return image, features[label_key]

    dataset = tf.data.TFRecordDataset(list(spec.records.paths), num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(spec.buffer_size).repeat()
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def make_pipeline(spec: dti.InputSpec, *, batch_size: int, num_threads: int) -> Any:
    """Returns a DALI pipeline on the CPU, not yet built, with the same outputs."""
    from nvidia import dali
    from nvidia.dali import fn, types
    from nvidia.dali import tfrecord as dali_tfrecord

    assert spec.label
    preprocess, dataset, label_key = spec.preprocess, spec.records, spec.label.key
    if preprocess.augment:
        raise dti.InputError("Augmentation is not written by hand for DALI: leave the row out.")
    crop, size = preprocess.crop, preprocess.image_size
    dtypes = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}
    raw = preprocess.dtype == "uint8"
    resizing = {"antialias": preprocess.antialias, "dtype": types.UINT8 if raw else types.FLOAT}
    normal = {} if raw else {"mean": list(preprocess.mean), "std": list(preprocess.std)}
    pipeline = dali.Pipeline(batch_size=batch_size, num_threads=num_threads, device_id=None, seed=0)
    with pipeline:
        features = fn.readers.tfrecord(
            path=list(dataset.paths),
            index_path=[file.index_file for file in dataset.files],
            features={
                dataset.image_key: dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
                label_key: dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, -1),
            },
            random_shuffle=True,
            initial_fill=spec.buffer_size,
        )
        images = fn.decoders.image(
            features[dataset.image_key], output_type=types.RGB, adjust_orientation=False
        )
        match crop:
            case dti.ResizeRandomCrop(resize=resize):
                images = fn.resize(images, size=resize, **resizing)
            case dti.RandomResizedCrop():
                images = fn.random_resized_crop(
                    images,
                    size=size,
                    random_area=crop.area_range,
                    random_aspect_ratio=crop.aspect_ratio_range,
                    num_attempts=crop.num_attempts,
                    **resizing,
                )
            case dti.RandomCrop():
                pass
            case _:
                raise _refuse(crop)
        names = ("crop_pos_x", "crop_pos_y")
        position = {name: fn.random.uniform(range=(0.0, 1.0)) for name in names}
        images = fn.crop_mirror_normalize(
            images,
            crop=size,
            mirror=fn.random.coin_flip(probability=preprocess.mirror_probability),
            output_layout="HWC",
            dtype=dtypes[preprocess.dtype],
            **normal,
            out_of_bounds_policy="pad",  # of images that are smaller than the crop
            **position,
        )
        pipeline.set_outputs(images, features[label_key])
    return pipeline
