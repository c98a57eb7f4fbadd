"""Checkpoints of all ranks: copied while training pauses, and written while it continues."""
