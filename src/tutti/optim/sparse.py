"""The user's optimizer on the rows of embedding tables that a batch has touched.

An `nn.Embedding(sparse=True)` has a gradient for the rows that were looked up. Moving only these costs in
proportion to the batch, not to the table, and leaves all other rows to other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.optim.state import add_whole
from tutti.optim.without_compiler import plain_step
from tutti.state import LocalState

BY_ROWS: Final[dict[type[Optimizer], type[Optimizer]]] = {
    optim.SGD: optim.SGD,
    optim.Adagrad: optim.Adagrad,
    optim.Adam: optim.SparseAdam,
}
"""Optimizers that can move single rows, and torch's class that does it."""

EVERYWHERE: Final = ("momentum", "weight_decay", "amsgrad")
"""Options that also move rows without a gradient, or need torch's dense form."""


_KEPT: Final = ("params", "foreach", "fused")


def sparse_tables(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable tables whose gradients are sparse, each once."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    weights = [layer.weight for layer in layers if layer.sparse and layer.weight.requires_grad]
    return list(dict.fromkeys(weight for weight in weights if isinstance(weight, nn.Parameter)))


class RowOptimizer:
    """An optimizer of the touched rows of embedding tables, with its own state.

    Existing state of the user's optimizer is carried over. SGD and Adagrad do what they do to a dense
    gradient. Adam is torch's `SparseAdam`: the moments of a row change only when the row is touched.
    BadOption: the optimizer cannot move only rows, by its class or by an option.
    """

    def __init__(self, optimizer: Optimizer, tables: Sequence[nn.Parameter]) -> None:
        known = {id(table) for table in tables}
        self._optimizer = optimizer
        self._groups: list[tuple[int, list[nn.Parameter], Optimizer]] = []
        for number, group in enumerate(optimizer.param_groups):
            mine = [parameter for parameter in group["params"] if id(parameter) in known]
            if mine:
                self._groups.append((number, mine, _by_rows(optimizer, group, mine)))
        self._tables = list(tables)

    def state(self, names: Mapping[nn.Parameter, str]) -> LocalState:
        """Return the state of the tables, by their names."""
        held = LocalState()
        for _, tables, optimizer in self._groups:
            for table in tables:
                add_whole(held, names[table], optimizer.state.get(table, {}))
        return held

    @torch.no_grad()
    def step(self) -> int:
        """Move the rows that have a gradient, and drop the gradients; return the bytes of these."""
        moved = 0
        for table in self._tables:
            if table.grad is not None:
                table.grad = table.grad.coalesce() if table.grad.is_sparse else _touched_rows(table.grad)
                moved += table.grad.values().nbytes
        for number, tables, optimizer in self._groups:
            theirs, own = self._optimizer.param_groups[number], optimizer.param_groups[0]
            own.update({name: theirs[name] for name in own if name in theirs and name not in _KEPT})
            if any(table.grad is not None for table in tables):
                # Otherwise torch warns of sparse tensors that its optimizers make.
                with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
                    plain_step(optimizer)()
        for table in self._tables:
            table.grad = None
        return moved


def _by_rows(optimizer: Optimizer, group: dict[str, Any], tables: list[nn.Parameter]) -> Optimizer:
    cls = BY_ROWS.get(type(optimizer))
    if cls is None:
        usable = ", ".join(sorted(kind.__name__ for kind in BY_ROWS))
        raise BadOption(
            f"optimizer {type(optimizer).__name__} cannot move single rows of an embedding; use one of "
            f"{usable}, or make the embedding with sparse=False"
        )
    for name in EVERYWHERE:
        if group.get(name):
            raise BadOption(
                f"{type(optimizer).__name__} with {name} = {group[name]} moves more than the rows that a "
                f"batch touches; leave {name} out, or make the embedding with sparse=False"
            )
    # Adagrad uses this one when it is made, and never again.
    begin = {name: group[name] for name in ("initial_accumulator_value",) if name in group}
    made = cls(tables, lr=float(group["lr"]), **begin)  # type: ignore[call-arg]
    for table in tables:
        if kept := optimizer.state.get(table):
            made.state[table] = deepcopy(kept)
    return made


def _touched_rows(dense: Tensor) -> Tensor:
    """Turn a dense gradient into a sparse one of its rows that are not zero; the dense one is zeroed."""
    rows = dense.flatten(1).any(dim=1).nonzero().T
    sparse = torch.sparse_coo_tensor(
        rows, dense[rows[0]], dense.shape, check_invariants=False, is_coalesced=True
    )
    dense.zero_()
    return sparse
