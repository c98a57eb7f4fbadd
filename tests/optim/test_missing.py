"""A parameter that an update brings no gradient for is left as it is, as torch leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Solo, Strategy, Sync
from tutti.strategies.base import Clip
from tutti.strategies.placement import place

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Rebinding(Optimizer):
    """Momentum, whose velocity is a new tensor in each step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["velocity"] = 0.9 * state.get("velocity", 0.0) + parameter.grad
                    parameter.sub_(group["lr"] * state["velocity"])


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": partial(optim.Adam, lr=0.05),
    "adam, amsgrad": partial(optim.Adam, lr=0.05, amsgrad=True),
    "adam, foreach": partial(optim.Adam, lr=0.05, foreach=True),
    "adamw": partial(optim.AdamW, lr=0.05, weight_decay=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "nesterov, decay": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nadam": partial(optim.NAdam, lr=0.05),
    "adafactor": partial(optim.Adafactor, lr=0.05),
    "rebinding": Rebinding,
    "asgd": partial(optim.ASGD, lr=0.05),
}

USED = {
    "in turn": "ababababab",
    "one after the other": "aaaaabbbbb",
    "once": "baaaaaaaaa",
    "late": "aaaaaaabab",
    "never": "aaaaaaaaaa",
    "both, then one": "**bbb*bbab",
}
"""Which heads the updates use; *: both."""


class TwoHeads(nn.Module):
    """A body and two heads, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.a = nn.Linear(5, 2)
        self.b = nn.Linear(5, 2)

    def forward(self, inputs: Tensor, heads: str) -> Tensor:
        hidden = self.body(inputs).tanh()
        return torch.stack([self.get_submodule(head)(hidden) for head in heads]).sum(0)


def build() -> TwoHeads:
    torch.manual_seed(3)
    return TwoHeads().double()


def batch(step: int) -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def heads_of(used: str) -> str:
    return used.replace("*", "ab")


def backward(model: nn.Module, inputs: Tensor, heads: str, whole: int) -> None:
    (model(inputs, heads).square().sum() / whole).backward()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def by_torch(make: MakeOptimizer, used: str) -> Tensor:
    model = build()
    optimizer = make(model.parameters())
    for step, heads in enumerate(used):
        optimizer.zero_grad()
        backward(model, batch(step), heads_of(heads), 7)
        optimizer.step()
    return weights_of(model)


def by_strategy(comm: Communicator, strategy: Strategy, make: MakeOptimizer, used: str) -> Tensor:
    """Each update's samples are dealt over the ranks; where both heads are used, each rank uses one."""
    model = build()
    replica = place(model, comm, strategy.home)
    optimizer = make(model.parameters())
    worker = strategy.worker(replica, comm, optimizer, Clip())
    for step, heads in enumerate(used):
        inputs = batch(step)
        # The first rank has no sample in some updates, and so no gradient at all.
        own = [n for n in range(7) if n % comm.size == (comm.rank + step) % comm.size]
        if comm.size > 1 and step % 3 == 2:
            own = [n for n in range(7) if n % (comm.size - 1) == comm.rank - 1]
        worker.share = len(own) / 7
        if own:
            backward(model, inputs[own], heads_of(heads), 7)
        worker.step()
    worker.finish()
    comm.barrier()
    return weights_of(model)


@pytest.mark.parametrize("used", USED.values(), ids=USED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_follows_plain_torch(name: str, used: str) -> None:
    make = OPTIMIZERS[name]
    expected = by_torch(make, used)
    (found,) = VirtualWorld(1).run(by_strategy, Solo(), make, used)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


WORLDS = {
    "3": (3, None),
    "hosts of 1": (2, 1),
    "hosts of 2": (4, 2),
    "hosts of 2 and 1": (3, 2),
}


@pytest.mark.parametrize("used", USED.values(), ids=USED)
@pytest.mark.parametrize("name", ["adam", "momentum", "adamw", "nadam", "adafactor", "rebinding"])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_step_together_follow_plain_torch(world: str, name: str, used: str) -> None:
    make = OPTIMIZERS[name]
    expected = by_torch(make, used)
    for found in VirtualWorld(*WORLDS[world]).run(by_strategy, Sync(), make, used):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_a_gradient_of_zeros_is_not_a_missing_one() -> None:
    replica = Replica(model := build())
    backward(model, batch(0) * 0, "a", 7)
    assert replica.gradients.missing() == {model.b.weight, model.b.bias}


def test_a_gradient_written_into_the_vector_is_not_missing() -> None:
    replica = Replica(model := build())
    assert replica.gradients.missing() == set(model.parameters())
    (flat,) = replica.flats
    flat.grads[flat.spans[3]] = 1.0
    assert replica.gradients.missing() == set(model.parameters()) - {flat.parameters[3]}


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_gradient_of_zeros_on_one_rank_is_missing_on_none(hosts: tuple[int, ...]) -> None:
    """The momentum moves what has a gradient, of whatever size."""

    def train(comm: Communicator) -> list[float]:
        module = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
        replica = place(module, comm, Sync.home)
        worker = Sync().worker(replica, comm, optim.SGD(module.parameters(), lr=1.0, momentum=0.5), Clip())
        gradient = module[0].grad
        assert gradient is not None
        gradient.fill_(0.5)
        worker.step()
        if comm.rank == 0:
            gradient.zero_()
        worker.step()
        comm.barrier()
        return module[0].tolist()

    assert VirtualWorld(2, hosts).run(train) == [[-1.5, -1.5]] * 2
