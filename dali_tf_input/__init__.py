"""TensorFlow input pipelines on NVIDIA DALI's TFRecord readers, with tf.data beside them doing the same from the same spec.

This module imports neither TensorFlow nor DALI and takes well under 0.1 s. The functions that need them stand in
`dali_tf_input.distribute` (``distribute``, ``enable_memory_growth``) and `dali_tf_input.dataset` (``make_dataset``).
"""

from dali_tf_input.benchmark import Spread, Window, measure
from dali_tf_input.index import BuiltIndex, build_index, find_files, index_files_of, read_index
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import (
    AUTOTUNE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    DaliOptions,
    DatasetSpec,
    InputSpec,
    Preprocess,
    ResizeRandomCrop,
    TfDataOptions,
)
from dali_tf_input.tfrecord import InputError

__version__ = "0.1.0"

__all__ = [
    "AUTOTUNE",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "BuiltIndex",
    "CenterCrop",
    "DaliOptions",
    "DatasetSpec",
    "InputError",
    "InputSpec",
    "Preprocess",
    "ResizeRandomCrop",
    "Shard",
    "Spread",
    "TfDataOptions",
    "Window",
    "build_index",
    "find_files",
    "index_files_of",
    "measure",
    "read_index",
]
