"""Ranks inside one process, under a virtual clock."""
