"""Making TFRecords of images."""
