"""Optimizers of somebody else's that keep things in attributes, and optimizers inside, go on as they were."""

from __future__ import annotations

import copy
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.checkpoint.encoding import decode, encode
from tutti.optim.attribute_memory import Stretches
from tutti.optim.state import held_by, load, lost_of, options_of
from tutti.state import State, saved_by

Closure = Callable[[], Tensor]


class Sam(Optimizer):
    """Sharpness-aware minimization, as its users write it."""

    def __init__(self, parameters: Iterable[nn.Parameter], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho, "lr": 0.01})
        self.base = optim.Adam(self.param_groups, lr=0.01)
        self.param_groups = self.base.param_groups

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        closure()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        self.base.step()


class Lookahead(Optimizer):
    """Slow weights by parameter and in a list, whose fast ones an inner optimizer moves."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.fast = optim.SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.fast.param_groups, {"lr": 0.1})
        self.slow: dict[nn.Parameter, Tensor] = {}
        self.moves: list[Tensor] = []
        self.count = (0, [torch.zeros(())])

    @torch.no_grad()
    def step(self, closure: Closure) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        self.fast.step()
        self.count = (self.count[0] + 1, [self.count[1][0] + 0.5])
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.count[0] % 3 == 1:
            self.moves = [self.slow.setdefault(p, p.clone()) - p for p in parameters]
        for parameter, move in zip(parameters, self.moves, strict=True):
            parameter.add_(move, alpha=0.1 / float(self.count[1][0]))


class History(Optimizer):
    """Like L-BFGS: lists of earlier gradients and moves, and the parameters themselves."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.parameters = self.param_groups[0]["params"]
        self.pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)
        self.by_length: dict[int, list[float]] = defaultdict(list)

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        closure()
        gradient = torch.cat([p.grad.flatten() for p in self.parameters])
        move = gradient + sum((old * float(old @ gradient) for old, _ in self.pairs), torch.zeros(()))
        self.pairs.append((gradient / (1 + gradient.norm()), move))
        self.by_length[len(self.pairs)].append(float(move.norm()))
        at, rate = 0, 0.1 / (1 + sum(map(len, self.by_length.values())))
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(move[at : at + parameter.numel()].view_as(parameter), alpha=rate)
                at += parameter.numel()


class ScheduleFree(Optimizer):
    """An average of the iterates, of which the group counts the weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "sum": 0.0})

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            group["k"] += 1
            group["sum"] += group["k"] ** 0.5
            with torch.no_grad():
                for p in group["params"]:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, group["k"] ** 0.5 / group["sum"])


class Decaying(Optimizer):
    """Another one with param groups of its own moves the weights, at a rate that falls."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        closure()
        self.inner.step()
        self.inner.param_groups[0]["lr"] *= 0.7


class Grouped(Optimizer):
    """Keeps in its state, besides that of parameters, what belongs to the numbers of groups, and to pairs."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Closure) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        state = cast("dict[Any, Any]", self.state)
        for number, group in enumerate(self.param_groups):
            steps = state.setdefault(number, {"steps": 0})
            norms = state.setdefault((number, "norms"), [])
            rates = state.setdefault(f"{number}/rate", {"sum": torch.zeros(())})
            steps["steps"] += 1
            norms.append(float(sum(p.grad.norm() for p in group["params"])))
            rates["sum"] += 1 / steps["steps"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(rates["sum"]) / (steps["steps"] + sum(norms)))


class Averaging(Optimizer):
    """Keeps the model that it moves, and another one that follows it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 0.1})
        self.module, self.average = module, copy.deepcopy(module)


class Windowed(Optimizer):
    """Keeps the sum of each of two kinds of steps, writes to one of them at a time, and has another optimizer
    know both."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = ScheduleFree(self.param_groups)
        self.sums, self.now, self.inner.sums, self.calls = torch.zeros(2, 1), None, None, 0

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        loss = closure().detach()
        if self.calls % 4 == 0:
            self.now = self.sums[self.calls // 4 % 2]
            self.inner.sums = self.sums.view(-1)
        self.calls += 1
        self.now += loss
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=float(self.inner.sums[0] - 0.5 * self.sums[1]))


class Luck:
    """Something that nobody can look into."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


class Noisy(Optimizer):
    """Keeps what cannot be kept, in attributes and inside of another optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        calls = 0

        def counted() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.random, self.inside, self.rule = Luck(0), {"calls": [counted]}, torch.relu
        self.inner = ScheduleFree(self.param_groups)
        self.inner.noise = Luck(1)
        self.rate, self.generator = 0.5, torch.Generator().manual_seed(3)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def train(module: nn.Module, optimizer: Optimizer, steps: range) -> Tensor:
    for step in steps:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = module(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    "make", [Sam, Lookahead, History, ScheduleFree, Decaying, Grouped, Windowed, optim.LBFGS]
)
def test_an_optimizer_goes_on_with_what_its_attributes_have(
    make: Callable[[Iterable[nn.Parameter]], Optimizer],
) -> None:
    module, other = network(0), network(1)
    optimizer, resumed = make(module.parameters()), make(other.parameters())
    train(module, optimizer, range(5))
    other.load_state_dict(module.state_dict())
    held = held_by(optimizer, names_of(module))
    file = encode(State(held), 0)
    (saved,) = saved_by([decode(json.loads(file.head), file.tensors)])
    assert lost_of([held]) == []
    load(resumed, names_of(other), saved, copy.deepcopy(options_of(optimizer)))
    for name, value in vars(optimizer).items():
        assert type(value) is type(vars(resumed)[name]) or name == "_numel_cache"
    assert torch.equal(train(other, resumed, range(5, 9)), train(module, optimizer, range(5, 9)))


def test_what_cannot_go_on_is_named() -> None:
    module, other = network(0), network(0)
    optimizer, resumed = Noisy(module.parameters()), Noisy(other.parameters())
    optimizer.rate = 0.25
    optimizer.late = Luck(2)  # type: ignore[attr-defined]
    torch.rand(3, generator=optimizer.generator)
    held = held_by(optimizer, names_of(module))
    lost = ["'inner.noise' (Luck)", "'inside.calls' (function)", "'late' (Luck)", "'random' (Luck)"]
    assert lost_of([held]) == [f"{one} of the optimizer" for one in lost]
    (saved,) = saved_by([State(copy.deepcopy(held))])
    random, generator = resumed.random, resumed.generator
    load(resumed, names_of(other), saved, options_of(optimizer))
    assert (resumed.rate, resumed.rule) == (0.25, torch.relu)
    assert resumed.random is random
    assert not hasattr(resumed, "late")  # the optimizer makes it anew
    assert resumed.generator is generator
    assert torch.equal(generator.get_state(), optimizer.generator.get_state())
    assert lost_of([saved.joint]) == lost_of([held])


def test_of_the_models_that_an_optimizer_has_only_the_trained_one_goes_on() -> None:
    module, other = network(0), network(1)
    optimizer, resumed = Averaging(module), Averaging(other)
    average = resumed.average
    held = held_by(optimizer, names_of(module))
    assert lost_of([held]) == ["'average' (Sequential) of the optimizer"]
    (saved,) = saved_by([State(copy.deepcopy(held))])
    load(resumed, names_of(other), saved, options_of(optimizer))
    assert resumed.module is other
    assert resumed.average is average


def test_stretches_that_are_added_are_one_with_those_that_they_overlap() -> None:
    numbers, found = torch.zeros(10), Stretches(())
    begin, size = numbers.data_ptr(), numbers.itemsize
    for first, stop in ((6, 8), (0, 2), (3, 4), (1, 3), (5, 5)):
        found.add((begin + first * size, begin + stop * size))
    wanted = [(0, 3)] * 3 + [(3, 4), None, None, (6, 8), (6, 8), None, None]
    for number, stretch in zip(numbers.split(1), wanted, strict=True):
        place = stretch and tuple(begin + one * size for one in stretch)
        assert found.around(number) == place
