"""Waiting for the other processes of a host: first quick, then cheap, and never for one that is gone.

    [1] spin     [2] yield    [3] naps of 20 us, growing with the time    [4] naps of 1 ms, each of which
                                  waited so far, to 1 ms                      ends when a peer's process ends
    |------------|------------|-- --- ---- ------ --------- ---------------- ...
    not with more ranks
    than cores

No rank wakes a sleeper: it would cost the awaited rank a system call at each store. So a nap is bounded, and
there is no wake-up that could be lost between the last look and the nap.

A rank that waits in [4] notices one that is gone, in this order:

    [5] the rank stores its last words for the others, then LEFT if it leaves in an orderly way, and ends
    [6] see that the process has ended, or LEFT
    ─── fence ───
    [7] look once more for what is waited for, and raise only if it is not there

As [5] stores LEFT last, [7] sees everything that the rank stored before: its last store may have ended the
wait. The kernel orders a process's stores before its end.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from tutti.comm.shm.fence import fence
from tutti.comm.shm.layout import FIRST_STEP, LOST, MOST_PHASES, PID, STEPS, WAITS, HostGroup
from tutti.errors import PeerLost

SPINS: Final = 1000
SPIN_S: Final = 200e-6
YIELD_S: Final = 1e-3
CROWDED_YIELD_S: Final = 50e-6
SHORTEST_NAP_S: Final = 20e-6
LONGEST_NAP_S: Final = 1e-3
NAP_SHARE: Final = 0.1
"""A nap is this share of the time waited so far: waking up late costs at most that share."""

REMOTE_NAP_S: Final = 100e-6
"""The longest nap while data may come from another host: MPI moves them only when it is called."""

SLOWEST_BYTES_PER_S: Final = 1e8
"""While a transfer between hosts may still go on at this speed, a gigabit per second, naps stay short."""

LEFT_EARLY: Final = "it left while others still waited for it"
"""Why a rank is lost that ended, or closed its communicator, in an orderly way."""

ENDED: Final = "its process ended"
"""Why a rank is lost that died."""

_PR_SET_TIMERSLACK: Final = 29


class Peers:
    """The processes of the job on this host: which live, which have left, which are lost."""

    def __init__(self, group: HostGroup, join_timeout_s: float, cores: int | None) -> None:
        self.group, self._words = group, group.words
        self._watch = ProcessWatch()
        self._first_step: int | None = None
        self._signs = 0
        self._words[group.layout.line(group.rank) + PID] = os.getpid()
        try:
            pids = self._meet(join_timeout_s)
        except BaseException:
            self._watch.close()
            raise
        self.crowded = group.size > (_allowed_cores(pids) if cores is None else cores)
        # A sleeping thread is woken up to 50 us late unless it asks for better.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def _meet(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        pids = [0] * self.group.size
        missing = list(range(self.group.size))
        while True:
            for rank in list(missing):
                pids[rank] = self._words[self.group.layout.line(rank) + PID]
                if pids[rank]:
                    missing.remove(rank)
                    if rank != self.group.rank:
                        self._watch.add(rank, pids[rank])
            if not missing:
                return pids
            if time.monotonic() > deadline:
                raise PeerLost(
                    [self.group.global_ranks[rank] for rank in missing],
                    f"did not come within {timeout_s:g} s",
                )
            self._watch.ended(LONGEST_NAP_S)
            self.check()

    def publish_steps(self, steps: int) -> None:
        """Publish the number of steps that this rank, which trains, has made."""
        self._first_step = steps if self._first_step is None else self._first_step
        word = 1 + steps + (FIRST_STEP if steps == self._first_step else 0)
        self._words[self.group.layout.line(self.group.rank) + STEPS] = word

    def publish_phase(self, number: int) -> None:
        """Publish the number, below `MOST_PHASES`, of this rank's phase outside training."""
        self._signs += 1
        word = -(1 + number + MOST_PHASES * self._signs)
        self._words[self.group.layout.line(self.group.rank) + STEPS] = word

    def note_progress(self) -> None:
        """Give a sign of life, if this rank has published a phase."""
        steps, _ = self.status()
        if steps < 0:
            self.publish_phase((-steps - 1) % MOST_PHASES)

    def status(self) -> tuple[int, bool]:
        """Return the published word STEPS, and whether this rank waits."""
        line = self.group.layout.line(self.group.rank)
        return int(self._words[line + STEPS]), bool(self._words[line + WAITS])

    def publish_waiting(self, long: bool) -> None:
        """Publish whether this rank has been waiting for others for more than a moment."""
        self._words[self.group.layout.line(self.group.rank) + WAITS] = long

    def check(self) -> None:
        """Raise PeerLost if a rank of the job died."""
        # LEFT first: a rank that has said so and has ended since is not lost.
        for rank in self._watch.ended(0.0):
            if self.group.has_left(rank):
                self._watch.remove(rank)
                continue
            self._words[LOST] = self._words[LOST] or 1 + rank
        lost = self._words[LOST]
        if lost > 0:
            raise PeerLost([self.group.global_ranks[lost - 1]], ENDED)
        if lost < 0:
            raise PeerLost([-lost - 1], "on another host")

    def report(self, global_rank: int) -> None:
        """Record for the ranks of this host that a rank of another host is lost."""
        if not self._words[LOST]:
            self._words[LOST] = -(1 + global_rank)

    def nap(self, waited_s: float, moving_s: float = 0.0) -> None:
        """Sleep for a moment that suits the time waited so far; less if a process ends meanwhile."""
        longest_s = REMOTE_NAP_S if waited_s < moving_s else LONGEST_NAP_S
        nap_s = min(max(SHORTEST_NAP_S, NAP_SHARE * waited_s), longest_s)
        if nap_s < LONGEST_NAP_S:
            time.sleep(nap_s)
        else:
            self._watch.ended(LONGEST_NAP_S)

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()


class Backoff:
    """The rests of a rank that waits: it yields its core first, then takes short naps, then longer ones."""

    def __init__(self, peers: Peers, moving_s: float | None) -> None:
        # A network takes longer than it pays to spin, and its driver may need this core.
        self.started, self.soon = time.monotonic(), peers.crowded or moving_s is not None
        self._peers, self._moving_s = peers, moving_s or 0.0
        self._yield_s = CROWDED_YIELD_S if self.soon else YIELD_S

    def rest(self) -> bool:
        """Let others work; return whether the wait is so long that some rank may be gone."""
        waited_s = time.monotonic() - self.started
        if waited_s < self._yield_s:
            os.sched_yield()  # [2]
            return False
        self._peers.nap(waited_s, self._moving_s)  # [3], [4]
        return waited_s > LONGEST_NAP_S / NAP_SHARE


class RanksOfGroup(Protocol):
    """The ranks of a communicator, with their numbers in the job."""

    global_ranks: tuple[int, ...]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left in an orderly way."""


def wait(
    ready: Callable[[], bool],
    peers: Peers,
    group: RanksOfGroup,
    needed: Callable[[], Sequence[int]],
    moving_s: float | None = None,
) -> None:
    """Return as soon as `ready`, which is cheap and safe to repeat, is true.

    `needed` returns the awaited ranks: if all of them leave, `ready` cannot become true. `moving_s` is as in
    `Backoff`. Raises PeerLost if a rank of the job died, or all needed ranks left.
    """
    pause = Backoff(peers, moving_s)
    if not pause.soon:
        # [1] By time as well as by number: `ready` may cost microseconds, and others may need this core.
        for _ in range(SPINS):
            if ready():
                return
            if time.monotonic() - pause.started > SPIN_S:
                break
    try:
        while not ready():
            if not pause.rest():
                continue
            peers.publish_waiting(True)
            try:
                peers.check()  # [6]
                missing = needed()
                if missing and all(map(group.has_left, missing)):
                    raise PeerLost([group.global_ranks[rank] for rank in missing], LEFT_EARLY)
            except PeerLost:
                fence()
                if not ready():  # [7]
                    raise
                return
    finally:
        peers.publish_waiting(False)


class ProcessWatch:
    """Watches processes by pidfds, so that a death ends a wait at once. A zombie has ended.

    Several threads may wait at a time, which `select.poll` refuses and the kernel's epoll allows: a group of
    torch.distributed waits in its own thread, while another one trains.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._fds: dict[int, int] = {}
        self._gone: set[int] = set()

    def add(self, rank: int, pid: int) -> None:
        """Watch the process `pid` of `rank`."""
        try:
            self._fds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(rank)
        else:
            self._poll.register(self._fds[rank], select.EPOLLIN)

    def remove(self, rank: int) -> None:
        """Stop watching a rank."""
        self._gone.discard(rank)
        if rank in self._fds:
            fd = self._fds.pop(rank)
            self._poll.unregister(fd)
            os.close(fd)

    def ended(self, timeout_s: float) -> list[int]:
        """Return the ranks whose processes have ended; wait up to `timeout_s` for the first."""
        events = {fd for fd, _ in self._poll.poll(0 if self._gone else timeout_s)}
        return sorted(self._gone | {rank for rank, fd in list(self._fds.items()) if fd in events})

    def close(self) -> None:
        """Stop watching."""
        for rank in list(self._fds):
            self.remove(rank)
        self._poll.close()


def _allowed_cores(pids: Iterable[int]) -> int:
    """Return the number of cores that the processes may use between them."""
    allowed: set[int] = set()
    for pid in pids:
        try:
            allowed |= os.sched_getaffinity(pid)
        except ProcessLookupError:
            continue
    return len(allowed)
