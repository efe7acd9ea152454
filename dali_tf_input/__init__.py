"""TensorFlow input pipelines on NVIDIA DALI's TFRecord readers, with tf.data doing the same work.

Everything a user needs is here: ``from dali_tf_input import Records, load``. Importing
the package brings neither TensorFlow nor DALI; names that need them load them when they are first
used.
"""

import lazy_loader

__version__ = "0.2.0.dev0"

# The names and where they come from are in __init__.pyi, which type checkers and editors read too.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
