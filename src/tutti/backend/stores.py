"""Where the ranks of one host meet before they share memory: torch's store in an anonymous file.

torch's TCPStore listens on all interfaces, whatever host it is given, and asks nobody who they are. A file of
this user without a name needs no port, and nothing of it is left behind.
See `tutti.comm.anonymous`, which makes the file.
"""

from __future__ import annotations

from torch.distributed import FileStore  # type: ignore[attr-defined]


def store_in(descriptor: int, size: int) -> FileStore:
    """The store in a file.

    Args:
        descriptor: of the file; to be kept open, as C++ may use the store for as long as the process lives.
        size: how many ranks meet there.
    """
    return FileStore(f"/proc/self/fd/{descriptor}", size)
