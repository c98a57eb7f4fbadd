"""Embedding tables whose touched rows alone are moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.optim.sparse import RowOptimizer, sparse_tables


class Words(nn.Module):
    """A table of 6 words, and a layer on the mean of a batch's words."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2)
        self.table = nn.Embedding(6, 3, sparse=sparse)
        self.last = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words)).square().mean()


def test_tables_are_found_once_and_frozen_ones_left_out() -> None:
    frozen = nn.Embedding(3, 3, sparse=True).requires_grad_(False)
    shared = nn.Embedding(4, 3, sparse=True)
    module = nn.ModuleList([shared, nn.Embedding(5, 3), shared, frozen, nn.EmbeddingBag(7, 3, sparse=True)])
    assert [len(table) for table in sparse_tables(module)] == [4, 7]


def by_rows(optimizer: Optimizer, module: Words, batches: list[list[int]]) -> None:
    move_rows(RowOptimizer(optimizer, sparse_tables(module)), module, batches)


def move_rows(rows: RowOptimizer, module: Words, batches: list[list[int]]) -> None:
    for words in batches:
        module(torch.tensor(words)).backward()
        rows.step()


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_rows_move_as_with_the_dense_gradient(name: str) -> None:
    batches = [[1, 4, 1], [4, 4], [0]]
    module, dense = Words(), Words(sparse=False)
    made, other = (getattr(optim, name)([m.table.weight], lr=0.1) for m in (module, dense))
    for words in batches:
        dense(torch.tensor(words)).backward()
        other.step()
        other.zero_grad()
    by_rows(made, module, batches)
    torch.testing.assert_close(module.table.weight, dense.table.weight)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_other_rows_are_not_touched(name: str) -> None:
    module = Words()
    before = module.table.weight.detach().clone()
    by_rows(getattr(optim, name)([module.table.weight], lr=0.1), module, [[1, 4], [1, 2]])
    moved = (module.table.weight != before).any(dim=1)
    assert moved.tolist() == [False, True, True, False, True, False]


def test_adam_is_torchs_sparse_adam() -> None:
    module, other = Words(), Words()
    by_rows(optim.Adam([module.table.weight], lr=0.1, betas=(0.5, 0.6)), module, [[1, 4], [1, 2]])
    plain = optim.SparseAdam([other.table.weight], lr=0.1, betas=(0.5, 0.6))
    for words in ([1, 4], [1, 2]):
        other(torch.tensor(words)).backward()
        plain.step()
        plain.zero_grad()
    assert torch.equal(module.table.weight, other.table.weight)


def test_a_dense_gradient_is_read_row_by_row() -> None:
    module = Words()
    table = module.table.weight
    optimizer = RowOptimizer(optim.SGD([table], lr=1.0), [table])
    before = table.detach().clone()
    dense = torch.zeros_like(table)
    dense[3] = torch.tensor([0.0, 2.0, 0.0])
    table.grad = dense
    assert optimizer.step() == dense[3].nbytes
    assert not dense.any()
    assert table.grad is None
    assert (before - table).abs().sum() == (before[3] - table[3]).sum() == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "SGD with momentum = 0.9 moves more than the rows"),
        (lambda p: optim.Adam(p, weight_decay=0.1), "Adam with weight_decay = 0.1"),
        (lambda p: optim.RMSprop(p), "RMSprop cannot move single rows .* Adagrad, Adam, SGD"),
    ],
)
def test_optimizers_that_move_more_than_rows_are_refused(make, message: str) -> None:
    table = nn.Embedding(3, 2, sparse=True).weight
    with pytest.raises(BadOption, match=message):
        RowOptimizer(make([table]), [table])
