"""What ranks hold alike is compared: one whose copy has changed by a bit is named, and none otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from tests.trainers import trainer_of
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import ReplicasDiffer
from tutti.state import TensorPiece
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training import replica_check
from tutti.training.agenda import Agenda, Wishes
from tutti.training.intervals import Every
from tutti.training.losses import LOSSES
from tutti.training.precision import Arithmetic
from tutti.training.replica_check import FixedParameters, ReplicaCheck, judge
from tutti.training.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(7)
INPUTS = torch.randn(48, 5, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randint(0, 3, (48,), generator=GENERATOR)
STEPS = 8
"""Updates, where the workers make them together."""


def flip(values: Tensor, bit: int = 3) -> None:
    """Flip a bit, as it happens to memory: torch does not know."""
    content = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    content[bit // 8] ^= 1 << bit % 8


class Net(nn.Module):
    """A layer that is trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fixed, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.fixed.requires_grad_(False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.fixed(inputs).tanh())


Disturb = Callable[[Trainer], None]


def train(comm: Communicator, strategy: Strategy, disturb: Disturb | None, rank: int, **rest: Any) -> Trainer:
    """Train; before the fourth step of a rank it is disturbed."""
    replica = place(Net(), comm, strategy.home)
    optimizer = Adam(replica.module.parameters(), lr=0.1)

    def on_step(made: int) -> None:
        if made == 3 and comm.rank == rank and disturb is not None:
            disturb(trainer)

    own = strategy.pace is not Pace.TOGETHER
    trainer = trainer_of(
        comm=comm,
        replica=replica,
        worker=strategy.worker(replica, comm, optimizer, Clip()),
        optimizer=optimizer,
        batches=Batches(Part(INPUTS, TARGETS), 6, comm.rank, comm.size, strategy.passes, seed=1, own=own),
        loss=LOSSES["cross_entropy"],
        metrics=[],
        arithmetic=Arithmetic("fp64"),
        on_step=on_step,
        **{"epochs": 1 if not own else comm.size, "check_replicas": 1, **rest},
    )
    trainer.fit()
    return trainer


def piece_named(trainer: Trainer, name: str) -> Tensor:
    """The first piece of what the worker holds as others do whose name has these words."""
    pieces: list[TensorPiece] = [piece for held in trainer.worker.replicated() for piece in held.pieces]
    return next(piece.values for piece in pieces if name in piece.name)


def disturbed(
    strategy: str, hosts: list[int], name: str, rank: int, **rest: Any
) -> pytest.ExceptionInfo[ReplicasDiffer]:
    """Train with a bit that flips in a tensor of a rank."""

    def disturb(trainer: Trainer) -> None:
        flip(trainer.replica.module.fixed.weight if name == "fixed" else piece_named(trainer, name))  # type: ignore[union-attr, arg-type]

    world = VirtualWorld(sum(hosts), ranks_per_host=hosts)
    with pytest.raises(ReplicasDiffer) as caught:
        world.run(partial(train, **rest), STRATEGIES[strategy](), disturb, rank)
    return caught


@pytest.mark.parametrize(
    ("strategy", "hosts", "name", "rank"),
    [
        ("sync", [1, 1, 1], "weights/last.weight", 1),
        ("sync", [2, 1, 1], "exp_avg_sq", 3),
        ("sync", [2, 2, 2], "weights/last", 3),
        ("diloco", [3], "anchor/last.weight", 2),
        ("easgd_sync", [2, 2], "centre/last.weight", 0),
        ("sync", [3], "fixed", 2),
        ("local", [1, 2], "fixed", 0),
    ],
)
def test_the_rank_whose_copy_has_changed_by_a_bit_is_named(
    strategy: str, hosts: list[int], name: str, rank: int
) -> None:
    caught = disturbed(strategy, hosts, name, rank)
    assert caught.value.ranks == [rank]
    assert caught.match(rf"^lost rank {rank}: '.*' .*after step 4 \(they were equal after step 3\)")


def test_how_many_tensors_differ_is_said() -> None:
    caught = disturbed("sync", [1, 1, 1], "exp_avg", 1)
    assert caught.match(
        r"^lost rank 1: 'optimizer/last.weight/exp_avg' and 1 more are not there what they are on"
    )


def test_of_two_that_differ_both_are_named_and_none_is_lost() -> None:
    caught = disturbed("sync", [1, 1], "weights/last.bias", 1, check_replicas=3)
    assert caught.value.ranks == []
    assert caught.match(r"^ranks 0, 1 hold different values of .* after step 6 \(.* after step 3\)")


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1, 2]])
@pytest.mark.parametrize("name", [name for name, one in STRATEGIES.items() if one.pace is not Pace.FREE])
def test_nobody_is_named_without_a_fault(name: str, hosts: list[int]) -> None:
    if name != "solo":
        of_one_host = name == "paramserver"
        VirtualWorld(sum(hosts), ranks_per_host=None if of_one_host else hosts).run(
            train, STRATEGIES[name](), None, 0
        )


def test_nothing_wrong_is_kept() -> None:
    kept: list[int] = []

    def saved_every_second_step(comm: Communicator) -> None:
        train(
            comm,
            STRATEGIES["sync"](),
            lambda trainer: flip(piece_named(trainer, "weights/last.weight")),
            0,
            check_replicas=1000,
            agenda=Agenda(comm, Wishes(Every.parse("2 steps", "--checkpoint"))),
            save=lambda step, state, decision: kept.append(step),
        )

    with pytest.raises(ReplicasDiffer, match=r"lost rank 0.* after step 4 \(they were equal after step 2\)"):
        VirtualWorld(3, ranks_per_host=1).run(saved_every_second_step)
    assert kept == [2] * 3


def test_a_parameter_that_the_program_changes_is_nobodys_fault() -> None:
    def change(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.replica.module.fixed.weight.add_(1)  # type: ignore[union-attr, operator]

    VirtualWorld(2).run(train, STRATEGIES["sync"](), change, 1)


def test_ranks_on_processors_that_round_differently_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["one", "another"])
    monkeypatch.setattr(replica_check, "processor_name", lambda: next(names))
    world = VirtualWorld(2, ranks_per_host=1)
    world.run(train, STRATEGIES["sync"](), lambda trainer: flip(piece_named(trainer, "weights/last")), 1)


def test_a_rank_alone_and_no_steps_between_mean_no_comparison() -> None:
    def compare(comm: Communicator, every: int) -> bool:
        check = ReplicaCheck(comm, place(Net(), comm, STRATEGIES["sync"].home), every)
        check.compare(lambda: pytest.fail("nobody to compare with"), 5)
        return check.is_due(0)

    assert VirtualWorld(1).run(compare, 5) == [False]
    assert VirtualWorld(2).run(compare, 0) == [False, False]


def test_the_minority_of_each_group_is_named() -> None:
    one, other = {("w", 0): 1, ("v", 0): 5}, {("w", 0): 2, ("v", 0): 5}
    assert judge([[(0, one)], [(0, one)], [(0, one)]]) is None
    assert judge([[(0, one)], [(1, other)]]) is None
    verdict = judge([[(0, one)], [(0, other)], [(0, one)], [(1, other)], [(1, other)]])
    assert verdict is not None
    assert (verdict.wrong, verdict.torn, verdict.name, verdict.others) == ((1,), (), "w", 0)
    torn = judge([[(0, one)], [(0, other)], [(0, one)], [(0, other)]])
    assert torn is not None
    assert (torn.wrong, torn.torn) == ((), (0, 1, 2, 3))


def test_rows_that_a_look_changes_are_not_compared() -> None:
    module = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    replica = VirtualWorld(1).run(lambda comm: place(module, comm, STRATEGIES["sync"].home))[0]
    assert not FixedParameters(replica).replicated().pieces
