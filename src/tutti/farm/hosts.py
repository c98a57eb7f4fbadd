"""A launch on each of several hosts, all of which work on one farm. No torch.

    tutti cv ... --hosts a,b ─┬─ mpirun ──► host a: tutti cv ...    makes the farm
                              └─ mpirun ──► host b: tutti cv ...    joins it, once it sees the farm's folder

Each host has an mpirun of its own, so that a host which is lost takes no other one with it: they share the
jobs as all launches on one folder do (`claims.py`), and take over what it has not finished.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from typing import Final

from tutti.errors import EXIT_INTERRUPTED, TuttiError, UserError
from tutti.farm.host_team import FARM_HOST, FARM_JOB
from tutti.launch.guard import JOB, guard
from tutti.launch.mpirun import EXTRA_ARGUMENTS, GRACE_S, command_line, end_mpirun, find_mpirun
from tutti.launch.mpirun_outcome import lost_host
from tutti.launch.placement import Host
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping

PROGRAM: Final = (sys.executable, "-P", "-m", "tutti")
"""The program of a launch, before the words of the command."""

LAST_S: Final = 60.0
"""Time of the other launches after the first that has done its work, and so the farm."""

ENDS: Final = (0, EXIT_INTERRUPTED, 1)
"""The exit codes of a launch that is not lost, the one that says most of the farm first."""

_PIECE: Final = 1 << 16
_TAIL_BYTES: Final = 64 << 10


@dataclass
class HostLaunch:
    """The launch of one host, as this process sees it.

    Attributes:
        host: its name.
        process: the mpirun that has started it.
        code: its exit code; None: it works.
        lost: it has ended before it saw the end of the farm.
        lines: what it has printed that nobody has seen.
        said: the end of what it has written to standard error.
    """

    host: str
    process: subprocess.Popen[bytes]
    code: int | None = None
    lost: bool = False
    lines: list[str] = field(default_factory=list)
    said: str = ""

    def hear(self, line: str) -> None:
        """Take a line of its standard error, and pass it on."""
        self.said = (self.said + line)[-_TAIL_BYTES:]
        print(f"{self.host}: {line}", end="", file=sys.stderr, flush=True)

    def ask(self) -> None:
        """Ask it to save and stop."""
        if self.code is None:
            self.process.send_signal(signal.SIGUSR1)

    def note_end(self) -> None:
        """Note how it has ended."""
        self.code = self.process.wait()
        # Open MPI's code for a lost host is 0.
        self.lost = self.code not in ENDS or lost_host(self.said) is not None


class _Lines:
    """The lines that come out of a pipe.

    Args:
        pipe: its reading end.
        take: is called with each line.
    """

    def __init__(self, pipe: FileIO, take: Callable[[str], None]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self._take, self._begun = pipe, take, b""

    def read(self) -> bool:
        """Pass on the lines that are there; return whether more may come."""
        while data := self.pipe.read(_PIECE):
            *lines, self._begun = (self._begun + data).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace") + "\n")
        return data is None

    def finish(self) -> None:
        """Pass on what is there, the last line too if it did not end."""
        self.read()
        if self._begun:
            self._take(self._begun.decode(errors="replace") + "\n")
            self._begun = b""


def run_on_hosts(hosts: Sequence[Host], words: Sequence[Sequence[str]]) -> int:
    """Have a launch on each host work on a farm, and print what one of them prints.

    Further arguments for mpirun are taken from TUTTI_MPIRUN_ARGS.

    Args:
        hosts: where to; the first one makes the farm.
        words: of the command on each of them, from its name on.

    Returns:
        The exit code: that of a launch which has seen the end of the farm, if there is one.

    Raises:
        UserError: there is no mpirun.
        TuttiError: all hosts are lost.
        KeyboardInterrupt, SystemExit: the second Ctrl-C or SIGTERM, when all launches have ended.
    """
    job = uuid.uuid4().hex
    # The guard starts before the first launch and ends last: a SIGKILL never leaves one behind.
    with SignalWatch() as signals, guard(job, GRACE_S):
        stopping = Stopping(signals, StopPage())
        # Nobody tells from which moment on the launches can be stopped.
        stopping.page.stoppable = True
        with ExitStack() as stack:
            launches = [
                stack.enter_context(_started(number, hosts, words[number], job))
                for number in range(len(hosts))
            ]
            _watch(launches, stopping)
    stopping.act()
    ended = {one.code: one for one in reversed(launches) if not one.lost}
    for code in ENDS:
        if code in ended:
            _show([ended[code]])
            return code
    if launches[0].code == UserError.exit_code:
        return UserError.exit_code
    if stopping.page.requested:
        return EXIT_INTERRUPTED
    raise TuttiError(
        "no host has come to the end of the farm; see what each of them says, and go on with --resume"
    )


@contextmanager
def _started(number: int, hosts: Sequence[Host], words: Sequence[str], job: str) -> Iterator[HostLaunch]:
    """Start the launch of a host, and end it, if it still runs, with the context."""
    environment = {**os.environ, JOB: job, FARM_JOB: job, FARM_HOST: f"{number}/{len(hosts)}"}
    exported = [name for name in environment if name.startswith("TUTTI_") or name == "PYTHONPATH"]
    extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
    program = [*PROGRAM, *words]
    name = hosts[number].name
    process = subprocess.Popen(
        command_line(find_mpirun(), [Host(name, 1)], exported, extra, program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )
    try:
        yield HostLaunch(name, process)
    finally:
        end_mpirun(process)


def _watch(launches: Sequence[HostLaunch], stopping: Stopping) -> None:
    """Pass on what the launches print and what they are asked, until all have ended or are to."""

    def ask_all() -> None:
        for one in launches:
            one.ask()

    stopping.forward = ask_all
    deadline = float("inf")
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        selector.register(stopping, selectors.EVENT_READ)
        outputs = dict[str, list[_Lines]]()
        for one in launches:
            out, err = one.process.stdout, one.process.stderr
            assert isinstance(out, FileIO)
            assert isinstance(err, FileIO)
            outputs[one.host] = [_Lines(out, one.lines.append), _Lines(err, one.hear)]
            for lines in outputs[one.host]:
                selector.register(lines.pipe, selectors.EVENT_READ, lines)
            ended = stack.enter_context(open(os.pidfd_open(one.process.pid)))
            selector.register(ended, selectors.EVENT_READ, one)
        while not stopping.over() and any(one.code is None for one in launches):
            limits = [deadline - time.monotonic(), stopping.patience_s() or float("inf")]
            limit = max(0.0, min(limits))
            for key, _ in selector.select(None if limit == float("inf") else limit):
                if isinstance(key.data, _Lines) and not key.data.read():
                    selector.unregister(key.fileobj)
                elif isinstance(key.data, HostLaunch):
                    selector.unregister(key.fileobj)
                    for lines in outputs[key.data.host]:
                        lines.finish()
                    key.data.note_end()
                    if _judge(key.data, launches, stopping):
                        deadline = min(deadline, time.monotonic() + LAST_S)
            _show(launches)
            if time.monotonic() >= deadline:
                late = ", ".join(one.host for one in launches if one.code is None)
                _warn(f"{late}: not done after {LAST_S:g} s, though the farm is; it is ended")
                return


def _judge(ended: HostLaunch, launches: Sequence[HostLaunch], stopping: Stopping) -> bool:
    """Say what the end of a launch means to the others; return whether the farm is known to be done."""
    if not ended.lost:
        return ended.code == 0
    if stopping.page.requested:
        return False
    if ended is launches[0] and ended.code == UserError.exit_code:
        # No host can do better with the same words.
        stopping.page.request()
        for one in launches:
            one.ask()
    elif any(one.code is None for one in launches):
        code = f" (exit code {ended.code})" if ended.code else ""
        _warn(f"host {ended.host} is lost{code}; the others go on without it")
    return False


def _show(launches: Sequence[HostLaunch]) -> None:
    """Print what the first one that is not lost has printed: all print the same in the end."""
    shown = next((one for one in launches if not one.lost), None)
    if shown is not None and shown.lines:
        print("".join(shown.lines), end="", flush=True)
        shown.lines.clear()


def _warn(text: str) -> None:
    print(f"tutti: warning: {text}", file=sys.stderr, flush=True)
