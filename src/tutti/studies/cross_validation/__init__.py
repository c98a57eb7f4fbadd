"""Cross-validation: the folds, their scores, and the comparison of candidates."""
