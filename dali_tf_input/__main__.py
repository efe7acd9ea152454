"""``python -m dali_tf_input``: the same as ``dali-tf-input``."""

import sys

from dali_tf_input.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
