"""Forward and backward as a CUDA graph: recorded once, and replayed with a single call.

    step 1 to 3     launched operation by operation, on their own stream: libraries initialise
    step 4          recorded, then replayed
    step 5 ...      positions of the samples ──copy──▶ the graph's input; replay

Without it a small model waits for the CPU, which takes longer to launch operations than the GPU to compute
them. A graph repeats the same work on the same memory: the model's Python code must do so, too.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from tutti.data.batches import Batch, Batches
from tutti.errors import BadModel
from tutti.replica import Replica
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES, Loss
from tutti.training.run_parts import Computed

WARM: Final = 3
"""Steps that are launched operation by operation before one is recorded."""

KNOWN: Final = "activation batchnorm container conv dropout flatten linear normalization pooling"
"""The modules of `torch.nn.modules` whose layers repeat the same work, and never wait for the GPU."""

Pass = tuple[Tensor, Tensor, Tensor]
"""The loss, the outputs and the targets of a batch."""

Work = Callable[[], Pass]


def can_be_recorded(module: nn.Module, loss: Loss) -> bool:
    """Return whether a graph can replace a model and a loss: torch's own layers, and losses with a name."""
    return loss in LOSSES.values() and all(map(_is_known, module.modules()))


def _is_known(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    package, _, name = type(layer).__module__.rpartition(".")
    # BatchNorm without momentum reads its count of batches from the GPU.
    waits = getattr(layer, "momentum", 0.0) is None
    return package == "torch.nn.modules" and name in KNOWN.split() and not waits and not any(hooks)


class GraphedPass:
    """The gradients of batches on a GPU; one graph serves all batches of equal size."""

    def __init__(
        self,
        replica: Replica,
        batches: Batches,
        objective: Objective,
        recorder: CudaRecorder,
    ) -> None:
        self._module, self._part, self._objective = replica.module, batches.part, objective
        self._arithmetic, self._keeps = objective.arithmetic, bool(objective.metrics)
        self._recorder = recorder
        self._parameters = [parameter for flat in replica.flats for parameter in flat.parameters]
        self._warm = 0
        self._written: list[Tensor] = []
        self._positions: Tensor | None = None
        self._shares: dict[float, Tensor] = {}
        self._share = 0.0
        self._recorded: tuple[Pass, Callable[[], None]] | None = None
        batches.take = lambda positions: (positions, positions)

    def __call__(self, batch: Batch) -> Computed:
        """Add the gradient of a batch of positions, weighted by its share of the update.

        The next batch overwrites the returned loss.
        """
        positions, share = batch.targets, self._share_of(batch)
        if self._positions is None:
            self._positions, self._share = positions.clone(), batch.share
        if len(positions) != len(self._positions) or batch.share != self._share:
            return Computed(*self._recorder.aside(lambda: self._pass(positions, share)))
        own = self._positions.copy_(positions)
        if self._warm < WARM:
            self._warm += 1
            return Computed(*self._recorder.aside(lambda: self._pass(own, share)))
        if self._recorded is None:
            self._recorded = self._record(lambda: self._pass(own, share))
        (loss, outputs, targets), replay = self._recorded
        replay()
        # torch does not see the writes of a graph.
        increment_version(self._written)
        return Computed(loss, *((outputs.clone(), targets.clone()) if self._keeps else (outputs, targets)))

    def _share_of(self, batch: Batch) -> Tensor:
        if batch.share not in self._shares:
            dtype = torch.float64 if self._arithmetic.precision == "fp64" else torch.float32
            self._shares[batch.share] = torch.full((), batch.share, dtype=dtype, device=batch.targets.device)
        return self._shares[batch.share]

    def _record(self, work: Work) -> tuple[Pass, Callable[[], None]]:
        try:
            return self._recorder.record(work)
        except RuntimeError as error:
            raise BadModel(
                f"the model cannot be recorded as a CUDA graph ({error}); use --cuda-graph off"
            ) from error

    def _pass(self, positions: Tensor, share: Tensor) -> Pass:
        inputs, targets = self._part.take(positions)
        inputs, targets = self._arithmetic.inputs(inputs), self._arithmetic.targets(targets)
        computed = self._objective.compute(self._module, inputs, targets)
        # `backward` would add each gradient in its own call.
        gradients = torch.autograd.grad(computed.loss, self._parameters, share, allow_unused=True)
        self._written = _add(self._parameters, gradients)
        return computed.reported.detach(), computed.outputs.detach(), targets


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Add to the parameters' gradients in one call, and return the changed ones."""
    found = [(p.grad, new) for p, new in zip(parameters, gradients, strict=True) if new is not None]
    sums = [grad for grad, _ in found if grad is not None]
    torch._foreach_add_(sums, [new for _, new in found])
    return sums


class CudaRecorder:
    """A recorder of CUDA graphs."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def aside(self, work: Work) -> Pass:
        """Run `work` in order, but on another stream.

        Nothing can be recorded from the default stream, and libraries and autograd remember their stream.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = work()
        current.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(current)
        return results

    def record(self, work: Work) -> tuple[Pass, Callable[[], None]]:
        """Record `work` as a graph; return its results, not computed yet, and its replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = work()
        return results, graph.replay
