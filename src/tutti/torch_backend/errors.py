"""The errors of a process group, which both tutti and torch know."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import DistBackendError

from tutti.errors import PeerLost, TuttiError, UserError


class RankLost(PeerLost, DistBackendError):
    """Another rank of the group died, or left while this one waited for it."""


class Absent(TuttiError, DistBackendError):
    """Ranks did not come within the time that the group, or the call, allows.

    Args:
        what: what was waited for.
        ranks: those that did not come, numbered in the job.
        timeout_s: how long they had.
    """

    def __init__(self, what: str, ranks: Iterable[int], timeout_s: float) -> None:
        self.what, self.ranks, self.timeout_s = what, sorted(ranks), timeout_s
        who = f"rank{'s' if len(self.ranks) != 1 else ''} {', '.join(map(str, self.ranks))}"
        super().__init__(
            f"{what} timed out: {who} did not come within {timeout_s:g} s; see what {who} does instead, or "
            "give init_process_group a longer timeout"
        )

    def __reduce__(self) -> tuple[type, tuple[str, list[int], float]]:
        return type(self), (self.what, self.ranks, self.timeout_s)


class Mismatch(UserError, DistBackendError):
    """The ranks of a group called different things, or one thing with different sizes or dtypes."""


class Unusable(UserError, DistBackendError):
    """A call that no rank can make: an unknown operation, a device or an argument that does not fit."""


class Closed(TuttiError, DistBackendError):
    """The group was destroyed, or failed before."""
