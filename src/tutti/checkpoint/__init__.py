"""Checkpoints of what all ranks know: copied while training pauses, and written while it goes on."""
