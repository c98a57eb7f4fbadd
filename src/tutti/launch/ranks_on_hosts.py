"""Ranks on several hosts, which mpirun starts: supervising them, and cleaning up."""

from __future__ import annotations

import base64
import os
import pickle
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, Self

from tutti.comm.shm.memfd import FileAddress
from tutti.errors import (
    HostLost,
    LauncherLost,
    PeerLost,
    RankHung,
)
from tutti.launch.exit_reports import Report
from tutti.launch.guard import JOB, guard
from tutti.launch.hangs import LOOK_S, PAUSE_S, STOPPED, STOPPED_WHY, RemoteHangWatch, state_of
from tutti.launch.liveness import PATIENT_S, QUICK_S, LivenessWatch, first_lost
from tutti.launch.malloc import TUNABLES, start_settings
from tutti.launch.mpi_rank import START, MpiStart
from tutti.launch.mpirun import (
    EXTRA_ARGUMENTS,
    GRACE_S,
    PROBE_S,
    answering,
    command_line,
    end_mpirun,
    find_mpirun,
    inherited,
    settings,
)
from tutti.launch.mpirun_channel import MpirunChannel, RankStarted
from tutti.launch.mpirun_outcome import KILLED, LATE_S, START_S, hosts_of, outcome, ranks_of
from tutti.launch.placement import Host, Placement, is_this_machine
from tutti.launch.recovery import DUE_S, Recovery, Replaced
from tutti.launch.signals import SignalWatch, suspended_together
from tutti.launch.stop_request import StopPage, Stopping
from tutti.terminal import warn_on_stderr

LARGEST_IN_ENVIRONMENT: Final = 48 << 10
"""Bytes of payload that travel in the environment, which reaches every host. (Linux allows it 128 KiB.)"""

FIRST_S: Final = 60.0
"""Time of mpirun to start one rank at least, after which another one is tried: it may hang when it starts."""

ASK_S: Final = 5.0
"""Time of the ranks of a host to begin before it is asked for a sign of life; after twice that again."""

SETTLE_S: Final = 3.0
"""Time of ranks to end after mpirun has, where their host can be reached."""

CAUSE_S: Final = 1.0
"""Time of mpirun to say by what a rank ended."""

FINISH_S: Final = 10.0
"""Time of mpirun to exit once it says no more."""

_TAIL_BYTES = 64 << 10
_NAP_S: Final = 0.02


def run_on_hosts(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    prefix: bool = False,
    hang_timeout_s: float | None = None,
    recovery: Recovery | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on its hosts, as `tutti.launch.start.start` says.

    Further arguments for mpirun are taken from TUTTI_MPIRUN_ARGS. Where others take over from lost
    ranks, a host that is silent is soon taken for lost. A rank that makes no step for `hang_timeout_s` is
    lost, too.
    """
    with ExitStack() as stack:
        stopping = Stopping(stack.enter_context(SignalWatch())) if recovery is None else recovery.stopping
        is_due = None if recovery is None else recovery.is_due
        for first_s in (FIRST_S, None):
            with RanksOnHosts(
                entry, payload, placement, prefix=prefix, goes_on=recovery is not None
            ) as ranks:
                returncode, said = ranks.wait(stopping, hang_timeout_s, first_s, is_due)
            if not ranks.hangs:
                break
            warn_on_stderr(f"mpirun has started no rank within {FIRST_S:g} s; another one is tried")
    if recovery is None:
        stopping.act()
    return None if stopping.ended_by else ranks.result(returncode, said)


class RanksOnHosts:
    """Ranks that mpirun starts, and all by which this process hears of them; leaving the context ends them.

    Args:
        entry: the function that each calls.
        payload: handed to it.
        placement: of the ranks.
        prefix: print whole lines of the ranks, each with its rank before it.
        goes_on: others take over from lost ranks, so a host that is silent is soon taken for lost.
    """

    def __init__(
        self,
        entry: str,
        payload: bytes,
        placement: Placement,
        *,
        prefix: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._placement, self._hosts = placement, placement.hosts_with_servers
        self._goes_on = goes_on
        self._messages: list[object] = []
        self._owes_request = False
        with ExitStack() as stack:
            start = self._open(stack, entry, payload)
            self._process = self._launch(stack, start, prefix)
            self._over, self._patience_s = True, FINISH_S
            stack.callback(self._end)
            self._opened = stack.pop_all()

    def _open(self, stack: ExitStack, entry: str, payload: bytes) -> MpiStart:
        """Make all by which this process and the ranks hear of each other; returns what these are told."""
        elsewhere = not all(is_this_machine(host.name) for host in self._hosts)
        silence_s = QUICK_S if self._goes_on else PATIENT_S
        self._watch = LivenessWatch(self._placement.ranks, silence_s, elsewhere=elsewhere)
        stack.callback(self._watch.close)
        self._channel = MpirunChannel(payload)
        stack.callback(self._forget)
        stop = StopPage.make_file()
        stack.callback(os.close, stop)
        self._page = StopPage(stop)
        # Of a rank 0 on another host nothing is known: it is asked in any case.
        self._page.stoppable = not is_this_machine(self._hosts[0].name)
        travels = len(payload) <= LARGEST_IN_ENVIRONMENT
        pairs = zip(self._placement.hosts, self._hosts, strict=True)
        return MpiStart(
            entry,
            self._placement.threads,
            payload if travels else None,
            self._channel.address,
            [str(folder) for folder in sys.path],
            sys.argv,
            START_S,
            FileAddress.of(stop),
            self._watch.address,
            [(workers.ranks, ranks.ranks) for workers, ranks in pairs],
            self._goes_on,
        )

    def _launch(self, stack: ExitStack, start: MpiStart, prefix: bool) -> subprocess.Popen[bytes]:
        mpirun, job = find_mpirun(), uuid.uuid4().hex
        environment = {
            **inherited(),
            **settings(mpirun, self._hosts, os.environ),
            **start_settings(os.environ),
            START: base64.urlsafe_b64encode(pickle.dumps(start)).decode(),
            JOB: job,
        }
        exported = [
            name for name in environment if name.startswith("TUTTI_") or name in ("PYTHONPATH", TUNABLES)
        ]
        extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
        command = command_line(mpirun, self._hosts, exported, extra, prefix=prefix)
        # The guard starts before the first rank and ends last: a SIGKILL never leaves ranks behind.
        stack.enter_context(guard(job, GRACE_S))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def hangs(self) -> bool:
        """Whether mpirun was given up as it started no rank."""
        return self._loss.nobody

    def wait(
        self,
        stopping: Stopping,
        hang_timeout_s: float | None,
        first_s: float | None,
        is_due: Callable[[], bool] | None,
    ) -> tuple[int | None, str]:
        """Wait for mpirun's end, or that by a signal, or until a rank is lost.

        Args:
            stopping: tells of signals.
            hang_timeout_s: the time in which each that trains has to make a step; None: any.
            first_s: the time in which one has to begin; None: any.
            is_due: see `Recovery`.

        Returns:
            Its exit code, None if it was ended as a rank is lost or others take over; the end of its stderr.
        """
        self._over = False
        # Ranks of other hosts do not see the page.
        stopping.pass_to(self._page, self._owe_request)
        late_s = LATE_S if self._goes_on else None
        self._loss = loss = _Loss(self._watch, self._process.pid, first_s, late_s, hang_timeout_s)
        if self._goes_on:
            loss.roll = _Roll(self._watch, self._hosts)
        with suspended_together(self._process.send_signal), closing(loss):
            said, self._over = _copy_stderr(self._process, stopping, self._watch, loss, is_due, self._pass_on)
        if stopping.ended_by:
            self._patience_s = 0.0
        elif not self._over:
            self._watch.look()
            self._watch.settle(SETTLE_S)
        lost = self._over
        self._opened.close()
        return None if lost else self._process.returncode, said

    def result(self, returncode: int | None, said: str) -> object:
        """The result of rank 0, or the error that the job ended with.

        Args:
            returncode: of mpirun; None: it was ended, as a rank was lost.
            said: the end of what mpirun has said.
        """
        reports = [one for one in self._messages if isinstance(one, Report)]
        if self._loss.replaced:
            raise Replaced
        if self._loss.mpirun_stopped:
            raise LauncherLost(f"mpirun had started the ranks; {STOPPED_WHY}")
        if hung := self._loss.hung:
            raise RankHung(hung, f"on {hosts_of(hung, self._hosts)}: {self._loss.why_hung}")
        if gone := self._loss.gone:
            ranks = [rank for host in gone for rank in ranks_of(host, self._hosts)]
            raise HostLost(gone, ranks, "no rank of it has begun, and it cannot be reached any more")
        result = outcome(reports, returncode, said, self._watch, self._hosts)
        if not reports and is_this_machine(self._placement.hosts[0].name):
            # A launcher that tolerates dead ranks says nothing of them.
            raise PeerLost([0], "it ended before it was done")
        return result

    def _owe_request(self) -> None:
        self._owes_request = True
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass a request to stop on once all ranks have begun: the signal would kill one that has not."""
        if self._owes_request and self._watch.complete:
            self._owes_request = False
            self._process.send_signal(signal.SIGUSR1)

    def _end(self) -> None:
        self._page.end()
        # Ranks of other hosts end at once, whatever holds mpirun up.
        self._watch.close()
        end_mpirun(self._process, self._patience_s, at_once=self._over)

    def _forget(self) -> None:
        """Take the last messages, and remove what ranks of this machine have left that were killed."""
        self._messages = self._channel.messages()
        self._channel.close()
        started = [one for one in self._messages if isinstance(one, RankStarted)]
        for segment in (file for one in started for file in one.segments):
            Path(segment).unlink(missing_ok=True)


def _copy_stderr(
    process: subprocess.Popen[bytes],
    stopping: Stopping,
    watch: LivenessWatch,
    loss: _Loss,
    is_due: Callable[[], bool] | None,
    pass_on: Callable[[], None],
) -> tuple[str, bool]:
    """Copy mpirun's stderr until it ends, mpirun does, or is to by a signal, or as a rank is lost.

    Returns:
        Its last part, and whether mpirun runs, and is to be ended: a rank is lost, or others take over.
    """
    assert process.stderr is not None
    said = bytearray()
    look_s = None if is_due is None else DUE_S
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid)) as ended:
        for one in (stopping, process.stderr, ended, watch):
            selector.register(one, selectors.EVENT_READ)
        while not stopping.over():
            times = stopping.patience_s(), loss.patience_s(), look_s
            limits = [limit for limit in times if limit is not None]
            ready = [key.fileobj for key, _ in selector.select(min(limits, default=None))]
            watch.look()
            pass_on()
            if process.stderr in ready:
                data = os.read(process.stderr.fileno(), 1 << 16)
                if not data:
                    break
                data = data.replace(b"\0", b"")  # Open MPI ends some lines with a zero.
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()
                said = (said + data)[-_TAIL_BYTES:]
            elif ended in ready:  # Something that it has started may hold its stderr, and never end.
                break
            if loss.over(said):
                return said.decode(errors="replace"), True
            if is_due is not None and is_due():
                loss.replaced = True
                return said.decode(errors="replace"), True
    return said.decode(errors="replace"), False


class _Roll:
    """The hosts of which no rank has begun, which are asked for signs of life; mpirun would wait for minutes.

    Args:
        watch: over the ranks.
        hosts: theirs.
    """

    def __init__(self, watch: LivenessWatch, hosts: Sequence[Host]) -> None:
        self._watch = watch
        self._ranks = {one.name: ranks_of(one.name, hosts) for one in hosts if not is_this_machine(one.name)}
        self._pause_s, self._at, self._over = ASK_S, time.monotonic() + ASK_S, False
        self._silent = list[str]()
        self._asking: threading.Thread | None = None

    def look(self, now: float) -> list[str]:
        """The hosts that do not answer; asks those that are to be asked by now.

        Args:
            now: by the monotonic clock.
        """
        late = [] if self._over else self._late()
        self._over = not late
        if late and now >= self._at and (self._asking is None or not self._asking.is_alive()):
            self._pause_s *= 2
            self._at = now + self._pause_s
            self._asking = threading.Thread(target=self._ask, args=(late,), name="tutti-roll", daemon=True)
            with suppress(RuntimeError):  # There are no threads left: nobody asks.
                self._asking.start()
        return [host for host in late if host in self._silent]

    def close(self) -> None:
        """Ask no more."""
        self._over = True
        if self._asking is not None and self._asking.ident is not None:
            self._asking.join()

    def _late(self) -> list[str]:
        return [host for host, ranks in self._ranks.items() if self._watch.seen.isdisjoint(ranks)]

    def _ask(self, hosts: Sequence[str]) -> None:
        there = answering(hosts, PROBE_S, lambda: self._over)
        self._silent = [] if self._over else [host for host in hosts if host not in there]


class _Loss:
    """The time from the loss of a rank to the end of all others.

    Args:
        watch: over the ranks.
        mpirun: its process.
        first_s: the time in which one has to begin; None: any.
        late_s: the time in which all have to begin; None: any.
        hang_timeout_s: the time in which each that trains has to make a step; None: any.

    Attributes:
        mpirun_stopped: a signal has stopped mpirun for that time.
        nobody: none has begun in time.
        replaced: the ranks were ended because others take over.
        roll: asks the hosts while they begin; None: mpirun waits for them.
        gone: those that do not answer.
        hung: the ranks that are lost as they hang.
        why_hung: what is known about that.
    """

    def __init__(
        self,
        watch: LivenessWatch,
        mpirun: int,
        first_s: float | None,
        late_s: float | None,
        hang_timeout_s: float | None,
    ) -> None:
        self._watch, self.nobody, self.replaced = watch, False, False
        self.roll: _Roll | None = None
        self.gone = list[str]()
        self._mpirun, self.mpirun_stopped, self._hang_timeout_s = mpirun, False, hang_timeout_s
        self._looked_at = time.monotonic()
        self._stopped_at: float | None = None
        self._first = None if first_s is None else time.monotonic() + first_s
        self._hangs = None if hang_timeout_s is None else RemoteHangWatch(watch, hang_timeout_s)
        self.hung, self.why_hung = list[int](), ""
        self._late = None if late_s is None else time.monotonic() + late_s
        self._deadline: float | None = None

    def patience_s(self) -> float | None:
        """Time after which `over` is to be asked again; None: any."""
        if self._watch.seen:
            self._first = None
        if self._watch.complete:
            self._late = None
        times = [one for one in (self._first, self._late, self._deadline) if one is not None]
        left = [max(0.0, min(times) - time.monotonic())] if times else []
        looks = self._hangs is not None or (self.roll is not None and not self._watch.complete)
        return min(left + [LOOK_S] * looks, default=None)

    def close(self) -> None:
        """Ask no host any more."""
        if self.roll is not None:
            self.roll.close()

    def over(self, said: bytes | bytearray) -> bool:
        """Tell whether all are to be ended now.

        Args:
            said: by mpirun.
        """
        now = time.monotonic()
        if self._first is not None and not self._watch.seen and now >= self._first:
            self.nobody = True
            return True
        if self._note_mpirun(now):
            return True
        self.gone = [] if self.roll is None else self.roll.look(now)
        if self.gone:
            return True
        # While they begin mpirun knows more: a rank may have ended before it had connected.
        if self._deadline is None and self._watch.complete and first_lost(self._watch.ends):
            self._deadline = now + CAUSE_S
        if self._hangs is not None and self._deadline is None:
            self.hung, self.why_hung = self._hangs.look(now)
            # They print their stacks until then.
            self._deadline = now + CAUSE_S if self.hung else None
        if self._late is not None and not self._watch.complete and now >= self._late:
            return True
        if any(end.silent for end in self._watch.ends):
            return True
        if self._deadline is None:
            return False
        return now >= self._deadline or self._is_explained(said)

    def _is_explained(self, said: bytes | bytearray) -> bool:
        """Tell whether it is known by what the rank has ended."""
        first = first_lost(self._watch.ends)
        seen = any(end.rank in first and end.returncode is not None for end in self._watch.ends)
        return seen or KILLED.search(said.decode(errors="replace")) is not None

    def _note_mpirun(self, now: float) -> bool:
        """Note whether mpirun is stopped by a signal; tell whether it is for too long."""
        timeout_s = self._hang_timeout_s
        passed, self._looked_at = now - self._looked_at, now
        if timeout_s is None or state_of(self._mpirun) != STOPPED:
            self._stopped_at = None
            return False
        if self._stopped_at is None or passed > PAUSE_S:  # In the pause this process was stopped as well.
            self._stopped_at = now
        self.mpirun_stopped = now - self._stopped_at > timeout_s
        return self.mpirun_stopped
