"""Cross-validation: the samples that each fold trains on, its scores, and the comparison of candidates."""
