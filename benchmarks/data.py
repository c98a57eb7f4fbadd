"""Samples per second that are delivered to a training loop, tutti against torch's DataLoader.

    python benchmarks/data.py [--rounds 5] [--samples 60000] [--table ROWS]

All sides read the same 8-bit images in memory (those of MNIST where TUTTI_DATA has them, else made up),
shuffled, in batches of 128, as normalised float32. The DataLoader's data set is what its users write: index,
to float, normalise. With --table a CSV file is read and prepared, against pyarrow.csv with the same options.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import torch
from pyarrow import csv
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from measure import describe_machine, interleave, medians, table
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, Part, open_data
from tutti.data.formats.csv import NULLS

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


def write_table(path: Path, rows: int) -> None:
    random, texts = np.random.default_rng(0), (2, 3, 5, 10, 20, 100, 1000, 20_000)
    columns = {f"n{at}": np.round(random.normal(size=rows) * 10 ** (at % 4), at % 5) for at in range(22)}
    words = pyarrow.array([f"value {number:05d}" for number in range(texts[-1])])
    columns |= {f"t{count}": words.take(pyarrow.array(random.integers(0, count, rows))) for count in texts}
    csv.write_csv(pyarrow.table(columns | {"target": random.integers(0, 2, rows)}), path)


def read_table(path: Path, ours: bool) -> tuple[float, ...]:
    """Seconds by the clock and of the processor; KiB that this took at most, and of what is kept."""

    def memory(name: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # The peak is that from here on.
    start, used, before = time.perf_counter(), time.process_time(), memory("VmRSS")
    if ours:
        [dataset] = VirtualWorld(ranks=1).run(lambda comm: open_data(str(path), comm))
        kept = dataset.train.stored_inputs.nbytes
    else:
        options = csv.ConvertOptions(null_values=NULLS, strings_can_be_null=True)
        kept = csv.read_csv(path, None, csv.ParseOptions(newlines_in_values=True), options).nbytes
    return time.perf_counter() - start, time.process_time() - used, memory("VmHWM") - before, kept / 1024


def compare_tables(path: Path, rows: int, rounds: int) -> None:
    write_table(path, rows)
    found: dict[str, list[tuple[float, ...]]] = {"pyarrow.csv": [], "tutti": []}
    for name in [*found] * rounds:
        with get_context("spawn").Pool(1) as pool:
            found[name].append(pool.apply(read_table, (path, name == "tutti")))
    middle = {name: np.median(some, axis=0) for name, some in found.items()}
    lines = [[n, *m[:2].round(2), *(m[2:] / middle["tutti"][3]).round(1)] for n, m in middle.items()]
    print(f"{describe_machine()}\n\n{rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB, median of {rounds}\n")
    print(table(["side", "seconds", "CPU seconds", "peak / matrix", "kept / matrix"], lines))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5, help="measurements of each side (5)")
    arguments.add_argument("--samples", type=int, default=60_000, help="samples of an epoch (60000)")
    arguments.add_argument("--table", type=int, metavar="ROWS", help="read a table of so many rows instead")
    options = arguments.parse_args()
    if options.table:
        with TemporaryDirectory() as folder:
            compare_tables(Path(folder, "table.csv"), options.table, options.rounds)
        return
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
