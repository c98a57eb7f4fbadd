"""Every collective against a reference, over dtypes, shapes, layouts and numbers of ranks."""

import functools

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import ReduceOp

from tests.torch_backend.every_operation import every_operation
from tests.torch_backend.process_groups import Ranks

quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SHAPES = [(), (0,), (1,), (7,), (3, 4), (2, 0, 5), (1000,), (9000,)]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
MOVED = [
    *FLOATS,
    *INTEGERS,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
NUMBERS = {
    "SUM": numpy.add,
    "PRODUCT": numpy.multiply,
    "MIN": numpy.minimum,
    "MAX": numpy.maximum,
    "BAND": numpy.bitwise_and,
    "BOR": numpy.bitwise_or,
    "BXOR": numpy.bitwise_xor,
}

shapes, layouts = st.sampled_from(SHAPES), st.sampled_from(["contiguous", "strided"])
seeds = st.integers(0, 2**20)


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request):
    with Ranks(request.param) as started:
        yield started


def drawn(seed, rank, shape, dtype, layout="contiguous"):
    """A rank's numbers at the beginning: small whole ones, whose sums and products every dtype can hold."""
    generator = numpy.random.default_rng([seed, rank])
    values = torch.from_numpy(generator.integers(1, 4, shape)).to(dtype)
    return laid_out(values, layout)


def laid_out(values, layout):
    """The same numbers in memory with gaps."""
    if layout == "contiguous" or not values.dim():
        return values.clone()
    wide = torch.zeros((*values.shape, 2), dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def folded(tensors, name):
    """NumPy's reduction of the ranks' tensors."""
    arrays = [tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in tensors]
    return torch.from_numpy(numpy.asarray(functools.reduce(NUMBERS[name], arrays))).to(tensors[0].dtype)


def plain(tensor):
    """The tensor without gaps, and of a dtype that torch can compare and pickle."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def same(found, expected):
    expected = plain(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def name_of(operation):
    return getattr(ReduceOp, operation)


@quick
@given(
    operation=st.sampled_from([*NUMBERS]),
    floating=st.sampled_from(FLOATS),
    integer=st.sampled_from(INTEGERS),
    use_integers=st.booleans(),
    shape=shapes,
    layout=layouts,
    seed=seeds,
)
def test_reductions_make_what_numpy_makes(
    ranks, operation, floating, integer, use_integers, shape, layout, seed
):
    dtype = integer if use_integers or operation.startswith("B") else floating

    def reduce(rank):
        everywhere = drawn(seed, rank, shape, dtype, layout)
        distributed.all_reduce(everywhere, name_of(operation))
        at_last = drawn(seed, rank, shape, dtype, layout)
        distributed.reduce(at_last, ranks_size - 1, name_of(operation))
        return everywhere.contiguous(), at_last.contiguous()

    ranks_size = ranks.size
    inputs = [drawn(seed, rank, shape, dtype) for rank in range(ranks.size)]
    expected = folded(inputs, operation)
    for rank, (everywhere, at_last) in enumerate(ranks.run(reduce)):
        same(everywhere, expected)
        same(at_last, expected if rank == ranks.size - 1 else inputs[rank])


@quick
@given(dtype=st.sampled_from(MOVED), shape=shapes, layout=layouts, seed=seeds)
def test_moves_bring_every_dtype_unchanged(ranks, dtype, shape, layout, seed):
    size = ranks.size

    def move(rank):
        root = seed % size
        sent = drawn(seed, rank, shape, dtype, layout)
        broadcast = drawn(seed, rank, shape, dtype, layout)
        distributed.broadcast(broadcast, root)
        gathered = [laid_out(torch.zeros(shape).to(dtype), layout) for _ in range(size)]
        distributed.all_gather(gathered, sent)
        at_root = [laid_out(torch.zeros(shape).to(dtype), layout) for _ in range(size)]
        distributed.gather(sent, at_root if rank == root else None, root)
        dealt = laid_out(torch.zeros(shape).to(dtype), layout)
        parts = [drawn(seed + part, rank, shape, dtype, layout) for part in range(size)]
        distributed.scatter(dealt, parts if rank == root else None, root)
        swapped = [laid_out(torch.zeros(shape).to(dtype), layout) for _ in range(size)]
        distributed.all_to_all(swapped, parts)
        return [[plain(one) for one in group] for group in ([broadcast], gathered, at_root, [dealt], swapped)]

    root = seed % size
    inputs = [drawn(seed, rank, shape, dtype) for rank in range(size)]
    for rank, (broadcast, gathered, at_root, dealt, swapped) in enumerate(ranks.run(move)):
        same(broadcast[0], inputs[root])
        same(dealt[0], drawn(seed + rank, root, shape, dtype))
        for other in range(size):
            same(gathered[other], inputs[other])
            if rank == root:
                same(at_root[other], inputs[other])
            same(swapped[other], drawn(seed + rank, other, shape, dtype))


@quick
@given(
    splits=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=5, max_size=5),
    width=st.sampled_from([None, 0, 3]),
    seed=seeds,
)
def test_all_to_all_single_follows_the_splits(ranks, splits, width, seed):
    size = ranks.size
    rows = [row[:size] for row in splits[:size]]
    inner = () if width is None else (width,)

    def swap(rank):
        source = drawn(seed, rank, (sum(rows[rank]), *inner), torch.int64)
        incoming = [row[rank] for row in rows]
        output = torch.zeros((sum(incoming), *inner), dtype=torch.int64)
        distributed.all_to_all_single(output, source, incoming, rows[rank])
        return output

    sources = [drawn(seed, rank, (sum(rows[rank]), *inner), torch.int64) for rank in range(size)]
    for rank, found in enumerate(ranks.run(swap)):
        same(found, torch.cat([sources[other].split(rows[other])[rank] for other in range(size)]))


@pytest.mark.parametrize("nbytes", [64 << 10, (64 << 10) + 4, (512 << 10) - 4, (2560 << 10) + 20])
def test_lengths_at_which_the_way_changes_are_no_exception(ranks, nbytes):
    size, length = ranks.size, nbytes // 4

    def everything(rank):
        reduced = torch.arange(length, dtype=torch.float32) + rank
        distributed.all_reduce(reduced)
        gathered = torch.zeros(size * length)
        distributed.all_gather_into_tensor(gathered, torch.arange(length, dtype=torch.float32) + rank)
        part = torch.zeros(length)
        distributed.reduce_scatter_tensor(part, torch.arange(size * length, dtype=torch.float32))
        swapped = torch.zeros(size * length)
        distributed.all_to_all_single(swapped, torch.arange(size * length, dtype=torch.float32) + rank)
        return reduced, gathered, part, swapped

    numbers, whole = (
        torch.arange(length, dtype=torch.float32),
        torch.arange(size * length, dtype=torch.float32),
    )
    for rank, (reduced, gathered, part, swapped) in enumerate(ranks.run(everything)):
        same(reduced, sum(numbers + other for other in range(size)))
        same(gathered, torch.cat([numbers + other for other in range(size)]))
        same(part, whole.view(size, length)[rank] * size)
        same(swapped, torch.cat([whole.view(size, length)[rank] + other for other in range(size)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_an_average_is_the_sum_through_the_number_of_ranks(ranks, dtype):
    def average(rank):
        tensor = torch.full((5,), 6 * (rank + 1), dtype=dtype)
        distributed.all_reduce(tensor, ReduceOp.AVG)
        return tensor

    for found in ranks.run(average):
        same(found, torch.full((5,), 3 * (ranks.size + 1), dtype=dtype))


def test_coalesced_forms_treat_each_tensor_by_itself(ranks):
    def coalesced(rank):
        several = [torch.ones(3) * rank, torch.ones(2, 2) * (rank + 1)]
        with distributed._coalescing_manager():
            for one in several:
                distributed.all_reduce(one)
        outputs = [torch.zeros(2 * size), torch.zeros(3 * size)]
        with distributed._coalescing_manager():
            for output, length in zip(outputs, (2, 3), strict=True):
                distributed.all_gather_into_tensor(output, torch.full((length,), float(rank)))
        parts = [torch.zeros(1), torch.zeros(2)]
        with distributed._coalescing_manager():
            for part in parts:
                distributed.reduce_scatter_tensor(part, torch.ones(len(part) * size))
        lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
        distributed.group.WORLD.allgather_coalesced(
            lists, [torch.full((2,), float(rank)), torch.full((1,), rank + 0.5)]
        ).wait()
        return several, outputs, parts, lists

    size = ranks.size
    total = sum(range(size))
    for several, outputs, parts, lists in ranks.run(coalesced):
        same(several[0], torch.full((3,), float(total)))
        same(several[1], torch.full((2, 2), float(total + size)))
        for output, length in zip(outputs, (2, 3), strict=True):
            same(output, torch.arange(size).float().repeat_interleave(length))
        for part in parts:
            same(part, torch.full_like(part, float(size)))
        for rank, (first, second) in enumerate(lists):
            same(first, torch.full((2,), float(rank)))
            same(second, torch.full((1,), rank + 0.5))


@pytest.mark.parametrize("length", [5, 100_000])
def test_autograd_learns_that_a_tensor_was_overwritten(ranks, length):
    def reduce(rank):
        tensor = torch.ones(length)
        distributed.all_reduce(tensor)
        return tensor._version

    # A sum over one rank changes nothing.
    assert [version > 0 for version in ranks.run(reduce)] == [ranks.size > 1] * ranks.size


def test_everything_comes_out_as_with_gloo(ranks):
    def both(rank):
        gloo = distributed.new_group(backend="gloo")
        found = [every_operation(group) for group in (None, gloo)]
        distributed.destroy_process_group(gloo)
        return found

    for ours, theirs in ranks.run(both):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)


def test_a_sum_over_many_ranks_is_rounded_once(ranks):
    def reduce(rank):
        tensor = torch.full((4,), 1.0 if rank == 0 else 2**-8, dtype=torch.bfloat16)
        distributed.all_reduce(tensor)
        return tensor

    exact = torch.full((4,), 1.0 + (ranks.size - 1) * 2**-8)
    for found in ranks.run(reduce):
        same(found, exact.bfloat16())


def test_sums_are_bit_equal_on_all_ranks_and_in_every_run(ranks):
    def reduce(rank):
        found = []
        for _ in range(2):
            torch.manual_seed(rank)
            tensor = torch.randn(300_000)
            distributed.all_reduce(tensor)
            found.append(tensor)
        return found

    runs = [one for found in ranks.run(reduce) for one in found]
    for one in runs[1:]:
        same(one, runs[0])
    torch.testing.assert_close(runs[0], contextual_sum(ranks.size))


def contextual_sum(size):
    total = torch.zeros(300_000)
    for rank in range(size):
        torch.manual_seed(rank)
        total += torch.randn(300_000)
    return total
