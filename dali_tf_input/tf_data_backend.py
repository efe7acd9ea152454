"""The tf.data backend: the same records and the same pixels as the DALI backend, by TensorFlow's own operations."""

import tensorflow as tf

from dali_tf_input.manifest import read_index
from dali_tf_input.options import AUTOTUNE, TfDataOptions
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import CenterCrop, DatasetSpec, InputSpec, Preprocess, ResizeRandomCrop

_READ_BUFFER_BYTES = 1 << 20  # of each open file; tf.data's own default (256 KB) holds two ImageNet records


def build(spec: InputSpec, options: TfDataOptions, *, batch_size: int, shard: Shard) -> tf.data.Dataset:
    """Builds the dataset of one shard, in the order the data travels.

    Args:
      spec: what comes out.
      options: how it is made.
      batch_size: images in each batch; the shard holds at least as many records.
      shard: which records are read.

    Returns:
      A dataset without end of (image, label): image float32 (batch_size, *spec.preprocess.image_shape), label int64
      (batch_size,). Each pass over the shard serves every record of it once; a batch may hold the end of one and the start of
      the next. With `order` "buffer" the files of the shard are read in a new random order each pass, `num_parallel_reads` of
      them at a time, before their records enter the buffer.
    """
    preprocess = spec.preprocess
    features = {
        spec.dataset.image_key: tf.io.FixedLenFeature((), tf.string),
        spec.dataset.label_key: tf.io.FixedLenFeature((), tf.int64),
    }

    @tf.autograph.experimental.do_not_convert
    def prepare(position: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(record, features)
        # Three numbers in [0, 1) for this image, a function of (seed, shard, position in the stream) alone: a parallel map
        # calls in no fixed order, so a generator with a state would not repeat.
        numbers = tf.random.stateless_uniform((3,), seed=tf.stack([seed, position]))
        label = parsed[spec.dataset.label_key]
        if spec.dataset.label_offset:
            label -= spec.dataset.label_offset
        return prepare_image(parsed[spec.dataset.image_key], numbers, preprocess), label

    seed = tf.constant(spec.seed * shard.num_shards + shard.shard_id, tf.int64)
    dataset = _read(spec, options, shard).repeat().enumerate()
    if options.num_parallel_calls == 1:
        dataset = dataset.map(prepare)
    else:
        dataset = dataset.map(prepare, num_parallel_calls=options.num_parallel_calls)
    dataset = dataset.batch(batch_size, drop_remainder=True)
    if options.prefetch_batches != 0:
        dataset = dataset.prefetch(options.prefetch_batches)
    tf_options = tf.data.Options()
    if not options.autotune:
        tf_options.autotune.enabled = False
        tf_options.experimental_optimization.map_parallelization = False
    return dataset.with_options(tf_options)


def prepare_image(encoded: tf.Tensor, numbers: tf.Tensor, preprocess: Preprocess) -> tf.Tensor:
    """Makes of one encoded image what the model sees.

    Args:
      encoded: a scalar string, the bytes of a JPEG (or PNG) file.
      numbers: float32 (3,) in [0, 1): they choose the crop's top, its left edge and whether to mirror, in this order.
      preprocess: what to do.

    Returns:
      float32 of shape `preprocess.image_shape`.
    """
    image = decode_image(encoded)
    height, width = preprocess.image_size
    size, top, left = _resize_and_position(tf.shape(image)[:2], numbers, preprocess)
    image = tf.image.resize(image, size, method="bilinear", antialias=preprocess.antialias)
    image = tf.slice(image, [top, left, 0], [height, width, 3])
    if preprocess.mirror_probability == 1:
        image = tf.reverse(image, [1])
    elif preprocess.mirror_probability > 0:
        image = tf.cond(numbers[2] < preprocess.mirror_probability, lambda: tf.reverse(image, [1]), lambda: image)
    # With a constant for each element: to broadcast three numbers over an image takes TensorFlow a quarter of all the work.
    shape = (height, width, 3)
    image = (image - tf.broadcast_to(preprocess.mean, shape)) * tf.broadcast_to(1 / tf.constant(preprocess.std), shape)
    if preprocess.layout == "CHW":
        image = tf.transpose(image, [2, 0, 1])
    return tf.ensure_shape(image, preprocess.image_shape)


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes a JPEG or PNG, a scalar string, to uint8 RGB (height, width, 3)."""
    # INTEGER_ACCURATE is the DCT that DALI's CPU decoder uses too: both backends decode to the same bits.
    return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


def _resize_and_position(shape: tf.Tensor, numbers: tf.Tensor, preprocess: Preprocess) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the size (height, width) to resize an image of `shape` to, and the top and left edge of the crop in it."""
    match preprocess.crop:
        case ResizeRandomCrop(resize=resize):
            margins = [full - part for full, part in zip(resize, preprocess.image_size, strict=True)]
            top, left = (tf.cast(numbers[axis] * (margin + 1), tf.int32) for axis, margin in enumerate(margins))
            return tf.constant(resize), top, left
        case CenterCrop(resize_shorter=resize_shorter):
            scale = resize_shorter / tf.reduce_min(shape)  # float64
            size = tf.cast(tf.floor(tf.cast(shape, tf.float64) * scale + 0.5), tf.int32)
            return size, (size[0] - preprocess.image_size[0]) // 2, (size[1] - preprocess.image_size[1]) // 2


def _read(spec: InputSpec, options: TfDataOptions, shard: Shard) -> tf.data.Dataset:
    """Returns the serialized records of a shard, once each, in the order that `spec` asks for."""
    files, offsets, counts = _fragments(spec.dataset, shard)
    dataset = tf.data.Dataset.from_tensor_slices((files, tf.constant(offsets, tf.int64), tf.constant(counts, tf.int64)))
    if spec.order == "sequential":
        return dataset.flat_map(_read_fragment)
    dataset = dataset.shuffle(len(files), seed=spec.seed, reshuffle_each_iteration=True)
    if options.num_parallel_reads == 1:
        dataset = dataset.flat_map(_read_fragment)
    else:
        dataset = dataset.interleave(
            _read_fragment, cycle_length=options.num_parallel_reads, num_parallel_calls=AUTOTUNE, deterministic=True
        )
    return dataset.shuffle(spec.buffer_size, seed=spec.seed, reshuffle_each_iteration=True)


def _fragments(dataset: DatasetSpec, shard: Shard) -> tuple[list[str], list[int], list[int]]:
    """Returns the stretches of records that a shard reads: the file of each, the byte where it starts, how many records it has.

    Where nothing is left out of a file, its part of the shard is one stretch.
    """
    records = shard.records(dataset.num_records)
    files, offsets, counts = [], [], []
    first = 0  # the position, among all records, of the file's first
    for file, index_file, num_records, left_out in zip(
        dataset.files, dataset.index_files, dataset.records_per_file, dataset.left_out_per_file, strict=True
    ):
        start, stop = max(records.start - first, 0), min(records.stop - first, num_records)
        first += num_records
        if start >= stop:
            continue
        if start == 0 and not left_out:
            files.append(file)
            offsets.append(0)
            counts.append(stop)
            continue
        end = None  # the byte where the stretch ends so far
        for offset, size in read_index(index_file)[start:stop]:
            if offset == end:
                counts[-1] += 1
            else:
                files.append(file)
                offsets.append(offset)
                counts.append(1)
            end = offset + size
    return files, offsets, counts


@tf.autograph.experimental.do_not_convert
def _read_fragment(file: tf.Tensor, offset: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Reads `count` records of a file from a byte offset on, which `tf.data.TFRecordDataset` does not offer."""
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file], compression_type="", buffer_size=_READ_BUFFER_BYTES, byte_offsets=[offset]
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)
