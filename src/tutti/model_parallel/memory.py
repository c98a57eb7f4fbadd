"""The memory that a rank needs under a layout, determined by a dry run on tensors without contents.

Weights, gradients and the optimizer's state follow from the rank's parameters. The rest of forward and
backward is the peak of a step on torch's meta device, where every operation has shapes but no numbers: each
tensor counts from the operation that makes it until nothing refers to it. Ranks of a pipeline run the actions
of its schedule.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from tutti.data.columns import each_of, mapped
from tutti.model_parallel.base import Workload
from tutti.training.losses import LossBatch

PROBE: Final = 64
"""Rows and columns of the parameter that shows how much state an optimizer keeps."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs; memory shared by the ranks of a host counts in equal parts."""

    weights: int
    gradients: int
    state: int
    activations: int
    """The further needs of a step, at its peak."""

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.state + self.activations


class PeakMemory(TorchDispatchMode):
    """A mode that counts the bytes of all tensors that operations make: at their peak, and in total."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.made = self._live = 0
        self._alive: set[int] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the memory of its results that its arguments do not have."""
        given = {
            x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        outputs = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(outputs):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._count(storage)
        if func is torch.ops.aten.convolution_backward.default:
            self.peak = max(self.peak, self._live + _rearranged(*args[:2]))
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage._cdata, storage.nbytes()
        self._alive.add(place)
        self._live += nbytes
        self.made += nbytes
        self.peak = max(self.peak, self._live)

        def freed() -> None:
            self._alive.discard(place)
            self._live -= nbytes

        weakref.finalize(storage, freed)


def _rearranged(gradient: Tensor, inputs: Tensor) -> int:
    """Return the bytes that a convolution's backward pass copies into oneDNN's memory layouts."""
    return sum(x.nbytes for x in (gradient, inputs) if not x.is_contiguous(memory_format=torch.channels_last))


def state_per_byte(make: Callable[[nn.Module], Optimizer]) -> float:
    """Return the bytes of state that an optimizer keeps for each byte of parameters."""
    hidden = nn.Linear(PROBE, PROBE, bias=False)
    probe = hidden.weight
    probe.grad = torch.zeros_like(probe)
    optimizer = make(nn.Sequential(hidden, nn.Linear(PROBE, 1, bias=False)))
    optimizer.step()
    kept = pytree.tree_leaves(list(optimizer.state.values()))
    return sum(x.nbytes for x in kept if isinstance(x, Tensor) and x.numel() > 1) / probe.nbytes


def of_teams(teams: int, weights: int, gradients: int, state: float, peak: int) -> MemoryNeed:
    """Return the need of a rank of teams on one host, where holders of the same portion share its weights."""
    return MemoryNeed(weights // teams, gradients, int(state * gradients) // teams, peak)


def on_meta(module: nn.Module) -> nn.Module:
    """Return the module without contents, ready for training: its gradients are allocated."""
    model = copy.deepcopy(module).to("meta").train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def held(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of parameters and buffers, and of gradients."""
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return weights, sum(p.nbytes for p in model.parameters() if p.requires_grad)


def peak_of_step(model: nn.Module, workload: Workload, count: int) -> int:
    """Return the peak of forward and backward of `count` samples, and the samples."""
    (inputs, targets), arithmetic = workload.batch(count), workload.arithmetic
    inputs, targets = mapped(inputs, methodcaller("to", "meta")), targets.to("meta")
    with PeakMemory() as ledger:
        if workload.loss.whole:
            loss = workload.loss(arithmetic.call(model, inputs), LossBatch(inputs, targets))
        else:
            loss = workload.loss(arithmetic.forward(model, inputs), targets)
        torch.autograd.backward(loss)
    return int(ledger.peak + sum(one.nbytes for one in each_of(inputs)) + targets.nbytes)
