"""One model on two ranks against one: memory of a rank, and samples per second.

    python benchmarks/parallel.py [repeats]

Memory is what torch's allocator has handed out to a rank at the peak of its training, weights and gradients
included: of the rank that takes the most. It does not differ from run to run. Times are of all sides in turn;
medians. Wanted: at most 0.6 of one rank's memory.
"""

from __future__ import annotations

import pickle
import statistics
import sys
from typing import Any, cast

import numpy as np

from measure import describe_machine
from tutti.comm.base import Communicator
from tutti.launch.placement import place_ranks
from tutti.launch.start import start
from tutti.run.config import TrainConfig
from tutti.run.train_job import RunOutcome, TrainJob

MODELS: dict[str, dict[str, Any]] = {
    "mlp 2048-2048-2048 (10 M)": {"model": "mlp", "model_options": {"hidden": [2048] * 3}, "batch_size": 128},
    "vgg11 (9 M)": {"model": "vgg11", "batch_size": 64},
    "cnn (0.4 M)": {"model": "cnn", "batch_size": 64},
}
WAYS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "tensor=2": {"parallel": "tensor=2"},
    "pipeline=2": {"parallel": "pipeline=2"},
    "sharded=2": {"parallel": "sharded=2"},
}
COMMON: dict[str, Any] = {"data": "parallel:images", "validation": 0.0, "threads": 1}


def images() -> tuple[Any, Any]:
    """Noise of the size of MNIST: nothing is learned here, and nothing is tested."""
    random = np.random.default_rng(0)
    return random.random((1280, 1, 28, 28), np.float32), np.arange(1280) % 10


def run(comm: Communicator, payload: bytes) -> dict[str, float]:
    """Samples per second of each run (entry point of the ranks)."""
    from tutti.run.train import work

    found = {}
    for name, config in pickle.loads(payload).items():
        job = TrainJob(TrainConfig.from_json(config), quiet=True, write=False)
        outcome = cast("RunOutcome", work(comm, pickle.dumps(job)))
        found[name] = outcome.summary.samples_per_s
    return found


def runs(way: str, steps: int) -> dict[str, dict[str, Any]]:
    return {name: COMMON | config | WAYS[way] | {"steps": steps} for name, config in MODELS.items()}


def on_ranks(entry: str, way: str, steps: int) -> dict[str, Any]:
    ranks = 2 if WAYS[way] else 1
    return cast("dict[str, Any]", start(entry, pickle.dumps(runs(way, steps)), place_ranks(ranks, 1)))


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(describe_machine())
    memory = {way: on_ranks("tests.model_parallel.allocated:measure_all", way, 2) for way in WAYS}
    rates: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, found in rates.items():
            found.append(on_ranks("parallel:run", way, 10))
    print(f"\n{'':28}{'':>12}{'MB of a rank':>14}{'of 1':>7}{'samples/s':>12}{'of 1':>7}")
    for name in MODELS:
        mb = {way: max(memory[way][name]) / 1e6 for way in WAYS}
        rate = {way: statistics.median(found[name] for found in rates[way]) for way in WAYS}
        for way in WAYS:
            print(
                f"{name:28}{way:>12}{mb[way]:>14,.1f}{mb[way] / mb['1 rank']:>7.2f}"
                f"{rate[way]:>12,.0f}{rate[way] / rate['1 rank']:>7.2f}"
            )


if __name__ == "__main__":
    main()
