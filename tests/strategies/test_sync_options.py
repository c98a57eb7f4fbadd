"""`sync` with every algorithm, every way to compress, and adaptive sums, against plain loops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.strategies import sequential as sequential_module
from tests.strategies.sequential import Case, by_strategy, distance, loss, sequential, weights_of
from tutti.allreduce.compression import Cast, Codec, Int8, TopK
from tutti.comm.base import Communicator, cut
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Sync
from tutti.strategies.measurements import Traffic
from tutti.strategies.placement import place

# The ranks' processes cannot import these; they get their functions by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sequential_module)

MESSAGES = ["mpi", "ring", "halving_doubling", "tree", "hierarchical", "torus"]
COMPRESSED = ["bf16", "fp16", "int8", "top_k", "power_sgd"]
SETTINGS = {
    **{name: Sync(collective=name) for name in MESSAGES},
    "adasum": Sync(reduce="adasum"),
    **{name: Sync(compress=name, compress_inside=True) for name in COMPRESSED},
}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    # Every parameter's length is a multiple of 16: the flat vector has no gaps, as the plain loops' has none.
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16)).to(
        dtype
    )


def sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


CASE = Case(partial(mlp, torch.float64), sgd, steps=12, dtype=torch.float64)


def world(ranks: int | tuple[int, ...]) -> VirtualWorld:
    return VirtualWorld(ranks) if isinstance(ranks, int) else VirtualWorld(sum(ranks), ranks)


def run(case: Case, ranks: int | tuple[int, ...], strategy: Sync) -> Tensor:
    """The weights after the strategy's run, which must be the same bits on all ranks."""
    first, *others = world(ranks).run(by_strategy, case, strategy)
    for other in others:
        assert torch.equal(other, first)
    return first


# --- exact sums


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("collective", MESSAGES)
def test_every_collective_agrees_with_plain_torch(collective: str, ranks: int | tuple[int, ...]) -> None:
    assert distance(run(CASE, ranks, Sync(collective=collective)), sequential(CASE)) < 1e-12


@pytest.mark.parametrize("clip", [Clip(norm=0.05), Clip(value=0.01)], ids=str)
@pytest.mark.parametrize("collective", ["mpi", "ring"])
def test_clipping_equals_torchs_with_every_collective(collective: str, clip: Clip) -> None:
    case = replace(CASE, clip=clip)
    assert distance(run(case, (2, 1), Sync(collective=collective)), sequential(case)) < 1e-12


def test_accumulation_agrees_with_plain_torch() -> None:
    assert distance(run(CASE, 3, Sync(every=3, collective="tree")), sequential(CASE)) < 1e-12


# --- plain loops


def plain_loop(
    case: Case, workers: int, reduce: Callable[[list[Tensor]], Tensor], weighted: bool = True
) -> Tensor:
    """Train by hand: `reduce` makes the update's gradient of the workers' own.

    Each is weighted by its share of the samples, or the mean over its own ones; zero where it has none.
    """
    module = case.build()
    optimizer = case.optimizer(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for inputs, targets in case.batches():
        gradients = []
        for own in cut(len(inputs), workers):
            module.zero_grad(set_to_none=False)
            share = (own.stop - own.start) / len(inputs)
            if share:
                (loss(module, inputs[own], targets[own]) * (share if weighted else 1)).backward()
            gradients.append(parameters_to_vector([p.grad for p in module.parameters()]).clone())
        values = [torch.empty_like(p) for p in module.parameters()]
        vector_to_parameters(reduce(gradients), values)
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.grad = value
        optimizer.step()
    return weights_of(module)


def with_error_feedback(codec: Codec, workers: int) -> Callable[[list[Tensor]], Tensor]:
    """Karimireddy et al. 2019, algorithm 2, on every worker."""
    errors = [torch.zeros(()) for _ in range(workers)]

    def reduce(gradients: list[Tensor]) -> Tensor:
        total = torch.zeros_like(gradients[0])
        for worker, gradient in enumerate(gradients):
            wanted = gradient + errors[worker]
            sent = torch.zeros_like(wanted)
            codec.add(codec.compress(wanted), sent)
            errors[worker] = wanted - sent
            total += sent
        return total

    return reduce


CODECS = {
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "int8": Int8(),
    "top_k": TopK(0.01),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_compression_follows_the_papers_loop(name: str, workers: int) -> None:
    expected = plain_loop(CASE, workers, with_error_feedback(CODECS[name], workers))
    assert distance(run(CASE, workers, SETTINGS[name]), expected) < 1e-9
    assert distance(expected, sequential(CASE)) > 1e-7  # it is lossy


def power_sgd(case: Case, workers: int, rank: int) -> Callable[[list[Tensor]], Tensor]:
    """Vogels et al. 2019, algorithms 1 and 2."""
    shapes = [p.shape for p in case.build().parameters()]
    errors = [[torch.zeros(shape, dtype=case.dtype) for shape in shapes] for _ in range(workers)]
    matrices = [number for number, shape in enumerate(shapes) if len(shape) > 1]
    rights = {
        number: torch.randn(
            shapes[number][1], rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        for seed, number in enumerate(matrices)
    }

    def reduce(gradients: list[Tensor]) -> Tensor:
        layers: list[list[Tensor]] = []
        for gradient, lost in zip(gradients, errors, strict=True):
            parts = [torch.empty_like(error) for error in lost]
            vector_to_parameters(gradient, parts)
            layers.append([part + error for part, error in zip(parts, lost, strict=True)])
        found = []
        for number in range(len(shapes)):
            deltas = [parts[number] for parts in layers]
            if number not in rights:
                found.append(sum(deltas))
                continue
            left, _ = torch.linalg.qr(sum([delta @ rights[number] for delta in deltas]))
            own = [delta.T @ left for delta in deltas]
            for worker, delta in enumerate(deltas):
                errors[worker][number] = delta - left @ own[worker].T
            rights[number] = sum(own)
            found.append(left @ rights[number].T)
        return parameters_to_vector(found)

    return reduce


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_power_sgd_follows_the_papers_loop(workers: int, rank: int) -> None:
    expected = plain_loop(CASE, workers, power_sgd(CASE, workers, rank))
    strategy = Sync(compress="power_sgd", rank=rank, compress_inside=True)
    assert distance(run(CASE, workers, strategy), expected) < 1e-9
    assert distance(expected, sequential(CASE)) > 1e-3


def adasum(case: Case, gradients: list[Tensor]) -> Tensor:
    """Maleki et al. 2020: pairs of neighbours, layer by layer; ranks beyond a power of two join first."""
    power = 1 << (len(gradients).bit_length() - 1)
    joined = [pair_sum(case, *gradients[rank::power]) for rank in range(power)]
    while len(joined) > 1:
        joined = [pair_sum(case, *joined[at : at + 2]) for at in range(0, len(joined), 2)]
    return joined[0]


def pair_sum(case: Case, first: Tensor, *second: Tensor) -> Tensor:
    if not second or not second[0].any():
        return first
    if not first.any():
        return second[0]
    lengths = [p.numel() for p in case.build().parameters()]
    found = []
    for a, b in zip(first.split(lengths), second[0].split(lengths), strict=True):
        dot = a @ b
        found.append((1 - dot / (2 * (a @ a))) * a + (1 - dot / (2 * (b @ b))) * b)
    return torch.cat(found)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 17, (2, 3)], ids=str)
def test_adasum_follows_the_papers_loop(ranks: int | tuple[int, ...]) -> None:
    """Each worker's gradient is its own mean; of 17 workers, some have no sample in the last batch of 12."""
    expected = plain_loop(CASE, world(ranks).ranks, partial(adasum, CASE), weighted=False)
    assert distance(run(CASE, ranks, Sync(reduce="adasum")), expected) < 1e-9
    assert distance(expected, sequential(CASE)) > 1e-3


# --- between hosts


@pytest.mark.parametrize("name", COMPRESSED)
def test_inside_one_host_nothing_is_compressed_unless_forced(name: str) -> None:
    assert torch.equal(run(CASE, 3, Sync(compress=name)), run(CASE, 3, Sync()))
    assert not torch.equal(run(CASE, 3, SETTINGS[name]), run(CASE, 3, Sync()))


@pytest.mark.parametrize("name", COMPRESSED)
def test_between_hosts_of_one_rank_compression_is_the_same_as_inside_one(name: str) -> None:
    assert torch.equal(run(CASE, (1, 1), Sync(compress=name)), run(CASE, 2, SETTINGS[name]))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_hosts_send_with_the_next_sum_what_compression_took_from_the_last(name: str) -> None:
    send = with_error_feedback(CODECS[name], 2)

    def between_hosts(gradients: list[Tensor]) -> Tensor:
        return send([gradients[0] + gradients[1], gradients[2] + gradients[3]])

    expected = plain_loop(CASE, 4, between_hosts)
    assert distance(run(CASE, (2, 2), Sync(compress=name)), expected) < 1e-9
    assert distance(expected, sequential(CASE)) > 1e-7


# --- traffic


def after_a_step(comm: Communicator, strategy: Sync, build: Callable[[], nn.Module]) -> Traffic:
    """Check what every step leaves behind; returns the worker's traffic."""
    module = build()
    replica = place(module, comm, strategy.home)
    worker = strategy.worker(replica, comm, sgd(module), Clip())
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad.normal_(generator=torch.Generator().manual_seed(comm.rank))
    worker.step()
    comm.barrier()
    for flat in replica.flats:
        assert not flat.rows.any()
        between = torch.ones(len(flat.weights), dtype=torch.bool)
        for span in flat.spans:
            between[span] = False
        assert not flat.weights[between].any()
    return worker.traffic


LENGTH = sum(p.numel() for p in mlp().parameters())


@pytest.mark.parametrize(
    ("strategy", "ranks", "nbytes"),
    [
        (Sync(), 1, 0),
        (Sync(), 4, 4 * LENGTH),
        (Sync(), (1, 1), 4 * LENGTH),
        (Sync(), (1, 1, 1, 1), 2 * 3 * 4 * LENGTH // 4),
        (Sync(collective="ring"), 4, 2 * 3 * 4 * LENGTH // 4),
        (Sync(reduce="adasum"), 4, 2 * 4 * LENGTH),
        (Sync(compress="bf16"), (1, 1, 1), 2 * 2 * LENGTH),
        (Sync(compress="top_k", keep=0.25), (1, 1), 2 * LENGTH),
        (Sync(compress="int8"), (1, 1), LENGTH + 16),
    ],
    ids=str,
)
def test_traffic_counts_the_bytes_that_were_sent(
    strategy: Sync, ranks: int | tuple[int, ...], nbytes: int
) -> None:
    for traffic in world(ranks).run(after_a_step, strategy, mlp):
        assert traffic.exchanges == 1
        assert traffic.bytes_sent == nbytes
        assert dict(traffic.staleness) == {0: 1}


def test_power_sgd_sends_factors_of_whole_matrices_however_many_ranks_own_them() -> None:
    strategy = Sync(compress="power_sgd")
    alone, _ = (traffic.bytes_sent for traffic in world((1, 1)).run(after_a_step, strategy, mlp))
    two = [traffic.bytes_sent for traffic in world((2, 2)).run(after_a_step, strategy, mlp)][:2]
    assert sum(two) - 2 * 4 * LENGTH == alone  # what they sum inside the host is counted too


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.5}, "has an effect with compress=top_k alone"),
        ({"compress": "int8", "rank": 4}, "has an effect with compress=power_sgd alone"),
        ({"compress_inside": True}, "nothing is compressed; set 'compress' to one of bf16, fp16"),
        ({"collective": "ring", "compress": "int8"}, "'ring' adds up plain numbers"),
        ({"reduce": "adasum", "collective": "tree"}, "leave 'collective' at native"),
        ({"reduce": "adasum", "compress": "int8"}, "'compress' at none"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Sync(**options)
