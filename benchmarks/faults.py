"""Eight workers of async_diloco, and one of them lost, stopped or cut off every 30 s (needs root).

    sudo python benchmarks/faults.py [--minutes 15] [--workers 8]

Each worker is a `tutti train` on a host of its own, a network namespace, and a loop starts it again when it
ends, as a scheduler would; the centre is `tutti centre` on another one. A step of the perceptron is followed
by 500 ms of sleep, so that eight workers fit on two cores; they exchange every 5 steps. The workers that
train, and the centre, have a higher priority than all else on this machine: on a cluster, too, a worker that
starts takes no core from others.

For some minutes without faults, before and after, the workers' steps are counted. Between these, every 30 s
a fault is made, in turn kill -9 of all processes of a worker, SIGSTOP of all of them for 20 s, and its link
down for 60 s; in turn of all workers. A worker is under fault from then on until it makes steps again after
the fault has ended. The figure is the number of steps per second of the workers not under fault, in percent
of that without faults; the sleeps set the pace, so it says what others wait, not how fast they compute. Two
runs that know no centre, and suffer no fault, make the same steps: what slows these down is this machine, and
the second figure is in percent of their steps at the same time.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from bisect import bisect
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.cluster.hosts import Hosts  # noqa: E402

from measure import describe_machine, table  # noqa: E402

ALONE: Final = 2
EVERY_S: Final = 30.0
PAUSE_S: Final = 0.5
FAULTS: Final = {"killed": 0.0, "stopped": 20.0, "cut off": 60.0}
"""How long each fault lasts, in seconds."""

TUTTI: Final = str(Path(sysconfig.get_path("scripts"), "tutti"))
CENTRE: Final = "10.77.0.1:7070"

PACE: Final = f"""
import os, struct, time
import tutti

class Pace(tutti.Callback):
    def begin(self, course):
        os.nice(-10)
        self.file = os.open(os.environ["STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def step(self, course):
        time.sleep({PAUSE_S})
        os.write(self.file, struct.pack("d", time.time()))
"""


@dataclass
class Fault:
    """A fault of a worker: when it began, and when it had ended."""

    kind: str
    worker: int
    began: float
    ended: float


class Cluster:
    """The centre and the workers, for as long as the context lasts."""

    def __init__(self, hosts: Hosts, folder: Path, workers: int) -> None:
        self._hosts, self._folder, self._runs = hosts, folder, True
        self.workers, self.alone = range(workers), range(workers, workers + ALONE)
        self.faults = list[Fault]()
        (folder / "pace.py").write_text(PACE)
        keep = [TUTTI, "centre", "--listen", CENTRE, "--keep", "centre"]
        self._centre = self._start("centre", ["nice", "-n", "-10", *keep])
        self._all = [*self.workers, *self.alone]
        self._loops = [threading.Thread(target=self._loop, args=(worker,)) for worker in self._all]
        for loop in self._loops:
            loop.start()

    def _start(self, host: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{host}.log", "ab") as log:
            return subprocess.Popen(
                self._hosts.on(host, command),
                cwd=self._folder,
                env={**os.environ, "STEPS": str(self._folder / f"{host}.steps")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _loop(self, worker: int) -> None:
        """Start a worker as often as it ends."""
        options = f"--strategy async_diloco --strategy.every 5 --strategy.centre {CENTRE} -n 1 --threads 1"
        options = "-n 1 --threads 1" if worker in self.alone else options
        run = (
            f"--steps 100000000 --validation 0 --callbacks pace.py:Pace --resume auto --trust --out w{worker}"
        )
        while self._runs:
            command = f"{TUTTI} train mlp --data digits --batch-size 8 --seed {worker} {options} {run}"
            self._start(f"w{worker}", command.split()).wait()
            time.sleep(1)

    def steps(self, worker: int) -> list[float]:
        """When a worker has made its steps."""
        file = self._folder / f"w{worker}.steps"
        content = file.read_bytes() if file.exists() else b""
        return [moment for (moment,) in struct.iter_unpack("d", content[: len(content) // 8 * 8])]

    def signal(self, worker: int, signum: int) -> None:
        for process in self._hosts.processes(f"w{worker}"):
            with suppress(ProcessLookupError):
                os.kill(process, signum)

    def make(self, kind: str, worker: int) -> None:
        """Make a fault, and wait until it has ended."""
        began = time.time()
        if kind == "killed":
            self.signal(worker, signal.SIGKILL)
        elif kind == "stopped":
            self.signal(worker, signal.SIGSTOP)
            time.sleep(FAULTS[kind])
            self.signal(worker, signal.SIGCONT)
        else:
            self._hosts.cut_off(f"w{worker}")
            time.sleep(FAULTS[kind])
            self._hosts.join_again(f"w{worker}")
        self.faults.append(Fault(kind, worker, began, time.time()))

    def end(self) -> None:
        self._runs = False
        for worker in self._all:
            self.signal(worker, signal.SIGKILL)
        for process in self._hosts.processes("centre"):
            os.kill(process, signal.SIGTERM)
        self._centre.wait()
        for loop in self._loops:
            loop.join()


def made(steps: list[float], begin: float, end: float) -> int:
    """Count the steps between two moments."""
    return bisect(steps, end) - bisect(steps, begin)


def rate(cluster: Cluster, workers: range, begin: float, end: float) -> float:
    """Steps per second of a worker, the mean of some."""
    found = [made(cluster.steps(worker), begin, end) for worker in workers]
    return sum(found) / (end - begin) / len(found)


def undisturbed(cluster: Cluster, seconds: float) -> tuple[float, float]:
    """Return the steps per second of a worker, and of a run alone, for some time from now on."""
    begin = time.time()
    time.sleep(seconds)
    found, alone = (rate(cluster, one, begin, time.time()) for one in (cluster.workers, cluster.alone))
    print(f"without faults: {found:.3f} steps/s of each worker, {alone:.3f} alone", flush=True)
    return found, alone


def disturbed(cluster: Cluster, minutes: float) -> tuple[float, float]:
    """Make the faults; return begin and end."""
    began, threads = time.time(), list[threading.Thread]()
    for number in range(int(minutes * 60 / EVERY_S)):
        kind, worker = list(FAULTS)[number % len(FAULTS)], number % len(cluster.workers)
        print(f"{time.time() - began:5.0f} s: worker {worker} is {kind}", flush=True)
        threads.append(threading.Thread(target=cluster.make, args=(kind, worker)))
        threads[-1].start()
        time.sleep(max(0.0, began + (number + 1) * EVERY_S - time.time()))
        now = time.time()
        counts = [made(cluster.steps(one), now - EVERY_S, now) for one in (*cluster.workers, *cluster.alone)]
        print(f"         steps of each: {' '.join(map(str, counts))}", flush=True)
    end = time.time()
    for thread in threads:
        thread.join()
    return began, end


def report(cluster: Cluster, without: float, alone: float, began: float, end: float) -> None:
    """Print how fast the workers not under fault were, and how soon the others came back."""
    steps = {worker: cluster.steps(worker) for worker in cluster.workers}
    back_s, count, seconds = defaultdict[str, list[float]](list), 0, 0.0
    for worker in cluster.workers:
        at = began
        faults = [one for one in cluster.faults if one.worker == worker]
        for fault in sorted(faults, key=lambda one: one.began):
            after = bisect(steps[worker], fault.ended)
            back = steps[worker][after] if after < len(steps[worker]) else end
            back_s[fault.kind].append(back - fault.ended)
            count += made(steps[worker], at, min(fault.began, end))
            seconds += max(0.0, min(fault.began, end) - at)
            at = max(at, back)
        count += made(steps[worker], at, end)
        seconds += max(0.0, end - at)
    print(
        table(
            ["fault", "times", "s", "steps again after, median s"],
            [
                [kind, len(back_s[kind]), f"{FAULTS[kind]:.0f}", f"{median(back_s[kind]):.1f}"]
                for kind in FAULTS
                if back_s[kind]
            ],
        )
    )
    others, machine = count / seconds / without, rate(cluster, cluster.alone, began, end) / alone
    print(f"workers not under fault: {others:.1%} of the steps without faults")
    print(f"runs alone: {machine:.1%}; workers not under fault against these: {others / machine:.1%}")
    print(f"all workers: {rate(cluster, cluster.workers, began, end) / without:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TUTTI_CENTRE_KEY": secrets.token_hex(16)}
    print(describe_machine(), flush=True)
    names = ["centre", *(f"w{worker}" for worker in range(args.workers + ALONE))]
    with tempfile.TemporaryDirectory() as folder, Hosts(names) as hosts:
        cluster = Cluster(hosts, Path(folder), args.workers)
        try:
            while not all(len(cluster.steps(one)) > 20 for one in (*cluster.workers, *cluster.alone)):
                time.sleep(1)
            calm_s = 60 * args.minutes / 6
            before, alone_before = undisturbed(cluster, calm_s)
            began, end = disturbed(cluster, args.minutes)
            time.sleep(EVERY_S)
            after, alone_after = undisturbed(cluster, calm_s)
            report(cluster, (before + after) / 2, (alone_before + alone_after) / 2, began, end)
            print((Path(folder) / "centre.log").read_text().splitlines()[-1])
        finally:
            cluster.end()


if __name__ == "__main__":
    main()
