"""What the built-in models reach on the built-in data, trained on every core of this machine.

    python benchmarks/accuracy.py [--seeds 3]

mnist and fashion-mnist are trained on all 60,000 training samples; the test part is read once, at the end.
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean

import tutti
from measure import describe_machine, table

RUNS = {
    "digits, the default": (0.975, {}),
    "mnist, lenet, 5 epochs": (
        0.990,
        {"model": "lenet", "data": "mnist", "epochs": 5, "lr": 0.005},
    ),
    "fashion-mnist, cnn, 10 epochs": (
        0.920,
        {"model": "cnn", "data": "fashion-mnist", "epochs": 10, "lr": 0.003, "layout": "channels_last"},
    ),
}
ONE_CYCLE = {"schedule": "one_cycle", "validation": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, 0 upwards")
    args = parser.parse_args()
    rows = []
    for name, (wanted, options) in RUNS.items():
        found = []
        for seed in range(args.seeds):
            schedule = ONE_CYCLE if options else {}
            result = tutti.train(seed=seed, quiet=True, **options, **schedule)
            found.append(result.summary.test.metrics["accuracy"])
            print(f"{name}, seed {seed}: {100 * found[-1]:.2f}", file=sys.stderr, flush=True)
        each = ", ".join(f"{100 * accuracy:.2f}" for accuracy in found)
        rows.append([name, each, f"{100 * mean(found):.2f}", f"{100 * wanted:.1f}"])
    print(describe_machine())
    print("test accuracy in %\n")
    print(table(["run", "each seed", "mean", "wanted"], rows))


if __name__ == "__main__":
    main()
