"""A cluster of 1,024 workers in one process: real gradients of a small MLP on MNIST, virtual time.

    python benchmarks/simulate.py [--workers 1024] [--steps 8] [--strategies downpour,easgd,sync]

Every strategy runs twice with the same seed. "gradients/s" counts forward, backward and the step in
wall time; wanted are 1,000. "same bits": both runs ended with the same weights.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn

from measure import describe_machine, table
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, Part, open_data
from tutti.strategies import Clip, Strategy, named, place
from tutti.strategies.base import Pace

BATCH = 4
COMPUTE_S = 5e-3
"""What a batch costs on the virtual clock, times 1 to 1.5 by rank."""

OPTIONS = {"easgd": {"every": 4}}
RANKS_PER_HOST = {"sync": 32}
"""Centres in shared memory need one host; it has as many cores as there are workers."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="of each worker")
    parser.add_argument("--strategies", default="downpour,easgd,sync")
    parser.add_argument("--hidden", type=int, default=16, help="neurons of the hidden layer")
    parser.add_argument("--data", default="mnist")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = open_data(args.data, HostCommunicator.alone(), validation=0.0)
    rows = []
    for name in args.strategies.split(","):
        strategy = named(name)(**OPTIONS.get(name, {}))
        runs = [simulate(strategy, data.train, args) for _ in range(2)]
        rates = [args.workers * args.steps / wall for wall, _, _ in runs]
        (_, virtual, first), (_, _, second) = runs
        same = "yes" if torch.equal(first, second) else "NO"
        rows.append([name, f"{max(rates):,.0f}", f"{runs[0][0]:.1f}", f"{virtual:.3f}", same])
    print(describe_machine())
    print(f"{args.workers} virtual workers, {args.steps} steps each, batches of {BATCH}\n")
    print(table(["strategy", "gradients/s", "wall s", "virtual s", "same bits"], rows))


def simulate(strategy: Strategy, part: Part, args: argparse.Namespace) -> tuple[float, float, Tensor]:
    """Wall seconds of the training, virtual seconds, and the final weights."""
    moments: list[float] = []

    def program(comm: Communicator) -> Tensor:
        torch.manual_seed(0)
        shape = part.take(torch.zeros(1, dtype=torch.int64))[0].numel()
        module = nn.Sequential(
            nn.Flatten(), nn.Linear(shape, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10)
        )
        own = strategy.pace is not Pace.TOGETHER
        replica = place(module, comm, strategy.home)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        worker = strategy.worker(replica, comm, optimizer, Clip())
        size = BATCH if own else BATCH * comm.size
        batches = Batches(part, size, comm.rank, comm.size, own=own)
        updates = _updates(batches, args.steps)
        comm.barrier()
        moments.append(perf_counter())
        for _, (batch,) in updates:
            loss = nn.functional.cross_entropy(module(batch.inputs), batch.targets)
            (loss * batch.share).backward()
            comm.compute(COMPUTE_S * (1 + 0.5 * comm.rank / comm.size))
            worker.step()
        worker.finish()
        moments.append(perf_counter())
        return replica.flats[0].weights

    per_host = RANKS_PER_HOST.get(strategy.name)
    world = VirtualWorld(args.workers, min(per_host, args.workers) if per_host else None, Network())
    found = world.run(program)
    return max(moments) - min(moments), world.seconds, found[0].clone()


def _updates(batches: Batches, steps: int) -> list:
    """The first updates of the run, over as many epochs as it takes."""
    found: list = []
    epoch = 0
    while len(found) < steps:
        found += batches.epoch(epoch, stop=steps - len(found))
        epoch += 1
    return found


if __name__ == "__main__":
    main()
