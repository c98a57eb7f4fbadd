"""What a checkpoint costs training, beside torch.save and torch's distributed checkpoint.

    python benchmarks/checkpoint.py [--rounds 10] [--ranks 2] [--seconds 30]

The state is that of a run with strategy sync: 11 M parameters and Adam, 135 MB, of which each rank has a
part. The pause is the time until all ranks can go on. All sides save the same values, in turn:

    tutti            copied into memory; a process at idle priority writes it afterwards
    torch.save       rank 0 writes all of it, the others wait
    each its part    each rank writes its part by torch.save, and waits for the others
    flushed          the same as torch.save, and on the disk when training goes on
    async_save       torch.distributed.checkpoint.async_save of each rank's part, over Gloo

Of these only tutti's and the flushed one survive a power cut. The second table is of training itself: runs
with a checkpoint every 10 s and runs without one, in turn. Runs without one differ by the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

BATCH = 128
HIDDEN = [2304, 2176, 2048]
EVERY = "10s"
SHORTER = 25
SHARE = 0.03
SIDES = ("tutti", "torch.save", "each its part", "flushed", "async_save")


def main() -> None:
    from measure import describe_machine, table
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="checkpoints of each side (10)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run of the second table (30)")
    parser.add_argument("--runs", type=int, default=3, help="of the second table, on each side (3)")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {**vars(args), "folder": str(folder), "port": port}
    try:
        pauses, runs = start("checkpoint:work", json.dumps(settings).encode(), place_ranks(args.ranks, 1))
    finally:
        shutil.rmtree(folder)
    print(describe_machine())
    print(f"{args.ranks} ranks, {pauses.pop('MB'):.0f} MB; the median and the range of {args.rounds}\n")
    ours, rows = median(pauses["tutti"]), []
    for side, seconds in pauses.items():
        times = [f"{1e3 * each:.1f}" for each in (median(seconds), min(seconds), max(seconds))]
        rows.append([side, *times, f"{median(seconds) / ours:.1f}"])
    print(table(["checkpoint", "pause ms", "least", "most", "of tutti's"], rows))
    ratio = median(pauses["torch.save"]) / ours
    verdict = "reached" if ratio >= SHORTER else "MISSED"
    print(f"\nwanted: torch.save's at least {SHORTER} times tutti's: {verdict}\n")
    if runs:
        print_runs(runs, table)


def print_runs(runs, table) -> None:
    """Print what checkpoints cost whole runs."""
    usual, rows, shares = median(run["seconds"] for run in runs["none"]), [], {}
    for side, of in runs.items():
        seconds = [run["seconds"] for run in of]
        shares[side] = f"{median(run['pauses'] / run['seconds'] for run in of):.2%}"
        times = [f"{each:.2f}" for each in (median(seconds), min(seconds), max(seconds))]
        written = sum(run["written"] for run in of) / len(of)
        longer = f"{median(seconds) / usual - 1:+.2%}"
        rows.append([side, f"{written:.1f}", *times, longer, shares[side]])
    print(table(["checkpoints", "of them", "run s", "least", "most", "longer by", "pauses"], rows))
    print(f"\nwanted: both under {SHARE:.0%}")


def work(comm, payload):
    """On each rank: the pauses of all sides, then whole runs."""
    settings = json.loads(payload)
    part = data(comm)
    pauses = measure_pauses(comm, part, settings)
    runs = {"none": [], EVERY: []}
    if settings["seconds"]:
        steps = max(3, int(settings["seconds"] / seconds_of_a_step(comm, part)))
        for turn in range(settings["runs"]):
            for side in sorted(runs, reverse=bool(turn % 2)):
                runs[side].append(train(comm, part, settings, steps, side))
    return pauses, runs if settings["seconds"] else None


def measure_pauses(comm, part, settings):
    """Save the state of a run in all ways, in turn."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from tutti.checkpoint.saver import Saver

    folder = Path(settings["folder"])
    store = f"tcp://127.0.0.1:{settings['port']}"
    dist.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
    pauses = {side: [] for side in SIDES}
    mine: dict[str, torch.Tensor] = {}
    saver = Saver(comm, folder / "tutti", keep=1)

    def ours(step: int, state) -> None:
        saver.save(step, state)

    def all_of_it(step: int, state) -> None:
        if comm.rank == 0:
            torch.save(whole, folder / "whole.pt")

    def its_part(step: int, state) -> None:
        torch.save(mine, folder / f"part-{comm.rank}.pt")

    def flushed(step: int, state) -> None:
        if comm.rank == 0:
            with open(folder / "flushed.pt", "wb") as file:
                torch.save(whole, file)
                os.fsync(file.fileno())

    def asynchronous(step: int, state):
        return dcp.async_save(mine, checkpoint_id=str(folder / "dcp"))

    def save(step: int, state, stop: bool) -> None:
        for name, piece in enumerate(state.joint.pieces):
            mine[f"{name} {piece.name}[{piece.start}:{piece.stop}]"] = piece.values
        for side, take in zip(SIDES, (ours, all_of_it, its_part, flushed, asynchronous), strict=True):
            comm.barrier()
            begun = perf_counter()
            pending = take(step, state)
            comm.barrier()
            seconds = max(comm.all_gather_objects(perf_counter() - begun))
            if step > 2:
                pauses[side].append(seconds)
            if pending is not None:
                pending.result()
            saver.wait()

    trainer = make_trainer(comm, part, settings["rounds"] + 2, save, "1 step")
    parameters = list(trainer.replica.module.parameters())
    whole = {f"{kept} {i}": p.detach().clone() for kept in range(3) for i, p in enumerate(parameters)}
    trainer.fit()
    saver.finish()
    dist.destroy_process_group()
    return {"MB": sum(t.nbytes for t in whole.values()) / 1e6, **pauses}


def train(comm, part, settings, steps: int, side: str):
    """One run; returns its seconds, and those of its pauses."""
    from tutti.checkpoint.saver import Saver

    folder = Path(settings["folder"]) / "runs"
    warnings: list[str] = []
    with Saver(comm, folder, keep=2, warn=warnings.append) as saver:
        taken = []

        def save(step: int, state, stop: bool) -> None:
            taken.append(saver.save(step, state))

        trainer = make_trainer(comm, part, steps, save, EVERY if side == EVERY else None)
        comm.barrier()
        begun = perf_counter()
        history = trainer.fit()
        seconds = perf_counter() - begun
    stages = [record.ranks[0].stages.get("checkpoint", 0.0) for record in history]
    return {"seconds": seconds, "pauses": sum(stages), "written": sum(taken)}


def seconds_of_a_step(comm, part) -> float:
    trainer = make_trainer(comm, part, 30, None, None)
    begun = perf_counter()
    trainer.fit()
    return comm.broadcast_object((perf_counter() - begun) / 30)


def make_trainer(comm, part, steps: int, save, every: str | None):
    import torch

    from tutti import models, strategies
    from tutti.data import Batches
    from tutti.training.agenda import Agenda, Wishes
    from tutti.training.evaluation import Objective
    from tutti.training.intervals import Every
    from tutti.training.losses import LOSSES
    from tutti.training.run_parts import Hooks, Schedule, Workers
    from tutti.training.trainer import Trainer

    torch.manual_seed(0)
    chosen = strategies.Sync()
    module = models.build("mlp", (1, 28, 28), 10, {"hidden": HIDDEN})
    replica = strategies.place(module, comm, chosen.home)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    return Trainer(
        Workers(comm, replica, chosen.worker(replica, comm, optimizer, strategies.Clip()), optimizer),
        Objective(LOSSES["cross_entropy"]),
        Schedule(Batches(part, BATCH, comm.rank, comm.size), steps=steps),
        hooks=Hooks(save=save),
        agenda=None if every is None else Agenda(comm, Wishes(every=Every.parse(every, "--checkpoint"))),
    )


def data(comm):
    """Samples of MNIST's shape; what is learned does not matter here."""
    import torch

    from tutti.data import open_data

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1 << 15, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return open_data((images, torch.arange(len(images)) % 10), comm, validation=0.0).train


if __name__ == "__main__":
    main()
