"""Train a neural network on every core, GPU and machine you have."""
