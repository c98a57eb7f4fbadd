"""In a loop of one's own, too, a rank is named whose copy of the weights has changed by a bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.own_loop.loops.base import fit, net, samples
from tests.training.test_replica_check import flip
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption, ReplicasDiffer
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.origins import SampleCounts

HELD = {"weights": "weights/0.weight", "momentum": "optimizer/0.weight/momentum_buffer", "anchor": "anchor"}


def loop(comm: Communicator, what: str | None, strategy: str | None = None, every: int = 2) -> None:
    """Make six steps; on rank 1 a bit of something flips behind the third."""
    own = distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    model = net()
    # A host's ranks would divide the steps of this optimizer, but for `foreach`.
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    model, optimizer = distribute.distribute(model, optimizer, strategy, check_replicas=every)
    stepper = own.steppers[0]
    inputs, targets = samples().tensors
    for step in range(6):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
        if step == 2 and comm.rank == 1 and what is not None:
            if what == "momentum":
                flip(optimizer.state[next(iter(model.parameters()))]["momentum_buffer"])
            elif what == "anchor":
                flip(stepper.worker.replicated()[0].pieces[0].values)  # type: ignore[attr-defined]
            else:
                flip(next(iter(model.parameters())))


def run(world: VirtualWorld, *arguments: object, every: int = 2) -> None:
    """Run the loop on virtual ranks, in a thread of its own.

    These take turns inside of `backward()`, so that torch does not notice its end, and holds what it was for
    until the thread ends; after the interpreter has ended it cannot be let go of any more.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.run, partial(loop, every=every), *arguments).result()


@pytest.mark.parametrize(("what", "strategy"), [("weights", None), ("momentum", None), ("anchor", "diloco")])
def test_the_rank_whose_copy_has_changed_is_named(what: str, strategy: str | None) -> None:
    with pytest.raises(ReplicasDiffer, match=rf"^lost rank 1: '{HELD[what]}.*after step 4") as caught:
        run(VirtualWorld(3), what, strategy)
    assert caught.value.ranks == [1]


@pytest.mark.parametrize("strategy", [None, "diloco"])
def test_nobody_is_named_without_a_fault(strategy: str | None) -> None:
    run(VirtualWorld(3, ranks_per_host=2), None, strategy, every=1)


def test_steps_that_are_no_number_are_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(BadOption, match="check_replicas is -1"):
        distribute.distribute(model, torch.optim.SGD(model.parameters()), check_replicas=-1)
