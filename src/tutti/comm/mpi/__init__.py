"""Ranks on several hosts, over MPI."""
