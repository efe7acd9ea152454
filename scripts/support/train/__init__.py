"""Training a small network."""
