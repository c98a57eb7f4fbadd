"""Samples per second that are delivered to a training loop, tutti against torch's DataLoader.

    python benchmarks/data.py [--rounds 5] [--samples 60000]

All sides read the same 8-bit images in memory (those of MNIST where TUTTI_DATA has them, else made up),
shuffled, in batches of 128, as normalised float32. The DataLoader's data set is what its users write: index,
to float, normalise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from measure import describe_machine, interleave, medians, table
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, Part, open_data

BATCH_SIZE = 128
WANTED = 10


class Images(Dataset[tuple[Tensor, Tensor]]):
    """What a user writes for images in memory."""

    def __init__(self, part: Part) -> None:
        self.inputs, self.targets = part.inputs, part.targets
        self.mean, self.std = part.scale.mean[0], part.scale.std[0]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.inputs[index].float() / 255 - self.mean) / self.std, self.targets[index]


def load(samples: int) -> DataSet:
    given = os.environ.get("TUTTI_DATA")
    if given and Path(given, "mnist").is_dir():
        data: object = "mnist"
    else:
        generator = torch.Generator().manual_seed(0)
        data = (
            torch.randint(0, 256, (samples, 28, 28), dtype=torch.uint8, generator=generator),
            torch.randint(0, 10, (samples,), generator=generator),
        )
    [opened] = VirtualWorld(ranks=1).run(lambda comm: open_data(data, comm, validation=0))
    return opened


def delivered(batches: Callable[[], Iterable[tuple[int, object]]]) -> float:
    """Samples per second over one epoch, its start included."""
    start = time.perf_counter()
    samples = sum(count for count, _ in batches())
    return samples / (time.perf_counter() - start)


def by_tutti(part: Part) -> Iterable[tuple[int, object]]:
    return ((len(batch.targets), batch) for _, (batch,) in Batches(part, BATCH_SIZE).epoch(0))


def by_loader(part: Part, workers: int) -> Iterable[tuple[int, object]]:
    loader = DataLoader(Images(part), BATCH_SIZE, shuffle=True, num_workers=workers)
    return ((len(targets), inputs) for inputs, targets in loader)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5, help="measurements of each side (5)")
    arguments.add_argument("--samples", type=int, default=60_000, help="samples of an epoch (60000)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    machine, whole = describe_machine(), load(options.samples)
    part = Part(
        whole.train.inputs[: options.samples], whole.train.targets[: options.samples], whole.train.scale
    )
    sides = {
        "tutti": partial(delivered, partial(by_tutti, part)),
        "DataLoader, 0 workers": partial(delivered, partial(by_loader, part, 0)),
        "DataLoader, 2 workers": partial(delivered, partial(by_loader, part, 2)),
    }
    found = medians(interleave(sides, options.rounds))
    rows = []
    for name, rate in found.items():
        ratio = found["tutti"] / rate
        wanted = "" if name == "tutti" else f"{WANTED}x, {'reached' if ratio >= WANTED else 'MISSED'}"
        rows.append([name, f"{rate:,.0f}", f"{ratio:.1f}x", wanted])
    print(f"{machine}\n")
    size = f"{len(part):,} samples, batch {BATCH_SIZE}"
    print(f"Samples delivered: {whole.name}, {size}, 1 thread, median of {options.rounds}\n")
    print(table(["side", "samples/s", "tutti / side", "wanted"], rows))


if __name__ == "__main__":
    main()
