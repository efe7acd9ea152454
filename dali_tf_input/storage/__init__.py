"""Files and stored objects: atomic writes, reads of byte ranges, and local copies."""
