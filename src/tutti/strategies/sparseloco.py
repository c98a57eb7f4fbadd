"""SparseLoCo: many local steps of each worker, then an exchange of their largest moves, in 2 bits each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.allreduce.base import GradientLayout
from tutti.allreduce.compression import ChunkedTopK, Compressed
from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State
from tutti.strategies.averaged import PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import choice, number, whole
from tutti.strategies.outer import OuterWorker


@part("sparseloco")
@dataclass(frozen=True)
class SparseLoCo(PeerStrategy):
    """Sparse low-communication training: local steps, and error feedback in place of an outer momentum.

        for t = 1, 2, ...:
            x_i = x                                          every worker begins at the common weights
            `every` times:  x_i = optimizer(x_i, g_i)        with its own batches; the paper's is AdamW
            e_i = decay e_i + x - x_i                        what it has done, and what it has not sent yet
            s_i = Q(top_k(e_i))                              the largest of each 4096 numbers, in 2 bits
            e_i = e_i - s_i
            x = x - outer_lr 1/n sum over i of s_i

    A worker sends a share `keep` of the numbers: with 0.03, 1.75 bytes for each of them, one 75th of the
    weights. It sends the rest later, when it has grown; that replaces DiLoCo's outer momentum. With keep 1,
    without `quantize` and `decay`, this is DiLoCo without momentum.

        worker 0   │ step │ step │ ... │ top k, outer step │ step │ step │ ...
        worker 1   │ step │ step │ ... │ top k, outer step │ step │ step │ ...

    An evaluation in the middle of a round sees an outer step from the average so far, without top k.

    The paper's sum is divided by the number of workers, as here; the authors' program divides each number by
    the number of workers that have sent it. Both send every worker's message to all others. See
    `tutti.allreduce.compression.ChunkedTopK` for the chunks and 2 bits of the authors' program.

    Source: Sarfi, Therien, Lidin, Belilovsky 2025, "Communication Efficient LLM Pre-training with
    SparseLoCo", arXiv:2508.15706, algorithm 1; there `every` is H, `decay` beta, `outer_lr` alpha.
    """

    every: int = whole(20, "batches of a worker between two outer steps")
    keep: float = number(0.03, "share of the numbers that is sent", above=0, most=1)
    decay: float = number(0.95, "share of what was not sent that is kept for the next time", least=0, most=1)
    quantize: bool = choice(True, "send numbers in 2 bits", (False, True))
    outer_lr: float = number(1.0, "learning rate of the outer steps", above=0)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _SparseLoCoWorker(self, replica, comm, optimizer, clip)


class _SparseLoCoWorker(OuterWorker[SparseLoCo]):
    def __init__(
        self, strategy: SparseLoCo, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        codec = ChunkedTopK(strategy.keep, strategy.quantize)
        layouts = [GradientLayout.of(flat, slice(0, len(flat.weights))) for flat in replica.flats]
        self._sums = [Compressed(comm, layout, codec, strategy.decay) for layout in layouts]
        if strategy.decay:
            self.restarts += ("what each worker has not sent yet",)

    @override
    def exchange(self, vectors: list[Tensor]) -> int:
        """Step from the anchors by the sum of what all workers send; returns the bytes sent."""
        sent = 0
        rate = self.strategy.outer_lr / self.comm.size
        for flat, anchor, over_all in zip(self.replica.flats, self.anchors, self._sums, strict=True):
            delta = (anchor - flat.weights).cpu()
            sent += over_all.all_reduce(delta, 1.0)
            for span in flat.spans:  # 2 bits cannot say 0, which is in the gaps between them
                anchor[span].sub_(delta[span].to(anchor.device), alpha=rate)
        copy_all(vectors, self.anchors)
        return sent

    @override
    @torch.no_grad()
    def agree(self) -> None:
        """Overwrite the weights with the result of an outer step that sends all, without making it."""
        if self.rounds % self.strategy.every:
            self.average.take(self.weights)
            for weights, anchor in zip(self.weights, self.anchors, strict=True):
                weights.sub_(anchor).mul_(self.strategy.outer_lr).add_(anchor)

    @override
    def state(self) -> State:
        state = super().state()
        state.own["left_out"] = [over_all.state() for over_all in self._sums]
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        if saved.own is not None and self.strategy.decay:
            for over_all, values in zip(self._sums, saved.own["left_out"], strict=True):
                over_all.load_state(values)
