"""What records hold, and what of it would hurt training."""
