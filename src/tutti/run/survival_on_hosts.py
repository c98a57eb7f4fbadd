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
from contextlib import closing
from dataclasses import replace
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import HostLost, LauncherLost, PeerLost
from tutti.launch.mpirun import PROBE_S
from tutti.launch.placement import Host, Placement, fill
from tutti.launch.ranks_on_hosts import RanksInReserve
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import Stopping
from tutti.run.batch_rule import resized, resized_text
from tutti.run.config import SHRINK, TrainConfig
from tutti.run.losses import Losses
from tutti.run.resume import Resume
from tutti.run.survival import last_copy_kept
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr

SLOW_S: Final = 60.0
"""Time of hosts to answer that no other can take the place of: they may be no more than busy."""

AHEAD_BYTES: Final = 512 << 20
"""The largest data set that ranks in reserve read ahead, so that each host has it twice."""

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
    first, before = job.config, placement.workers
    shrinks = job.config.on_failure == SHRINK

    def job_for(ranks: Placement) -> TrainJob:
        sized = resized(job, first, before, ranks.workers) if ranks.workers < before else job
        return replace(sized, config=_placed(sized, ranks), takes_over=True)

    def next_one() -> tuple[Placement, bytes] | None:
        after = _without_a_rank(placement, shrinks) if job.config.standby and memory.place.whole else None
        if after is None:
            return None
        nbytes = memory.place.data_bytes
        ahead = nbytes is not None and nbytes <= AHEAD_BYTES
        return after, pickle.dumps(job_for(after)) if ahead else b""

    with (
        closing(StateMemory()) as memory,
        last_copy_kept(job, memory.place),
        closing(RanksInReserve(job.entry, next_one, stopping)) as reserve,
    ):
        losses = Losses(job.config.max_failures, memory)
        while True:
            sent = pickle.dumps(replace(job, memory=memory.place))
            try:
                return start(
                    job.entry,
                    sent,
                    placement,
                    announce=announce,
                    hang_timeout_s=job.hang_timeout_s,
                    goes_on=True,
                    reserve=reserve,
                    stopping=stopping,
                )
            except PeerLost as lost:
                if isinstance(lost, LauncherLost) and not memory.place.whole:
                    raise  # It cannot start here, and would not the next time.
                losses.note(lost)
                memory.place.note_takeover(str(lost))
                workers = placement.workers
                try:
                    placement = after_loss(placement, lost, reserve.answering, shrinks=shrinks)
                except PeerLost:
                    if stopping.ended_by:
                        return None
                    raise
                if stopping.ended_by:
                    return None
                job, announce = job_for(placement), None
                of_fewer = resized_text(job, first) if placement.workers < workers else ""
                say_on_stderr(f"{lost}; going on with {placement.describe()}{of_fewer}")
            if job.resume is None and (folder := memory.place.folder) is not None:
                job = replace(job, resume=Resume(folder, auto=True, again=True))


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


def _placed(job: TrainJob, placement: Placement) -> TrainConfig:
    """The configuration of a job with the hosts that are left, for those who resume it later."""
    hosts = ",".join(f"{host.name}:{host.ranks}" for host in placement.places)
    return replace(job.config, workers=str(placement.workers), hosts=hosts)


def _names(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts)
    return f"only {names} is" if len(hosts) == 1 else f"only {names} are"
