"""The program of a rank that `tutti` has started by mpirun, for a server to fork."""

from tutti.launch.mpi_rank import main

if __name__ == "__main__":
    main()
