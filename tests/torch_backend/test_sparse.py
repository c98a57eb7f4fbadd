"""Sparse tensors are summed as the dense ones that they stand for."""

import pytest
import torch
from torch import distributed, nn

from tests.torch_backend.process_groups import Ranks
from tutti.errors import CallsDiffer

SHAPE = (6, 3)
DTYPES = [torch.float64, torch.float16, torch.int32]


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request):
    with Ranks(request.param) as started:
        yield started


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as started:
        yield started


def drawn(rank, dtype, sparse_dim):
    """A tensor that names an index twice; that of rank 1 has no element at all."""
    if rank == 1:
        return torch.sparse_coo_tensor(
            torch.empty((sparse_dim, 0), dtype=torch.long),
            torch.empty((0, *SHAPE[sparse_dim:]), dtype=dtype),
            SHAPE,
            check_invariants=True,
        )
    indices = torch.tensor([[0, 4, 4, rank], [1, 2, 2, 0]])[:sparse_dim]
    values = torch.arange(4 * 3).reshape(4, 3)[:, : 3 if sparse_dim == 1 else 1].to(dtype) + rank
    values = values if sparse_dim == 1 else values.squeeze(1)
    return torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)


@pytest.mark.parametrize("sparse_dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_equals_the_sum_of_dense_tensors(ranks, dtype, sparse_dim):
    def work(rank):
        tensor = drawn(rank, dtype, sparse_dim)
        distributed.all_reduce(tensor)
        return tensor.dtype, tensor.is_coalesced(), tensor.sparse_dim(), tensor.to_dense()

    expected = sum(drawn(rank, dtype, sparse_dim).to_dense() for rank in range(ranks.size))
    for found_dtype, coalesced, found_dim, dense in ranks.run(work):
        assert (found_dtype, coalesced, found_dim) == (dtype, True, sparse_dim)
        assert torch.equal(dense, expected)


def test_tensors_of_different_shapes_are_refused_on_all_ranks(two):
    def work(rank):
        with pytest.raises(CallsDiffer) as raised:
            distributed.all_reduce(torch.ones(2, 2 + rank).to_sparse())
        return str(raised.value)

    for text in two.run(work):
        assert "(2, 2)" in text
        assert "(2, 3)" in text


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a head whose gradient is dense."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, words):
        return self.head(self.embedding(words).mean(1))


def trained(model, words):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_ddp_trains_an_embedding_with_sparse_gradients_as_one_process_does(two):
    words = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(1))

    def work(rank):
        return trained(nn.parallel.DistributedDataParallel(Words()), words.chunk(2)[rank])

    expected, start = trained(Words(), words), list(Words().parameters())
    assert (expected[0] - start[0]).abs().max() > 0.01
    for found in two.run(work):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
