"""Rules that move the centre's weights themselves, without an optimizer."""

from __future__ import annotations

from typing_extensions import override

from tutti.centre.base import Desk, Outcome, Rule
from tutti.centre.remedies import Remedy
from tutti.rules.elastic import attract


class AddRule(Rule):
    """The message is a move, which the centre makes too: c = c + m.

    With levels, the centre above adds up what the centres below have moved.

    Args:
        remedy: gives the rate for a stale message; a move is as long as the rate is large. None: 1 for all.
    """

    consumes = True

    def __init__(self, remedy: Remedy | None = None) -> None:
        self._remedy = remedy

    @override
    def apply(self, desk: Desk) -> Outcome:
        rate = 1.0 if self._remedy is None else self._remedy.rate(desk)
        for centre, message in zip(desk.centre, desk.message, strict=True):
            centre.add_(message, alpha=rate)
        return Outcome.APPLIED

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


class ElasticRule(Rule):
    """The message is a worker's weights; they and the centre's go towards each other.

    With levels, the centre of a host is to the centre above what a worker is to its own: elastic averaging in
    a tree (Zhang 2016, "Distributed stochastic optimization for deep learning", chapter 6).

    Args:
        force: beta, how far the centre goes towards the mean of the workers, when each comes once.
        workers: p, how many come to this centre; each pulls with the rate alpha = beta / p.
    """

    brings_weights = True

    def __init__(self, force: float, workers: int) -> None:
        self._force, self._rate = force, force / workers

    @override
    def apply(self, desk: Desk) -> Outcome:
        for centre, message in zip(desk.centre, desk.message, strict=True):
            attract(message, centre, self._rate)
        return Outcome.APPLIED

    @override
    def answer(self, desk: Desk) -> None:
        """The worker's weights, moved."""
        assert desk.reply is not None
        for reply, message in zip(desk.reply, desk.message, strict=True):
            if reply is not message:
                reply.copy_(message)

    @override
    def above(self, hosts: int) -> Rule:
        return ElasticRule(self._force, hosts)
