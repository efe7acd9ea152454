"""Frozen descriptions of a model's input, which both backends read."""
