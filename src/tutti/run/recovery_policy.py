"""The choice of the next ranks, once the previous ones have ended. Needs no torch.

end of the ranks                          the next ranks
────────────────────────────────────────  ─────────────────────────────────────────────
a rank or a host was lost                 as many, or fewer (--on-failure shrink)
a copy was taken for a resize             the requested number
anything else                             none
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import BadOption, BadRunFolder, HostLost, LauncherLost, PeerLost, TuttiError, UserError
from tutti.launch.mpirun import PROBE_S, answering
from tutti.launch.placement import Placement, fill
from tutti.launch.stop_request import StopRequests
from tutti.records.resize_request import ResizeRequest, answer_request, read_request
from tutti.records.texts import plural
from tutti.run.config import SHRINK
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr, warn_on_stderr

MOST_LOSSES: Final = 10
"""The most losses in a row without progress of the run."""


@dataclass(frozen=True)
class _Resize:
    """A pending resize."""

    folder: Path  # of the run
    request: ResizeRequest
    job: TrainJob  # of the new ranks
    placement: Placement  # theirs
    copies: int  # taken before; the next one ends the phase


class RecoveryPolicy:
    """Decides which ranks train; `job` and `placement` are the current ones."""

    def __init__(
        self, job: TrainJob, placement: Placement, memory: StateMemory, stopping: StopRequests
    ) -> None:
        self.job, self.placement = job, placement
        self._memory, self._stopping = memory, stopping
        self._losses, self._step = 0, -1
        self._resize: _Resize | None = None

    def go_on_after(self, end: TuttiError) -> None:
        """Choose the ranks that continue after others have ended with an error."""
        # Without a copy mpirun has started nothing, and cannot start anything here.
        if not isinstance(end, PeerLost) or (
            isinstance(end, LauncherLost) and not self._memory.place.last.number
        ):
            raise end
        self._count(end)
        self._cancel_resize()
        try:
            job, placement = self._without(end)
            self._change_to(job, placement, str(end))
        except PeerLost:
            if not self._stopping.ended_by:
                raise
        except UserError as error:
            raise end.adding(str(error)) from error
        else:
            what = placement.describe() if placement.hosts else plural(placement.workers, "new rank")
            say_on_stderr(f"{end}; continuing with {what}")

    def is_due(self) -> bool:
        """Look for a request, and return whether its copy was taken: then the ranks must end."""
        with suppress(BadRunFolder, OSError):  # The ranks do not need the folder.
            return self._look()
        return False

    def resize(self) -> None:
        """Choose the requested ranks."""
        resize = self._resize
        assert resize is not None, "`is_due` returned True"
        old = self.placement.workers
        self._cancel_resize()
        self._change_to(resize.job, resize.placement, f"a resize to {plural(resize.request.workers, 'rank')}")
        text = f"continuing with {plural(resize.placement.workers, 'rank')} instead of {old}"
        say_on_stderr(f"{text}, as requested")
        answer_request(resize.folder, resize.request, text, agreed=True)

    def _count(self, lost: PeerLost) -> None:
        """Count a loss."""
        step = self._memory.place.last.step
        self._losses = 1 if step > self._step else self._losses + 1
        self._step = step
        if self._losses > MOST_LOSSES:
            raise lost.adding(f"it was loss {self._losses} in a row without a step further") from lost

    def _without(self, lost: PeerLost) -> tuple[TrainJob, Placement]:
        """Return the job and placement of the remaining ranks."""
        job, placement = self.job, self.placement
        shrinks = job.config.on_failure == SHRINK
        if placement.hosts:
            after = after_loss(placement, lost, self._answering, shrinks=shrinks)
            return self._on_hosts(after), after
        left = placement.workers - sum(rank < placement.workers for rank in lost.ranks)
        if not shrinks or left == placement.workers:
            return job, placement
        if left < 1:
            raise lost.adding("none is left to go on") from lost
        return self._of(left)

    def _of(self, workers: int) -> tuple[TrainJob, Placement]:
        """Return the job and placement of another number of workers."""
        before, config = self.placement, self.job.config
        if config.strategy in ("auto", "sync") and workers > config.batch_size:
            raise BadOption(
                f"a batch of {config.batch_size} samples cannot be split over {workers} workers; ask for "
                "fewer"
            )
        if before.hosts:
            room = sum(host.ranks for host in before.places)
            if workers > room:
                raise BadOption(
                    f"the hosts have places for {plural(room, 'worker')}, not for {workers}; ask for "
                    "fewer, or stop the run, and continue it with --resume and more --hosts"
                )
            placement = replace(before, workers=workers, hosts=fill(before.places, workers))
            return self._on_hosts(placement), placement
        job = replace(self.job, config=config.changed({"workers": str(workers)}))
        return job, job.placement()

    def _on_hosts(self, placement: Placement) -> TrainJob:
        """Return the job of other ranks on hosts; it names the remaining hosts, for a later resume."""
        hosts = ",".join(f"{host.name}:{host.ranks}" for host in placement.places)
        config = replace(self.job.config, workers=str(placement.workers), hosts=hosts)
        return replace(self.job, config=config)

    def _answering(self, hosts: Sequence[str], patience_s: float) -> list[str]:
        soon = time.monotonic() + PROBE_S

        def over() -> bool:
            # A run that must stop does not wait for hosts that may come back.
            return self._stopping.over() or (self._stopping.page.requested and time.monotonic() > soon)

        return answering(hosts, patience_s, over)

    def _change_to(self, job: TrainJob, placement: Placement, why: str) -> None:
        self.job, self.placement = job.again(why), placement

    def _look(self) -> bool:
        resize, place = self._resize, self._memory.place
        folder = place.folder
        request = None if folder is None or self._stopping.page.requested else read_request(folder)
        if folder is None or request is None or request.answer:
            self._cancel_resize()
        elif resize is None or resize.request != request:
            self._begin(folder, request)
        else:
            return place.last.taken > resize.copies
        return False

    def _begin(self, folder: Path, request: ResizeRequest) -> None:
        """Request a copy for a resize, or refuse the resize."""
        self._cancel_resize()
        ranks = plural(request.workers, "rank")
        if request.workers == self.placement.workers:
            answer_request(folder, request, f"it has {ranks} already", agreed=True)
            return
        try:
            job, placement = self._of(request.workers)
        except UserError as error:
            warn_on_stderr(f"a request for {ranks} was refused: {error}")
            answer_request(folder, request, str(error), agreed=False)
            return
        for text in placement.warnings:
            warn_on_stderr(text)
        self._resize = _Resize(folder, request, job, placement, self._memory.place.last.taken)
        self._memory.want_copy(True)

    def _cancel_resize(self) -> None:
        if self._resize is not None:
            self._resize = None
            self._memory.want_copy(False)


SLOW_S: Final = 60.0
"""Time for hosts to answer that no other host can replace: they may only be busy."""

Answering = Callable[[Sequence[str], float], Sequence[str]]
"""(hosts, seconds) -> the hosts that answer within that time."""


def after_loss(placement: Placement, lost: PeerLost, answers: Answering, *, shrinks: bool) -> Placement:
    """Place the ranks that continue; wait for silent hosts only if the others have too few places."""
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
            "continue with --resume and other --hosts; next time name more hosts than -n needs, so that some "
            "stand by, or give --on-failure shrink"
        ) from lost
    away = tuple(host for host in others if host.name not in there)
    return replace(placement, workers=workers, hosts=fill(left, workers), places=left, away=away)
