"""DiLoCo follows the loop of its paper, batch by batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.contracts.strategy import check_other_ranks_go_on_from_the_agreed_weights, setting
from tests.strategies.alone import (
    LENGTH,
    SPEEDS,
    Point,
    Setting,
    assert_close,
    batch,
    evaluate,
    gradient,
    run,
    start,
)
from tests.strategies.test_sparseloco import descend
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.optim.optimizers.muon import Muon
from tutti.replica import Replica
from tutti.strategies import Clip, DiLoCo, Local, SparseLoCo, Strategy
from tutti.strategies.diloco import fragments_of
from tutti.strategies.placement import place


def adamw(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def by_hand(strategy: DiLoCo, steps: int, workers: int) -> tuple[Tensor, list[Tensor]]:
    """Algorithm 2 of Streaming DiLoCo with torch's own optimizers, and the outer steps that end a run.

    With one fragment and without delay it is DiLoCo's algorithm 1. Returns the final weights, and each
    worker's before the outer steps that end the run.
    """
    every, count = strategy.every, strategy.fragments
    places = [slice(0, 3), slice(3, LENGTH)] if count == 2 else [slice(0, LENGTH)]
    outer = [nn.Parameter(start()[place]) for place in places]
    momentum = strategy.outer_momentum
    outwards = [optim.SGD([x], strategy.outer_lr, momentum, nesterov=momentum > 0) for x in outer]
    inner = [nn.Parameter(start()) for _ in range(workers)]
    optimizers = [optim.AdamW([weights], lr=0.05, weight_decay=0.1) for weights in inner]
    on_their_way: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        for rank, (weights, optimizer) in enumerate(zip(inner, optimizers, strict=True)):
            weights.grad = gradient(weights.detach(), rank, step - 1)
            optimizer.step()
        for p, (span, x) in enumerate(zip(places, outer, strict=True)):
            first = (p + 1) * every // count
            moves = [x.detach() - weights.detach()[span] for weights in inner]
            if step >= first and (step - first) % every == 0:
                on_their_way[p] = sum(moves) / workers
            if step >= first + strategy.delay and (step - first - strategy.delay) % every == 0:
                x.grad = on_their_way.pop(p)
                outwards[p].step()
                for weights in inner:
                    mixed = strategy.mixing * weights.data[span] + (1 - strategy.mixing) * x.data
                    weights.data[span] = mixed
    for p, (span, x) in enumerate(zip(places, outer, strict=True)):
        # Steps have followed the last outer one, or own weights have outlasted it.
        if strategy.delay or strategy.mixing or (steps - (p + 1) * every // count) % every:
            x.grad = sum(x.detach() - weights.detach()[span] for weights in inner) / workers
            outwards[p].step()
    return torch.cat([x.detach() for x in outer]), [weights.detach() for weights in inner]


OPTIONS = [
    DiLoCo(every=3),
    DiLoCo(every=3, outer_lr=1.0),
    DiLoCo(every=3, outer_momentum=0.0),
    DiLoCo(every=5, outer_lr=0.5, outer_momentum=0.5),
    DiLoCo(every=4, fragments=2),
    DiLoCo(every=4, delay=1),
    DiLoCo(every=4, delay=3, mixing=0.5),
    DiLoCo(every=3, mixing=0.25),
    DiLoCo(every=5, fragments=2, delay=4, mixing=0.5),
]


# With one worker this is SNOO. The last round may be shorter than the others.
@pytest.mark.parametrize("hosts", [(1,), (3,), (2, 1)], ids=str)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: DiLoCo, hosts: tuple[int, ...]) -> None:
    workers = sum(hosts)
    for steps in (11, 12):
        expected, inner = by_hand(strategy, steps, workers)
        found = run(Setting(strategy, adamw, steps, SPEEDS[:workers]), VirtualWorld(workers, hosts))
        assert_close(found[0].final, expected)
        for outcome, wanted in zip(found, inner, strict=True):
            assert_close(outcome.steps[-1], wanted)


def test_eager_numbers_worked_by_hand() -> None:
    """With v = 0.5 v + u, a = a - (u + 0.5 v): u is half of the own slopes, then the mean of all slopes."""
    strategy = DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.5, eager=True)
    first, second = VirtualWorld(2).run(descend, strategy, 2)
    mean = [-4.75, -5.34375]
    assert first == [[-2.25, -1.875], [-5.625, -5.5625], mean, [0.0]]
    assert second == [[-0.75, -1.5], [-3.875, -5.125], mean, [0.0]]


@pytest.mark.parametrize(
    ("one", "other", "workers"),
    [
        (DiLoCo(every=4, eager=True), DiLoCo(every=4), 1),
        (DiLoCo(every=4, outer_momentum=0.0, outer_lr=0.5), SparseLoCo(4, 1.0, 0.0, False, 0.5), 3),
        (Local(every=4), SparseLoCo(4, 1.0, 0.0, False), 3),
        (Local(every=4), DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), 3),
    ],
    ids=str,
)
def test_reductions(one: Strategy, other: Strategy, workers: int) -> None:
    settings = (Setting(strategy, adamw, 12, SPEEDS[:workers]) for strategy in (one, other))
    first, second = (run(setting)[0] for setting in settings)
    assert_close(first.final, second.final)


def test_muon_inside_is_muloco() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + step)
        return module(torch.randn(8, 4, generator=generator, dtype=torch.float64)).square().mean()

    def program(comm: Communicator) -> Tensor:
        module = model()
        replica = place(module, comm, DiLoCo.home)
        worker = DiLoCo(every=3).worker(replica, comm, Muon(module, lr=0.02), Clip())
        for step in range(6):
            loss(module, comm.rank, step).backward()
            worker.step()
        worker.finish()
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    outer, inner = model(), [model(), model()]
    outwards = optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizers = [Muon(module, lr=0.02) for module in inner]
    for step in range(6):
        for rank, (module, optimizer) in enumerate(zip(inner, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(module, rank, step).backward()
            optimizer.step()
        if step % 3 == 2:
            for x, *own in zip(outer.parameters(), *(one.parameters() for one in inner), strict=True):
                x.grad = x.detach() - sum(one.detach() for one in own) / 2
            outwards.step()
            for module in inner:
                module.load_state_dict(outer.state_dict())
    expected = nn.utils.parameters_to_vector(outer.parameters()).detach()
    for found in VirtualWorld(2).run(program):
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 3, "fragments": 4}, "'fragments' of strategy 'diloco' is 4.*at most 3"),
        ({"every": 3, "delay": 3}, "'delay' of strategy 'diloco' is 3.*at most 2"),
        ({"delay": 1, "eager": True}, "'delay' of strategy 'diloco' is 1.*'eager'"),
        ({"fragments": 3}, "'fragments' of strategy 'diloco' is 3, but the model has 2 parameters"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        run(Setting(DiLoCo(**options)))


@pytest.mark.parametrize(
    ("elements", "count", "lengths"),
    [([16] * 6, 3, [32, 32, 32]), ([160, 16, 16], 3, [160, 16, 16]), ([16, 16, 160], 2, [32, 160])],
    ids=str,
)
def test_fragments_are_about_equal_and_none_is_empty(
    elements: list[int], count: int, lengths: list[int]
) -> None:
    module = nn.ParameterList(torch.zeros(number) for number in elements)
    module.append(torch.zeros(3, dtype=torch.float64))
    found = [
        [place.stop - place.start for place in places]
        for places in fragments_of(Replica(module).flats, count)
    ]
    assert found == [[length, 16 if index == 0 else 0] for index, length in enumerate(lengths)]


@pytest.mark.parametrize("options", [{"eager": True}, {"delay": 1, "mixing": 0.5}], ids=str)
def test_other_ranks_resume_what_they_can(options: dict[str, Any]) -> None:
    check_other_ranks_go_on_from_the_agreed_weights(
        DiLoCo, replace(setting(DiLoCo), brisk={"every": 3, **options})
    )


@pytest.mark.parametrize("step", [1, 3, 5])
def test_an_evaluation_sees_the_result_of_a_run_that_ends_there(step: int) -> None:
    def program(comm: Communicator) -> bool:
        module = Point()
        replica = place(module, comm, DiLoCo.home)
        worker = DiLoCo(every=4).worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        for number in range(step + 1):
            curvature, minimum = batch(comm.rank, number)
            (curvature / 2 * (module() - minimum) ** 2).sum().backward()
            worker.step()
        evaluated = evaluate(worker, module, comm)
        worker.finish()
        return torch.equal(evaluated, module())

    assert VirtualWorld(2).run(program) == [True, True]


def test_exchanges_are_counted() -> None:
    traffic = run(Setting(DiLoCo(every=5), adamw, steps=10))[0].traffic
    assert traffic.exchanges == 2
    assert traffic.bytes_sent == 2 * 8 * 32  # two parameters, each at an aligned place


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        # 1008 numbers of 4 bits, with the gap that aligns them, and 2 scales.
        (DiLoCo(every=5, compress="e3m0"), [512, 512]),
        # 496 numbers and a scale, in steps of 8 bytes; 512 and a scale.
        (DiLoCo(every=4, fragments=2, compress="e3m0"), [256, 264, 256, 264, 256]),
        # 30 places of 12 bits, 30 codes of 2 bits, 2 sizes.
        (SparseLoCo(every=5), [64, 64]),
    ],
    ids=str,
)
def test_messages_are_as_short_as_they_are_said_to_be(strategy: Strategy, messages: list[int]) -> None:
    def program(comm: Communicator) -> tuple[list[int], int]:
        module = nn.ParameterList([torch.ones(496), torch.ones(504)])
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        sent: list[int] = []
        gather, reduce = comm.all_gather, comm.all_reduce
        comm.all_gather = lambda vector: (sent.append(vector.nbytes // comm.size), gather(vector))
        comm.all_reduce = lambda vector: (sent.append(vector.nbytes), reduce(vector))
        for _ in range(10):
            sum(parameter.square().sum() for parameter in module).backward()
            worker.step()
        return sent, worker.traffic.bytes_sent

    for found, counted in VirtualWorld(3, (2, 1)).run(program):
        assert found == messages
        assert counted == 2 * sum(messages)
