"""Muon against torch's own Muon and AdamW on one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.contracts.resuming import Course, begin, checkpoint, go_on
from tests.strategies.sequential import Case, by_strategy, distance, sequential
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.memory import state_per_byte
from tutti.optim.named import build
from tutti.optim.optimizers.muon import Muon
from tutti.optim.sharded import own_slices
from tutti.replica import Replica
from tutti.strategies import Clip, Sync

RATES = {"lr": 0.02, "adamw_lr": 0.005, "weight_decay": 0.2}


class Words(nn.Module):
    """A convolution, a table, and dense layers."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(6, 6).view(shape))
        self.table, self.hidden, self.output = nn.Embedding(5, 8), nn.Linear(12, 8), nn.Linear(8, 5)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = nn.functional.conv2d(inputs.view(-1, 3, 2, 2), self.filters.view(6, 3, 2, 1)).flatten(1)
        words = self.table((inputs[:, 0].abs() * 2).long().clamp(max=4))
        return self.output(torch.tanh(self.hidden(maps)) + words)


class Both(Optimizer):
    """torch's two optimizers; the model's convolution is to be a matrix."""

    def __init__(self, model: Words) -> None:
        matrices = [model.filters, model.hidden.weight]
        others = [model.table.weight, model.hidden.bias, *model.output.parameters()]
        self.parts = [
            optim.Muon(matrices, lr=0.02, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
            optim.AdamW(others, lr=0.005, weight_decay=0.2, betas=(0.9, 0.95)),
        ]
        super().__init__(others, {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("hosts", [(1,), (2,), (3,), (2, 1)], ids=str)
def test_ranks_move_the_weights_as_torchs_two_optimizers_do(hosts: tuple[int, ...]) -> None:
    falling = partial(LambdaLR, lr_lambda=lambda step: 0.9**step)
    options = {"steps": 12, "clip": Clip(0.5, 0.1), "schedule": falling, "dtype": torch.float64}
    expected = sequential(Case(partial(Words, 6, 6), Both, **options))
    case = Case(partial(Words, 6, 3, 2, 1), partial(Muon, **RATES), **options)
    for found in VirtualWorld(sum(hosts), hosts).run(by_strategy, case, Sync()):
        assert distance(found, expected) < 1e-10


def by_dimensions(parameters: list[nn.Parameter]) -> Muon:
    of = {muon: [p for p in parameters if (p.dim() > 1) is muon] for muon in (True, False)}
    return Muon([{"params": of[muon], "use_muon": muon} for muon in of], **RATES)


@pytest.mark.parametrize(("ranks", "rounding"), [(1, 1e-10), (2, 0.0), (3, 1e-10)])
def test_a_run_resumes(ranks: int, rounding: float) -> None:
    course = Course(Sync(), optimizer=by_dimensions, dtype=torch.float64)
    left = VirtualWorld(2).run(begin, course)
    for after in VirtualWorld(ranks).run(go_on, course, checkpoint(left, ranks)):
        assert distance(after.final, left[0].final) <= rounding


def test_whole_matrices_are_shared_out_by_what_newton_schulz_costs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 2000), nn.Linear(2000, 4))
    replica = Replica(model)
    first, _ = own_slices(replica.flats[0], 2, Muon(model))
    assert first.stop == replica.flats[0].spans[1].start  # behind 4096 of 22,164 elements


def test_parameters_and_options_of_muon() -> None:
    made = build("muon", Muon.groups(Words(6, 6)), 0.5, {"adamw_lr": 0.25})
    assert [(len(group["params"]), group["lr"]) for group in made.param_groups] == [(2, 0.5), (4, 0.25)]
    assert [group["lr"] for group in Muon(Words(6, 6), lr=0.5).param_groups] == [0.5, 0.5]
    assert state_per_byte(Muon) == 1
    with pytest.raises(BadModel, match="the Linear trains none"):
        Muon(nn.Linear(3, 2))
    with pytest.raises(BadOption, match=r"shape \(2,\) is no matrix"):
        build("muon", nn.Linear(3, 2).parameters())
    for options in ({"betas": [0.9, 1.0]}, {"momentum": 1.0}, {"adamw_lr": -1.0}):
        with pytest.raises(BadOption, match=f"{next(iter(options))} .*expected momentum and betas"):
            build("muon", [nn.Parameter(torch.zeros(2, 2))], None, options)
