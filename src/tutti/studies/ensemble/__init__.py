"""Ensembles: the trained candidates to combine, how, and the gain over the best of them."""
