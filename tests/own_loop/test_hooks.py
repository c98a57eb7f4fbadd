"""Hooks on parameters that cannot be what they are in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.own_loop.loops.base import batches, net, sgd
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.experiments import dealing, own_loop


def _narrow(comm: Communicator) -> None:
    own_loop._job = dealing.OwnLoop(comm, dealing.Dealt(1, comm.size))
    model = net()
    model, optimizer = own_loop.distribute(model, sgd(model))
    model[2].bias.register_hook(lambda grad: grad.sum(0, keepdim=True))
    for inputs, targets in own_loop.shard(batches()):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_a_hook_that_changes_the_shape_of_a_gradient_is_refused(worlds: Worlds) -> None:
    """It would be stretched to the old shape in silence, as one that is added to it."""
    with pytest.raises(BadOption, match=r"\(1,\).*\(3,\)"):
        worlds.call(_narrow, 2)
