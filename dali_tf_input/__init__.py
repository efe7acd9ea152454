"""TensorFlow input pipelines on NVIDIA DALI's TFRecord readers, with tf.data beside them doing the same from the same spec.

This module imports neither TensorFlow nor DALI and takes well under 0.1 s. The functions that need them stand in
`dali_tf_input.distribute` (``distribute``, ``enable_memory_growth``) and `dali_tf_input.dataset` (``make_dataset``).
"""

from dali_tf_input.benchmark import Spread, Window, measure
from dali_tf_input.checks import Checks
from dali_tf_input.files import find_files
from dali_tf_input.index import FaultsError, IndexReport, build_index
from dali_tf_input.options import AUTOTUNE, DaliOptions, TfDataOptions, load_options, save_options
from dali_tf_input.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    NoCrop,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
)
from dali_tf_input.sharding import Shard
from dali_tf_input.spec import DatasetSpec, InputSpec
from dali_tf_input.tfrecord import Fault, InputError

__version__ = "0.1.0"

__all__ = [
    "AUTOTUNE",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "Checks",
    "DaliOptions",
    "DatasetSpec",
    "Fault",
    "FaultsError",
    "IndexReport",
    "InputError",
    "InputSpec",
    "NoCrop",
    "Preprocess",
    "RandomCrop",
    "RandomResizedCrop",
    "ResizeRandomCrop",
    "Shard",
    "Spread",
    "TfDataOptions",
    "Window",
    "build_index",
    "find_files",
    "load_options",
    "measure",
    "save_options",
]
