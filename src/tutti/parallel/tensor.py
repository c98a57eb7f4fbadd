"""Tensor parallelism: every layer's weights are cut over the ranks, its outputs put together again.

All ranks of a team work on the same samples. Of a layer with F outputs (features, or maps) rank r computes
its share, and all get all of them:

    forward     y_r = W_r x + b_r            y = [y_0; y_1; ...]           all_gather
    backward    dW_r = dy_r x^T              dx = sum over r of W_r^T dy_r  all_reduce

    rank 0   x ──► W_0 x ─┐        ┌─► y ─► ReLU ─► ...
    rank 1   x ──► W_1 x ─┴ gather ┴─► y ─► ReLU ─► ...

What lies between such layers computes the same on every rank. A layer's parameters, gradients and optimizer
state exist once in a team; the outputs of all layers exist on every rank.

Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 3 (model
parallelism in dense layers); Shoeybi et al. 2019, "Megatron-LM", section 3 (the pair of conjugate operators).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import modules
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator, cut
from tutti.errors import BadModel
from tutti.parallel.base import Of, Portion, Ranks, count_of, taken, values_of
from tutti.parallel.moving import Gradients, worker_of
from tutti.replica import Replica
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.strategies.placement import place

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


_Apply = Callable[..., Tensor]


class TensorPortion(Portion):
    """The shares that one rank has of a model's layers.

    Args:
        module: the model, alike on all ranks. Its layers are cut in place.
        ranks: who holds what.

    Raises:
        BadModel: a layer cannot be cut, or has fewer outputs than there are ranks.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module, self._ranks = module, ranks
        self.peers = self.data = ranks.data
        self.parameters = count_of(module)
        self._split = split(module, ranks.team)
        self._gradients = Gradients(module, lambda p: p in self._split or ranks.team.rank == 0)

    @override
    def place(self, strategy: Strategy) -> Replica:
        return place(self.module, self._ranks.data, strategy.home)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return worker_of(strategy, replica, self._ranks, optimizer, clip, self._gradients)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        whole: dict[Tensor, Tensor] = {}
        for tensor, outputs in self._split.items():
            whole[tensor] = stack(of(tensor), self._ranks.team, outputs, 0)
        # Shares that stand under two names are one tensor under two names again.
        return taken(self.module, lambda tensor: whole[tensor] if tensor in whole else of(tensor))

    @override
    def close(self) -> None:
        self._ranks.close()


def split(module: nn.Module, team: Communicator) -> dict[Tensor, int]:
    """Cut every Linear and Conv2d layer of `module` over the team, in place.

    Args:
        module: alike on all ranks.
        team: the ranks.

    Returns:
        The parameters that are shares now, and how many outputs their layer has in all.

    Raises:
        BadModel: a layer cannot be cut, or has fewer outputs than there are ranks.
    """
    layers = {name: part for name, part in module.named_modules() if part._parameters}
    for name, layer in layers.items():
        _refuse_uncut(name or type(module).__name__, layer, team.size)
    shares: dict[Tensor, nn.Parameter] = {}
    found: dict[Tensor, int] = {}
    for layer in layers.values():
        dim = SPLIT.get(type(layer))
        if dim is None:
            continue
        outputs = len(layer.get_parameter("weight"))
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in shares:
                shares[parameter] = _share(parameter, team)
                found[shares[parameter]] = outputs
            setattr(layer, name, shares[parameter])
        _put_together(layer, team, outputs, dim)
    return found


def _share(parameter: nn.Parameter, team: Communicator) -> nn.Parameter:
    own = parameter.detach()[cut(len(parameter), team.size)[team.rank]]
    return nn.Parameter(own.clone(memory_format=torch.preserve_format), parameter.requires_grad)


def _put_together(layer: nn.Module, team: Communicator, outputs: int, dim: int) -> None:
    """Have `layer`, which computes its share of the outputs alone, give all of them."""
    own = cut(outputs, team.size)[team.rank]
    for attribute in ("out_features", "out_channels"):
        if hasattr(layer, attribute):
            setattr(layer, attribute, own.stop - own.start)
    enter, gather = cast("_Apply", _Enter.apply), cast("_Apply", _Stack.apply)
    layer.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0], team), *inputs[1:]))
    layer.register_forward_hook(lambda _, inputs, share: gather(share, team, outputs, dim))


def stack(share: Tensor, team: Communicator, length: int, dim: int) -> Tensor:
    """The shares of all ranks, one after the other along `dim`, where they make `length` (collective).

    On the meta device nothing is exchanged.
    """
    parts = cut(length, team.size)
    own = share.movedim(dim, 0)
    widest = parts[0].stop
    # All rows are as long as the longest, so that they end where the communicator cuts.
    rows = own.new_empty(team.size, widest, *own.shape[1:])
    rows[team.rank, : len(own)] = own
    if not rows.is_meta:
        team.all_gather(rows.view(-1))
    whole = torch.cat([row[: part.stop - part.start] for row, part in zip(rows, parts, strict=True)])
    return whole.movedim(0, dim).contiguous()


class _Enter(Function):
    """The inputs of a layer that is cut. Each rank's share adds to their gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, team: Communicator) -> Tensor:
        ctx.team = team
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        if not total.is_meta:
            ctx.team.all_reduce(total.view(-1))
        return total.to(gradient.dtype), None


class _Stack(Function):
    """The outputs of a layer that is cut. Of their gradient, which all ranks have, each needs its share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, team: Communicator, length: int, dim: int) -> Tensor:
        ctx.own, ctx.dim = cut(length, team.size)[team.rank], dim
        return stack(share, team, length, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient.narrow(ctx.dim, ctx.own.start, ctx.own.stop - ctx.own.start), None, None, None


def _refuse_uncut(name: str, layer: nn.Module, ranks: int) -> None:
    kind = type(layer).__name__
    if type(layer) not in SPLIT:
        if not isinstance(layer, REPLICATED):
            raise BadModel(
                f"layer '{name}' of the model is a {kind}, which cannot be cut by its outputs; use "
                "--parallel sharded, or say how to cut it with --parallel.plan file.py:function"
            )
        return
    if getattr(layer, "groups", 1) != 1:
        raise BadModel(
            f"layer '{name}' of the model is a Conv2d of {layer.groups} groups, which cannot be cut by its "
            "outputs; use --parallel sharded, or a convolution of one group"
        )
    outputs = len(layer.get_parameter("weight"))
    if outputs < ranks:
        what = "outputs" if isinstance(layer, nn.Linear) else "channels"
        raise BadModel(
            f"layer '{name}' of the model ({kind}) has {outputs} {what}, which cannot be cut over {ranks} "
            f"ranks; use tensor={outputs} or fewer"
        )
