"""Ranks inside one process, with virtual clocks."""
