"""The files that a run leaves behind, read and written here alone. Needs neither torch nor MPI."""
