"""Cross-validation: which samples each fold trains on, its scores, and what can be told from them."""
