"""Models whose forward writes weights: workers that make one update together would each do so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import BadModel
from tutti.replica import Replica
from tutti.training.forward_writes import ForwardWrites

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randint(0, 20, (40, 6), generator=GENERATOR)
TARGETS = torch.randint(0, 3, (40,), generator=GENERATOR)


class LookUp(nn.Module):
    """Rows of a table, which are shortened where they are long."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 4, max_norm=0.7, sparse=sparse), nn.Linear(24, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.table(inputs).flatten(1))


class Decaying(nn.Module):
    """A layer whose weight decays by itself, at each look or from the second one on."""

    def __init__(self, first: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.looks, self.first = 0, first

    def forward(self, inputs: Tensor) -> Tensor:
        self.looks += self.training
        if self.training and self.looks >= self.first:
            with torch.no_grad():
                self.layer.weight.mul_(0.99)
        return self.layer(inputs.to(self.layer.weight.dtype))


class Constrained(nn.Linear):
    """A layer that replaces its weight by one with short columns, maybe of another dtype."""

    def __init__(self, longest: float = 0.1, dtype: torch.dtype | None = None) -> None:
        super().__init__(6, 3)
        self.longest, self.other = longest, dtype

    def forward(self, inputs: Tensor) -> Tensor:
        short = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.longest)
        self.weight.data = short if self.other is None else short.to(self.other)
        return super().forward(inputs.to(self.weight.dtype))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LookUp, r"'table\.weight', by max_norm=0\.7"),
        (lambda: LookUp(sparse=True), r"'table\.weight', by max_norm=0\.7"),
        (Decaying, r"'layer\.weight': workers"),
        (lambda: Decaying(first=2), r"'layer\.weight': workers"),
        (Constrained, "'weight': workers"),
        (lambda: Constrained(longest=1e9), "'weight': workers"),
    ],
)
def test_a_forward_that_writes_a_weight_is_refused(model: Callable[[], nn.Module], name: str) -> None:
    module = model()
    reading = ForwardWrites(Replica(module), refuses=True)

    def look_twice() -> None:
        for _ in range(2):
            with reading.watched():
                module(INPUTS)

    with pytest.raises(BadModel, match=f"forward writes its weight {name}.*such as --strategy local"):
        look_twice()


def test_what_only_reads_is_let_be() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    reading = ForwardWrites(Replica(module), refuses=True)
    for _ in range(3):
        with reading.watched():
            loss = module(INPUTS.float()).sum()
        loss.backward()
        with torch.no_grad():
            module[0].weight.sub_(0.1)  # as an optimizer does


@pytest.mark.parametrize("workers", [1, 2])
def test_one_worker_may_and_several_that_step_together_may_not(workers: int) -> None:
    given = {"strategy": "sync", "epochs": 1, "batch_size": 8, "quiet": True}
    if workers == 1:
        given["strategy"] = "solo"
        tutti.train(LookUp(), (INPUTS, TARGETS), workers=1, **given)
        return
    with pytest.raises(BadModel, match=r"forward writes its weight 'table\.weight'"):
        tutti.train(LookUp(), (INPUTS, TARGETS), workers=2, **given)


def test_workers_with_weights_of_their_own_may() -> None:
    given = {"strategy": "local", "epochs": 1, "batch_size": 8, "quiet": True}
    tutti.train(LookUp(), (INPUTS, TARGETS), workers=2, **given)


def test_a_weight_that_forward_replaces_is_trained_as_by_torch() -> None:
    def trained(laid_out: bool) -> Tensor:
        torch.manual_seed(0)
        module = Constrained().double()
        watch = ForwardWrites(Replica(module), refuses=False).watched if laid_out else nullcontext
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
        for first in range(0, 40, 8):
            module(INPUTS[:8])  # as an evaluation does
            optimizer.zero_grad(set_to_none=False)
            with watch():
                outputs = module(INPUTS[first : first + 8])
            nn.functional.cross_entropy(outputs, TARGETS[first : first + 8]).backward()
            optimizer.step()
        return module.weight.detach()

    assert torch.equal(trained(laid_out=True), trained(laid_out=False))


def test_a_weight_that_forward_replaces_is_trained_on_one_worker() -> None:
    torch.manual_seed(0)
    module = Constrained()
    untrained = torch.renorm(module.weight.detach().clone(), p=2, dim=0, maxnorm=module.longest)
    given = {"strategy": "solo", "epochs": 2, "lr": 0.1, "optimizer": "sgd", "batch_size": 8, "quiet": True}
    trained = tutti.train(module, (INPUTS, TARGETS), workers=1, **given).model
    assert not torch.allclose(trained.weight, untrained)


def test_a_weight_that_forward_replaces_by_one_of_another_kind_is_refused() -> None:
    module = Constrained(dtype=torch.float64)
    watch = ForwardWrites(Replica(module), refuses=False)
    said = r"its weight 'weight', torch.float32 of shape \(3, 6\), by another kind: torch.float64 of shape"
    with pytest.raises(BadModel, match=said), watch.watched():
        module.weight.data = module.weight.data.double()
