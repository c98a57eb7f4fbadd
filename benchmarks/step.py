"""Training speed of one machine: plain torch, DDP + Gloo, and tutti, beside what two ranks could do at best.

    python benchmarks/step.py [--models mlp,lenet] [--rounds 7]

The sides, all in the same two processes, in turn, `rounds` times, medians:

    1 thread    plain torch, one process with one thread
    all threads plain torch, one process with all threads
    DDP + Gloo  torch's DistributedDataParallel, one rank per core
    tutti       strategy sync, one rank per core
    in step     one rank per core, forward, backward, barrier: each step lasts as long as its slower rank
    ceiling     one rank per core, forward and backward and nothing else: no exchange, no optimizer

Adam (torch's fused one on every side), global batch 128, fp32, contiguous. "exchange" is the time of a step
beyond the ceiling's: all that training in parallel adds to forward and backward, the optimizer included. What
lies between "in step" and "ceiling" is the noise of the machine, which no synchronous training escapes. All
sides run in ranks of tutti, which keep the memory that they free: that helps every one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

BATCH = 128
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "mlp": ("mlp", (1, 28, 28), {}),
    "lenet": ("lenet", (1, 28, 28), {}),
    "cnn": ("cnn", (1, 28, 28), {}),
    "vgg11": ("vgg11", (3, 32, 32), {}),
    "large mlp": ("mlp", (1, 28, 28), {"hidden": [2048, 2048]}),
    "small cnn": ("cnn", (1, 28, 28), {"channels": [16, 32]}),
}
SIDES = ("1 thread", "all threads", "DDP + Gloo", "tutti", "in step", "ceiling")


def timed(entry, description, models):
    """The seconds of every side's steps by model, as the command line asks; says on which machine.

    Args:
        entry: what each rank runs, as "module:function" of this folder.
        description: of the program.
        models: those measured by default.
    """
    from measure import describe_machine
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(models), help="comma-separated, of: " + ", ".join(MODELS)
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--ranks", default="2")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    payload = json.dumps({"models": args.models.split(","), "rounds": args.rounds, "port": port}).encode()
    times = start(entry, payload, place_ranks(args.ranks, None))
    print(describe_machine())
    print(f"samples/s at global batch {BATCH}, fp32, Adam, median of {args.rounds}\n")
    return times


def main() -> None:
    from measure import table

    times = timed("step:work", __doc__, [*MODELS][:-1])
    speeds, exchanges = [], []
    for name, sides in times.items():
        step = {side: median(values) for side, values in sides.items()}
        rate = {side: BATCH / seconds for side, seconds in step.items()}
        ratios = [f"{rate['tutti'] / rate[side]:.3f}" for side in ("ceiling", "in step", "DDP + Gloo")]
        speeds.append([name, *(f"{rate[side]:,.0f}" for side in SIDES), *ratios])
        ours, theirs = (1e3 * (step[side] - step["ceiling"]) for side in ("tutti", "DDP + Gloo"))
        exchanges.append([name, f"{theirs:.3f}", f"{ours:.3f}", f"1/{theirs / ours:.1f}"])
    print(table(["model", *SIDES, "tutti/ceiling", "tutti/in step", "tutti/DDP"], speeds))
    print("\nexchange: ms of a step beyond forward and backward\n")
    print(table(["model", "DDP + Gloo", "tutti", "tutti/DDP"], exchanges))


def work(comm, payload):
    """On each rank: time every side of every model, in turn."""
    import torch.distributed as dist

    settings = json.loads(payload)
    address = f"tcp://127.0.0.1:{settings['port']}"
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    times: dict[str, dict[str, list[float]]] = {}
    for name in settings["models"]:
        sides = {side: make(comm, name) for side, make in MAKERS.items()}
        count = steps_of_a_turn(comm, sides["ceiling"])
        times[name] = {side: [] for side in SIDES}
        for turn in range(settings["rounds"]):
            order = SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]
            for side in order:
                times[name][side].append(time_steps(comm, sides[side], count))
        if comm.rank == 0:
            print(f"measured {name}: {count} steps a turn", file=sys.stderr)
    dist.destroy_process_group()
    return times


def steps_of_a_turn(comm, step: Callable[[int], None]) -> int:
    """How many steps take about 0.8 s, agreed by all ranks."""
    step(2)
    began = perf_counter()
    step(3)
    seconds = comm.broadcast_object((perf_counter() - began) / 3)
    return max(3, int(0.8 / seconds))


def time_steps(comm, step: Callable[[int], None], count: int) -> float:
    step(max(1, count // 20))
    comm.barrier()
    began = perf_counter()
    step(count)
    comm.barrier()
    return (perf_counter() - began) / count


def make_model(name: str, samples: int):
    import torch

    from tutti import models

    spec, shape, options = MODELS[name]
    torch.manual_seed(0)
    module = models.build(spec, shape, 10, options)
    inputs = torch.randn(samples, *shape)
    targets = torch.randint(10, (samples,))
    return module, inputs, targets


def _plain(threads: int | None):
    def make(comm, name: str) -> Callable[[int], None]:
        import torch

        module, inputs, targets = make_model(name, BATCH)
        optimizer = torch.optim.Adam(module.parameters(), fused=True)
        loss = torch.nn.CrossEntropyLoss()

        def train(count: int) -> None:
            for _ in range(count):
                loss(module(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

        def run(count: int) -> None:
            """Rank 0 alone computes; the others sleep at the barrier that follows."""
            if comm.rank:
                return
            cores, before = os.sched_getaffinity(0), torch.get_num_threads()
            if threads is None:
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
                torch.set_num_threads(len(os.sched_getaffinity(0)))
            train(count)
            torch.set_num_threads(before)
            os.sched_setaffinity(0, cores)

        return run

    return make


def _ddp(comm, name: str) -> Callable[[int], None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    module, inputs, targets = make_model(name, BATCH // comm.size)
    wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(wrapped.parameters(), fused=True)
    loss = torch.nn.CrossEntropyLoss()

    def train(count: int) -> None:
        for _ in range(count):
            loss(wrapped(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def _tutti(comm, name: str) -> Callable[[int], None]:
    import torch

    from tutti import strategies

    module, inputs, targets = make_model(name, BATCH // comm.size)
    strategy = strategies.Sync()
    replica = strategies.place(module, comm, strategy.home)
    optimizer = torch.optim.Adam(module.parameters())
    worker = strategy.worker(replica, comm, optimizer, strategies.Clip())
    loss, share = torch.nn.CrossEntropyLoss(), 1 / comm.size

    def train(count: int) -> None:
        for _ in range(count):
            (loss(module(inputs), targets) * share).backward()
            worker.step()

    return train


def _passes(barrier: bool):
    def make(comm, name: str) -> Callable[[int], None]:
        import torch

        module, inputs, targets = make_model(name, BATCH // comm.size)
        loss = torch.nn.CrossEntropyLoss()

        def train(count: int) -> None:
            for _ in range(count):
                loss(module(inputs), targets).backward()
                if barrier:
                    comm.barrier()

        return train

    return make


MAKERS = dict(zip(SIDES, (_plain(1), _plain(None), _ddp, _tutti, _passes(True), _passes(False)), strict=True))

if __name__ == "__main__":
    main()
