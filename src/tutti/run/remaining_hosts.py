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
from tutti.launch.placement import Host, Placement, fill
from tutti.terminal import say_on_stderr

SLOW_S: Final = 60.0
"""Time to answer of hosts that no other host can replace: they may only be busy."""

Answering = Callable[[Sequence[str], float], Sequence[str]]
"""Returns which of some hosts answer within some seconds."""


def after_loss(placement: Placement, lost: PeerLost, answers: Answering, *, shrinks: bool) -> Placement:
    """Place the ranks that go on.

    A host that was lost, or does not answer at once, is passed over unless the run had to end or to shrink
    for it.

    Args:
        placement: of those before them.
        lost: what was lost of these.
        answers: asked for the hosts that are to have ranks, but for this machine, the first of them.
        shrinks: lost workers are not replaced.

    Raises:
        PeerLost: no hosts are left that have places for them.
    """
    gone, there = set[str](), set[str]()
    lost_hosts = set(lost.hosts) if isinstance(lost, HostLost) else set[str]()
    silent = set(lost_hosts)
    # Those that were lost come last, even if they are back.
    places = sorted((*placement.places, *placement.away), key=lambda host: host.name in lost_hosts)
    while True:
        left = [host for host in places if host.name not in gone | silent]
        room = sum(host.ranks for host in left)
        wanted = placement.workers - _lost_workers(placement, lost.ranks, gone) * shrinks
        workers = placement.workers - _lost_workers(placement, lost.ranks, gone | silent) * shrinks
        if silent and min(workers, room) < wanted:
            names = ", ".join(sorted(silent))
            say_on_stderr(f"{lost}; waiting up to {SLOW_S:g} s for {names}")
            there |= set(answers(sorted(silent), SLOW_S))
            gone, silent = gone | (silent - there), set()
            continue
        if shrinks:
            workers = min(workers, room)
        if workers < 1:
            raise lost.adding("none is left to go on") from lost
        if room < workers or left[0] != placement.places[0]:
            raise lost.adding(
                f"{_names(left)} left, with too few places for {workers} workers: go on by "
                "--resume and other --hosts; next time name more hosts than -n needs, so that some stand by, "
                "or let fewer workers go on, by --on-failure shrink",
            ) from lost
        hosts = fill(left, workers)
        asked = [host.name for host in hosts[1:] if host.name not in there]
        if not asked:
            unused = silent | {host.name for host in placement.away} - {host.name for host in hosts}
            away = tuple(host for host in places if host.name in unused)
            others = tuple(host for host in left if host.name not in unused)
            return replace(placement, workers=workers, hosts=hosts, places=others, away=away)
        there |= set(answers(asked, PROBE_S))
        silent |= set(asked) - there


def _lost_workers(placement: Placement, ranks: Sequence[int], gone: set[str]) -> int:
    """The number of workers that were lost: single ones, and all of the hosts that are gone."""
    first, count = 0, 0
    for host, with_servers in zip(placement.hosts, placement.hosts_with_servers, strict=True):
        own = range(first, first + host.ranks)
        count += host.ranks if host.name in gone else len(set(own) & set(ranks))
        first += with_servers.ranks
    return count


def _names(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts)
    return f"only {names} is" if len(hosts) == 1 else f"only {names} are"
