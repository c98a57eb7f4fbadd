"""The errors of a process group, besides `PeerLost` and `CallsDiffer` of all communicators."""

from __future__ import annotations

from collections.abc import Iterable

from tutti.errors import TuttiError, UserError


class Absent(TuttiError, RuntimeError):
    """Ranks, numbered in the job, did not come within the time that the group, or the call, allows."""

    def __init__(self, what: str, ranks: Iterable[int], timeout_s: float) -> None:
        self.what, self.ranks, self.timeout_s = what, sorted(ranks), timeout_s
        who = f"rank{'s' if len(self.ranks) != 1 else ''} {', '.join(map(str, self.ranks))}"
        super().__init__(
            f"{what} timed out: {who} did not come within {timeout_s:g} s; see what {who} does instead, or "
            "give init_process_group a longer timeout"
        )

    def __reduce__(self) -> tuple[type, tuple[str, list[int], float]]:
        return type(self), (self.what, self.ranks, self.timeout_s)


class Unusable(UserError, RuntimeError):
    """A call that no rank can make: an unknown operation, or an unsuitable device or argument."""


class Closed(TuttiError, RuntimeError):
    """The group was destroyed, or failed before."""
