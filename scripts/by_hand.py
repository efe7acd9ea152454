"""The training input as an experienced TensorFlow user writes it by hand: what the package's layers are measured against.

It does the same work as `Preprocess.for_training` on the tf.data backend (the accurate DCT too) and uses nothing of the
package but the spec's numbers.
"""

from dali_tf_input import InputSpec, ResizeRandomCrop


def make_dataset(tf, spec: InputSpec, *, batch_size: int):
    """Returns a dataset without end of (image float32 (batch_size, height, width, 3), label int64 (batch_size,))."""
    preprocess = spec.preprocess
    assert isinstance(preprocess.crop, ResizeRandomCrop)
    resize, crop_shape = preprocess.crop.resize, preprocess.image_shape
    # Constants of the full shape, because broadcasting over the channels is slow in TensorFlow.
    mean = tf.broadcast_to(preprocess.mean, crop_shape)
    std = tf.broadcast_to(preprocess.std, crop_shape)
    image_key, label_key = spec.dataset.image_key, spec.dataset.label_key

    def prepare(record):
        features = tf.io.parse_single_example(
            record, {image_key: tf.io.FixedLenFeature([], tf.string), label_key: tf.io.FixedLenFeature([], tf.int64)}
        )
        image = tf.io.decode_jpeg(features[image_key], channels=3, dct_method="INTEGER_ACCURATE")
        image = tf.image.resize(image, resize)
        image = tf.image.random_crop(image, crop_shape)
        image = tf.image.random_flip_left_right(image)
        image = (image - mean) / std
        return image, features[label_key]

    dataset = tf.data.TFRecordDataset(list(spec.dataset.files), num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(spec.buffer_size).repeat()
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
