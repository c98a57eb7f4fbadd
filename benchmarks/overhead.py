"""What it costs to measure where the time goes: stages, and a trace.

    python benchmarks/overhead.py [--rounds 7] [--model lenet] [--ranks 2]

Each side trains the same epochs with strategy sync on the same ranks, in turn, in one process tree; a side's
time is the median of its epochs. "off" looks at the clock twice an epoch; "stages" is what every run does;
"trace" is `--trace`, without the writing of the file, which comes after the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

BATCH = 64
SAMPLES = 3_000
SIDES = ("off", "stages", "trace")
WANTED = {"stages": 0.01, "trace": 0.02}


def main() -> None:
    from measure import describe_machine, table
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side (7)")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    payload = json.dumps({"rounds": args.rounds, "model": args.model}).encode()
    found = start("overhead:work", payload, place_ranks(args.ranks, 1))
    print(describe_machine())
    print(f"{args.model}, {args.ranks} ranks, epochs of {SAMPLES:,} samples, median of {args.rounds}\n")
    off = median(found["off"])
    rows = []
    for side in SIDES:
        seconds = median(found[side])
        # Against the side beside it in the same round: what else the machine does changes slowly.
        more = median(one / before - 1 for one, before in zip(found[side], found["off"], strict=True))
        spread = f"{min(found[side]):.3f}, {max(found[side]):.3f}"
        wanted = WANTED.get(side)
        verdict = "" if wanted is None else f"< {wanted:.0%}, {'reached' if more < wanted else 'MISSED'}"
        rows.append([side, f"{seconds:.3f}", spread, f"{seconds / off - 1:+.2%}", f"{more:+.2%}", verdict])
    heads = ["measured", "seconds", "shortest, longest", "of medians", "median of ratios", "wanted"]
    print(table(heads, rows))


def work(comm, payload):
    """On each rank: train every side in turn."""
    settings = json.loads(payload)
    part = data(comm)
    found = {side: [] for side in SIDES}
    for turn in range(settings["rounds"] + 1):
        for side in SIDES:
            seconds = train(comm, part, settings["model"], side)
            if turn:
                found[side].append(seconds)
    return found


def train(comm, part, model: str, side: str) -> float:
    """Return the seconds of an epoch."""
    import torch

    from tutti import models, strategies
    from tutti.comm.traced import TracedCommunicator
    from tutti.data import Batches
    from tutti.records.trace import Trace
    from tutti.training.evaluation import Objective
    from tutti.training.losses import LOSSES
    from tutti.training.run_parts import Hooks, Schedule, Workers
    from tutti.training.timers import StageTimer
    from tutti.training.trainer import Trainer

    torch.manual_seed(0)
    trace = Trace() if side == "trace" else None
    comm = comm if trace is None else TracedCommunicator(comm, trace)
    module = models.build(model, (1, 28, 28), 10, {})
    strategy = strategies.Sync()
    replica = strategies.place(module, comm, strategy.home)
    optimizer = torch.optim.Adam(module.parameters())
    worker = strategy.worker(replica, comm, optimizer, strategies.Clip())
    trainer = Trainer(
        Workers(comm, replica, worker, optimizer),
        Objective(LOSSES["cross_entropy"]),
        Schedule(Batches(part, BATCH * comm.size, comm.rank, comm.size), epochs=1),
        hooks=Hooks(trace=trace),
    )
    if side == "off":
        trainer._work.stages = trainer._gradient._stages = blind(StageTimer)
        worker.updating = Blind()
    comm.barrier()
    (record,) = trainer.fit()
    return record.seconds["total"]


class Blind:
    """A stopwatch that looks at no clock."""

    seconds, trace = 1.0, None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def blind(stages: type):
    """A StageTimer that looks at the clock where an epoch begins and ends, and not between two stages."""
    from time import perf_counter

    from tutti.training.timers import EXCHANGE

    class BlindStages(stages):
        def lap(self, stage: str, *others) -> float:
            # The loop wants the time after training and after validation; and progress is silent here.
            return 0.0 if stage in SEEN else super().lap(stage, *others)

    SEEN = ("data", "copy", "forward", "backward", "update", EXCHANGE)
    return BlindStages(perf_counter)


def data(comm):
    """Samples of MNIST's shape; what is learned does not matter here."""
    import torch

    from tutti.data import open_data

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return open_data((images, torch.arange(SAMPLES) % 10), comm, validation=0).train


if __name__ == "__main__":
    main()
