"""BatchNorm over the whole batch: what one process computes, on any number of ranks."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.comm.ranks import World
from tests.trainers import trainer_by
from tests.training.blobs import blobs
from tutti.comm.base import Communicator
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data.parts import Part
from tutti.strategies import Sync
from tutti.training.batch_norm import BatchStatistics, batch_norms, normalising
from tutti.training.precision import Arithmetic
from tutti.training.stopping import Ending

DOUBLE = torch.float64
LAYERS = {
    "1d": (nn.BatchNorm1d(4), (4,)),
    "1d of sequences, without weights": (nn.BatchNorm1d(4, affine=False), (4, 3)),
    "2d, a mean of all batches": (nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "3d without running statistics": (nn.BatchNorm3d(4, track_running_stats=False), (4, 2, 2, 1)),
    "far from zero": (nn.BatchNorm1d(4, eps=1e-9), (4,)),
    "synchronised": (nn.SyncBatchNorm(4), (4, 2)),
}


def passes(layer: nn.Module, samples: Tensor, gradient: Tensor) -> list[Tensor]:
    """Outputs and gradients of three passes, and the state after them."""
    found = []
    for _ in range(3):
        inputs = samples.clone().requires_grad_()
        outputs = layer(inputs)
        outputs.backward(gradient)
        found += [outputs.detach(), inputs.grad]
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("kind", "parts"), [*zip(LAYERS, [(5, 2), (1, 6), (2, 3, 2), (7, 0), (4, 3), (6, 1)], strict=True)]
)
def test_a_layer_computes_what_torchs_does_of_the_whole_batch(kind: str, parts: tuple[int, ...]) -> None:
    given, shape = LAYERS[kind]
    kind_of_torch: Any = {nn.SyncBatchNorm: nn.BatchNorm1d}.get(type(given), type(given))
    layer = given.double()
    whole = copy.deepcopy(layer)
    whole.__class__ = kind_of_torch
    samples = torch.randn(7, *shape, dtype=DOUBLE) + (1e4 if kind.startswith("far") else 1)
    gradient = torch.randn(7, *shape, dtype=DOUBLE)
    expected = passes(whole, samples, gradient)
    gradients = [parameter.grad for parameter in whole.parameters()]

    def rank(comm: Communicator) -> None:
        mine, statistics = copy.deepcopy(layer), BatchStatistics(comm)
        here = slice(sum(parts[: comm.rank]), sum(parts[: comm.rank + 1]))
        empty = not parts[comm.rank]
        with normalising(mine, statistics):
            if empty:  # one that does not count
                with statistics.absent():
                    found = passes(mine, samples[:1], 0 * gradient[:1])
                assert not any(one.any() for one in found[1::2])
                found = [one[:0] for one in found]
            else:
                found = passes(mine, samples[here], gradient[here])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other[here], rtol=1e-9, atol=1e-9)
        for name, value in mine.named_buffers():
            torch.testing.assert_close(value, whole.get_buffer(name), rtol=1e-12, atol=1e-12)
        total = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in mine.parameters()]
        for one, of_whole in zip(total, gradients, strict=True):
            comm.all_reduce(one)
            torch.testing.assert_close(one, of_whole, rtol=1e-9, atol=1e-9)

    with World(len(parts)) as world:
        world.run(rank)


def test_layers_are_torchs_own_in_evaluation_mode_and_afterwards() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).double().eval()
    inputs = torch.randn(3, 4, dtype=DOUBLE)

    plain = module(inputs)
    with closing(HostCommunicator.alone()) as comm, normalising(module, BatchStatistics(comm)):
        assert torch.equal(module(inputs), plain)
    assert all("forward" not in vars(layer) for layer in batch_norms(module))


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4, bias=False), nn.BatchNorm1d(4)
    )
    return Arithmetic("fp64").prepare(module)


def trained(
    comm: Communicator, part: Part, every: int = 1, ending: Ending | None = None
) -> dict[str, Tensor]:
    module = network()
    statistics = BatchStatistics(comm) if comm.size > 1 else None
    given = {"statistics": statistics, "arithmetic": Arithmetic("fp64"), "ending": ending}
    optimizer = SGD(module.parameters(), lr=0.1)
    trainer_by(Sync(every=every), comm, module, optimizer, part, 12, **given, steps=20).fit()
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (3, 2), (5, 1)])
def test_training_gives_the_weights_and_statistics_of_one_process(ranks: int, every: int) -> None:
    part = blobs(12 * 4 + 2 * every)  # 2 samples in the last pass of an epoch, for up to 5 ranks
    part = Part(part.stored_inputs.double(), part.stored_targets)
    with closing(HostCommunicator.alone()) as comm:
        expected = trained(comm, part, every)
    with World(ranks) as world:
        every_rank = world.run(partial(trained, part=part, every=every))
    for found in every_rank:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
