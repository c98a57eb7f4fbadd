"""Compare `--lr auto` with five rates, by the accuracy at the end, on six tasks and with four optimizers.

    TUTTI_DATA=... python benchmarks/lr_auto.py [--seeds 2] [--tasks digits,cancer]

The pictures are 6,000 of the training part and 4,000 of the test part; those of CIFAR-10 are halved in size.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tutti
from measure import describe_machine, table
from PIL import Image
from sklearn.datasets import load_breast_cancer

PARTS = {"train": 6000, "t10k": 4000}
ADAM = (0.0003, 0.001, 0.003, 0.01, 0.03)
SGD = (0.003, 0.01, 0.03, 0.1, 0.3)
MOMENTUM = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
CNN = {"channels": [8, 16], "hidden": 64}
TRANSFORMER = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 1}


def idx(name: str) -> tuple[Any, Any]:
    """Read pictures in the format of MNIST."""
    folder = Path(os.environ["TUTTI_DATA"], name)

    def read(kind: str, skip: int) -> list[Any]:
        files = {folder / f"{part}-{kind}.gz": count for part, count in PARTS.items()}
        size = 28 * 28 if skip == 16 else 1
        return [
            np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, count * size, skip)
            for file, count in files.items()
        ]

    pictures = np.concatenate(read("images-idx3-ubyte", 16)).reshape(-1, 1, 28, 28)
    return pictures.astype(np.float32) / 128 - 1, np.concatenate(read("labels-idx1-ubyte", 8)).astype(
        np.int64
    )


def cifar10() -> tuple[Any, Any]:
    folder = Path(os.environ["TUTTI_DATA"], "cifar10")
    sizes = {"train": PARTS["train"], "test": PARTS["t10k"]}
    rows = [
        row for part, n in sizes.items() for row in pq.read_table(folder / f"{part}.parquet")[:n].to_pylist()
    ]
    pictures = np.stack(
        [np.asarray(Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")) for row in rows]
    )
    halved = pictures.reshape(-1, 16, 2, 16, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    return halved.astype(np.float32) / 128 - 1, np.array([row["label"] for row in rows])


def cancer() -> tuple[Any, Any]:
    found = load_breast_cancer()
    return ((found.data - found.data.mean(0)) / found.data.std(0)).astype(np.float32), found.target


def tokens() -> tuple[Any, Any]:
    """Make sequences whose class is that of the largest sum of scores of their tokens."""
    random = np.random.default_rng(0)
    found = random.integers(0, 32, (8000, 8))
    return found, random.normal(size=(32, 4))[found].sum(1).argmax(1)


TASKS: dict[str, tuple[tuple[float, ...], Any, dict[str, Any]]] = {
    "digits": (ADAM, lambda: "digits", {"model": "mlp", "epochs": 20}),
    "mnist": (SGD, lambda: idx("mnist"), {"model": "lenet", "epochs": 5, **MOMENTUM}),
    "fashion-mnist": (
        ADAM,
        lambda: idx("fashion-mnist"),
        {"model": "cnn", "model_options": CNN, "optimizer": "adamw", "epochs": 5},
    ),
    "cifar10": (
        SGD,
        cifar10,
        {"model": "mobilenet", "model_options": {"width": 0.25}, "batch_size": 16, "steps": 400, **MOMENTUM},
    ),
    "cancer": (ADAM, cancer, {"model": "mlp", "optimizer": "adamw", "epochs": 60}),
    "tokens": (
        ADAM,
        tokens,
        {
            "model": "transformer",
            "model_options": TRANSFORMER,
            "optimizer": "muon",
            "batch_size": 64,
            "epochs": 10,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", default=",".join(TASKS))
    args = parser.parse_args()
    rows = []
    for name in args.tasks.split(","):
        rates, data, options = TASKS[name]
        options = {"data": data(), "validation": 0, "schedule": "one_cycle", "quiet": True, **options}
        options |= {} if name == "digits" else {"test": 0.4}
        found: dict[float | str, list[float]] = {}
        picks = []
        for rate in (*rates, "auto"):
            for seed in range(args.seeds):
                result = tutti.train(**options, lr=rate, seed=seed, workers=1)
                found.setdefault(rate, []).append(100 * result.summary.test.metrics["accuracy"])
                picks += [f"{result.config.lr:g}"] if rate == "auto" else []
        scores = {rate: mean(some) for rate, some in found.items()}
        auto = scores.pop("auto")
        best = max(scores, key=scores.__getitem__)
        each = ", ".join(f"{rate:g}: {score:.1f}" for rate, score in scores.items())
        rows.append([name, each, ", ".join(picks), f"{auto:.1f}", f"{auto - scores[best]:+.1f}"])
        print(*rows[-1], sep=" | ", flush=True)
    print(describe_machine())
    print(table(["task", "test accuracy in % by rate", "picks", "auto", "to the best"], rows))


if __name__ == "__main__":
    main()
