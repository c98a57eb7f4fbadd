"""Training on several hosts that goes on when a rank, a host or mpirun is lost.

    host a    launching process, with the memory ─────────── lost: b ── asks c ── starts ranks ──────────
              rank 0    train, copy, train, copy ✝                                load, train ...
    host b    rank 1    train, copy, train, copy ✝ ✝ ✝
    host c                                                                        load, train ...

It is as on one host (`tutti.run.survival`), but that new processes are started, by a new mpirun, and that a
host may be gone: one that stands by takes its place. The memory is that of the launching process, whose host
has the first rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import HostLost, LauncherLost, PeerLost
from tutti.launch.crew import Orders
from tutti.launch.mpirun import PROBE_S
from tutti.launch.placement import Host, Placement, fill
from tutti.launch.ranks_on_hosts import Replaced
from tutti.launch.reserve_on_hosts import RanksInReserve
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import Stopping
from tutti.run.config import SHRINK
from tutti.run.lineup import LineupOnHosts
from tutti.run.losses import Losses
from tutti.run.resize_answers import ResizeAnswers
from tutti.run.survival import last_copy_kept
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr

SLOW_S: Final = 60.0
"""Time of hosts to answer that no other can take the place of: they may be no more than busy."""

Answering = Callable[[Sequence[str], float], Sequence[str]]
"""Tells which of some hosts answer within some seconds."""


def survive_on_hosts(job: TrainJob, placement: Placement, announce: Callable[[str], None] | None) -> object:
    """Run a training job, again and again if ranks are lost; returns what its entry returned on rank 0.

    Args:
        job: with `on_failure` other than "stop".
        placement: its ranks, on hosts of which this machine is the first.
        announce: as for `start`.

    Raises:
        PeerLost: more were lost than `max_failures` in an hour, or no host is left that could take over.
        TuttiError: as of `start`.
    """
    # A request to stop is for whoever trains by then.
    with SignalWatch() as signals:
        stopping = Stopping(signals)
        result = _survive(job, placement, announce, stopping)
    stopping.act()
    return result


def _survive(
    job: TrainJob, placement: Placement, announce: Callable[[str], None] | None, stopping: Stopping
) -> object:
    """Do the same; returns as well once a signal is to end everything."""
    shrinks = job.config.on_failure == SHRINK
    with ExitStack() as stack:
        memory = stack.enter_context(closing(StateMemory()))
        stack.enter_context(last_copy_kept(job, memory.place))
        lineup = LineupOnHosts(replace(job, memory=memory.place), placement, memory)
        others = stack.enter_context(closing(ResizeAnswers(lineup)))

        def for_loss() -> Orders | None:
            wanted = job.config.standby and memory.place.whole
            after = _without_a_rank(lineup.placement, shrinks) if wanted else None
            return None if after is None else lineup.in_reserve(lineup.job_on(after), after)

        reserve = stack.enter_context(closing(RanksInReserve(job.entry, for_loss, stopping, others)))
        losses = Losses(job.config.max_failures, memory)
        while True:
            try:
                return start(
                    job.entry,
                    pickle.dumps(lineup.job),
                    lineup.placement,
                    announce=announce,
                    hang_timeout_s=job.hang_timeout_s,
                    goes_on=True,
                    reserve=reserve,
                    stopping=stopping,
                )
            except Replaced:
                others.forget()  # The lineup has them.
            except PeerLost as lost:
                if isinstance(lost, LauncherLost) and not memory.place.whole:
                    raise  # It cannot start here, and would not the next time.
                losses.note(lost)
                others.note_loss()
                workers = lineup.placement.workers
                answers = partial(reserve.answering, lost=lost.hosts if isinstance(lost, HostLost) else ())
                try:
                    after = after_loss(lineup.placement, lost, answers, shrinks=shrinks)
                except PeerLost:
                    if stopping.ended_by:
                        return None
                    raise
                if stopping.ended_by:
                    return None
                batch = lineup.change_to(lineup.job_on(after), after, str(lost))
                of_fewer = batch if after.workers < workers else ""
                say_on_stderr(f"{lost}; going on with {after.describe()}{of_fewer}")
            announce = None


def _without_a_rank(placement: Placement, shrinks: bool) -> Placement | None:
    """Place the ranks that go on when one is lost, and no host; None: none is left."""
    try:
        return after_loss(placement, PeerLost([0], ""), lambda hosts, patience_s: hosts, shrinks=shrinks)
    except PeerLost:
        return None


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
