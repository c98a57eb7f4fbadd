"""A loop of one's own that any launcher starts: prints what each rank sees of the others."""

import tutti

comm = tutti.init()
# In one piece: all ranks write to the same pipe.
print(f"{comm.rank} of {comm.size}: {tutti.total(float(comm.rank + 1))}\n", end="", flush=True)
