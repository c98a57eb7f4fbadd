"""The rank for which all others wait. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tutti.records.run import RankRecord

OFTEN: Final = 0.6
"""The share of the steps in which a straggler comes last; of two equal ranks each does in half of them."""

UNEVEN: Final = 1.25
"""The ratio of the ranks' times from which on they differ in speed."""


@dataclass(frozen=True)
class Straggler:
    """A rank that comes last to the exchanges."""

    rank: int  # its number
    share: float  # of the steps in which it was the last one
    ratio: float  # of its time in a step to the other ranks'

    def __str__(self) -> str:
        return (
            f"rank {self.rank} arrives last in {self.share:.0%} of the steps, and takes {self.ratio:.1f} "
            "times as long as the others"
        )


def straggler(ranks: Sequence[Sequence[RankRecord]]) -> Straggler | None:
    """Find the rank that the others wait for, if it is always the same one."""
    # Ranks that never wait, or that hold one model together, are not compared.
    steps = sum(record.compared for record in ranks[0]) if len(ranks) > 1 else 0
    if not steps:
        return None
    last = [sum(record.last for record in records) for records in ranks]
    own = [sum(record.own_s * record.compared for record in records) / steps for records in ranks]
    rank = last.index(max(last))
    others = statistics.median(seconds for number, seconds in enumerate(own) if number != rank)
    found = Straggler(rank, last[rank] / steps, own[rank] / others if others > 0 else 1.0)
    return found if found.share >= OFTEN and found.ratio >= UNEVEN else None
