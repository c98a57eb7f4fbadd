"""What runs have shown, from their records alone: no torch, no MPI, any machine."""
