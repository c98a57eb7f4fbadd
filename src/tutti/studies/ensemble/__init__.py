"""Ensembles: which trained candidates to combine, how, and what that gains over the best of them."""
