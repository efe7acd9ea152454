"""``python -m dali_tf_input.index``: the same as ``dali-tf-input index``."""

import sys

from dali_tf_input.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))
