"""The index step: what `tfrecord2idx` does, with checks, a manifest, and no TensorFlow.

Command: ``python -m dali_tf_input.index --help``. From Python: `build_index`.
"""

from dali_tf_input.index.build import IndexFaultsError, IndexReport, build_index
from dali_tf_input.index.checks import Checks
from dali_tf_input.index.files import find_files
from dali_tf_input.index.tfrecord import BadRecord

__all__ = ["BadRecord", "Checks", "IndexFaultsError", "IndexReport", "build_index", "find_files"]
