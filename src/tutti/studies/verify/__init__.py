"""The comparison of parallel with sequential training."""
