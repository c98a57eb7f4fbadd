"""A module as flat vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import BadModel
from tutti.replica import ALIGNMENT, Gradients, NormShare, Replica, ReplicaMemory


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def test_parameters_become_views_and_keep_their_values() -> None:
    module, before = mlp(), [p.detach().clone() for p in mlp().parameters()]
    (flat,) = Replica(module).flats
    assert flat.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    for parameter, value, span in zip(module.parameters(), before, flat.spans, strict=True):
        assert torch.equal(parameter, value)
        flat.weights[span] = 2.0
        assert bool((parameter == 2.0).all())


def test_parameters_are_aligned_and_the_gaps_are_zero() -> None:
    flat = Replica(mlp()).flats[0]
    assert all(span.start % ALIGNMENT == 0 for span in flat.spans)
    gaps = torch.ones(len(flat.weights), dtype=torch.bool)
    for span in flat.spans:
        gaps[span] = False
    assert gaps.any()
    assert not flat.weights[gaps].any()


def test_backward_writes_into_the_vector_of_gradients() -> None:
    module, plain = mlp(), mlp()
    flat = Replica(module).flats[0]
    for model in (module, plain):
        model(torch.ones(2, 7)).sum().backward()
    for span, parameter in zip(flat.spans, plain.parameters(), strict=True):
        assert torch.equal(flat.grads[span], parameter.grad.reshape(-1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_tied_weights_are_laid_down_once() -> None:
    module, plain = Tied(), Tied()
    plain.load_state_dict(module.state_dict())
    (flat,) = Replica(module).flats
    assert flat.names == ("first.weight", "first.bias", "second.bias")
    assert module.first.weight is module.second.weight
    for model in (module, plain):
        model(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(flat.grads[flat.spans[0]], plain.first.weight.grad.reshape(-1))


def test_each_dtype_has_a_vector_of_its_own() -> None:
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3).bfloat16()])
    flats = Replica(module).flats
    assert [flat.weights.dtype for flat in flats] == [torch.float32, torch.float64, torch.bfloat16]
    assert [flat.names for flat in flats] == [(f"{i}.weight", f"{i}.bias") for i in range(3)]


def test_zero_grad_keeps_the_views() -> None:
    module = mlp()
    replica = Replica(module)
    module(torch.ones(2, 7)).sum().backward()
    replica.zero_grad()
    assert not any(parameter.grad.any() for parameter in module.parameters())
    module(torch.ones(2, 7)).sum().backward()
    assert replica.flats[0].grads.any()


def test_buffers_are_views_that_forward_goes_on_updating() -> None:
    module, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    (vector,) = Replica(module).buffers
    for model in (module, plain):
        model(torch.arange(6.0).view(2, 3))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(module, name), getattr(plain, name))
    assert len(vector) == 2 * ALIGNMENT
    assert torch.equal(vector[:3], plain.running_mean)
    vector.fill_(7.0)
    assert bool((module.running_var == 7.0).all())


def test_a_replica_that_does_not_fill_takes_the_weights_that_are_there() -> None:
    module, there = mlp(), torch.full((96,), 3.0)
    Replica(module, ReplicaMemory(weights=lambda length, *_: there[:length], fill=False))
    assert all(bool((parameter == 3.0).all()) for parameter in module.parameters())


def test_what_is_frozen_is_laid_down_only_where_that_is_asked_for() -> None:
    for frozen, names in (
        (False, ("2.weight", "2.bias")),
        (True, ("0.weight", "0.bias", "2.weight", "2.bias")),
    ):
        module = mlp()
        module[0].requires_grad_(False)
        (flat,) = Replica(module, frozen=frozen).flats
        assert flat.names == names


def test_weights_that_were_cut_from_wider_ones_lie_without_gaps() -> None:
    module = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    module.weight = nn.Parameter(torch.arange(12.0, dtype=torch.float64).view(3, 4)[:, :2])
    (flat,) = Replica(module).flats
    assert flat.weights.tolist() == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0] + 10 * [0.0]


def test_replicas_over_one_memory_see_each_others_weights() -> None:
    weights, rows = torch.zeros(96), torch.zeros(2, 96)

    def memory(row: int) -> ReplicaMemory:
        return ReplicaMemory(lambda *_: weights, lambda *_: rows, row, fill=row == 0)

    first, second = mlp(), nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    replicas = [Replica(first, memory(0)), Replica(second, memory(1))]
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() == theirs.data_ptr()
    second(torch.ones(1, 7)).sum().backward()
    assert not rows[0].any()
    assert rows[1].any()
    assert replicas[1].flats[0].grads.data_ptr() == rows[1].data_ptr()


def test_the_first_parameter_that_is_not_finite_is_named() -> None:
    module = mlp()
    replica = Replica(module)
    assert replica.first_not_finite() is None
    module[2].weight.grad[0, 0] = torch.inf
    assert replica.first_not_finite() == "2.weight"
    with torch.no_grad():
        module[0].bias[1] = torch.nan
    assert replica.first_not_finite() == "0.bias"


def test_large_numbers_are_finite_also_where_their_sum_is_not() -> None:
    module = mlp()
    replica = Replica(module)
    with torch.no_grad():
        module[0].bias.fill_(3e38)
        module[2].weight.fill_(-3e38)
    assert replica.first_not_finite() is None


class Sharded(Tensor):
    """A tensor of which this process has the first row, as it has a part of a DTensor."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)[:1]


def sharded() -> nn.Sequential:
    """A plain layer, and one whose weights are scattered."""
    module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 3, False, dtype=torch.float64))
    module[1].weight = nn.Parameter(torch.ones(3, 2, dtype=torch.float64).as_subclass(Sharded))
    return module


@pytest.mark.parametrize("row", [0, 1])
def test_a_scattered_parameter_is_looked_at_in_this_process_s_part(row: int) -> None:
    module = sharded()
    replica = Replica(module)
    assert replica.first_not_finite() is None
    with torch.no_grad():
        module[1].weight.as_subclass(Tensor)[row, 1] = torch.nan
    assert replica.first_not_finite() == ("1.weight" if row == 0 else None)


def backward(kind: str) -> tuple[nn.Module, Gradients]:
    """A model and its gradients: all in the vector, or those of a table or of all parameters apart."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(6, 3, sparse=kind == "rows"), nn.Linear(3, 2)).double()
    gradients = Replica(module).gradients
    if kind != "dense":
        gradients.keep_apart(module.parameters() if kind == "apart" else [module[0].weight])
    module(torch.tensor([4, 1, 4])).square().sum().backward()
    return module, gradients


@pytest.mark.parametrize("kind", ["dense", "rows", "apart"])
def test_gradients_are_scaled_measured_looked_at_and_zeroed_wherever_they_lie(kind: str) -> None:
    module, gradients = backward(kind)
    plain = [p.grad.to_dense().clone() for p in backward("dense")[0].parameters()]
    gradients.scale(0.5)
    for parameter, expected in zip(module.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), expected / 2, rtol=1e-12, atol=0)
    squares = sum(float(one.square().sum()) for one in plain) / 4
    assert gradients.squared_norm() == pytest.approx(squares, rel=1e-12)
    gradients.share = NormShare(lambda parameter: parameter is module[0].weight, lambda squares: squares + 7)
    counted = float(plain[0].square().sum()) / 4 + 7
    assert gradients.squared_norm() == pytest.approx(counted, rel=1e-12)
    assert gradients.is_finite()
    gradients.vectors()[-1].fill_(torch.nan)
    assert not gradients.is_finite()
    gradients.zero()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_beside_scattered_gradients_those_that_autograd_made_anew_are_scaled() -> None:
    module = sharded()
    replica = Replica(module)
    replica.gradients.keep_apart(module.parameters())
    module[0].weight.grad = torch.full((2, 2), 8.0, dtype=torch.float64)
    module[0].bias.grad = None
    module[1].weight.grad = torch.full((3, 2), 4.0, dtype=torch.float64).as_subclass(Sharded)
    replica.gradients.scale(0.25)
    assert bool((module[0].weight.grad == 2.0).all())
    assert module[0].bias.grad is None
    assert module[1].weight.grad.as_subclass(Tensor).tolist() == [[1.0, 1.0], [4.0, 4.0], [4.0, 4.0]]


def test_the_module_can_look_at_other_weights_and_back_again() -> None:
    module = mlp()
    replica = Replica(module)
    (flat,) = replica.flats
    inputs = torch.randn(4, 7)
    before = module(inputs)
    replica.point_to([torch.zeros_like(flat.weights)])
    assert not module(inputs).any()
    assert flat.weights.any()
    replica.point_to([flat.weights])
    assert module[0].weight.data_ptr() == flat.weights.data_ptr()
    assert torch.equal(module(inputs), before)


def test_a_scalar_and_an_empty_parameter_are_fine() -> None:
    module = nn.ParameterList([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))])
    replica = Replica(module)
    assert module[0].item() == 2.0
    assert replica.count == 1


def untied() -> nn.Module:
    """Two layers that have one memory, but are not one parameter."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.T)
    return module


class Elsewhere(Tensor):
    """A tensor that says it lies on another device."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("layer", "order"),
    [
        (nn.Conv2d(3, 4, 3), torch.channels_last),
        (nn.Conv3d(3, 4, 2), torch.channels_last_3d),
        (nn.Linear(3, 2), torch.contiguous_format),
    ],
)
def test_the_order_in_memory_is_kept(layer: nn.Module, order: torch.memory_format) -> None:
    module = layer.to(memory_format=order)
    weight = module.get_parameter("weight")
    weight.grad, before = torch.ones_like(weight), weight.detach().clone()
    flat = Replica(module).flats[0]
    assert weight.is_contiguous(memory_format=order)
    assert torch.equal(weight, before)
    assert not flat.grads.any()
    flat.weights.fill_(1.0)
    assert bool((weight == 1.0).all())


def moved() -> nn.Module:
    module = mlp()
    module[2].weight = nn.Parameter(torch.zeros(3, 5).as_subclass(Elsewhere))
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (mlp().requires_grad_(False), "no trainable parameter"),
        (nn.LazyLinear(2), "lazy"),
        (nn.Linear(2, 2, device="meta"), "'weight' .* meta device"),
        (moved(), "cpu and cuda:1"),
        (untied(), r"'0\.weight' and '1\.weight'"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        Replica(module)
