"""What a vector of gradients consists of, and sums of it that a strategy's tests do not see closely."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tutti.allreduce import ALGORITHMS
from tutti.allreduce.adasum import Adasum
from tutti.allreduce.base import GradientLayout, GradientReduction, Layer
from tutti.allreduce.compression import Compressed, TopK
from tutti.allreduce.exact import ByMessages, Native
from tutti.allreduce.powersgd import PowerSGD
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica

MAKERS = {
    "native": Native,
    "ring": partial(ByMessages, algorithm=ALGORITHMS["ring"]),
    "adasum": Adasum,
    "top_k": partial(Compressed, codec=TopK(0.5)),
    "power_sgd": partial(PowerSGD, rank=1),
}


def flat_of(*shapes: tuple[int, ...]) -> Replica:
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
    return Replica(module).flats[0]


def test_a_layout_tells_layers_from_gaps() -> None:
    layout = GradientLayout.of(flat_of((3, 5), (), (16,)), slice(0, 48))
    assert layout.length == 48
    assert layout.layers == (
        Layer(slice(0, 15), (3, 5)),
        Layer(slice(16, 17), ()),
        Layer(slice(32, 48), (16,)),
    )


def test_a_part_of_a_parameter_is_a_layer_without_its_shape() -> None:
    layout = GradientLayout.of(flat_of((2, 16), (2, 8)), slice(16, 48))
    assert layout.layers == (Layer(slice(0, 16), (16,)), Layer(slice(16, 32), (2, 8)))


def reduced(comm: Communicator, name: str, dtype: torch.dtype, steps: int = 1) -> tuple[Tensor, int]:
    layout = GradientLayout(
        96, dtype, (Layer(slice(0, 60), (10, 6)), Layer(slice(64, 65), ()), Layer(slice(80, 96), (16,)))
    )
    reduction: GradientReduction = MAKERS[name](comm, layout)
    gaps = [*range(60, 64), *range(65, 80)]
    for step in range(steps):
        vector = torch.randn(96, generator=torch.Generator().manual_seed(10 * step + comm.rank)).to(dtype)
        vector[gaps] = 0
        sent = reduction.all_reduce(vector, 1 / comm.size)
    assert not vector[gaps].any()
    return vector, sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_all_ranks_get_the_same_and_gaps_stay_zero(name: str, dtype: torch.dtype) -> None:
    (first, sent), *others = VirtualWorld(3).run(reduced, name, dtype, 3)
    assert first.dtype == dtype
    assert first.any()
    assert sent > 0
    for other, _ in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bit_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    exact = sum(
        [
            torch.randn(96, generator=torch.Generator().manual_seed(rank)).to(dtype).double()
            for rank in range(5)
        ]
    )
    for name in ("native", "ring"):
        found, _ = VirtualWorld(5).run(reduced, name, dtype)[0]
        places = found != 0
        assert torch.equal(found[places], exact.to(dtype)[places])


def test_low_rank_leaves_vectors_and_scalars_exact() -> None:
    exact, _ = VirtualWorld(3).run(reduced, "native", torch.float32)[0]
    found, sent = VirtualWorld(3).run(reduced, "power_sgd", torch.float32)[0]
    assert torch.allclose(found[64:], exact[64:])
    assert not torch.allclose(found[:60], exact[:60])
    # Factors of 10 and 6 numbers, and 17 numbers as they are; 2 (p - 1)/p of their bytes.
    assert sent == 2 * 2 * 4 * (10 + 6 + 17) // 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_adasum_of_one_workers_samples_is_their_mean_gradient(ranks: int) -> None:
    """The last update of an epoch may have one sample: it counts as much on 8 ranks as on 1."""

    def reduce(comm: Communicator) -> list[float]:
        vector = torch.tensor([3.0, -4.0] if comm.rank == ranks // 2 else [0.0, 0.0])
        Adasum(comm, GradientLayout(2, torch.float32, (Layer(slice(0, 2), (2,)),))).all_reduce(
            vector, float(comm.rank == ranks // 2)
        )
        return vector.tolist()

    assert VirtualWorld(ranks).run(reduce) == [[3.0, -4.0]] * ranks


def test_adasum_combines_means_over_samples_for_any_shares() -> None:
    def reduce(comm: Communicator) -> list[float]:
        share, mean = ((0.75, [1.0, 0.0]), (0.25, [2.0, 2.0]))[comm.rank]
        vector = torch.tensor(mean, dtype=torch.float64) * share
        Adasum(comm, GradientLayout(2, torch.float64, (Layer(slice(0, 2), (2,)),))).all_reduce(vector, share)
        return vector.tolist()

    # a.b = 2, |a|^2 = 1, |b|^2 = 8: (1 - 2/2) a + (1 - 2/16) b.
    assert VirtualWorld(2).run(reduce) == [[1.75, 1.75]] * 2


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_leaves_nothing_behind(
    name: str, broken: float
) -> None:
    """A training that leaves such an update out goes on as if it had not been."""
    layout = GradientLayout(60, torch.float64, (Layer(slice(0, 60), (10, 6)),))

    def sums(comm: Communicator, breaks: bool) -> list[Tensor]:
        reduction: GradientReduction = MAKERS[name](comm, layout)
        found = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            if breaks and step == 2:
                vector = torch.ones(60, dtype=torch.float64)
                vector[7] = broken if comm.rank == 1 else 1.0
                reduction.all_reduce(vector, 1 / 3)
                assert not vector.isfinite().all()
            vector = torch.randn(60, generator=generator, dtype=torch.float64)
            reduction.all_reduce(vector, 1 / 3)
            found.append(vector)
        return found

    for without, found in zip(VirtualWorld(3).run(sums, False), VirtualWorld(3).run(sums, True), strict=True):
        assert all(map(torch.equal, without, found))
        assert not torch.equal(found[2], found[3])
