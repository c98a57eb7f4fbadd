"""Faults of many kinds, each in a training of its own: does the message name the right rank and cause?

    python benchmarks/attribution.py [--only NAME ...]

Each fault befalls rank 1 of two (unless its name says otherwise) behind a few steps. Right is a message that
names that rank and that cause, and an exit code other than 0; of a fault that is none, such as a rank that is
only slow, that nobody is blamed and the training comes to its end. What this machine does not allow, such as
a disk of its own without root, is left out and named. Faults of links and hosts are in
`attribution_on_hosts.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from measure import describe_machine, table
from tutti.studies.chaos.running_ranks import RunningRanks

FAULTS = Path(__file__).parent / "programs" / "faults.py"

LIMIT_S = 240.0
"""Time of a training until it counts as one that nothing ends."""

HANG = ("--hang-timeout", "3s")


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: of it, for `programs/faults.py` too if it is caused there.
        said: what the message has to match.
        words: further options of the training.
        cause: causes it from outside, once the ranks train; given the training and its run folder.
        around: circumstances that it needs, such as a small disk; yields further options.
        code: the exit code that is right; None: any other than 0.
        unblamed: what the message must not match.
    """

    name: str
    said: str
    words: tuple[str, ...] = ()
    cause: Callable[[subprocess.Popen[bytes], Path], None] | None = None
    around: Callable[[Path], object] | None = None
    code: int | None = None
    unblamed: str = r"lost rank 0|rank 0 failed|on rank 0\b"
    environment: dict[str, str] = field(default_factory=dict)


class Impossible(Exception):
    """The machine does not allow the fault."""


def ranks_of(training: subprocess.Popen[bytes]) -> dict[int, int]:
    """The processes of the ranks, by number, once all make steps."""
    seen = RunningRanks(training.pid)
    deadline = time.monotonic() + LIMIT_S
    while training.poll() is None and time.monotonic() < deadline:
        ranks = seen.look()
        if len(ranks) == 2 and all((one.steps or 0) >= 3 for one in ranks.values()):
            return {rank: one.process for rank, one in ranks.items()}
        time.sleep(0.01)
    raise RuntimeError("the training has made no steps")


def signalled(number: int, *victims: int) -> Callable[[subprocess.Popen[bytes], Path], None]:
    """Send a signal to ranks, at the same time."""

    def send(training: subprocess.Popen[bytes], folder: Path) -> None:
        ranks = ranks_of(training)
        for victim in victims or (1,):
            os.kill(ranks[victim], number)

    return send


def slowed(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Let rank 1 run for a quarter of the time, for 5 s."""
    process, until = ranks_of(training)[1], time.monotonic() + 5
    with suppress(ProcessLookupError):
        while time.monotonic() < until and training.poll() is None:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.03)


def suspended(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Suspend the whole job for longer than a rank may hang, as a scheduler does."""
    ranks = [*ranks_of(training).values(), training.pid]
    for process in ranks:
        os.kill(process, signal.SIGSTOP)
    time.sleep(8)
    for process in ranks:
        os.kill(process, signal.SIGCONT)


def supervisor_killed(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the process that has started the ranks; they have to be gone soon."""
    ranks = ranks_of(training)
    training.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{one}").exists() for one in ranks.values()):
        time.sleep(0.05)
    left = [one for one in ranks.values() if Path(f"/proc/{one}").exists()]
    print("no rank is left" if not left else f"left: {left}", file=sys.stderr, flush=True)
    (folder.parent / "note").write_text("no rank is left" if not left else "ranks are left")


def parent_of(process: int) -> int:
    """The process that has forked another one."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def server_killed(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the process that ranks are forked from."""
    os.kill(parent_of(ranks_of(training)[1]), signal.SIGKILL)


def server_stopped(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop the process that ranks are forked from, which is told of their ends, and kill rank 1."""
    rank = ranks_of(training)[1]
    os.kill(parent_of(rank), signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[str, ...]]:
    """A disk of 64 KB for the run folder."""
    if os.geteuid() != 0:
        raise Impossible("a disk of its own needs root")
    place = folder / "disk"
    place.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        raise Impossible("no file system can be mounted here")
    try:
        yield ("--out", str(place / "run"))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@contextmanager
def full_disk(folder: Path) -> Iterator[tuple[str, ...]]:
    """A disk for the run folder without room."""
    with small_disk(folder) as words:
        with suppress(OSError), (folder / "disk" / "large").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        yield words


@contextmanager
def read_only_disk(folder: Path) -> Iterator[tuple[str, ...]]:
    """A disk for the run folder on which nothing can be written."""
    with small_disk(folder) as words:
        remount = ["mount", "-o", "remount,ro", str(folder / "disk")]
        if subprocess.run(remount, capture_output=True, check=False).returncode != 0:
            raise Impossible("no file system can be mounted here")
        yield words


def fills_up(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave no room on the disk of the run folder while it trains."""
    ranks_of(training)
    with suppress(OSError), (folder.parent / "large").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


@contextmanager
def small_group(folder: Path) -> Iterator[tuple[str, ...]]:
    """A control group of limited memory, which rank 1 enters by itself."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"tutti-{os.getpid()}")
        # Of a folder that is no control group nothing is limited.
        if not Path(root, "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(600 << 20))
            os.environ["FAULT_GROUP"] = str(group)
            yield ()
            return
        except OSError:
            pass
        finally:
            os.environ.pop("FAULT_GROUP", None)
            with suppress(OSError):
                group.rmdir()
    raise Impossible("no control group for memory can be made here")


def corrupt(folder: Path) -> Iterator[tuple[str, ...]]:
    """Data whose file ends too early."""
    file = folder / "cut.npz"
    import numpy as np

    np.savez(file, x=np.zeros((200, 4), np.float32), y=np.zeros(200, np.int64))
    file.write_bytes(file.read_bytes()[:1500])
    yield ("--data", str(file))


LOST, FAILED = "lost rank 1: ", "rank 1 failed"
HUNG = LOST + r"it made no step for \d+ s, and waited for no other rank: it hung"

FAULTS_KNOWN = [
    Fault("SIGKILL", LOST + r"killed by signal 9 \(SIGKILL\)", cause=signalled(signal.SIGKILL)),
    Fault("SIGSEGV", LOST + r"killed by signal 11 \(SIGSEGV\)", cause=signalled(signal.SIGSEGV)),
    Fault("SIGABRT", LOST + r"killed by signal 6 \(SIGABRT\)", cause=signalled(signal.SIGABRT)),
    Fault("SIGBUS", LOST + r"killed by signal 7 \(SIGBUS\)", cause=signalled(signal.SIGBUS)),
    Fault("SIGFPE", LOST + r"killed by signal 8 \(SIGFPE\)", cause=signalled(signal.SIGFPE)),
    Fault("SIGILL", LOST + r"killed by signal 4 \(SIGILL\)", cause=signalled(signal.SIGILL)),
    Fault("SIGXCPU", LOST + r"killed by signal 24 \(SIGXCPU\)", cause=signalled(signal.SIGXCPU)),
    Fault("SIGSTOP", LOST + r"it was stopped by a signal \(SIGSTOP\)", HANG, signalled(signal.SIGSTOP)),
    Fault(
        "SIGKILL of both ranks",
        r"lost ranks 0, 1: killed by signal 9 \(SIGKILL\)",
        cause=signalled(signal.SIGKILL, 0, 1),
        unblamed="failed",
    ),
    Fault(
        "SIGKILL of rank 0",
        r"lost rank 0: killed by signal 9 \(SIGKILL\)",
        cause=signalled(signal.SIGKILL, 0),
        unblamed="rank 1",
    ),
    Fault("sys.exit(3)", r"rank 1.*(?s:.*)SystemExit: 3|lost rank 1: exited with code 3"),
    Fault("os._exit(3)", LOST + "exited with code 3 before it was done"),
    Fault("os._exit(0)", LOST + "exited with code 0 before it was done"),
    Fault("exception in model", FAILED + r"(?s:.*)in forward(?s:.*)ValueError: a fault"),
    Fault("exception in backward", FAILED + r"(?s:.*)ValueError: a fault"),
    Fault("exception in loss", FAILED + r"(?s:.*)ValueError: a fault"),
    Fault(
        "exception in data",
        r"samples' failed(?s:.*)ValueError: a fault|in samples(?s:.*)a fault",
        unblamed="^$",
    ),
    Fault("exception in augmentation", FAILED + r"(?s:.*)ValueError: a fault"),
    Fault("exception in callback", FAILED + r"(?s:.*)in step(?s:.*)ValueError: a fault"),
    Fault("exception in thread", "Exception in thread", code=0, unblamed="lost rank|rank . failed"),
    Fault("KeyboardInterrupt", FAILED + r"(?s:.*)KeyboardInterrupt"),
    Fault("RecursionError", FAILED + r"(?s:.*)RecursionError"),
    Fault("memory by RLIMIT_AS", FAILED + r"(?s:.*)(MemoryError|can't allocate memory)"),
    Fault(
        "memory by control group",
        LOST + r"killed by signal 9 \(SIGKILL\); the kernel ran out of memory",
        around=small_group,
    ),
    Fault("too many files", r"(?i)too many open files"),
    Fault("hang in callback", r"in dwell(?s:.*)" + HUNG, HANG),
    Fault("hang in model", r"in dwell(?s:.*)" + HUNG, HANG),
    Fault("hang in augmentation", r"in dwell(?s:.*)" + HUNG, HANG),
    Fault("hang with the GIL held", r"in hold_the_gil(?s:.*)" + HUNG, HANG),
    Fault("hang in a file system", r"in wait_for_a_file_system(?s:.*)" + HUNG, HANG),
    Fault("hang in an endless loop", r"in compute_for_ever(?s:.*)" + HUNG, HANG),
    Fault("another collective", r"rank 1 called barrier\(\) while rank 0 called", unblamed="^$"),
    Fault("straggler", "", HANG, cause=slowed, code=0, unblamed="lost rank|hung"),
    Fault("job suspended for 8 s", "", HANG, cause=suspended, code=0, unblamed="lost rank|hung"),
    Fault("NaN in the loss of one rank", r"loss.*nan.* rank 1|rank 1.*nan", unblamed="rank 0"),
    Fault("NaN in the weights of one rank", r"rank 1", ("--strategy", "local"), unblamed="rank 0"),
    Fault("full disk", "No space left on device; free some space|room", around=full_disk, unblamed="^$"),
    Fault("read-only disk", "Read-only file system", around=read_only_disk, code=2),
    Fault(
        "disk fills up",
        "No space left on device",
        around=small_disk,
        cause=fills_up,
        code=0,
        unblamed="lost rank",
    ),
    Fault("data file cut off", r"cut\.npz", around=contextmanager(corrupt), code=2),
    Fault("run folder deleted", r"(gone|deleted|not there|No such file)", unblamed="lost rank"),
    Fault("supervisor killed", "", cause=supervisor_killed, code=-signal.SIGKILL),
    Fault(
        "fork server killed",
        r"the process that forked all ranks ended: killed by signal 9",
        cause=server_killed,
        unblamed="lost rank",
    ),
    Fault(
        "fork server stopped, a rank killed",
        LOST + "(its process ended|killed by signal 9)",
        cause=server_stopped,
    ),
    Fault("clock set back", "", HANG, code=0, unblamed="lost rank|hung"),
    Fault("no fault", "", HANG, code=0, unblamed="lost rank|hung|failed|warning"),
]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: whether it was named rightly, how the training ended, and its last line."""

    right: bool
    code: int | None
    line: str


def tried(fault: Fault, show: bool) -> Verdict:
    """Train with the fault.

    Raises:
        Impossible: it cannot be caused here.
    """
    with tempfile.TemporaryDirectory(prefix="attribution-") as name:
        folder = Path(name)
        if fault.around is None:
            return in_folder(fault, folder, ("--out", str(folder / "run")), show)
        with fault.around(folder) as words:  # type: ignore[attr-defined]
            out = () if "--out" in words else ("--out", str(folder / "run"))
            return in_folder(fault, folder, (*out, *words), show)


def in_folder(fault: Fault, folder: Path, words: tuple[str, ...], show: bool) -> Verdict:
    """Train in a folder."""
    data = () if "--data" in words else ("--data", f"{FAULTS}:samples")
    command = [
        *(sys.executable, "-m", "tutti", "train", f"{FAULTS}:Net", *data, "-n", "2", "--threads", "1"),
        *("--batch-size", "8", "--epochs", "4", "--loss", f"{FAULTS}:loss", "--augment", f"{FAULTS}:change"),
        *("--callbacks", f"{FAULTS}:Faulty", "--checkpoint", "off"),
        *words,
        *fault.words,
    ]
    environment = {**os.environ, "FAULT": fault.name, "FAULT_FOLDER": str(folder)}
    with (folder / "said").open("w+b") as said:
        training = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
        )
        try:
            if fault.cause is not None:
                out = Path(command[command.index("--out") + 1])
                fault.cause(training, out)
            code: int | None = training.wait(LIMIT_S)
        except (subprocess.TimeoutExpired, RuntimeError):
            code = None
        finally:
            training.kill()
            training.wait()
        text = (folder / "said").read_text(errors="replace")
    ended_rightly = code not in (0, None) if fault.code is None else code == fault.code
    named = re.search(fault.said, text) is not None and re.search(fault.unblamed, text) is None
    if (folder / "note").exists():
        named = named and (folder / "note").read_text() == "no rank is left"
    lines = [line for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if "lost rank" in line or "error" in line.lower()]
    if show:
        print(text)
    return Verdict(ended_rightly and named, code, (shown or lines or [""])[-1][:150])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of faults")
    parser.add_argument("--show", action="store_true", help="print all that the trainings say")
    options = parser.parse_args()
    print(describe_machine())
    rows, right, left_out = [], 0, []
    for fault in FAULTS_KNOWN:
        if options.only and fault.name not in options.only:
            continue
        try:
            found = tried(fault, options.show)
        except Impossible as why:
            left_out.append(f"{fault.name} ({why})")
            continue
        right += found.right
        rows.append([fault.name, "yes" if found.right else "NO", f"{found.code}", found.line])
        print(*rows[-1], sep="  ", flush=True)
    print(table(["fault", "named rightly", "exit code", "last of the message"], rows))
    print(f"{right} of {len(rows)} faults were named rightly")
    for one in left_out:
        print(f"left out: {one}")


if __name__ == "__main__":
    main()
