"""Whether parallel training follows sequential training."""
