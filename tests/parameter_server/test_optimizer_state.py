"""Optimizers that keep their state in ways of their own, run by whoever brings a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import Point, Setting, assert_close, finishes, gradient, run, start
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.optim.sharded import ShardedOptimizer
from tutti.replica import Replica
from tutti.strategies import Downpour

LR, MU = 0.05, 0.9


class Own(optim.Optimizer):
    """Moves each parameter by `move`."""

    move: Callable[..., Tensor]

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": LR, "steps": 0, "sum": torch.zeros((), dtype=torch.float64)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.move(group, self.state[parameter], parameter.grad))


class Rebinding(Own):
    """Momentum, whose velocity is a new tensor in each step."""

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        state["velocity"] = MU * state.get("velocity", torch.zeros_like(grad)) + grad
        return group["lr"] * state["velocity"]


class Counting(Own):
    """A rate that falls with the number of steps, which is the param group's."""

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        return group["lr"] / group["steps"] * grad


class Summing(Own):
    """A rate that falls with a tensor that the param group has, another one after each step."""

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        group["sum"] = group["sum"] + 1
        return group["lr"] / group["sum"] * grad


class Forgetting(Own):
    """Keeps every other gradient, and nothing in between."""

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        last = state.get("last")
        state["last"] = grad.clone() if last is None else None
        return group["lr"] * (grad if last is None else grad + last)


class Late(Own):
    """Remembers something from its third step on."""

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        if state["count"] > 2:
            state["slow"] = grad.clone()
        return group["lr"] * grad


def by_hand(kind: type[Own], steps: int) -> Tensor:
    """One optimizer for all workers' gradients, each of which is computed at what its worker pulled."""
    parameter = nn.Parameter(start())
    optimizer = kind([parameter])
    pulled = {rank: start() for rank in range(3)}
    for rank, step in finishes(steps):
        parameter.grad = gradient(pulled[rank], rank, step)
        optimizer.step()
        pulled[rank] = parameter.detach().clone()
    return parameter.detach()


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Rebinding, Counting, Forgetting])
def test_what_an_optimizer_keeps_is_kept_for_all_workers(kind: type[Own], servers: int) -> None:
    found = run(
        Setting(Downpour(), lambda module: kind(module.parameters())), VirtualWorld(3, servers=servers)
    )
    assert_close(found[0].final, by_hand(kind, 12))


def test_tensors_of_a_param_group_are_shared_too() -> None:
    """Each of the two parameters adds one to the sum."""
    parameters = [nn.Parameter(start()[:3]), nn.Parameter(start()[3:])]
    optimizer = Summing(parameters)
    pulled = {rank: start() for rank in range(3)}
    for rank, step in finishes(12):
        g = gradient(pulled[rank], rank, step)
        parameters[0].grad, parameters[1].grad = g[:3], g[3:]
        optimizer.step()
        pulled[rank] = torch.cat([p.detach() for p in parameters])
    found = run(Setting(Downpour(), lambda module: Summing(module.parameters())))
    assert_close(found[0].final, torch.cat([p.detach() for p in parameters]))


def test_state_that_comes_later_is_refused() -> None:
    with pytest.raises(BadOption, match="Late keeps other things"):
        run(Setting(Downpour(), lambda module: Late(module.parameters())))


class Remembering(Own):
    """Counts in an attribute, or in what an attribute holds."""

    def __init__(self, parameters: Iterable[nn.Parameter], held: bool) -> None:
        super().__init__(parameters)
        self.count, self.seen, self.held = 0, [], held

    def move(self, group: dict, state: dict, grad: Tensor) -> Tensor:
        if self.held:
            self.seen.append(1)
        else:
            self.count += 1
        return group["lr"] / (self.count + len(self.seen)) * grad


@pytest.mark.parametrize(("held", "name"), [(False, "'count'"), (True, "'seen'")])
def test_an_optimizer_that_keeps_something_in_an_attribute_is_refused(held: bool, name: str) -> None:
    with pytest.raises(BadOption, match=f"Remembering changes its attribute {name}"):
        run(Setting(Downpour(), lambda module: Remembering(module.parameters(), held)))


def test_an_optimizer_with_step_hooks_is_refused() -> None:
    def make(module: nn.Module) -> optim.Optimizer:
        optimizer = optim.SGD(module.parameters(), lr=LR)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(BadOption, match="SGD has step hooks"):
        run(Setting(Downpour(), make))


def test_an_optimizer_that_may_use_several_param_groups_together_is_refused() -> None:
    def two_groups(module: nn.Module) -> optim.Optimizer:
        return Counting([{"params": [parameter]} for parameter in module.parameters()])

    with pytest.raises(BadOption, match="Counting, which is not one of torch's, has 2 param groups"):
        run(Setting(Downpour(), two_groups))


def test_an_option_that_the_user_changes_is_taken_beside_what_the_optimizer_counts() -> None:
    plain, flat = Point(), Point()
    optimizers = [Counting(module.parameters()) for module in (plain, flat)]
    replica = Replica(flat)
    sharded = ShardedOptimizer(optimizers[1], replica, [slice(0, len(replica.flats[0].weights))])
    for rate in (0.4, 0.4, 0.2, 0.2, 0.1):
        for module, optimizer in zip((plain, flat), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            for parameter in module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.fill_(1.0)
        optimizers[0].step()
        sharded.step()
    moved = plain().detach() - start()
    assert_close(moved, torch.full_like(moved, -(0.4 + 0.4 / 2 + 0.2 / 3 + 0.2 / 4 + 0.1 / 5)))
    assert_close(flat().detach(), plain().detach())


@pytest.mark.parametrize("made", [optim.LBFGS, optim.SparseAdam])
def test_an_optimizer_that_cannot_move_slices_is_refused(made: type[optim.Optimizer]) -> None:
    with pytest.raises(BadOption, match=made.__name__):
        run(Setting(Downpour(), lambda module: made(module.parameters())))
