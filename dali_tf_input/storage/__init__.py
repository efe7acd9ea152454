"""Files and objects: written whole or not at all, read by ranges, copied."""
