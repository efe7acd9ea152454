"""Indexes TFRecord files: `python -m dali_tf_input.index` in a clone."""

import sys

from dali_tf_input import command
from dali_tf_input.index.__main__ import FLAGS, main

if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
