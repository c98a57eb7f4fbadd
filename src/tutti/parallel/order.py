"""In which order the ranks of a pipeline work, schedule by schedule."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tutti.bubbles import BACKWARD, FORWARD, INPUTS, WEIGHTS
from tutti.parallel.layout import SCHEDULES

_KINDS: Final = {
    "FORWARD": FORWARD,
    "BACKWARD_INPUT": INPUTS,
    "BACKWARD_WEIGHT": WEIGHTS,
    "FULL_BACKWARD": BACKWARD,
}


@dataclass(frozen=True)
class Action:
    """One piece of work: a microbatch in a stage. `kind` is one of `tutti.bubbles.KINDS`."""

    stage: int
    kind: str
    microbatch: int


def order(schedule: str, ranks: int, microbatches: int, rank: int) -> list[Action]:
    """What one rank does with a batch, in order."""
    every = range(microbatches)
    if schedule == "gpipe":
        return [Action(rank, kind, at) for kind in (FORWARD, BACKWARD) for at in every]
    if schedule == "1f1b":
        ahead = min(microbatches, ranks - rank)
        found = [Action(rank, FORWARD, at) for at in range(ahead)]
        for at in every:
            found.append(Action(rank, BACKWARD, at))
            if at + ahead < microbatches:
                found.append(Action(rank, FORWARD, at + ahead))
        return found
    return _of_torch(schedule, ranks, microbatches, rank)


def _of_torch(schedule: str, ranks: int, microbatches: int, rank: int) -> list[Action]:
    """What torch's schedule would do; it asks nothing but numbers of itself for that."""
    kinds: dict[str, Any] = {
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
    rounds, stages = max(1, microbatches // ranks), SCHEDULES[schedule]
    numbers = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * stages,
        n_local_stages=stages,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    found = kinds[schedule]._calculate_single_rank_operations(numbers, rank)
    return [
        Action(one.stage_index, _KINDS[one.computation_type.name], one.microbatch_index)
        for one in found
        if one is not None and one.computation_type.name in _KINDS
    ]
