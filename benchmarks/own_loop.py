"""Speed of a loop of one's own: plain torch, DDP + Gloo, and tutti's lines, beside what ranks do at best.

    python benchmarks/own_loop.py [--models mlp,lenet] [--rounds 7]

The loop is that of docs/own-loop.md, over batches that lie in memory. The sides are those of step.py, all in
the same two processes, in turn, `rounds` times, medians:

    1 thread    plain torch, one process with one thread
    all threads plain torch, one process with all threads
    DDP + Gloo  torch's DistributedDataParallel, one rank per core
    tutti       `distribute` and `shard`, one rank per core
    ceiling     one rank per core, forward and backward and nothing else

Adam (torch's fused one on every side), global batch 128, fp32, contiguous.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median

from step import BATCH, MAKERS, make_model, steps_of_a_turn, time_steps, timed

SIDES = ("1 thread", "all threads", "DDP + Gloo", "tutti", "ceiling")


def main() -> None:
    from measure import table

    times = timed("own_loop:work", __doc__, ("mlp", "lenet"))
    rows = []
    for name, sides in times.items():
        rate = {side: BATCH / median(values) for side, values in sides.items()}
        ratios = [f"{rate['tutti'] / rate[side]:.3f}" for side in ("1 thread", "DDP + Gloo", "ceiling")]
        rows.append([name, *(f"{rate[side]:,.0f}" for side in SIDES), *ratios])
    print(table(["model", *SIDES, "tutti/1 thread", "tutti/DDP", "tutti/ceiling"], rows))


def work(comm, payload):
    """On each rank: time every side of every model, in turn."""
    import torch.distributed as dist

    from tutti.launch.world import adopt

    settings = json.loads(payload)
    address = f"tcp://127.0.0.1:{settings['port']}"
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    adopt(comm)
    makers = {**MAKERS, "tutti": _own_loop}
    times: dict[str, dict[str, list[float]]] = {}
    for name in settings["models"]:
        sides = {side: makers[side](comm, name) for side in SIDES}
        count = steps_of_a_turn(comm, sides["ceiling"])
        times[name] = {side: [] for side in SIDES}
        for turn in range(settings["rounds"]):
            at = turn % len(SIDES)
            for side in SIDES[at:] + SIDES[:at]:
                times[name][side].append(time_steps(comm, sides[side], count))
    dist.destroy_process_group()
    return times


def _own_loop(comm, name: str) -> Callable[[int], None]:
    import torch

    import tutti

    module, inputs, targets = make_model(name, BATCH)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    module, optimizer = tutti.distribute(module, optimizer)
    loss = torch.nn.CrossEntropyLoss()

    def train(count: int) -> None:
        for mine, labels in tutti.shard([(inputs, targets)] * count):
            loss(module(mine), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


if __name__ == "__main__":
    main()
