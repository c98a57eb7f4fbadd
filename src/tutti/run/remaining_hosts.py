"""The hosts that are left when ranks or hosts are lost, and the ranks that go on there. Needs no torch.

host a    rank 0    train, copy ✝                         load, train ...
host b    rank 1    train, copy ✝ ✝ ✝
host c              stands by         asked: it answers   load, train ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tutti.errors import HostLost, PeerLost
from tutti.launch.mpirun import PROBE_S
from tutti.launch.placement import Placement, fill
from tutti.terminal import say_on_stderr

SLOW_S: Final = 60.0
"""Time to answer of hosts that no other host can replace: they may only be busy."""

Answering = Callable[[Sequence[str], float], Sequence[str]]
"""Returns which of some hosts answer within some seconds."""


def after_loss(placement: Placement, lost: PeerLost, answers: Answering, *, shrinks: bool) -> Placement:
    """Place the ranks that go on.

    Hosts that were lost, or do not answer at once, are waited for only if the others have too few places.

    Args:
        placement: of the ranks before.
        lost: what was lost of these.
        answers: asks hosts other than this machine, the first one.
        shrinks: lost workers are not replaced.

    Raises:
        PeerLost: no hosts are left that have places for them.
    """
    first, *others = (*placement.places, *placement.away)
    lost_hosts = set(lost.hosts) if isinstance(lost, HostLost) else set()
    suspects = lost_hosts | {host.name for host in placement.away}
    others.sort(key=lambda host: (host.name in lost_hosts, host.name in suspects))

    def room() -> int:
        return first.ranks + sum(host.ranks for host in others if host.name in there)

    wanted = placement.workers - sum(rank < placement.workers for rank in lost.ranks) * shrinks
    there = set(answers([host.name for host in others if host.name not in suspects], PROBE_S))
    if room() < wanted:
        silent = [host.name for host in others if host.name not in there]
        say_on_stderr(f"{lost}; waiting up to {SLOW_S:g} s for {', '.join(silent)}")
        there |= set(answers(silent, SLOW_S))
    workers = min(wanted, room()) if shrinks else wanted
    if workers < 1:
        raise lost.adding("none is left to go on") from lost
    left = (first, *(host for host in others if host.name in there))
    if room() < workers:
        raise lost.adding(
            f"only {', '.join(host.name for host in left)} left, with too few places for {workers} workers: "
            "go on by --resume and other --hosts; next time name more hosts than -n needs, so that some "
            "stand by, or let fewer workers go on, by --on-failure shrink"
        ) from lost
    away = tuple(host for host in others if host.name not in there)
    return replace(placement, workers=workers, hosts=fill(left, workers), places=left, away=away)
