"""The parameter centre: vectors of weights that all workers see, and the rule by which messages move them."""
