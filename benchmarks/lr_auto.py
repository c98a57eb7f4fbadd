"""Compare `--lr auto` with five rates, by the test accuracy at the end, on six tasks.

    TUTTI_DATA=... python benchmarks/lr_auto.py [--seeds 2] [--tasks digits,cancer]

Pictures are 6,000 of the training part, 4,000 of the test part, and those of CIFAR-10 half as wide and high.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

import tutti
from measure import describe_machine, table
from tutti.data.sources import read_source

ADAM, SGD = (0.0003, 0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.1, 0.3)
MOMENTUM = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
CNN = {"channels": [8, 16], "hidden": 64}
TRANSFORMER = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 1}


def pictures(name: str, shrink: int = 1) -> tuple[Any, Any]:
    parts = read_source(name, {}).parts
    some = [(parts[part], count) for part, count in (("train", 6000), ("test", 4000))]
    x, y = (np.concatenate([np.asarray(pair[at][:count]) for pair, count in some]) for at in (0, 1))
    x = x.reshape(len(x), -1, x.shape[-2] // shrink, shrink, x.shape[-1] // shrink, shrink).mean((3, 5))
    return x.astype(np.float32) / 128 - 1, y.astype(np.int64)


def cancer() -> tuple[Any, Any]:
    found = load_breast_cancer()
    return ((found.data - found.data.mean(0)) / found.data.std(0)).astype(np.float32), found.target


def tokens() -> tuple[Any, Any]:
    """Make sequences; the class is that of the largest sum of the scores of their tokens."""
    random = np.random.default_rng(0)
    found = random.integers(0, 32, (8000, 8))
    return found, random.normal(size=(32, 4))[found].sum(1).argmax(1)


TASKS: dict[str, tuple[tuple[float, ...], Any, dict[str, Any]]] = {
    "digits": (ADAM, lambda: "digits", {"model": "mlp", "epochs": 20, "test": 0.0}),
    "cancer": (ADAM, cancer, {"model": "mlp", "optimizer": "adamw", "epochs": 60}),
    "fashion-mnist": (
        ADAM,
        lambda: pictures("fashion-mnist"),
        {"model": "cnn", "model_options": CNN, "epochs": 5},
    ),
    "mnist": (SGD, lambda: pictures("mnist"), {"model": "lenet", "epochs": 5, **MOMENTUM}),
    "tokens": (
        ADAM,
        tokens,
        {"model": "transformer", "model_options": TRANSFORMER, "batch_size": 64, "epochs": 10},
    ),
    "cifar10": (
        SGD,
        lambda: pictures("cifar10", 2),
        {"model": "mobilenet", "batch_size": 16, "steps": 400, **MOMENTUM},
    ),
}
TASKS["fashion-mnist"][2]["optimizer"] = "adamw"
TASKS["tokens"][2]["optimizer"] = "muon"
TASKS["cifar10"][2]["model_options"] = {"width": 0.25}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", default=",".join(TASKS))
    args = parser.parse_args()
    rows = []
    for name in args.tasks.split(","):
        rates, data, own = TASKS[name]
        options = {
            "data": data(),
            "validation": 0,
            "test": 0.4,
            "schedule": "one_cycle",
            "quiet": True,
            **own,
        }
        scores, picks = {}, []
        for rate in (*rates, "auto"):
            runs = [tutti.train(**options, lr=rate, seed=seed, workers=1) for seed in range(args.seeds)]
            scores[rate] = mean(100 * run.summary.test.metrics["accuracy"] for run in runs)
            picks = [f"{run.config.lr:g}" for run in runs]
        auto = scores.pop("auto")
        each = ", ".join(f"{rate:g}: {score:.1f}" for rate, score in scores.items())
        rows.append([name, each, ", ".join(picks), f"{auto:.1f}", f"{auto - max(scores.values()):+.1f}"])
        print(*rows[-1], sep=" | ", flush=True)
    print(describe_machine())
    print(table(["task", "test accuracy in % by rate", "picks", "auto", "against the best"], rows))


if __name__ == "__main__":
    main()
