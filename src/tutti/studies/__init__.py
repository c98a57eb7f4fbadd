"""Studies over several runs: comparisons, plans, verification."""
