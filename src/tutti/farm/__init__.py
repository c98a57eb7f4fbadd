"""Many trainings at once on the same ranks: jobs flow over blocks of ranks that are started once."""
