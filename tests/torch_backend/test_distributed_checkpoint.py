"""torch.distributed.checkpoint on our groups: shards that one number of ranks saves, and another loads."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.torch_backend.process_groups import Ranks

WIDTH = 7
"""Rows that no number of ranks above 1 can deal evenly."""

WHOLE = StateDictOptions(full_state_dict=True)


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[int, Ranks]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(Ranks(size)) for size in (1, 2, 3)}


def sharded(seed: int, mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01 * (1 + seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on the same samples on every rank, so that the outcome does not depend on their number."""
    samples = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=samples, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights and the optimizer's state, whole, and its options."""
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    found = {name: value.clone() for name, value in weights.items()}
    for name, kept in state["state"].items():
        found |= {f"{name} {key}": value.clone() for key, value in kept.items()}
    return found | {"lr": torch.tensor(state["param_groups"][0]["lr"])}


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def loaded(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(seed=5)
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(model, optimizer)


def saved(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, 3)
    dcp.save(parts(model, optimizer), checkpoint_id=folder)
    return whole(model, optimizer)


@pytest.fixture(scope="module")
def by_two(jobs, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return folder, jobs[2].run(lambda rank: saved(rank, folder))[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_two_ranks_save_is_the_same_on_any_number(jobs, by_two, size):
    folder, expected = by_two
    for found in jobs[size].run(lambda rank: loaded(rank, folder)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def went_on(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(seed=5)
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 3)
    return whole(model, optimizer)


def test_training_goes_on_alike_on_another_number_of_ranks(jobs, by_two):
    folder, _ = by_two
    expected = jobs[2].run(lambda rank: went_on(rank, folder))[0]
    for found in jobs[3].run(lambda rank: went_on(rank, folder)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def saved_beside_training(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, 3)
    before = whole(model, optimizer)
    group = distributed.new_group()
    writing = dcp.async_save(parts(model, optimizer), checkpoint_id=folder, process_group=group)
    train(model, optimizer, 5)
    writing.result()
    distributed.destroy_process_group(group)
    return before


def test_shards_are_saved_beside_training(jobs, tmp_path):
    before = jobs[2].run(lambda rank: saved_beside_training(rank, str(tmp_path)))[0]
    for found in jobs[3].run(lambda rank: loaded(rank, str(tmp_path))):
        torch.testing.assert_close(found, before, rtol=0, atol=0)
