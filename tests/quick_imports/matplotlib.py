"""Stands before the real one while Keras is imported, which takes it if it can: half a second."""

import importlib
import sys
from pathlib import Path

keras = sys.modules.get("keras")
if keras and not hasattr(keras, "__version__"):
    raise ImportError("tests that plot by Keras leave this folder out of their path")
path = sys.path[:]
sys.path[:] = [folder for folder in path if Path(folder) != Path(__file__).parent]
del sys.modules["matplotlib"]
importlib.import_module("matplotlib")
sys.path[:] = path
