"""DALI's own TFRecord reader, which serves order "buffer" on a GPU."""

import os
from functools import lru_cache

from nvidia.dali import fn, types
from nvidia.dali import tfrecord as dali_tfrecord
from nvidia.dali.data_node import DataNode

from dali_tf_input.backends.stream import Stream
from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.records.labels import ClassLabel
from dali_tf_input.records.records import Records
from dali_tf_input.spec.balance import is_label_of_index
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import DaliOptions
from dali_tf_input.storage.staging import make_process_folder, private_folder

_MOST_COPIED = 8  # sets of records whose indexes are copied for DALI's own reader


def can_use_dali_reader(spec: InputSpec, options: DaliOptions) -> bool:
    """Whether DALI's own reader is used: images and integer labels, order "buffer", on a GPU.

    Only where the index step has seen the label of every record: where one has none, DALI's reader
    serves -1 without an error.
    """
    label = spec.label
    is_plain = isinstance(label, ClassLabel) and not (label.vocabulary or label.one_hot)
    is_simple = (
        [*spec.outputs] == ["image", "label"]
        and is_label_of_index(spec.records, label)
        and not (spec.preprocess.augment or spec.mix or spec.records.other_image_keys)
    )
    return options.device == "gpu" and spec.order == "buffer" and is_plain and is_simple


def define_reader(stream: Stream, options: DaliOptions) -> dict[str, DataNode]:
    """Defines DALI's reader for a shard; returns encoded images and converted labels."""
    spec, shard = stream.spec, stream.shard
    records, label = spec.records, spec.label
    assert isinstance(label, ClassLabel)
    number = dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, -1)
    size_keys = SIZE_KEYS if records.stores_pixels else ()
    indexes = hold_indexes(records)
    features = fn.readers.tfrecord(
        path=[*indexes],
        index_path=[*indexes.values()],
        features={
            records.image_key: dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
            **dict.fromkeys((str(label.key), *size_keys), number),
        },
        random_shuffle=spec.order == "buffer",
        initial_fill=spec.buffer_size,
        shard_id=shard.shard_id,
        num_shards=shard.num_shards,
        stick_to_shard=True,
        dont_use_mmap=options.read_mode != "mmap",
        use_o_direct=options.read_mode == "direct",
        read_ahead=options.read_ahead,
        name="reader",
    )
    images = features[records.image_key]
    if size_keys:
        channels = types.Constant([3], dtype=types.INT64)
        shape = fn.cat(*(features[key] for key in size_keys), channels)
        images = fn.reshape(images, shape=fn.cast(shape, dtype=types.INT32), layout="HWC")
    labels = fn.reshape(features[label.key], shape=[])
    if label.offset:
        labels = fn.cast(labels - label.offset, dtype=types.INT64)
    return {"image": images, "label": labels}


def hold_indexes(records: Records) -> dict[str, str]:
    """Copies the indexes to a folder that is removed when the process ends.

    DALI reads them again for each iterator: a missing index would end the process, and a truncated
    one would lose records without an error.

    Returns:
      The path of the copied index for each file with records in use; DALI rejects empty indexes.
    """
    copies = _copy_indexes(records)
    if not all(map(os.path.exists, copies.values())):  # someone emptied the folder
        _copy_indexes.cache_clear()
        copies = _copy_indexes(records)
    return copies


@lru_cache(_MOST_COPIED)
def _copy_indexes(records: Records) -> dict[str, str]:
    staging = make_process_folder(private_folder())
    copies = {}
    for number, file in enumerate(records.files):
        if not records.counts[number]:
            continue
        copies[file.path] = staging.path(f"{number}.idx")
        # Checked, and in DALI's number format: DALI stops silently at anything else.
        extents = records.index(number).tolist()
        with open(copies[file.path], "wb") as stream:
            stream.writelines(b"%d %d\n" % (offset, size) for offset, size in extents)
    return copies
