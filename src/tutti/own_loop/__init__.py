"""Training loops of the user's own: `tutti.distribute` and what stands behind it."""
