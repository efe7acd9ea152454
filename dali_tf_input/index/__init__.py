"""The index step: what `tfrecord2idx` does, with checks, a manifest, and no TensorFlow.

Command: ``dali-tf-input index --help``. From Python: `build_index`.
"""

from dali_tf_input.index.build import IndexFaultsError, IndexReport, build_index
from dali_tf_input.records.checks import Checks
from dali_tf_input.records.paths import find_files
from dali_tf_input.records.tfrecord import BadRecord

__all__ = ["BadRecord", "Checks", "IndexFaultsError", "IndexReport", "build_index", "find_files"]
