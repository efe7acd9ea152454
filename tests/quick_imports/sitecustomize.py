"""Lets what tests start look for garbage less often, as conftest.py does: most of it imports
TensorFlow, which is many objects that stay.
"""

import gc

gc.set_threshold(20_000)
