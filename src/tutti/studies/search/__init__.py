"""Searching for the best options of a training run."""
