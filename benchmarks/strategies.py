"""Every strategy beside one process and DDP + Gloo: speed, and time to 90 % on Fashion-MNIST.

    python benchmarks/strategies.py [--epochs 4] [--seeds 3] [--strategies sync,easgd] [--batches 40]

First table: all sides in the same two processes, in turn, medians. 128 samples behind a round of updates,
64 of each rank. "ceiling" is the same ranks doing forward and backward and nothing else; "exchange" is the
time of a step beyond the ceiling's, everything that training in parallel adds. "in step" is the ceiling with
a barrier behind each step, so that every step lasts as long as its slower rank: what lies between the two is
the noise of the machine, which strategies that step together do not escape. Staleness is counted in updates
by others.

Second table: the same network, from the start, for so many epochs and seeds. Time is that of training alone,
without evaluations; when 90 % of the validation samples were right is interpolated between epochs. Updates
are those of each worker. Accuracy is that on the test part at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

ROUND = 128
GOAL = 0.9
MODEL, DATA = "cnn", "fashion-mnist"
OPTIONS = {"channels": [16, 32]}
NAME = "cnn with 16 and 32 channels"
"""Half as wide as the built-in model by default: it reaches the goal no later, in half the time."""
SOLO, DDP, IN_STEP, CEILING = "1 process, 1 thread", "DDP + Gloo", "in step", "ceiling"
SIDES = {"1 thread": SOLO, "DDP + Gloo": DDP, "in step": IN_STEP, "ceiling": CEILING}
"""The sides of step.py that are measured here too, with their names."""


@dataclass(frozen=True)
class Recipe:
    """How a strategy is trained here."""

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    lr: float = 0.003
    optimizer_options: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "adpsgd": Recipe(lr=0.002),
    "diloco": Recipe({"every": 20}, "adamw", 0.002),
    "downpour": Recipe(lr=0.002),
    "easgd": Recipe({"every": 4}),
    "easgd_sync": Recipe({"every": 4}),
    "gem": Recipe(optimizer="sgd", lr=0.05),
    "hogwild": Recipe(lr=0.001),
    "lazy": Recipe(lr=0.002),
}
"""By strategy; others are trained with Adam and their own defaults. Chosen on the validation part."""


def main() -> None:
    from tutti.strategies import STRATEGIES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = ",".join(name for name in STRATEGIES if name != "solo")
    parser.add_argument("--strategies", default=several, help="comma-separated, of: " + several)
    parser.add_argument("--epochs", type=int, default=4, help="of the second table; 0 leaves it out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40, help="steps of a turn in the first table")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side in the first table")
    parser.add_argument("--ranks", default="2")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from measure import describe_machine

    print(describe_machine())
    names = [name for name in args.strategies.split(",") if name]
    show_speeds(args, names)
    if args.epochs:
        show_learning(args, names)


def show_speeds(args: argparse.Namespace, names: Sequence[str]) -> None:
    from measure import table

    measured = _on_ranks("speeds", args, names)
    steps = {side: median(turns) for side, turns in measured["seconds"].items()}
    rate = {side: ROUND / seconds for side, seconds in steps.items()}
    rows = []
    for side in (SOLO, DDP, IN_STEP, CEILING, *names):
        stale = measured["staleness"].get(side, {})
        share, beyond = rate[side] / rate[CEILING], 1e3 * (steps[side] - steps[CEILING])
        cells = [f"{rate[side]:,.0f}", f"{share:.3f}", f"{beyond:.3f}"]
        rows.append([side, *cells, *(_number(stale.get(key)) for key in ("mean", "p99"))])
    print(f"\n{NAME}, fp32, {ROUND} samples a round, median of {args.rounds}\n")
    print(table(["side", "samples/s", "/ceiling", "exchange ms", "staleness mean", "p99"], rows))


def show_learning(args: argparse.Namespace, names: Sequence[str]) -> None:
    from measure import table

    rows = []
    for side in (SOLO, DDP, *names):
        runs = [_learn(side, args, seed) for seed in range(args.seeds)]
        reached = [run["reached"] for run in runs if run["reached"]]
        seconds = f"{median(s for s, _ in reached):.1f}" if len(reached) == len(runs) else "-"
        updates = f"{median(u for _, u in reached):,.0f}" if len(reached) == len(runs) else "-"
        each = ", ".join(f"{100 * run['accuracy']:.2f}" for run in runs)
        average = f"{100 * mean(run['accuracy'] for run in runs):.2f}"
        rows.append([side, seconds, updates, average, each])
        print(f"measured {side}: {each}", file=sys.stderr)
    print(f"\n{NAME} on {DATA}, fp32, {args.epochs} epochs, {args.seeds} seeds\n")
    print(table(["side", f"s to {GOAL:.0%}", "updates to it", "accuracy %", "each seed"], rows))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _on_ranks(what: str, args: argparse.Namespace, names: Sequence[str], **rest: object) -> Any:
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"names": list(names), "port": port, **rest}
    given |= {"batches": args.batches, "rounds": args.rounds, "epochs": args.epochs}
    return start(f"strategies:{what}", json.dumps(given).encode(), place_ranks(args.ranks, None))


def _learn(side: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train once; the accuracy in the end, and seconds and updates until the goal was reached."""
    import tutti
    from tutti.reports.runs import crossing

    if side == DDP:
        found = _on_ranks("learn_by_ddp", args, [], seed=seed)
        return {"accuracy": found["accuracy"], "reached": crossing(found["points"], GOAL)}
    alone = side == SOLO
    recipe = Recipe() if alone else RECIPES.get(side, Recipe())
    strategy = "solo" if alone else side
    result = tutti.train(
        MODEL,
        DATA,
        model_options=OPTIONS,
        strategy=strategy,
        strategy_options=recipe.options,
        workers=1 if alone else args.ranks,
        threads=1,
        batch_size=ROUND if alone or _together(side) else ROUND // int(args.ranks),
        optimizer=recipe.optimizer,
        optimizer_options=recipe.optimizer_options,
        lr=recipe.lr,
        epochs=args.epochs,
        seed=seed,
        quiet=True,
    )
    points, seconds = [], 0.0
    for record in result.history:
        seconds += record.seconds["total"] - record.seconds["validation"]
        points.append((seconds, record.step, record.validation.metrics["accuracy"]))
    return {"accuracy": result.summary.test.metrics["accuracy"], "reached": crossing(points, GOAL)}


def _together(name: str) -> bool:
    from tutti.strategies import named
    from tutti.strategies.base import Pace

    return named(name).pace is Pace.TOGETHER


# What follows runs on the ranks.


def speeds(comm, payload: bytes) -> dict[str, Any]:
    """Time every side in turn; seconds of a round, and staleness."""
    import torch.distributed as dist

    from step import MAKERS, time_steps

    given = json.loads(payload)
    _join_gloo(comm, given["port"])
    sides = {SIDES[name]: make(comm, "small cnn") for name, make in MAKERS.items() if name in SIDES}
    workers = {name: _worker(comm, name) for name in given["names"]}
    sides |= {name: train for name, (train, _) in workers.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(given["rounds"]):
        order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        for side in order:
            seconds[side].append(time_steps(comm, sides[side], given["batches"]))
    staleness = {name: _staleness(comm, worker) for name, (_, worker) in workers.items()}
    for _, worker in workers.values():
        worker.finish()
    dist.destroy_process_group()
    return {"seconds": seconds, "staleness": staleness}


def _join_gloo(comm, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
    )


def _staleness(comm, worker: Any) -> dict[str, float]:
    found = list(worker.traffic.take().staleness.elements())
    stale = sorted(n for part in comm.all_gather_objects(found) for n in part)
    return {"mean": mean(stale), "p99": stale[int(0.99 * (len(stale) - 1))]} if stale else {}


def _worker(comm, name: str) -> tuple[Callable[[int], None], Any]:
    """A function that makes so many steps of a strategy, and its worker."""
    import torch

    from step import make_model
    from tutti import optim, strategies
    from tutti.strategies.base import Pace

    recipe = RECIPES.get(name, Recipe())
    strategy = strategies.named(name)(**recipe.options)
    module, inputs, targets = make_model("small cnn", ROUND // comm.size)
    replica = strategies.place(module, comm, strategy.home)
    # A learning rate of next to nothing: the same batch again and again must not lead anywhere.
    optimizer = optim.build(recipe.optimizer, [*module.parameters()], 1e-9, recipe.optimizer_options)
    worker = strategy.worker(replica, comm, optimizer, strategies.Clip())
    loss, share = torch.nn.CrossEntropyLoss(), 1 / comm.size if strategy.pace is Pace.TOGETHER else 1.0

    def train(count: int) -> None:
        for _ in range(count):
            (loss(module(inputs), targets) * share).backward()
            worker.step()
        if strategy.pace is Pace.FREE:  # Ranks meet at a barrier now: nobody may still wait for an answer.
            worker.settle()
            worker.resume()

    return train, worker


def learn_by_ddp(comm, payload: bytes) -> dict[str, Any]:
    """Train by DDP on the batches that `sync` would have; accuracy after each epoch, and in the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tutti import models
    from tutti.data import Batches, open_data
    from tutti.training.losses import LOSSES
    from tutti.training.precision import Arithmetic

    given = json.loads(payload)
    _join_gloo(comm, given["port"])
    data, arithmetic = open_data(DATA, comm, seed=given["seed"]), Arithmetic("fp32")
    torch.manual_seed(given["seed"])
    module = arithmetic.prepare(models.build(MODEL, data.shape, data.classes, OPTIONS))
    wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=Recipe().lr, fused=True)
    batches = Batches(data.train, ROUND, comm.rank, comm.size, seed=given["seed"])
    loss, points, seconds = LOSSES["cross_entropy"], [], 0.0
    for epoch in range(given["epochs"]):
        comm.barrier()
        began = perf_counter()
        for _, (batch,) in batches.epoch(epoch):
            # DDP averages the ranks' gradients, so that each counts for its share of the samples.
            outputs = arithmetic.forward(wrapped, batch.inputs)
            (loss(outputs, batch.targets) * (batch.share * comm.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        comm.barrier()
        seconds += perf_counter() - began
        points.append((seconds, (epoch + 1) * batches.updates, _accuracy(module, data.validation, comm)))
    accuracy = _accuracy(module, data.test, comm)
    dist.destroy_process_group()
    return {"accuracy": accuracy, "points": points}


def _accuracy(module, part, comm) -> float:
    from tutti.training.evaluation import Objective, evaluate
    from tutti.training.losses import LOSSES
    from tutti.training.metrics import METRICS

    found = evaluate(module, part, comm, Objective(LOSSES["cross_entropy"], (METRICS["accuracy"],))).total(
        comm
    )
    return found.metrics["accuracy"]


if __name__ == "__main__":
    main()
