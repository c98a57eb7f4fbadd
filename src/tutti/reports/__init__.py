"""Reports of runs, from their records only: on any machine, without torch and MPI."""
