"""Emulated clusters against what the simulator predicts for them (needs root).

    sudo python benchmarks/emulated.py [--hosts 2,4,8,16] [--rates 20,100,1000] [--pass 0.2]

Each host is a network namespace with one rank, its link shaped by `tc`. Training is in slow motion: a pass
sleeps, give or take a tenth, so that two cores hold 16 hosts; everything else is a run of `tutti train` over
MPI, with servers where a strategy has a centre. Longer passes on slower links are slower motion.

On two hosts, `sync` and a run without exchanges calibrate what the rate does not say: how much of it
messages get, and what a step takes beyond its pass. Everything else is predicted by virtual ranks, by the
same strategies' code with the same passes. An error is that of the seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from tests.cluster.hosts import Hosts  # noqa: E402
from torch import Tensor, nn  # noqa: E402

PARAMETERS: Final = 250_000
STEPS: Final = 35
FIRST: Final = 10
"""The first pass that counts: at first, rank 0 is ahead of the rank that gets the initial weights last."""
ALONE: Final = "without exchange"
SIDES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    ALONE: ("local", {"every": 10_000}),
    "sync": ("sync", {}),
    "local": ("local", {"every": 4}),
    "diloco": ("diloco", {"every": 8}),
    "easgd": ("easgd", {"every": 4}),
    "downpour": ("downpour", {}),
    "gossip": ("gossip", {}),
}
CENTRED: Final = ("easgd", "downpour")
BEGINS: Final[list[float]] = []
"""When a rank has begun its steps."""


def sleep(seconds: float) -> None:
    BEGINS.append(time.monotonic())
    time.sleep(seconds)


class Pass(nn.Module):
    """A model of `PARAMETERS` numbers whose forward pass takes a drawn time, by `wait`."""

    def __init__(self, seed: int, pass_s: float, wait: Any) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(PARAMETERS))
        self._pace, self._pass_s, self._wait = torch.Generator().manual_seed(seed), pass_s, wait

    def forward(self, inputs: Tensor) -> Tensor:
        self._wait(self._pass_s * (0.9 + 0.2 * float(torch.rand((), generator=self._pace))))
        return inputs.flatten(1)[:, :10] + self.weights.view(10, -1).sum(1)


def step_of(begins: list[float]) -> float:
    return (begins[STEPS - 1] - begins[FIRST]) / (STEPS - 1 - FIRST)


def train(name: str, pass_s: float) -> float:
    """Be a rank of a run; returns the seconds of one of its steps."""
    import tutti

    strategy, options = SIDES[name]
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
    servers = int(name in CENTRED)
    together = strategy not in CENTRED and strategy == "sync"
    tutti.train(
        Pass(rank, pass_s, sleep), "digits", strategy=strategy, strategy_options=options, servers=servers,
        optimizer="sgd", lr=1e-9, batch_size=(size - servers) if together else 1, steps=STEPS, validation=0.0,
        test=0.0, out=None, quiet=True,
    )  # fmt: skip
    return step_of(BEGINS) if len(BEGINS) >= STEPS else 0.0  # A server makes no steps.


def measured(hosts: Hosts, count: int, name: str, pass_s: float) -> float:
    """Run a side on the first hosts; seconds of a step."""
    ranks = dict.fromkeys(hosts.names[:count], 1)
    if name in CENTRED:
        ranks[hosts.names[count - 1]] += 1  # The last rank is the server.
    done = hosts.mpirun(
        ranks, [sys.executable, __file__, "--rank", name, "--pass", f"{pass_s}"], timeout_s=600
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"{name} has failed: {done.stdout}\n{done.stderr}")
    return float(json.loads(found[0])["step_s"])


def predicted(
    count: int, name: str, pass_s: float, bytes_per_s: float, latency_s: float, step_s: float
) -> float:
    """The same on virtual ranks; a step takes `step_s` beyond its pass."""
    from tutti.comm.network import Network
    from tutti.comm.virtual.world import VirtualWorld
    from tutti.optim import build
    from tutti.replica import Replica
    from tutti.strategies import Clip, named, place
    from tutti.strategies.base import Pace

    strategy = named(SIDES[name][0])(**SIDES[name][1])

    def program(comm: Any) -> float:
        begins: list[float] = []

        def wait(seconds: float) -> None:
            begins.append(comm.clock())
            comm.compute(seconds + step_s)

        module = Pass(comm.rank, pass_s, wait)
        optimizer = build("sgd", [*module.parameters()], 0.0)
        if comm.servers is not None and comm.servers.serving:
            strategy.serve(comm.servers, Replica(module), optimizer, Clip())
            return 0.0
        worker = strategy.worker(place(module, comm, strategy.home), comm, optimizer, Clip())
        worker.share = 1 / comm.size if strategy.pace is Pace.TOGETHER else 1.0
        for _ in range(STEPS):
            module(torch.zeros(1, 64)).sum().backward()
            worker.step()
        worker.finish()
        return step_of(begins)

    network = Network(latency_s, bytes_per_s)
    world = VirtualWorld(count, 1, network, servers=int(name in CENTRED))
    return world.run(program)[-1]  # The server is on the first host here, on the last one there.


def calibrated(alone_s: float, sync_s: float, rate: float, pass_s: float) -> tuple[float, float, float]:
    """Bytes per second, latency and seconds beyond a pass, from two runs on two hosts."""
    beyond = alone_s - predicted(2, ALONE, pass_s, 1e12, 0.0, 0.0)
    least, most = 0.2, 1.2
    for _ in range(20):  # The share of the rate that messages get, by bisection.
        share = (least + most) / 2
        if predicted(2, "sync", pass_s, share * rate, 1e-4, beyond) > sync_s:
            least = share
        else:
            most = share
    return share * rate, 1e-4, beyond


def report(args: argparse.Namespace) -> None:
    from measure import describe_machine, table

    counts = [int(count) for count in args.hosts.split(",")]
    sides, pass_s = args.strategies.split(","), args.pass_s
    print(describe_machine(), flush=True)
    rows, errors, right = [], [], []
    for mbit in args.rates.split(","):
        with Hosts([f"h{number}" for number in range(max(2, *counts))], rate=f"{mbit}mbit") as hosts:
            alone, sync = measured(hosts, 2, ALONE, pass_s), measured(hosts, 2, "sync", pass_s)
            link = calibrated(alone, sync, float(mbit) * 125_000, pass_s)
            print(f"{mbit} Mbit/s: {link[0] * 8e-6:.1f} reach messages; {1e3 * link[2]:.1f} ms beyond a pass")
            for count in counts:
                found = {}
                for name in sides:
                    if (count, name) != (2, "sync"):
                        found[name] = (
                            predicted(count, name, pass_s, *link),
                            measured(hosts, count, name, pass_s),
                        )
                        error = found[name][0] / found[name][1] - 1
                        errors.append(abs(error))
                        rows.append([mbit, count, name, *(f"{1e3 * s:.1f}" for s in found[name])])
                        rows[-1].append(f"{error:+.1%}")
                        print(*rows[-1], sep="  ", flush=True)
                for one, other in combinations(found.values(), 2):
                    right.append((one[0] < other[0]) == (one[1] < other[1]))
    print(table(["Mbit/s", "hosts", "strategy", "predicted ms", "measured ms", "error"], rows))
    print(f"mean error {mean(errors):.1%}, worst {max(errors):.1%}")
    if right:
        print(f"order right: {mean(right):.0%} of pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", default="2,4,8,16")
    parser.add_argument("--rates", default="20,100,1000", help="of a link, in Mbit/s")
    parser.add_argument("--strategies", default=",".join(list(SIDES)[1:]))
    parser.add_argument("--pass", dest="pass_s", type=float, default=0.2, help="of a worker, in seconds")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.rank is None:
        report(args)
    else:
        found = train(args.rank, args.pass_s)
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            print(json.dumps({"step_s": found}))


if __name__ == "__main__":
    import emulated  # A rank of `tutti train` imports the model: `BEGINS` is that module's.

    emulated.main()
