"""One rank of each host looks at data; all ranks have what it found, the same on all hosts, or one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from tutti.comm.base import Communicator
from tutti.errors import BadData, UserError

T = TypeVar("T")


def agreed(
    comm: Communicator, look: Callable[[], T], what: str = "data", about: Callable[[T], object] = repr
) -> T:
    """Return what the first rank of this host has found (collective).

    Args:
        comm: all ranks.
        look: called by the first rank of each host.
        what: it looks at, for messages.
        about: what must be the same on all hosts. Texts have the shapes and types of tensors without memory,
            which cannot be compared themselves.

    Raises:
        UserError: a look ended with it; on every rank the first one.
        BadData: two hosts have found different things.
    """
    found: T | UserError | None = None
    if comm.node.rank == 0:
        try:
            found = look()
        except UserError as error:
            found = error  # the host's other ranks wait for it
    known = cast("T | UserError", comm.node.broadcast_object(found))
    every = comm.all_gather_objects(known if isinstance(known, UserError) else about(known))
    for rank, one in enumerate(every):
        if isinstance(one, UserError):
            raise one
        if one != every[0]:
            raise BadData(
                f"the hosts read different {what}: rank {rank} has others than rank 0; copy the same files "
                "to every host"
            )
    return cast("T", known)
