"""One worker of two is three times slower: what the two ways to balance the work bring.

    python benchmarks/balance.py [--rounds 3] [--strategies downpour,easgd]

Rank 1 computes further forward passes whose result nobody uses, so that a sample costs it three times as
much. Each side trains the same epochs on the same two ranks, in turn; a side's time is the median of its
runs, the first updates with their still equal split included. `--balance speed` is measured with strategy
sync, where both workers make each update together, `--balance queue` with strategies whose workers wait for
nobody.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

BATCH = 64
EPOCHS = 2
SAMPLES = 6_000
EXTRA_PASSES = 6
"""Forward passes: a backward pass takes about as long as two, so that three times in all are nine."""
WANTED = 1.4


def main() -> None:
    from measure import describe_machine, table
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side (3)")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--strategies", default="downpour,easgd", help="for --balance queue")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    sides = [["sync", "none"], ["sync", "speed"]]
    for name in args.strategies.split(","):
        sides += [[name, "none"], [name, "queue"]]
    payload = json.dumps({"sides": sides, "rounds": args.rounds, "model": args.model}).encode()
    runs = start("balance:work", payload, place_ranks(2, 1))
    print(describe_machine())
    print(f"{args.model}, {EPOCHS} epochs of {SAMPLES:,} samples, rank 1 slowed, median of {args.rounds}\n")
    rows, equal_s = [], 1.0
    for (strategy, balance), measured in zip(sides, runs, strict=True):
        seconds = median(run["seconds"] for run in measured)
        equal_s = seconds if balance == "none" else equal_s
        ratio = equal_s / seconds
        wanted = "" if balance == "none" else f"{WANTED}x, {'reached' if ratio >= WANTED else 'MISSED'}"
        slowness = median(run["slowness"] for run in measured)
        share = median(run["share"] for run in measured)
        rows.append([f"{strategy}, {balance}", f"{seconds:.2f}", f"{ratio:.2f}x", wanted])
        rows[-1] += [f"{slowness:.1f}x", f"{share:.0%}"]
    heads = ["strategy, balance", "seconds", "equal / this", "wanted", "rank 1 slower", "its samples"]
    print(table(heads, rows))


def work(comm, payload):
    """On each rank: train every side in turn."""
    settings = json.loads(payload)
    part = data(comm)
    runs = [[] for _ in settings["sides"]]
    for turn in range(settings["rounds"] + 1):
        for measured, (strategy, balance) in zip(runs, settings["sides"], strict=True):
            found = train(comm, part, settings["model"], strategy, balance)
            if turn:
                measured.append(found)
    return runs


def train(comm, part, model: str, strategy: str, balance: str) -> dict[str, float]:
    """One run: its seconds, how much slower rank 1 was, and its share of the samples."""
    import torch

    from tutti import models, strategies
    from tutti.run.build import deal
    from tutti.run.config import TrainConfig
    from tutti.strategies.base import Pace
    from tutti.training.evaluation import Objective
    from tutti.training.losses import LOSSES
    from tutti.training.run_parts import Schedule, Workers
    from tutti.training.trainer import Trainer

    torch.manual_seed(0)
    chosen = strategies.named(strategy)()
    module = slowed(models.build(model, (1, 28, 28), 10, {}), EXTRA_PASSES if comm.rank == 1 else 0)
    replica = strategies.place(module, comm, chosen.home)
    optimizer = torch.optim.Adam(module.parameters())
    batch = BATCH * comm.size if chosen.pace is Pace.TOGETHER else BATCH
    batches, balancing = deal(TrainConfig(batch_size=batch, balance=balance), chosen, part, comm)
    history = Trainer(
        Workers(comm, replica, chosen.worker(replica, comm, optimizer, strategies.Clip()), optimizer),
        Objective(LOSSES["cross_entropy"]),
        Schedule(batches, EPOCHS, balance=balancing),
    ).fit()
    samples, compute_s = (
        [sum(getattr(record.ranks[rank], name) for record in history) for rank in range(2)]
        for name in ("samples", "compute_s")
    )
    return {
        "seconds": sum(record.seconds["total"] for record in history),
        "slowness": compute_s[1] / samples[1] / (compute_s[0] / samples[0]),
        "share": samples[1] / sum(samples),
    }


def slowed(module, passes: int):
    """`module`, with so many further forward passes before each in training."""
    import torch

    def compute_in_vain(module, inputs) -> None:
        if module.training and passes:
            with torch.no_grad():
                for _ in range(passes):
                    module.forward(*inputs)

    module.register_forward_pre_hook(compute_in_vain)
    return module


def data(comm):
    """Samples of MNIST's shape; what is learned does not matter here."""
    import torch

    from tutti.data import open_data

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return open_data((images, torch.arange(SAMPLES) % 10), comm, validation=0).train


if __name__ == "__main__":
    main()
