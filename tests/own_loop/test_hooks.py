"""Hooks on parameters that cannot be what they are in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.own_loop.loops.base import batches, net, sgd
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop, SampleCounts


def _narrow(comm: Communicator) -> None:
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    model = net()
    model, optimizer = distribute.distribute(model, sgd(model))
    model[2].bias.register_hook(lambda grad: grad.sum(0, keepdim=True))
    for inputs, targets in distribute.shard(batches()):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_a_hook_that_changes_the_shape_of_a_gradient_is_refused(worlds: Worlds) -> None:
    """It would be stretched to the old shape in silence, as one that is added to it."""
    with pytest.raises(BadOption, match=r"\(1,\).*\(3,\)"):
        worlds.call(_narrow, 2)
