"""What TFRecord files are and hold, and where each record is."""
