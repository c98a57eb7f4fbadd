"""The files of a run; only this package reads and writes them. Needs neither torch nor MPI."""
