"""Kinds of files that hold a whole model, each known by the end of its name."""
