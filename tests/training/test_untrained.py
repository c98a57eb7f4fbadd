"""Parameters that are not trained, and move nevertheless."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.training.untrained import Untrained


def model() -> nn.Module:
    """A layer that is trained, one that follows, and one that stays as it is."""
    return nn.ModuleDict(
        {
            "trained": nn.Linear(2, 2),
            "follower": nn.Linear(2, 2).requires_grad_(False),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
        }
    )


def test_those_that_move_on_any_rank_meet_and_others_stay() -> None:
    def program(comm: Communicator) -> tuple[list[str], Tensor, Tensor]:
        torch.manual_seed(comm.rank)
        module = model()
        kept = module["frozen"].weight.clone()
        untrained = Untrained(Replica(module))
        module["follower"].bias.fill_(1.0)
        if comm.rank:  # Rank 0 may have had no sample.
            module["follower"].bias.fill_(1.0 + 3 * comm.rank)
            # As others than torch's functions do, which count no versions.
            module["follower"].weight.data = torch.full((2, 2), float(comm.rank))
        else:
            module["follower"].weight.zero_()
        with torch.no_grad():
            module["trained"].weight.fill_(comm.rank)
        untrained.meet(comm)
        assert torch.equal(module["frozen"].weight, kept)
        assert (module["trained"].weight == comm.rank).all()
        return sorted(untrained.moved()), module["follower"].weight.clone(), module["follower"].bias.clone()

    for moved, weight, bias in VirtualWorld(3).run(program):
        assert moved == ["follower.bias", "follower.weight"]
        assert torch.equal(weight, torch.ones(2, 2))
        assert torch.equal(bias, torch.full((2,), 4.0))


def test_what_nobody_moves_is_given_to_nobody() -> None:
    untrained = Untrained(Replica(model()))
    assert untrained.moved() == {}
