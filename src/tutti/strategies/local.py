"""Local SGD: workers step independently, and average their weights at intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.parameterwise import is_parameterwise
from tutti.registry import part
from tutti.replica import Replica
from tutti.strategies.averaged import AveragedWorker, PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import whole

ADAMS: Final = frozenset({"exp_avg", "exp_avg_sq"})
"""Names, in the state of optimizers like Adam, of the running means of gradients and of their squares."""

MOMENTUM: Final = frozenset({"momentum_buffer"})
"""The same of SGD with momentum."""

MOMENTS: Final = {
    "first_moment_every": frozenset({"exp_avg", "momentum_buffer"}),
    "second_moment_every": frozenset({"exp_avg_sq"}),
}
"""The moments averaged at the period of each option."""


@part("local")
@dataclass(frozen=True)
class Local(PeerStrategy):
    """Local SGD: the workers' weights are averaged after every `every` batches of each.

        x_i = optimizer(x_i, g_i(x_i))                         each worker i with its own batch
        x_i = 1/n sum over j of x_j       in step t = 1, 2, ...   if t <= after, or every divides t - after

    Post-local SGD averages after each of the first `after` steps: with plain SGD these are the steps of
    synchronous training. Each worker has its own momentum and other optimizer state, by default never
    averaged; with SGD's momentum, which is linear, the steps up to `after` are still the synchronous ones.
    BatchNorm's statistics are each worker's own in training, and averaged for evaluations and at the end.

    DES-LOC also averages the optimizer's moments, at longer intervals, as they change more slowly than the
    weights: its authors use 3 `every` for the first and 6 `every` for the second. With all three equal it is
    Local Adam.

        u_i = 1/n sum over j of u_j       after each `first_moment_every` batches
        v_i = 1/n sum over j of v_j       after each `second_moment_every` batches

    u is exp_avg or momentum_buffer of the optimizer's state, v is exp_avg_sq. Where a worker has seen no
    gradient of a weight yet, as with inputs that are often 0, its v is 0, and a u from others would make a
    huge step. So u_i is then limited to C sqrt(v_i), which no mean of a worker's own gradients exceeds (see
    `steepest`); the paper has no such limit. As printed, a step uses a gradient from before the averaging;
    here the averaging comes before the next gradient, as in local SGD.

        worker 0   │ step │ step │ average │ step │ step │ average │        every = 2
        worker 1   │ step │ step │ average │ step │ step │ average │

    On one host the average is read from all workers' rows in shared memory.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, algorithm 1;
    Lin, Stich, Patel, Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217 (post-local
    SGD). Iacob et al. 2025, "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
    Models", arXiv:2505.22549, algorithm 1 (periods of moments: K_x, K_u and K_v).
    """

    every: int = whole(8, "batches of a worker between two averagings")
    after: int = whole(0, "how many first batches are averaged one by one (post-local)", least=0)
    first_moment_every: int = whole(0, "batches between two averagings of Adam's mean; 0: never", least=0)
    second_moment_every: int = whole(0, "batches between two averagings of Adam's squares; 0: never", least=0)

    @property
    @override
    def period(self) -> int:
        return 1 if self.after else self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        kept = set[str]()
        for group in optimizer.param_groups:
            kept |= ADAMS if "betas" in group else MOMENTUM if group.get("momentum") else set()
        for option, moment in MOMENTS.items():
            if getattr(self, option) and is_parameterwise(optimizer) and not kept & moment:
                raise BadOption(
                    f"{self.as_given(option)}, but {type(optimizer).__name__} as it is set keeps no such "
                    "moment; leave the option out, or use '--optimizer adamw'"
                )
        return _LocalWorker(self, replica, comm, optimizer, clip)


class _LocalWorker(AveragedWorker[Local]):
    def __init__(
        self, strategy: Local, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        betas = [group["betas"] for group in optimizer.param_groups if "betas" in group]
        self._steepest = max((steepest(*one) for one in betas), default=math.inf)

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the averagings that may follow a round."""
        self.rounds += 1
        if self._is_due(self.strategy.every):
            self.meet(self.exchange)
        due = [moment for option, moment in MOMENTS.items() if self._is_due(getattr(self.strategy, option))]
        for moment in due:
            self._average_moment(moment)
        if due and self._steepest < math.inf:
            self._limit_first_moments()

    def _is_due(self, every: int) -> bool:
        late = self.rounds - self.strategy.after
        return every > 0 and (late <= 0 or late % every == 0)

    def _moments(self) -> Iterator[tuple[str, str, slice, Tensor]]:
        """Yield this worker's optimizer state: parameter, name, place in the parameter, and values."""
        assert self.steps is not None
        for piece in self.steps.state().pieces:
            parameter, _, key = piece.name.partition("/")[2].rpartition("/")
            yield parameter, key, slice(piece.start, piece.stop), piece.values

    def _average_moment(self, keys: frozenset[str]) -> None:
        """Average a moment; where this worker's optimizer does not have it (yet), it counts as zeros."""
        vectors = [torch.zeros_like(weights) for weights in self.weights]
        places = {
            name: vector[span]
            for flat, vector in zip(self.replica.flats, vectors, strict=True)
            for name, span in zip(flat.names, flat.spans, strict=True)
        }
        moments = [
            (places[name][place], values) for name, key, place, values in self._moments() if key in keys
        ]
        for place, values in moments:
            place.copy_(values)
        self.meet(lambda _: self.average.take(vectors))
        for place, values in moments:
            values.copy_(place)

    def _limit_first_moments(self) -> None:
        """Limit the averaged first moments to |u| <= C sqrt(v)."""
        kept = {(name, key, place.start): values for name, key, place, values in self._moments()}
        for (name, key, start), first in kept.items():
            second = kept.get((name, "exp_avg_sq", start))
            if key == "exp_avg" and second is not None:
                room = second.sqrt().mul_(self._steepest)
                torch.clamp(first, -room, room, out=first)


def steepest(beta1: float, beta2: float) -> float:
    """Return C, the largest ratio of Adam's mean of gradients u to the root of their mean square v.

        |u| <= C sqrt(v)          C^2 = (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2))

    This is the Cauchy-Schwarz inequality for u = (1 - beta1) sum over s of beta1^(t-s) g_s and
    v = (1 - beta2) sum over s of beta2^(t-s) g_s^2. With betas of 0.9 and 0.999, C is 7.3. With beta2 up to
    beta1^2 there is no such bound, and C is inf.
    """
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
