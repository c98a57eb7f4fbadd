"""Published measurements of clusters against what the simulator's models predict for them.

    python benchmarks/predict.py [--write predictions.json] [--score predictions.json]

`published/*.toml` has the rows, each with its source. Rows up to `fit_up_to` calibrate three numbers of a
series: the seconds of a pass, its spread, and what an exchange costs compared with the network's data sheet.
All others are predicted from these. The step of N workers is

    slowest of N passes + cost x exchange(N)

with the closed forms of `tutti.comm.network`. Where few rows calibrate, spread and cost stay near 2 % and 1.
`--write` keeps the predictions in a file, `--score` compares such a file with the published rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any, Final

import numpy
from scipy.optimize import least_squares

from measure import table
from tutti.comm.network import Network

PUBLISHED: Final = Path(__file__).parent / "published"
SPREAD, COST = 0.02, 1.0
"""What a pass's spread and an exchange's cost are taken for where no row says otherwise."""
ROWS_AGREE: Final = 0.01
"""The relative error of a published row."""


@dataclass(frozen=True)
class Series:
    """One model on one machine, at several numbers of workers."""

    name: str
    facts: dict[str, Any]

    @property
    def rows(self) -> dict[int, float]:
        return {int(count): float(value) for count, value in self.facts["rows"]}

    @property
    def fitted(self) -> dict[int, float]:
        return {count: value for count, value in self.rows.items() if count <= self.facts["fit_up_to"]}

    def hosts(self, count: int) -> list[int]:
        """The numbers of workers on each host."""
        per_host = self.facts["workers_per_host"]
        if self.facts.get("rows_count") == "hosts":
            return [per_host] * count
        full, rest = divmod(count, per_host)
        return [per_host] * full + [rest] * (rest > 0)

    def exchange_s(self, count: int) -> float:
        """Seconds of an exchange of all gradients by the network's data sheet."""
        hosts, network = self.hosts(count), Network.parse(self.facts["network"])
        inside = Network.parse(self.facts.get("inside", self.facts["network"]))
        network = Network(
            network.latency_s, network.bandwidth_bytes_per_s, inside.latency_s, inside.bandwidth_bytes_per_s
        )
        nbytes = self.facts["parameters"] * self.facts.get("bytes_per_parameter", 4)
        if self.facts["exchange"] == "all_reduce":
            return network.all_reduce_s(hosts, nbytes)
        # Every worker sends to the servers of all hosts, and receives from them, through its host's link.
        away = (len(hosts) - 1) / len(hosts)
        remote = network.remote.transfer_s(2 * max(hosts) * nbytes * away)
        return remote + network.local.transfer_s(2 * max(hosts) * nbytes * (1 - away) * (max(hosts) > 1))

    def step_s(self, count: int, pass_s: float, spread: float, cost: float) -> float:
        workers = sum(self.hosts(count))
        if "global_batch" in self.facts:  # It is the same for any number of workers.
            pass_s *= sum(self.hosts(1)) / workers
        return pass_s * slowest_of(workers, spread) + cost * self.exchange_s(count)

    def value(self, count: int, step_s: float) -> float:
        """What was published for such a step, in its unit."""
        if "global_batch" in self.facts:
            return self.facts["global_batch"] / step_s
        each = self.facts["batch"] / step_s
        return each if "each worker" in self.facts["unit"] else each * sum(self.hosts(count))

    def predictions(self) -> dict[int, float]:
        """The values at all numbers of workers that do not calibrate."""
        fitted = self.fitted
        first = min(fitted)

        def off(numbers: numpy.ndarray) -> list[float]:
            pass_s, spread, cost = map(exp, numbers)
            errors = [
                log(self.value(count, self.step_s(count, pass_s, spread, cost)) / value) / ROWS_AGREE
                for count, value in fitted.items()
            ]
            return [*errors, log(spread / SPREAD), log(cost / COST)]

        begin = [log(self.value(first, 1.0) / fitted[first]), log(SPREAD), log(COST)]
        pass_s, spread, cost = map(exp, least_squares(off, begin).x)
        counts = [*self.rows, *self.facts.get("predict", [])]
        return {
            count: self.value(count, self.step_s(count, pass_s, spread, cost))
            for count in counts
            if count not in fitted
        }


def slowest_of(workers: int, spread: float) -> float:
    """The mean of the largest of so many times around 1, log-normal with this deviation."""
    middles = (numpy.arange(1000) + 0.5) / 1000
    return float(numpy.mean([exp(spread * NormalDist().inv_cdf(u ** (1 / workers))) for u in middles]))


def read() -> list[Series]:
    found = []
    for file in sorted(PUBLISHED.glob("*.toml")):
        facts = tomllib.loads(file.read_text(encoding="utf-8"))
        series = facts.pop("series", [{}])
        found += [Series(f"{file.stem}: {one.get('model', '')}", {**facts, **one}) for one in series]
    return found


def utilisations(series: Series) -> dict[int, float]:
    """For links of each speed in Mbit/s: the share of a step in which workers compute, in percent."""
    facts, nbytes = series.facts, 4 * series.facts["parameters"]
    found = {}
    for mbit in series.rows:
        exchange_s = Network(0.0, mbit * 125_000).all_reduce_s([1] * facts["workers"], nbytes)
        found[mbit] = 100 * facts["step_s"] / (facts["step_s"] + exchange_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="keep the predictions there")
    parser.add_argument("--score", type=Path, help="predictions to compare; by default today's")
    args = parser.parse_args()
    every = read()
    predicted = {one.name: utilisations(one) if "step_s" in one.facts else one.predictions() for one in every}
    if args.write:
        args.write.write_text(json.dumps(predicted, indent=2) + "\n", encoding="utf-8")
    if args.score:
        kept = json.loads(args.score.read_text(encoding="utf-8"))
        predicted = {name: {int(count): value for count, value in of.items()} for name, of in kept.items()}
    rows, errors = [], []
    for one in every:
        for count, value in predicted[one.name].items():
            published = one.rows.get(count)
            error = None if published is None else value / published - 1
            errors += [] if error is None else [abs(error)]
            cells = ["-", "-"] if error is None else [f"{published:,.4g}", f"{error:+.1%}"]
            rows.append([one.name, count, f"{value:,.4g}", *cells])
    print(table(["series", "workers", "predicted", "published", "error"], rows))
    print(f"\n{len(errors)} rows: mean error {mean(errors):.1%}, worst {max(errors):.1%} (5 and 12 % wanted)")


if __name__ == "__main__":
    sys.exit(main())
