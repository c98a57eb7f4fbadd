"""How to run a training on this machine, found out by measuring."""
