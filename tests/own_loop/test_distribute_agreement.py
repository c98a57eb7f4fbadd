"""What the ranks of a user's own loop agree on: weights of samples, options, state, and who takes part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.worlds import Worlds
from tutti.errors import BadOption
from tutti.own_loop import distribute

INPUTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_mean_of_a_figure_counts_samples_and_leaves_out_ranks_without_any(worlds: Worlds) -> None:
    def work() -> tuple[float, Tensor, float]:
        rank = distribute.init().rank
        figure = [1.0, 4.0, float("nan")][rank]
        return (
            distribute.mean(figure, [3, 1, 0][rank]),
            distribute.mean(torch.tensor(figure, dtype=torch.float32), [3, 1, 0][rank]),
            distribute.mean(float(rank)),
        )

    for number, tensor, plain in worlds.each(3, work):
        assert number == 7 / 4
        assert tensor.dtype == torch.float32
        assert tensor.item() == 7 / 4
        assert plain == 1.0


def test_the_mean_counts_the_samples_that_were_dealt_without_gradients(worlds: Worlds) -> None:
    def work() -> list[float]:
        with torch.no_grad():
            return [
                distribute.mean(float(part.mean()) if len(part) else 0.0)
                for (part,) in distribute.shard(DataLoader(TensorDataset(INPUTS[:, 0]), 5))
            ]

    wanted = [INPUTS[:5, 0].mean().item(), INPUTS[5:, 0].mean().item()]
    for found in worlds.each(3, work):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_losses_that_are_sums_are_added_up(worlds: Worlds) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> Tensor:
        for (part,) in batches:
            optimizer.zero_grad()
            model(part).square().sum().backward()
            optimizer.step()
        return vector(model)

    def work() -> Tensor:
        model, optimizer = distribute.distribute(*make(0.01), reduction="sum")
        return train(model, optimizer, distribute.shard(DataLoader(TensorDataset(INPUTS), 4)))

    wanted = train(*make(0.01), DataLoader(TensorDataset(INPUTS), 4))
    assert not torch.equal(wanted, vector(make()[0]))
    for found in worlds.each(3, work):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_learning_rates_that_differ_are_refused_with_both_values(
    worlds: Worlds, kind: Callable[[float], Any]
) -> None:
    def work() -> None:
        model, optimizer = distribute.distribute(*make())
        optimizer.param_groups[0]["lr"] = kind([0.125, 0.25][distribute.init().rank])
        model(INPUTS).sum().backward()
        optimizer.step()

    with pytest.raises(BadOption, match=r"in the options: .*0.125.*0.25"):
        worlds.each(2, work)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("others_stepped", [False, True])
def test_all_ranks_get_the_optimizers_state_of_rank_0(
    worlds: Worlds, cls: type[torch.optim.Optimizer], others_stepped: bool
) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()

    def fresh(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = make()
        return model, cls(model.parameters(), lr=lr)

    def work() -> tuple[Tensor, float]:
        rank = distribute.init().rank
        model, optimizer = fresh(0.01 if rank == 0 else 0.5)
        group = optimizer.param_groups[0]
        if rank == 0 or others_stepped:
            train(model, optimizer)
        train(*distribute.distribute(model, optimizer))
        return vector(model), group["lr"]

    model, optimizer = fresh(0.01)
    train(model, optimizer)
    train(model, optimizer)
    for found, lr in worlds.each(2, work):
        torch.testing.assert_close(found, vector(model), rtol=0, atol=1e-12)
        assert lr == 0.01


def test_optimizers_of_other_parameters_are_refused(worlds: Worlds) -> None:
    def work() -> None:
        model, _ = make()
        parameters = list(model.parameters())[distribute.init().rank :]
        distribute.distribute(model, torch.optim.SGD(parameters, lr=0.1))

    with pytest.raises(BadOption, match="same optimizer on every rank"):
        worlds.each(2, work)


def test_state_that_only_one_rank_has_loaded_is_refused(worlds: Worlds) -> None:
    def work() -> None:
        model, optimizer = distribute.distribute(*make())
        for _ in range(2):
            model(INPUTS).sum().backward()
            optimizer.step()
            if distribute.init().rank == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    with pytest.raises(BadOption, match=r"loaded or changed its state: by rank, \[0, 1\]"):
        worlds.each(2, work)


def test_the_state_of_a_divided_optimizer_may_be_replaced_and_not_changed_in_place(worlds: Worlds) -> None:
    """The ranks have it in one memory: each that halves it in place would halve it again."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            for entries in optimizer.state.values():
                entries["momentum_buffer"] = entries["momentum_buffer"] * 0.5
        return vector(model)

    def in_place() -> None:
        model, optimizer = distribute.distribute(*make())
        for _ in range(2):
            model(INPUTS).square().mean().backward()
            optimizer.step()
            optimizer.state[next(model.parameters())]["momentum_buffer"].mul_(0.5)

    wanted = train(*make())
    for found in worlds.each(2, lambda: train(*distribute.distribute(*make()))):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with pytest.raises(BadOption, match="changed in place"):
        worlds.each(2, in_place)


def test_a_hook_on_a_parameter_sees_the_gradient_of_its_rank(worlds: Worlds) -> None:
    def work() -> tuple[Tensor, Tensor]:
        model, _ = distribute.distribute(*make())
        seen: list[Tensor] = []
        weight = next(model.parameters())
        weight.register_hook(seen.append)
        model(INPUTS[distribute.init().rank]).mean().backward()
        return seen[0], weight.grad

    (first, joint), (second, same) = worlds.each(2, work)
    assert torch.equal(joint, same)
    torch.testing.assert_close((first + second) / 2, joint, rtol=0, atol=1e-12)
    assert not torch.equal(first, joint)
