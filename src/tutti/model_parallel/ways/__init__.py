"""The ways in which the ranks of a team hold one model together: one file each. They need no torch."""
