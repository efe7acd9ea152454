"""Imports what programs of tests need, without a look for garbage meanwhile, or later among it."""

import gc

gc.disable()

import keras  # noqa: E402, F401
import nvidia.dali.plugin.tf  # noqa: E402, F401
import tensorflow as tf  # noqa: E402, F401

gc.enable()
gc.freeze()
