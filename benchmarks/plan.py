"""Whether a plan finds the fastest way: its pick against an exhaustive measurement of all that it could pick.

    python benchmarks/plan.py [--models mlp,cnn] [--budget 50] [--truth 80]

For each model `tutti plan` chooses among ranks x threads x precision x layout, stopping slow ways early. Then
all of them are measured in turn, without stopping any, and that alone says how fast the pick is, and the
best. "ratio" is the pick's speed / the best's in that second measurement, the median over its rounds:
0.95 is wanted. Random images, batch 64, Adam. With the defaults it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

BATCH = 64
SAMPLES = 8192
WANTED = 0.95
MODELS = {"mlp": "grey", "lenet": "grey", "cnn": "grey", "vgg11": "colour"}
PRECISIONS = ("fp32", "bf16")


def main() -> None:
    from measure import describe_machine, table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help="comma-separated, of: " + ", ".join(MODELS)
    )
    parser.add_argument("--budget", type=float, default=50.0, help="seconds of a plan (50)")
    parser.add_argument("--truth", type=float, default=80.0, help="seconds of an exhaustive measurement (80)")
    args = parser.parse_args()
    print(describe_machine())
    rows = [judge(name, args.budget, args.truth) for name in args.models.split(",")]
    print(f"\nthe plan's pick against the best of all, batch {BATCH}; wanted: {WANTED}\n")
    heads = ["model", "ways", "pick", "best", "pick samples/s", "best samples/s", "ratio", "", "plan s"]
    print(table(heads, rows))


def judge(model: str, budget_s: float, truth_s: float) -> list[str]:
    """Plan, measure everything, and compare."""
    from tutti.run.config import TrainConfig
    from tutti.studies.autotune.plan import plan
    from tutti.studies.autotune.race import leader, ratio

    data = f"{Path(__file__).resolve()}:{MODELS[model]}"
    config = TrainConfig(model=model, data=data, batch_size=BATCH, validation=0.0)
    found = plan(config, budget_s=budget_s, precisions=PRECISIONS)
    truth = plan(config, budget_s=truth_s, precisions=PRECISIONS, exhaustive=True)
    for title, one in (("plan", found), ("everything", truth)):
        print(f"\n{model}, {title}, {one.seconds:.0f} s", flush=True)
        one.show(sys.stdout)
        print(one.why()[0], flush=True)
    best = leader(truth.ways)
    (pick,) = [way for way in truth.ways if way.candidate == found.pick.candidate]
    of_best = ratio(pick, best)
    verdict = "reached" if of_best >= WANTED else "MISSED"
    if any(way.rate is None for way in truth.ways):
        verdict = "INCOMPLETE: raise --truth"
    speeds = [f"{way.rate:,.0f}" for way in (pick, best)]
    return [
        model,
        str(len(truth.ways)),
        describe(pick),
        describe(best),
        *speeds,
        f"{of_best:.3f}",
        verdict,
        f"{found.seconds:.0f}",
    ]


def describe(way) -> str:
    one = way.candidate
    return f"{one.shape}, {one.precision}, {one.layout}"


def grey():
    """Random images of the size of MNIST's."""
    return _images(1, 28)


def colour():
    """Random images of the size of CIFAR-10's."""
    return _images(3, 32)


def _images(channels: int, side: int):
    import numpy as np

    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (SAMPLES, channels, side, side), dtype=np.uint8)
    return pixels, random.integers(0, 10, SAMPLES)


if __name__ == "__main__":
    main()
