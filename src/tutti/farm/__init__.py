"""Many trainings at once on the same ranks: jobs run on blocks of ranks that are started once."""
