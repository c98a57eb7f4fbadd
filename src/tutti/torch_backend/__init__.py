"""torch.distributed over shared memory and MPI: `torch.distributed.init_process_group("tutti")`."""
