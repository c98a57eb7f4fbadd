"""What the ranks of a user's own loop agree on: weights of samples, options, state, and who takes part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.own_loop.entries import Worlds
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.strategies import Sync

INPUTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as started:
        yield started


def make(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_adasum_takes_each_ranks_mean_over_its_own_samples(worlds: Worlds) -> None:
    """Gradients of one weight are parallel: Adasum's combination is the mean of the ranks' own means."""

    def work() -> float:
        model = nn.Linear(1, 1, bias=False)
        distribute.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Sync(reduce="adasum"))
        (inputs,) = next(iter(distribute.shard([(torch.tensor([[1.0], [2.0], [6.0]]),)])))
        model(inputs).mean().backward()
        return float(model.weight.grad.item())

    assert worlds.run(2, work) == [pytest.approx((1.5 + 6) / 2)] * 2


def test_the_mean_of_a_figure_counts_samples_and_leaves_out_ranks_without_any(worlds: Worlds) -> None:
    def work() -> tuple[float, Tensor, float]:
        rank = distribute.init().rank
        figure = [1.0, 4.0, float("nan")][rank]
        return (
            distribute.mean(figure, [3, 1, 0][rank]),
            distribute.mean(torch.tensor(figure, dtype=torch.float32), [3, 1, 0][rank]),
            distribute.mean(float(rank)),
        )

    for number, tensor, plain in worlds.run(3, work):
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
    for found in worlds.run(3, work):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_after_an_evaluation_gradients_count_as_before_it(worlds: Worlds) -> None:
    """Of three samples to evaluate the first rank has two; what is trained on was not dealt."""

    def work() -> Tensor:
        model, _ = distribute.distribute(*make())
        with torch.no_grad():
            assert [len(part) for (part,) in distribute.shard(DataLoader(TensorDataset(INPUTS[:3]), 3))]
        model(INPUTS[distribute.init().rank]).sum().backward()
        return model[0].weight.grad

    model, _ = make()
    (model(INPUTS[:2]).sum() / 2).backward()
    for found in worlds.run(2, work):
        torch.testing.assert_close(found, model[0].weight.grad, rtol=0, atol=1e-12)


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
    for found in worlds.run(3, work):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_another_reduction_is_refused() -> None:
    with pytest.raises(BadOption, match="reduction is 'max'"):
        distribute.distribute(*make(), reduction="max")


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_learning_rates_that_differ_are_refused_with_both_values(
    worlds: Worlds, kind: Callable[[float], Any]
) -> None:
    def work() -> None:
        model, optimizer = distribute.distribute(*make())
        optimizer.param_groups[0]["lr"] = kind([0.125, 0.25][distribute.init().rank])
        model(INPUTS).sum().backward()
        optimizer.step()

    with pytest.raises(BadOption, match=r"'lr' of param group 0 is 0.125 on rank 0 and 0.25 on rank 1"):
        worlds.run(2, work)


@pytest.mark.parametrize(
    "make_option",
    [lambda rank: torch.tensor([1.0, 2.0 + rank]), lambda rank: (0.5, torch.tensor(2.0 + rank))],
    ids=["several numbers", "a tensor in a tuple"],
)
def test_tensors_among_the_options_are_compared_by_their_numbers(
    worlds: Worlds, make_option: Callable[[int], Any]
) -> None:
    def work(differ: bool) -> None:
        model, optimizer = distribute.distribute(*make())
        optimizer.param_groups[0]["scale"] = make_option(differ * distribute.init().rank)
        model(INPUTS).sum().backward()
        optimizer.step()

    worlds.run(2, work, False)
    with pytest.raises(
        BadOption, match=r"'scale' .* is \([\d.]+, 2.0\) on rank 0 and \([\d.]+, 3.0\) on rank 1"
    ):
        worlds.run(2, work, True)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("others_stepped", [False, True])
def test_the_optimizers_state_of_rank_0_is_that_of_all(
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
    for found, lr in worlds.run(2, work):
        torch.testing.assert_close(found, vector(model), rtol=0, atol=1e-12)
        assert lr == 0.01


def test_optimizers_of_other_parameters_are_refused(worlds: Worlds) -> None:
    def work() -> None:
        model, _ = make()
        parameters = list(model.parameters())[distribute.init().rank :]
        distribute.distribute(model, torch.optim.SGD(parameters, lr=0.1))

    with pytest.raises(BadOption, match="same optimizer on every rank"):
        worlds.run(2, work)


def test_state_that_only_one_rank_has_loaded_is_refused(worlds: Worlds) -> None:
    def work() -> None:
        model, optimizer = distribute.distribute(*make())
        for _ in range(2):
            model(INPUTS).sum().backward()
            optimizer.step()
            if distribute.init().rank == 1:
                optimizer.load_state_dict(optimizer.state_dict())

    with pytest.raises(BadOption, match=r"loaded or changed on some ranks .* \[0, 1\]"):
        worlds.run(2, work)


def test_one_rank_alone_reads_the_whole_state(worlds: Worlds) -> None:
    def work() -> dict | None:
        model, optimizer = distribute.distribute(*make())
        for _ in range(2):
            optimizer.zero_grad()
            model(INPUTS).sum().backward()
            optimizer.step()
        return optimizer.state_dict() if distribute.init().rank == 1 else None

    model, optimizer = make()
    for _ in range(2):
        optimizer.zero_grad()
        model(INPUTS).sum().backward()
        optimizer.step()
    _, found = worlds.run(2, work)
    wanted = optimizer.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        torch.testing.assert_close(found["state"][number], entries, rtol=0, atol=1e-12)


def test_a_rank_that_leaves_a_batch_out_takes_part_in_the_others_gradient(worlds: Worlds) -> None:
    def work() -> Tensor:
        model, optimizer = distribute.distribute(*make())
        if distribute.init().rank == 0:
            model(INPUTS).sum().backward()
        optimizer.step()
        return vector(model)

    model, optimizer = make()
    (model(INPUTS).sum() / 2).backward()
    optimizer.step()
    for found in worlds.run(2, work):
        torch.testing.assert_close(found, vector(model), rtol=0, atol=1e-12)


def test_passes_that_are_left_over_are_used_in_the_end(worlds: Worlds) -> None:
    def work() -> Tensor:
        model, optimizer = distribute.distribute(*make(), Sync(every=3))
        for (part,) in distribute.shard(DataLoader(TensorDataset(INPUTS), 2)):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
        distribute.finish(model)
        return vector(model)

    model, optimizer = make()
    for part in (INPUTS[:6], INPUTS[6:]):
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
    for found in worlds.run(2, work):
        torch.testing.assert_close(found, vector(model), rtol=0, atol=1e-12)


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(INPUTS[:, 0])


def test_a_loader_of_an_iterable_data_set_is_cut_batch_by_batch(worlds: Worlds) -> None:
    def work() -> list[Tensor]:
        return list(distribute.shard(DataLoader(Numbers(), batch_size=4)))

    first, second = worlds.run(2, work)
    assert torch.equal(torch.cat([first[0], second[0], first[1], second[1]]), INPUTS[:, 0])


def test_a_strategy_goes_by_its_name(worlds: Worlds) -> None:
    def work() -> str:
        distribute.distribute(*make(), "local")
        return type(distribute._current().steppers[0].worker).__name__

    assert worlds.run(2, work) == ["_LocalWorker"] * 2


def test_the_state_of_a_divided_optimizer_is_its_readers_copy(worlds: Worlds) -> None:
    """Each rank halves the momentum: it is halved once."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            model(INPUTS).sum().backward()
            optimizer.step()
            for entries in optimizer.state.values():
                entries["momentum_buffer"].mul_(0.5)
        return vector(model)

    wanted = train(*make())
    for found in worlds.run(2, lambda: train(*distribute.distribute(*make()))):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("passes", [(1, 2), (3, 2)])
def test_ranks_that_step_after_different_numbers_of_passes_are_refused(
    worlds: Worlds, passes: tuple[int, int]
) -> None:
    def work() -> None:
        model, optimizer = distribute.distribute(*make())
        for _ in range(passes[distribute.init().rank]):
            optimizer.zero_grad()
            model(INPUTS).mean().backward()
        optimizer.step()

    with pytest.raises(BadOption, match=rf"passes: by rank, \[{passes[0]}, {passes[1]}\]"):
        worlds.run(2, work)


def test_a_rank_may_leave_out_all_passes_before_a_step(worlds: Worlds) -> None:
    def work() -> Tensor:
        model, optimizer = distribute.distribute(*make())
        if distribute.init().rank:
            for _ in range(2):
                model(INPUTS).mean().backward()
        optimizer.step()
        return vector(model)

    before = vector(make()[0])
    first, second = worlds.run(2, work)
    assert not torch.equal(first, before)
    assert torch.equal(first, second)


def test_a_hook_on_a_parameter_sees_the_gradient_of_its_rank(worlds: Worlds) -> None:
    def work() -> tuple[Tensor, Tensor]:
        model, _ = distribute.distribute(*make())
        seen: list[Tensor] = []
        weight = next(model.parameters())
        weight.register_hook(seen.append)
        model(INPUTS[distribute.init().rank]).mean().backward()
        return seen[0], weight.grad

    (first, joint), (second, same) = worlds.run(2, work)
    assert torch.equal(joint, same)
    torch.testing.assert_close((first + second) / 2, joint, rtol=0, atol=1e-12)
    assert not torch.equal(first, joint)


def test_a_backward_pass_of_which_nobody_knows_is_refused_where_parts_are_uneven(worlds: Worlds) -> None:
    def work() -> None:
        model, _ = distribute.distribute(*make())
        for (part,) in distribute.shard(DataLoader(TensorDataset(INPUTS[:3]), 3)):
            distribute._torchs_backward(model(part).mean())

    with pytest.raises(BadOption, match="backward"):
        worlds.run(2, work)


def test_a_batch_fetched_ahead_is_weighed_as_the_model_is_called_with_a_view_of_it(worlds: Worlds) -> None:
    def work(ahead: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute.distribute(model, optimizer)
        dealt = distribute.shard(DataLoader(TensorDataset(INPUTS), 4))
        gradients = []
        for (part,) in list(dealt) if ahead else dealt:
            optimizer.zero_grad()
            model(part.view(len(part), -1)).square().mean().backward()
            gradients.append(model.weight.grad.clone())
        return gradients

    for found, wanted in zip(worlds.run(2, work, True), worlds.run(2, work, False), strict=True):
        assert len(found) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_copy_of_a_model_that_is_watched_for_its_batches_can_be_pickled_and_is_not_watched(
    worlds: Worlds,
) -> None:
    def work() -> tuple[Tensor, Tensor]:
        model, _ = distribute.distribute(*make())
        list(distribute.shard(DataLoader(TensorDataset(INPUTS), 4)))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(one._forward_hooks for one in (model, *copies))
        return tuple(one(INPUTS).detach() - model(INPUTS).detach() for one in copies)

    for differences in worlds.run(2, work):
        assert all(not difference.any() for difference in differences)
