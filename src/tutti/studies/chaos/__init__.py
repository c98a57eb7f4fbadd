"""Faults that are caused in a running training, by a seeded script, and what each of them costs."""
