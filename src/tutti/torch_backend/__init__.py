"""torch.distributed over shared memory and MPI: `torch.distributed.init_process_group("tutti")`."""

from typing import Final

NAME: Final = "tutti"
"""The name of the backend."""
