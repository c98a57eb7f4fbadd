"""The pause of training for a checkpoint, beside torch.save and torch's distributed checkpoint.

    python benchmarks/checkpoint.py [--rounds 10] [--ranks 2]

The state is that of a run with strategy sync: 11 M parameters and Adam, 135 MB, of which each rank has a
part. All sides save the same values, in turn, each after a step of training:

    tutti            copied into memory; a process at the lowest priority writes it afterwards
    torch.save       rank 0 writes all of it, the others wait
    flushed          the same, and file and folder are on the disk (fsync) when training goes on
    async_save       torch.distributed.checkpoint.async_save of each rank's part, over Gloo

Of these only tutti's and the flushed one survive a power cut. The pause is the time until all ranks can go
on; tutti's begins when the ranks meet and gather the state.
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
SHORTER = 25
SIDES = ("tutti", "torch.save", "flushed", "async_save")


def main() -> None:
    from measure import describe_machine, table
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="checkpoints of each side (10)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {**vars(args), "folder": str(folder), "port": port}
    try:
        turns = start("checkpoint:work", json.dumps(settings).encode(), place_ranks(args.ranks, 1))
    finally:
        shutil.rmtree(folder)
    print(describe_machine())
    print(f"{args.ranks} ranks, {turns['MB']:.0f} MB; the median and the range of {args.rounds}\n")
    pauses = {side: each[1 if side == "tutti" else 2 :] for side, each in turns["pauses"].items()}
    ours, rows = median(pauses["tutti"]), []
    for side, each in pauses.items():
        times = [f"{1e3 * one:.1f}" for one in (median(each), min(each), max(each))]
        rows.append([side, *times, f"{median(each) / ours:.1f}"])
    print(table(["checkpoint", "pause ms", "least", "most", "of tutti's"], rows))
    verdict = "reached" if median(pauses["torch.save"]) / ours >= SHORTER else "MISSED"
    print(f"\nwanted: the pause of torch.save at least {SHORTER} times tutti's: {verdict}")


def work(comm, payload):
    """On each rank: save the state of a run in all ways, in turn; returns the pauses of the slowest rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from tutti.checkpoint.saver import Saver
    from tutti.training.agenda import Agenda, Wishes
    from tutti.training.intervals import Every

    settings, part = json.loads(payload), data(comm)
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

    def flushed(step: int, state) -> None:
        if comm.rank == 0:
            with open(folder / "flushed.pt", "wb") as file:
                torch.save(whole, file)
                os.fsync(file.fileno())
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)
            os.close(directory)

    def asynchronous(step: int, state):
        return dcp.async_save(mine, checkpoint_id=str(folder / "dcp"))

    takes = (ours, all_of_it, flushed, asynchronous)
    turns = [*zip(SIDES, takes, strict=True)] * (settings["rounds"] + 2)

    class Turns(Agenda):
        """Meets after every step. What was saved before the step has been written when a turn begins."""

        began, pending = 0.0, None

        def calls(self, step: int) -> bool:
            called = super().calls(step)
            if self.pending is not None:
                self.pending.result()
                self.pending = None
            saver.wait()
            self.begin()
            return called

        def begin(self) -> None:
            comm.barrier()
            self.began = perf_counter()

    agenda = Turns(comm, Wishes(every=Every.parse("1 step", "--checkpoint")))

    def save(step: int, state, stop: bool) -> None:
        if not turns:
            return
        side, take = turns.pop(0)
        if take is not ours:
            for name, piece in enumerate(state.joint.pieces):
                mine[f"{name} {piece.name}[{piece.start}:{piece.stop}]"] = piece.values
            agenda.begin()
        agenda.pending = take(step, state)
        comm.barrier()
        pauses[side].append(perf_counter() - agenda.began)

    trainer = make_trainer(comm, part, len(turns) + 2, save, agenda)
    parameters = list(trainer.replica.module.parameters())
    whole = {f"{kept} {i}": p.detach().clone() for kept in range(3) for i, p in enumerate(parameters)}
    trainer.fit()
    saver.end()
    dist.destroy_process_group()
    ranks = comm.all_gather_objects(pauses)
    by_side = {side: zip(*(rank[side] for rank in ranks), strict=True) for side in SIDES}
    slowest = {side: [max(each) for each in turns] for side, turns in by_side.items()}
    return {"MB": sum(t.nbytes for t in whole.values()) / 1e6, "pauses": slowest}


def make_trainer(comm, part, steps: int, save, agenda):
    import torch

    from tutti import models, strategies
    from tutti.data import Batches
    from tutti.training.evaluation import Objective
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
        agenda=agenda,
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
