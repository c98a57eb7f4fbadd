"""Optimizers that torch does not have, one in each file: `tutti.optim.named` finds them by name."""
