"""Learning-rate schedulers that torch does not have, one in each file: `tutti.optim.schedules` finds them."""
