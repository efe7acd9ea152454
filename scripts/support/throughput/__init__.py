"""Measuring ways of feeding TensorFlow."""
