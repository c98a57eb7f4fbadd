"""The states of ranks that stop, as other ranks are given them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from tutti.state import Saved, State, named


def saved_by(states: Sequence[State], ranks: int | None = None) -> list[Saved]:
    """Return what each rank of a run is given to go on from, after these states of all ranks.

    Args:
        states: of the ranks that stop, in order; all is copied.
        ranks: how many go on; None: as many.
    """
    states = deepcopy(list(states))
    joint, shared = named(state.joint for state in states), states[0].shared
    if ranks is None or ranks == len(states):
        found = [Saved(joint, named([state.alone]), shared, state.own) for state in states]
    else:
        found = [Saved(joint, None, shared, None)] * ranks
    return [deepcopy(saved) for saved in found]
