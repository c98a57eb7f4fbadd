"""Faults of links, hosts and launchers, each in a training on two hosts: are host, rank and cause named?

    python benchmarks/attribution_on_hosts.py [--policies stop respawn] [--only NAME ...]

The hosts are network namespaces of this machine, with processes, shared memory and temporary files of their
own (it needs root, and mpirun): a and b train, c stands by. The fault befalls b, or rank 1 on it, unless its
name says otherwise. Right is

- a message that names the host or rank, and the cause, and blames nobody else;
- an exit code of 0 if the training went on and came to its end, and only then;
- an end within the time that is promised;
- that no process, and no file in shared memory or among the temporary files, is left on any host.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attribution import FAULTS
from lost_hosts import TIMED, steps_of
from measure import describe_machine, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.hosts import TEMPORARY, Hosts, why_not

TRAIN = (
    *("train", f"{FAULTS}:Net", "--data", f"{FAULTS}:samples", "--loss", f"{FAULTS}:loss", "--threads", "1"),
    *("--batch-size", "8", "--epochs", "8", "--callbacks", f"{FAULTS}:Faulty,{TIMED}:Timed"),
    *("--augment", f"{FAULTS}:change", "--checkpoint", "off", "--hang-timeout", "5s"),
)

LIMIT_S = 150.0
"""Time of a training until it counts as one that nothing ends."""

STEPS = 100
"""Steps before the fault, in seconds of which it is known how long they take."""

LEFT_S = 8.0
"""Time, after the command has ended, in which all has to be gone on all hosts."""

QUICK_S, SILENT_S = 12.0, 40.0
"""Seconds from a fault to the end of a training that stops: a host is silent for 30 s before it is lost."""


class Training:
    """A training on the hosts.

    Args:
        hosts: a, b and c.
        program: the command, on a.
        notes: the folder with the steps of each rank.
    """

    def __init__(self, hosts: Hosts, program: subprocess.Popen[bytes], notes: Path) -> None:
        self.hosts, self.program, self.notes = hosts, program, notes
        self.faulty_at = 0.0

    def wait_for_steps(self) -> None:
        """Wait until both ranks have made some steps, or the training has ended."""
        deadline = time.monotonic() + LIMIT_S
        while self.program.poll() is None and time.monotonic() < deadline:
            made = steps_of(self.notes).values()
            if len(made) == 2 and all(len(steps) >= STEPS for steps in made):
                return
            time.sleep(0.02)

    def processes(self, host: str, *words: str) -> list[int]:
        """The processes of a host in whose commands all the words are."""
        found = []
        for process in self.hosts.processes(host):
            try:
                command = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            except OSError:
                continue
            names = [part.rpartition("/")[2] for part in command]
            # The names of programs that a launcher is to start come later.
            if all(word in names for word in words) and (not words or words[0] == names[0]):
                found.append(process)
        if not words:
            return found
        # The parent of a rank is its witness, which has the same command.
        parents = {int(fields_of(process)[1]) for process in found}
        return [process for process in found if process not in parents]

    def signal(self, number: int, host: str, *words: str) -> None:
        """Send a signal to those processes."""
        for process in self.processes(host, *words):
            os.kill(process, number)


def fields_of(process: int) -> list[str]:
    """What /proc says of a process from its state on."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


RANK = ("python", "-P", "-m", "tutti.launch.mpi_rank")
"""The command of a rank; that of mpirun has these words, too, but is none of Python."""

Cause = Callable[[Training], None]


def signalled(number: int, host: str, *words: str) -> Cause:
    return lambda training: training.signal(number, host, *words)


def cut_for_a_second(training: Training) -> None:
    training.hosts.cut_off("b")
    time.sleep(1)
    training.hosts.join_again("b")


def launcher_killed(training: Training) -> None:
    """Kill mpirun, which calls itself prterun."""
    training.signal(signal.SIGKILL, "a", "prterun")


def fill(*places: str) -> Callable[[Hosts], None]:
    """Leave no room in file systems of host b."""

    def leave_none(hosts: Hosts) -> None:
        for place in places:
            command = ["mount", "-o", "remount,size=64k", place]
            subprocess.run(hosts.on("b", command), check=True)
            full = f"head -c 65536 /dev/zero > {place}/large"
            subprocess.run(hosts.on("b", ["sh", "-c", full]), check=False, stderr=subprocess.DEVNULL)

    return leave_none


@dataclass(frozen=True)
class HostFault:
    """A kind of fault.

    Attributes:
        name: of it, for `programs/faults.py` too if it is caused there.
        said: what the message has to match.
        cause: causes it from outside, once the ranks train; None: it happens by itself.
        before: a circumstance, from before the start.
        stop_code: the exit code that is right with `--on-failure stop`; None: any other than 0.
        respawn_code: the same with `--on-failure respawn`.
        stop_s: the most seconds from the fault to the end, with `--on-failure stop`.
        unblamed: what the message must not match.
        said_on: what it has to match in addition, with `--on-failure respawn`.
    """

    name: str
    said: str
    cause: Cause | None = None
    before: Callable[[Hosts], None] | None = None
    stop_code: int | None = None
    respawn_code: int | None = 0
    stop_s: float = QUICK_S
    unblamed: str = r"lost host [ac]|lost rank 0|rank 0 failed|Traceback"
    said_on: str = "; going on with 2 ranks x 1 thread on"


NOBODY = r"lost (rank|host)|rank \d failed|tutti: error|Traceback"
"""Words that blame somebody; PRRTE warns of calls that failed, to no harm."""

KINDS = [
    HostFault("no fault", "", None, stop_code=0, unblamed=NOBODY, said_on=""),
    HostFault(
        "link cut",
        "lost host b: it cannot be reached any more",
        lambda training: training.hosts.cut_off("b"),
        stop_s=SILENT_S,
    ),
    HostFault(
        "link cut for 1 s", "", cut_for_a_second, stop_code=0, stop_s=LIMIT_S, unblamed=NOBODY, said_on=""
    ),
    HostFault(
        "link at 100 kbit/s",
        "",
        lambda training: training.hosts.slow_down("b", "100kbit"),
        stop_code=0,
        stop_s=LIMIT_S,
        unblamed=NOBODY,
        said_on="",
    ),
    HostFault(
        "nothing comes from the host",
        "lost host b: it cannot be reached any more",
        lambda training: training.hosts.lose_packets("b", "a"),
        stop_s=SILENT_S,
    ),
    HostFault(
        "nothing gets to the host",
        "lost host b: it cannot be reached any more",
        lambda training: training.hosts.lose_packets("a", "b"),
        stop_s=SILENT_S,
    ),
    HostFault(
        "host without power",
        "lost host b: it cannot be reached any more",
        lambda training: training.hosts.kill("b"),
        stop_s=SILENT_S,
    ),
    HostFault(
        "all processes of the host stopped",
        "lost rank 1: on host b: it has not run for",
        signalled(signal.SIGSTOP, "b"),
        stop_s=SILENT_S,
    ),
    HostFault(
        "rank stopped",
        "lost rank 1: on host b: it has not run for",
        signalled(signal.SIGSTOP, "b", *RANK),
        stop_s=SILENT_S,
    ),
    HostFault(
        "hang in callback",
        r"in dwell(?s:.*)lost rank 1: on host b: it made no step for \d+ s",
        stop_s=SILENT_S,
    ),
    HostFault("hang with the GIL held", "lost rank 1: on host b: it has not run for", stop_s=SILENT_S),
    HostFault(
        "rank killed", r"lost rank 1: killed by signal 9 \(SIGKILL\)", signalled(signal.SIGKILL, "b", *RANK)
    ),
    HostFault(
        "rank 0 killed",
        r"lost rank 0: killed by signal 9 \(SIGKILL\)",
        signalled(signal.SIGKILL, "a", *RANK),
        unblamed=r"lost host|lost rank 1|Traceback",
    ),
    HostFault(
        "exception in model",
        r"rank 1 failed(?s:.*)in forward(?s:.*)ValueError: a fault(?s:.*)rank 1 failed on host b",
        respawn_code=None,
        unblamed="lost rank|lost host|rank 0 failed|Try the hosts",
        said_on="",
    ),
    HostFault("os._exit(0)", "lost rank 1: exited with code 0 before it was done"),
    HostFault(
        "mpirun killed",
        r"mpirun, which had started the ranks, was killed by signal 9 \(SIGKILL\)",
        launcher_killed,
        unblamed="lost host|lost rank",
    ),
    HostFault(
        "mpirun's daemon killed",
        r"lost host b: mpirun's daemon there has ended",
        signalled(signal.SIGKILL, "b", "prted"),
    ),
    HostFault(
        "launching process killed",
        "",
        signalled(signal.SIGKILL, "a", "python", "tutti", "train"),
        stop_code=-signal.SIGKILL,
        respawn_code=-signal.SIGKILL,
        said_on="",
        unblamed="going on",
    ),
    HostFault(
        "no room in /dev/shm",
        "",
        before=fill("/dev/shm"),
        stop_code=0,
        unblamed=NOBODY,
        said_on="",
        stop_s=LIMIT_S,
    ),
    HostFault(
        "no room in TMPDIR",
        r"Remote host: +b(?s:.*)make room",
        before=fill(TEMPORARY),
        respawn_code=None,
        said_on="",
        stop_s=LIMIT_S,
    ),
    HostFault(
        "no room in /dev/shm and TMPDIR",
        r"Remote host: +b(?s:.*)make room",
        before=fill("/dev/shm", TEMPORARY),
        respawn_code=None,
        said_on="",
        stop_s=LIMIT_S,
    ),
]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: what was wrong, the exit code, the seconds to its end, and its last line."""

    wrong: str
    code: int | None
    seconds: float
    line: str


def tried(fault: HostFault, policy: str, show: bool) -> Verdict:
    """Train with the fault."""
    with tempfile.TemporaryDirectory(prefix="attribution-") as name, Hosts("abc", apart=True) as hosts:
        folder = Path(name)
        if fault.before is not None:
            fault.before(hosts)
        before = files_of(hosts)
        (folder / "notes").mkdir()
        with (folder / "said").open("wb") as said:
            program = started(fault, policy, hosts, folder, said.fileno())
            training = Training(hosts, program, folder / "notes")
            training.wait_for_steps()
            at = time.monotonic()
            if fault.cause is not None:
                fault.cause(training)
            try:
                code: int | None = program.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
        seconds = time.monotonic() - at
        left = what_is_left(training, before)
        text = (folder / "said").read_text(errors="replace")
    if show:
        print(text)
    return judged(fault, policy, text, code, seconds, left)


def started(fault: HostFault, policy: str, hosts: Hosts, folder: Path, said: int) -> subprocess.Popen[bytes]:
    """Start the training on host a."""
    words = [word for word in hosts.mpirun_arguments if word != "--allow-run-as-root"]
    told = {"FAULT": fault.name, "FAULT_FOLDER": str(folder), "TIMED_STEPS": str(folder / "notes")}
    told["FAULT_STEP"] = str(STEPS)
    words += [word for name in told for word in ("-x", name)]
    environment = {**os.environ, **hosts.settings, **told, "TUTTI_MPIRUN_ARGS": shlex.join(words)}
    placed = ["--hosts", "a:1,b:1,c:1", "-n", "2", "--on-failure", policy, "--out", str(folder / "run")]
    command = hosts.on("a", [sys.executable, "-m", "tutti", *TRAIN, *placed])
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)


def files_of(hosts: Hosts) -> set[Path]:
    """The files in shared memory, and the temporary ones, of all hosts that are up."""
    found = set[Path]()
    for host in filter(hosts.is_up, hosts.names):
        for place in ("/dev/shm", TEMPORARY):
            found.update(hosts.file(host, place).iterdir())
    # The cache of torch, which each import of it makes.
    return {file for file in found if not file.name.startswith("torchinductor_")}


def what_is_left(training: Training, before: set[Path]) -> str:
    """The processes and files that are left after a while; those of a host that is stopped may go on."""
    hosts = training.hosts
    training.signal(signal.SIGCONT, "b")
    deadline = time.monotonic() + LEFT_S
    while any(map(hosts.processes, hosts.names)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for host in hosts.names:
        for process in hosts.processes(host):
            command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:60]
            names.append(f"{command.strip()} on {host}")
    names += [f"{'/'.join(one.parts[4:])}" for one in sorted(files_of(hosts) - before)]
    return ", ".join(names)


def judged(fault: HostFault, policy: str, text: str, code: int | None, seconds: float, left: str) -> Verdict:
    """Compare what has happened with what is right."""
    respawns = policy == "respawn"
    right_code = fault.respawn_code if respawns else fault.stop_code
    wrong = []
    if code is None:
        wrong.append("no end")
    elif code != right_code and (right_code is not None or code == 0):
        wrong.append("exit code")
    if re.search(fault.said, text) is None or (respawns and re.search(fault.said_on, text) is None):
        wrong.append("not named")
    if (found := re.search(fault.unblamed, text)) is not None:
        wrong.append(f"says '{found[0]}'")
    if not respawns and seconds > fault.stop_s:
        wrong.append("late")
    if left:
        wrong.append(f"left: {left}")
    lines = [line for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if re.search(r"tutti: (error|lost)", line)]
    return Verdict("; ".join(wrong), code, seconds, (shown or lines or [""])[-1][:200])


def rows_of(faults: Sequence[HostFault], policies: Sequence[str], show: bool) -> list[list[str]]:
    """Try faults with policies."""
    rows = []
    for fault in faults:
        for policy in policies:
            found = tried(fault, policy, show)
            right = "yes" if not found.wrong else f"NO: {found.wrong}"
            rows.append([fault.name, policy, right, f"{found.code}", f"{found.seconds:.1f}", found.line])
            print(*rows[-1], sep="  ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of faults")
    parser.add_argument("--policies", nargs="+", default=["stop", "respawn"])
    parser.add_argument("--show", action="store_true", help="print all that the trainings say")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    print(describe_machine())
    faults = [fault for fault in KINDS if not options.only or fault.name in options.only]
    rows = rows_of(faults, options.policies, options.show)
    heads = ["fault", "--on-failure", "right", "exit code", "seconds", "last of the message"]
    print(table(heads, rows))
    print(f"{sum(row[2] == 'yes' for row in rows)} of {len(rows)} were right")


if __name__ == "__main__":
    main()
