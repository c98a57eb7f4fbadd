"""Tensor parallelism: the weights of every Linear and Conv2d layer are cut over the ranks by their outputs.

All ranks of a team work on the same samples. Of a layer with F outputs (features, or maps) rank r computes
its share, and all gather the whole:

    forward     y_r = W_r x + b_r                y: all_gather
    backward    dW_r = dy_r x^T                  own channels of dy
                dx = sum over r of W_r^T dy_r    all_reduce

    rank 0   W_0 x ─┐        ┌─► ReLU, pooling, ... ─► V_0 y ─┐
    rank 1   W_1 x ─┴ gather ┴─► ReLU, pooling, ... ─► V_1 y ─┴ gather ─ ...

A layer's parameters, gradients and optimizer state exist once in a team; activations are whole on every rank.

Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 3 (model
parallelism in dense layers); Shoeybi et al. 2019, "Megatron-LM", section 3 (the pair of conjugate operators).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import modules
from typing_extensions import override

from tutti.comm.base import Communicator, cut
from tutti.errors import BadModel
from tutti.model_parallel.base import LayoutRanks, Of, TeamPortion, Workload, taken, values_of
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, held, of_teams, on_meta, peak_of_step

SPLIT: Final[dict[type[nn.Module], int]] = {nn.Linear: -1, nn.Conv2d: -3}
"""The layers that can be cut, and which dimension of their outputs the cut runs through."""

REPLICATED: Final = (
    modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.PReLU,
)
"""Layers with few weights, which every rank has whole."""


@dataclass(frozen=True)
class Cut:
    """A cut of one dimension of a tensor over the ranks of a team.

    On the meta device nothing is exchanged.
    """

    team: Communicator
    widths: tuple[int, ...]  # the length of each rank's part; the parts follow one another
    dim: int

    @classmethod
    def of(cls, length: int, team: Communicator, dim: int) -> Cut:
        """Cut `length` into parts that differ by at most one."""
        return cls(team, tuple(part.stop - part.start for part in cut(length, team.size)), dim)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part, a view."""
        rank = self.team.rank
        return whole.narrow(self.dim, sum(self.widths[:rank]), self.widths[rank])

    def gather(self, own: Tensor) -> Tensor:
        """Return the whole, gathered from all ranks' parts (collective)."""
        shape = list(own.shape)
        shape[self.dim] = max(
            self.widths
        )  # where the communicator cuts, all parts are as long as the longest
        rows = own.new_empty(len(self.widths), *shape)
        parts = [row.narrow(self.dim, 0, width) for row, width in zip(rows, self.widths, strict=True)]
        parts[self.team.rank].copy_(own)
        if not rows.is_meta:
            self.team.all_gather(rows.view(-1))
        return torch.cat(parts, self.dim)


class _Gather(Function):
    """Gathers the ranks' parts; backward takes the own channels of the gradient, equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.cut.own(gradients[0]), None


class _Enter(Function):
    """The identity on a tensor that every rank has whole; the backward pass adds up its gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, team: Communicator) -> Tensor:
        ctx.team = team
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # Short floats are added in fp32.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True).contiguous()
        if not total.is_meta:
            ctx.team.all_reduce(total.view(-1))
        return total.to(gradient.dtype), None


_gather = cast("Callable[[Tensor, Cut], Tensor]", _Gather.apply)
_enter = cast("Callable[[Tensor, Communicator], Tensor]", _Enter.apply)


class TensorPortion(TeamPortion):
    """One rank's shares of a model's layers."""

    def __init__(self, module: nn.Module, ranks: LayoutRanks) -> None:
        super().__init__(module, ranks, lambda p: p in self._split or ranks.team.rank == 0)
        self._split = split(module, ranks.team)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        found = {tensor: cut.gather(of(tensor)) for tensor, cut in self._split.items()}
        # Shares that stand under two names are one tensor under two names again.
        return taken(self.module, lambda tensor: found[tensor] if tensor in found else of(tensor))


def split(module: nn.Module, team: Communicator) -> dict[Tensor, Cut]:
    """Cut every Linear and Conv2d layer of `module` over the team, in place.

    Each takes whole inputs and gives whole outputs afterwards, on every rank. Return the parameters that are
    now shares, with their cuts. BadModel: a layer cannot be cut, or has fewer outputs than there are ranks.
    """
    layers = {name: part for name, part in module.named_modules() if part._parameters}
    for name, layer in layers.items():
        _refuse_uncut(name or type(module).__name__, layer, team.size)
    shares: dict[Tensor, nn.Parameter] = {}
    found: dict[Tensor, Cut] = {}
    for layer in layers.values():
        if type(layer) not in SPLIT:
            continue
        outputs = Cut.of(len(layer.get_parameter("weight")), team, 0)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in shares:
                own = outputs.own(parameter.detach()).clone(memory_format=torch.preserve_format)
                shares[parameter] = nn.Parameter(own, parameter.requires_grad)
                found[shares[parameter]] = outputs
            setattr(layer, name, shares[parameter])
        for attribute in ("out_features", "out_channels"):
            if hasattr(layer, attribute):
                setattr(layer, attribute, outputs.widths[team.rank])
        layer.forward = _CutForward(layer, outputs)
    return found


class _CutForward:
    """The forward pass of a layer whose outputs are shared out over the ranks (collective)."""

    def __init__(self, layer: nn.Module, outputs: Cut) -> None:
        self._compute = layer.forward
        self._outputs = replace(outputs, dim=SPLIT[type(layer)])

    def __call__(self, inputs: Tensor) -> Tensor:
        return _gather(self._compute(_enter(inputs, self._outputs.team)), self._outputs)


def _refuse_uncut(name: str, layer: nn.Module, ranks: int) -> None:
    groups = getattr(layer, "groups", 1)
    if type(layer) not in SPLIT or groups != 1:
        if isinstance(layer, REPLICATED):
            return
        kind = f"{type(layer).__name__}{f' of {groups} groups' if groups != 1 else ''}"
        raise BadModel(
            f"layer '{name}' of the model is a {kind}, which cannot be cut by its outputs; use "
            "--parallel sharded"
        )
    outputs = len(layer.get_parameter("weight"))
    if outputs < ranks:
        raise BadModel(
            f"layer '{name}' of the model has {outputs} outputs, which cannot be cut over {ranks} "
            f"ranks; use tensor={outputs} or fewer"
        )


def portion(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> TensorPortion:
    """Make this rank's shares of a model (collective)."""
    return TensorPortion(module, LayoutRanks.of(comm, layout.team))


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the need of a rank."""
    model = on_meta(module)
    # Rank 0 of a team that does not exist: on the meta device nothing is exchanged.
    split(model, cast("Communicator", SimpleNamespace(rank=0, size=layout.team)))
    peak = peak_of_step(model, workload, -(-workload.batch_size // layout.data))
    return of_teams(layout.data, *held(model), state, peak)
