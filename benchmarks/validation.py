"""What validation costs training: none, in pauses, and beside training.

    python benchmarks/validation.py [--rounds 5] [--strategy downpour]

Two ranks train on all cores; after each epoch as many samples are validated as make a third of an epoch's
work (a forward pass is about a third of a training step, so these are about as many as are trained on; the
table says how much it was). "training" is the time until the last update, "loss" what validation added to it,
"whole run" the time until the last result: with all cores at work, evaluation beside training is done in the
gaps that training leaves, and for the rest at its end. Sides are measured in turn; medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

BATCH = 64
EPOCHS = 4
SAMPLES = 6_000
WANTED = 0.03
SIDES = ("none", "pause", "background")


def main() -> None:
    from measure import describe_machine, table
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side (5)")
    parser.add_argument("--strategy", default="downpour", help="one whose workers wait for nobody")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of an epoch ({SAMPLES})")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    payload = json.dumps(vars(args)).encode()
    runs = start("validation:work", payload, place_ranks(2, 1))
    found = {
        side: {name: median(run[name] for run in runs[side]) for name in ("training", "whole")}
        for side in SIDES
    }
    pauses = median(run["validation"] for run in runs["pause"])
    work = pauses / found["pause"]["whole"] / (1 - pauses / found["pause"]["whole"])
    print(describe_machine())
    print(
        f"{args.model}, {args.strategy}, 2 ranks, {EPOCHS} epochs of {args.samples:,} samples; "
        f"a validation is {work:.0%} of an epoch's work; median of {args.rounds}\n"
    )
    rows = []
    for side, times in found.items():
        loss = times["training"] / found["none"]["training"] - 1
        wanted = ""
        if side == "background":
            wanted = f"{WANTED:.0%}, {'reached' if loss <= WANTED else 'MISSED'}"
        rows.append([side, f"{times['training']:.2f}", f"{loss:.1%}", wanted, f"{times['whole']:.2f}"])
    print(table(["validation", "training s", "loss", "wanted", "whole run s"], rows))


def work(comm, payload):
    """On each rank: train every side in turn."""
    settings = json.loads(payload)
    parts = data(comm, settings["samples"])
    runs = {side: [] for side in SIDES}
    for turn in range(settings["rounds"] + 1):
        first = turn % len(SIDES)
        for side in SIDES[first:] + SIDES[:first]:
            found = train(comm, parts, settings, side)
            if turn:
                runs[side].append(found)
    return runs


def train(comm, parts, settings, side: str) -> dict[str, float]:
    """One run: seconds until the last update and until the last result, and those of validation."""
    import torch

    from tutti import models, strategies
    from tutti.data import Batches
    from tutti.training.evaluation import Objective
    from tutti.training.losses import LOSSES
    from tutti.training.run_parts import Schedule, Workers
    from tutti.training.trainer import Trainer
    from tutti.training.validation import ValidationPlan

    torch.manual_seed(0)
    chosen = strategies.named(settings["strategy"])()
    module = models.build(settings["model"], (1, 28, 28), 10, {})
    replica = strategies.place(module, comm, chosen.home)
    optimizer = torch.optim.Adam(module.parameters())
    training, validation = parts
    history = Trainer(
        Workers(comm, replica, chosen.worker(replica, comm, optimizer, strategies.Clip()), optimizer),
        Objective(LOSSES["cross_entropy"]),
        Schedule(Batches(training, BATCH, comm.rank, comm.size, own=True), EPOCHS),
        None if side == "none" else ValidationPlan(validation, side),
    ).fit()
    whole = sum(record.seconds["total"] for record in history)
    return {
        "training": whole - history[-1].seconds["validation"],
        "whole": whole,
        "validation": sum(record.seconds["validation"] for record in history),
    }


def data(comm, samples: int):
    """Training and validation samples of MNIST's shape; what is learned does not matter here."""
    import torch

    from tutti.data import open_data

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    opened = open_data((images, torch.arange(2 * samples) % 10), comm, validation=0.5)
    return opened.train, opened.validation


if __name__ == "__main__":
    main()
