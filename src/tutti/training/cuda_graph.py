"""Forward and backward as a CUDA graph: told to the GPU once, and done again with a single call.

    step 1 to 3     told operation by operation, on a stream of their own: libraries set themselves up
    step 4          recorded, then replayed
    step 5 ...      positions of the samples ──copy──▶ where the graph reads them; replay

Otherwise a small model waits for the CPU, which needs longer to tell the GPU what to do than that to do it.
A graph does the same to the same memory each time: it is for models whose Python code would do so, too.

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
"""Steps that are told operation by operation before one is recorded."""

KNOWN: Final = "activation batchnorm container conv dropout flatten linear normalization pooling"
"""The modules of `torch.nn.modules` whose layers do the same in each step, and never wait for the GPU."""

Pass = tuple[Tensor, Tensor, Tensor]
"""The loss, the outputs and the targets of a batch."""

Work = Callable[[], Pass]


def can_be_recorded(module: nn.Module, loss: Loss) -> bool:
    """Return whether a model and a loss are known to do the same in each step, and never to wait for the GPU.

    That is so for most of torch's own layers, without hooks, and for the losses that have a name.
    """
    return loss in LOSSES.values() and all(map(_is_known, module.modules()))


def _is_known(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    package, _, name = type(layer).__module__.rpartition(".")
    # BatchNorm without momentum asks the GPU how many batches there were.
    waits = getattr(layer, "momentum", 0.0) is None
    return package == "torch.nn.modules" and name in KNOWN.split() and not waits and not any(hooks)


class GraphedPass:
    """The gradients of batches on a GPU, most of them computed by one graph."""

    def __init__(
        self,
        replica: Replica,
        batches: Batches,
        objective: Objective,
        recorder: CudaRecorder,
    ) -> None:
        self._module, self._part, self._loss = replica.module, batches.part, objective.loss
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

        The next batch overwrites the loss that this returns.

        Raises:
            BadModel: the model cannot be recorded.
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
        # What a graph writes, torch does not count.
        increment_version(self._written)
        return Computed(loss, *((outputs.clone(), targets.clone()) if self._keeps else (outputs, targets)))

    def _share_of(self, batch: Batch) -> Tensor:
        """The batch's share, on the GPU."""
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
        outputs = self._arithmetic.forward(self._module, inputs)
        loss = self._loss(outputs, targets)
        # Not `backward`, which would add one parameter's gradient after the other.
        gradients = torch.autograd.grad(loss, self._parameters, share, allow_unused=True)
        self._written = _add(self._parameters, gradients)
        return loss.detach(), outputs.detach(), targets


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Add to the parameters' gradients, all in one call; returns those that were added to."""
    found = [(p.grad, new) for p, new in zip(parameters, gradients, strict=True) if new is not None]
    sums = [grad for grad, _ in found if grad is not None]
    torch._foreach_add_(sums, [new for _, new in found])
    return sums


class CudaRecorder:
    """A recorder of CUDA graphs."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def aside(self, work: Work) -> Pass:
        """Do `work` after all that the GPU was told before, and before all that it will be told.

        On another stream than the default one, from which nothing can be recorded: libraries and autograd
        remember where they were used.
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
        """Record `work` as a graph, without doing it: where its results will be, and what does it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = work()
        return results, graph.replay
