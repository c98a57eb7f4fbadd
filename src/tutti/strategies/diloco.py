"""DiLoCo: many local steps of each worker, then one step of an outer optimizer for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.allreduce.base import GradientLayout
from tutti.allreduce.compression import E3M0, Compressed
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.registry import part
from tutti.replica import Flat, Replica
from tutti.strategies.averaged import PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import choice, number, whole
from tutti.strategies.outer import VELOCITY, OuterWorker, move_outer
from tutti.terminal import warn_on_stderr

OUTER_GRADIENT: Final = "outer_gradient"
"""The first word of the names of outer gradients under way, in a checkpoint."""


@part("diloco")
@dataclass(frozen=True)
class DiLoCo(PeerStrategy):
    """Distributed low-communication training: local steps, and Nesterov's momentum between their averages.

        for t = 1, 2, ...:
            x_i = x                                          every worker begins at the common weights
            `every` times:  x_i = optimizer(x_i, g_i)        with its own batches; the paper's is AdamW
            d = 1/n sum over i of (x - x_i)                  the outer gradient
            v = outer_momentum v + d
            x = x - outer_lr (d + outer_momentum v)

    Each worker keeps the state of its inner optimizer from one round to the next; the outer momentum is the
    same on all workers, so no separate rank keeps it. With outer_lr 1 and without outer momentum this is
    local SGD. BatchNorm's statistics are averaged for evaluations and at the end.

        worker 0   │ step │ step │ ... │ average, outer step │ step │ step │ ...
        worker 1   │ step │ step │ ... │ average, outer step │ step │ step │ ...

    With one worker this is SNOO; with `--optimizer muon`, MuLoCo.

    Streaming DiLoCo cuts the weights into `fragments`, so that less is exchanged at a time: each fragment has
    its own rounds of `every` steps, every / fragments steps after those of the previous one. An outer
    gradient of step t arrives `delay` steps later. The worker trains on, and keeps a share `mixing` of its
    own weights:

        d = 1/n sum over i of (x - x_i)                      of one fragment, x_i as in step t
        v = outer_momentum v + d
        x = x - outer_lr (d + outer_momentum v)              in step t + delay
        x_i = mixing x_i + (1 - mixing) x

    With every 4, delay 2 and two fragments, step by step:

        fragment 0   │      │ d    │      │ x    │      │ d    │      │ x    │
        fragment 1   │      │      │      │ d    │      │ x    │      │ d    │

    With `eager`, a worker uses its own new outer gradient with the others' from the previous round, and waits
    for none. Each worker then has its own anchor a_i and momentum v_i.

        m = 1/n sum over j of d_j                            of the round before
        e_i = a_i - x_i                                      of this round
        u_i = m + 1/n (e_i - d_i)                            its outer gradient, for a_i and v_i
        d_i = e_i

    That is stable where a round goes only part of the way to a minimum (about half, with the default outer
    optimizer); otherwise lower outer_momentum, or `every`.

    Fragments are consecutive parameters of about equal length, as in MuLoCo's program; the paper prefers
    strided layers of a transformer. An outer gradient is measured from x, as in torchft's program. It is
    exchanged when it is due, not during the `delay` steps: the numbers are the paper's, but the time
    of an exchange is not hidden. `compress` sends it as 4-bit floats to all workers, which add up in 32 bits;
    as in the paper, there is no error feedback.

    An evaluation in the middle of a round sees the result of an outer step from the average so far; with
    `eager`, the average.

    Sources: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, algorithm 1; there `every` is H, 500 for its long runs. Douillard et al. 2025,
    "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, algorithm 2; there `delay` is tau,
    `mixing` alpha. Kale, Douillard, Donchev 2025, "Eager Updates For Overlapped Communication and Computation
    in DiLoCo", arXiv:2502.12996. Kallusky et al. 2025, "SNOO: Step-K Nesterov Outer Optimizer",
    arXiv:2510.15830. Therien et al. 2025, "MuLoCo: Muon is a practical inner optimizer for DiLoCo",
    arXiv:2505.23725.
    """

    every: int = whole(20, "batches of a worker between two outer steps")
    outer_lr: float = number(0.7, "learning rate of the outer steps", above=0)
    outer_momentum: float = number(0.9, "Nesterov momentum of the outer steps", least=0, below=1)
    fragments: int = whole(1, "stretches of the weights with outer steps at different times")
    delay: int = whole(0, "batches from an outer gradient to the step that uses it", least=0)
    mixing: float = number(
        0.0, "share of a worker's own weights that outlasts an outer step", least=0, below=1
    )
    eager: bool = choice(False, "use others' outer gradients one round late", (False, True))
    compress: str = choice("none", "the form in which outer gradients travel", ("none", "e3m0"))

    @override
    def __post_init__(self) -> None:
        """Refuse options that do not fit into a round."""
        super().__post_init__()
        if self.fragments > self.every:
            raise BadOption(
                f"{self.as_given('fragments')}, but each needs its own step among the "
                f"{self.every} of a round; give at most {self.every}, or a larger 'every'"
            )
        if self.delay >= self.every:
            raise BadOption(
                f"{self.as_given('delay')}, but the next outer gradient follows after {self.every} "
                f"steps; give at most {self.every - 1}, or a larger 'every'"
            )
        if self.eager and self.delay:
            raise BadOption(
                f"{self.as_given('delay')}, but with 'eager' others' outer gradients arrive one round late; "
                "leave one of the two out"
            )

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        if self.eager and self.outer_momentum >= 0.5 and comm.size > 1 and comm.rank == 0:
            warn_on_stderr(
                f"{self.as_given('outer_momentum')}, which may diverge with 'eager'; give "
                "'--strategy.outer-momentum 0.3' if the loss grows"
            )
        return _DiLoCoWorker(self, replica, comm, optimizer, clip)


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a vector of the replica, with the state of its outer optimizer."""

    weights: Tensor
    anchor: Tensor  # x, from which the outer optimizer steps
    velocity: Tensor  # v
    delta: Tensor  # this worker's outer gradient under way; with `eager` the previous round's


@dataclass(frozen=True)
class _Fragment:
    """A stretch of each vector; they make their outer step together."""

    offset: int  # the step of its first outer gradient
    places: list[slice]  # its slices of the vectors
    stretches: list[_Stretch]
    sums: list[Compressed]  # of compressed outer gradients; empty without compression


class _DiLoCoWorker(OuterWorker[DiLoCo]):
    def __init__(
        self, strategy: DiLoCo, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._velocities = [torch.zeros_like(weights) for weights in self.weights]
        self._deltas = [torch.zeros_like(weights) for weights in self.weights]
        self.common[VELOCITY] = self._velocities
        if strategy.delay or strategy.eager:
            self.private[OUTER_GRADIENT] = self._deltas
            self.restarts += ("outer gradients under way",)
        if strategy.eager:
            self.private |= self.common
            self.common = {}
            self.restarts += ("the outer momentum",)
        everywhere = fragments_of(replica.flats, strategy.fragments)
        self._fragments = [self._fragment(index, places) for index, places in enumerate(everywhere)]

    def _fragment(self, index: int, places: list[slice]) -> _Fragment:
        every, fragments = self.strategy.every, self.strategy.fragments
        vectors = zip(self.weights, self.anchors, self._velocities, self._deltas, places, strict=True)
        stretches = [_Stretch(*(vector[place] for vector in kinds)) for *kinds, place in vectors]
        sums = []
        if self.strategy.compress == "e3m0":
            layouts = map(GradientLayout.of, self.replica.flats, places)
            sums = [Compressed(self.comm, layout, E3M0(), decay=0.0) for layout in layouts]
        return _Fragment((index + 1) * every // fragments, places, stretches, sums)

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the outer steps that may follow a step."""
        self.rounds += 1
        for fragment in self._fragments:
            since = self.rounds - fragment.offset
            if since < 0:
                continue
            if since % self.strategy.every == 0 and not self.strategy.eager:
                for one in fragment.stretches:
                    torch.sub(one.anchor, one.weights, out=one.delta)
            if since % self.strategy.every == self.strategy.delay:
                self._move_outer(fragment)

    def _move_outer(self, fragment: _Fragment) -> None:
        """Make the outer step of a fragment."""
        gradients = [one.delta.clone() for one in fragment.stretches]
        self.meet(lambda _: self._average(fragment, gradients))
        with self.updating:
            for gradient, one in zip(gradients, fragment.stretches, strict=True):
                if self.strategy.eager:
                    gradient.sub_(one.delta, alpha=1 / self.comm.size)
                    torch.sub(one.anchor, one.weights, out=one.delta)
                    gradient.add_(one.delta, alpha=1 / self.comm.size)
                self._step_outer(one.anchor, gradient, one.velocity)
                one.weights.lerp_(one.anchor, 1 - self.strategy.mixing)

    def _average(self, fragment: _Fragment, vectors: list[Tensor]) -> int:
        """Overwrite vectors of a fragment with their mean over the workers; returns the bytes sent."""
        if not fragment.sums:
            return self.average.take(vectors, fragment.places)
        sent = 0
        for vector, over_all in zip(vectors, fragment.sums, strict=True):
            total = vector.cpu()
            sent += over_all.all_reduce(total, 1.0)
            vector.copy_(total.div_(self.comm.size))
        return sent

    def _step_outer(self, anchor: Tensor, gradient: Tensor, velocity: Tensor) -> None:
        move_outer(anchor, gradient, velocity, self.strategy.outer_lr, self.strategy.outer_momentum)

    @override
    @torch.no_grad()
    def agree(self) -> None:
        """Overwrite the weights with the result of outer steps from here, without making them."""
        under_way = [fragment for fragment in self._fragments if not self._is_at_anchor(fragment)]
        if under_way:
            self.average.take(self.weights)
        for one in (one for fragment in under_way for one in fragment.stretches):
            if not self.strategy.eager:
                anchor = one.anchor.clone()
                self._step_outer(anchor, anchor - one.weights, one.velocity.clone())
                one.weights.copy_(anchor)

    def _is_at_anchor(self, fragment: _Fragment) -> bool:
        """Return whether all workers' weights are the anchor: no step has followed an outer one."""
        strategy = self.strategy
        keeps_own = strategy.delay or strategy.mixing or strategy.eager
        return self.rounds == 0 or not (keeps_own or (self.rounds - fragment.offset) % strategy.every)


def fragments_of(flats: Sequence[Flat], count: int) -> list[list[slice]]:
    """Cut a model's vectors between parameters into `count` fragments of about equal length.

    Each fragment has a slice of each vector; those of a vector with few parameters may be empty.
    """
    if not flats:  # A rank may hold none of its worker's weights.
        return [[] for _ in range(count)]
    most = max(len(flat.parameters) for flat in flats)
    if count > most:
        raise BadOption(
            f"option 'fragments' of strategy 'diloco' is {count}, but the model has {most} parameters, which "
            f"are not cut; give at most {most}"
        )
    return [list(places) for places in zip(*(_cut(flat, count) for flat in flats), strict=True)]


def _cut(flat: Flat, count: int) -> list[slice]:
    """Cut one vector; the last slices are empty where there are fewer parameters."""
    starts = [span.start for span in flat.spans]
    length, parts = len(flat.weights), min(count, len(starts))
    edges = [0]
    for index in range(1, parts):
        # At least one parameter for this fragment and for each that follows.
        choices = range(edges[-1] + 1, len(starts) - parts + index + 1)
        edges.append(min(choices, key=lambda edge: abs(starts[edge] - length * index / parts)))
    places = [starts[edge] for edge in edges] + [length] * (count - parts + 1)
    return [slice(start, stop) for start, stop in pairwise(places)]
