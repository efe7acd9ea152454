"""TFRecord files: their format, their contents, and the location of each record."""
