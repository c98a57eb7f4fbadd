"""The cost of a lost rank: trainings whose ranks are killed.

They have `--on-failure respawn` or `shrink`:

    python benchmarks/chaos.py                  kills, by strategy, number of ranks and policy: the table
    python benchmarks/chaos.py --quick          the same for sync alone, within 6 minutes
    python benchmarks/chaos.py --cost           the training with and without --on-failure, in turn
    python benchmarks/chaos.py --storm 36       a kill every 5 s: how much of the speed is left
    python benchmarks/chaos.py --soak 2         two hours of every fault, as `make soak HOURS=2` has them

The trainings are disturbed as by `tutti chaos`: after each kill the time is taken until all ranks have
finished the next step, and until the training is as far as it was. The final weights are compared with those
of a training that was left alone, in fp64.

Wanted: all kills survived, and the next step within 0.3 s in the median with 2 ranks; 90 % of the speed in a
storm; at most 1 % less of it when nothing fails. Of a
soak, in which ranks come and go as well: no recovery above 10 s, ranks and causes named, nothing left, and
the final weights but for rounding those of a training that was left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from measure import describe_machine, interleave, medians, table
from tutti.studies.chaos.disturbance import Event, Promise
from tutti.studies.chaos.script import ADD, KILL, REMOVE, STOP, USUAL
from tutti.studies.chaos.study import Outcome, Question, disturb, p95

MANY = 100_000
"""More losses than there will be."""

HANG_S = 3.0
"""The time-out of hangs in a soak: a rank that was stopped is found within it and a second."""

STORM_S = 5.0
"""The mean time from a recovery to the next kill of a storm."""

HUNG_S = 10.0
"""The longest recovery of a soak, besides the time in which a rank that was stopped is found."""

ROUNDED = 1e-12
"""The largest difference between weights that were trained with other numbers of ranks, in fp64."""

SOAKED = ["--optimizer", "sgd", "--optimizer.momentum", "0.9", "--lr", "0.01"]
"""The optimizer of a soak. Adam divides by gradients, also by those that are nothing but rounding."""

POLICIES = {
    "stop": [],
    "respawn": ["--on-failure", "respawn"],
    "shrink": ["--on-failure", "shrink"],
}
"""The options of a training, by what is to happen when a rank is lost."""

STRATEGIES = ("sync", "hogwild", "downpour", "downpour:1", "easgd", "gossip", "local")

DETERMINISTIC = ("sync", "local", "gossip")


def question(
    options: argparse.Namespace,
    ranks: int,
    strategy: str,
    policy: str,
    kinds: Sequence[str],
    kills: int,
    out: Path | None = None,
) -> Question:
    """A training that is disturbed."""
    words = ["train", options.model, "--data", options.data, "-n", str(ranks), "--threads", "1"]
    name, _, servers = strategy.partition(":")
    words += ["--epochs", str(options.epochs), "--strategy", name, "--precision", "fp64"]
    words += ["--servers", servers] if servers else []
    words += ["--checkpoint", "off", "--seed", str(options.seed)]
    words += [*POLICIES[policy], "--max-failures", str(MANY)]
    if STOP in kinds:
        words += ["--hang-timeout", f"{HANG_S:g}s"]
    if ADD in kinds:
        words += SOAKED
    return Question(
        words=words,
        promise=Promise("shrink" not in policy, MANY, HANG_S if STOP in kinds else None),
        kinds=kinds,
        out=out,
        every_s=options.pause,
        most=kills,
        seed=options.seed,
        compare="respawn" in policy and strategy in DETERMINISTIC,
        repeats=strategy in DETERMINISTIC,
        quiet=True,
    )


def ms(values: Sequence[float]) -> list[str]:
    """The median and the p95 in milliseconds."""
    return [f"{1000 * median(values):.0f}", f"{1000 * p95(values):.0f}"] if values else ["", ""]


def row(strategy: str, ranks: int, policy: str, found: Outcome) -> list[str]:
    """The row of a training in the table."""
    back = [event.back_s for event in found.events if event.back_s is not None]
    named = sum(event.named for event in found.events)
    redone = [event.redone for event in found.events]
    same, speed = "", ""
    if found.twin is not None:
        same = "yes" if found.twin.apart == 0 else "NO"
        speed = f"{found.twin.seconds / found.seconds:.0%}"
    return [
        *(
            strategy,
            f"{ranks}",
            policy,
            f"{found.survived} of {len(found.events)}",
            f"{named}",
            f"{found.code}",
        ),
        *(*ms(found.recoveries_s), *ms(back), f"{median(redone):.0f}" if redone else "", same, speed),
    ]


def losses(options: argparse.Namespace) -> None:
    """Kill ranks of every strategy, and print the table."""
    rows = []
    for strategy in options.strategies:
        for ranks in options.ranks:
            for policy in options.policies:
                kills = ranks - 1 if "shrink" in policy else options.kills
                found = disturb(question(options, ranks, strategy, policy, [KILL], kills), lambda event: None)
                rows.append(row(strategy, ranks, policy, found))
                print(*rows[-1], *found.broken, flush=True)
    heads = ["strategy", "ranks", "policy", "survived", "named", "exit code", "next step, ms", "p95"]
    heads += ["as far as before, ms", "p95", "steps again", "same weights", "speed of undisturbed"]
    print(table(heads, rows))


def storm(options: argparse.Namespace) -> None:
    """Print what a kill every 5 s leaves of the speed."""
    options.pause = STORM_S
    asked = question(options, 2, "sync", "respawn", [KILL], options.storm)
    found = disturb(asked, lambda event: None)
    assert found.twin is not None, "the same training is run undisturbed"
    share = found.twin.seconds / found.seconds
    print(f"survived {found.survived} of {len(found.events)} kills in {found.seconds:.0f} s", *found.broken)
    print(f"{share:.1%} of the speed of the undisturbed training")


def rate(options: argparse.Namespace, policy: str) -> float:
    """The samples per second of a training that nothing disturbs."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "run")
        disturb(question(options, 2, "sync", policy, [], 0, out), lambda event: None)
        lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
        return median(line["samples_per_s"] for line in lines)


def cost(options: argparse.Namespace) -> None:
    """Print what `--on-failure` costs when nothing fails."""
    ways = {policy: lambda policy=policy: rate(options, policy) for policy in ("stop", "respawn")}
    found = medians(interleave(ways, options.rounds))
    print(f"nothing fails: {found['respawn'] / found['stop']:.4f} of the samples/s without copies")


def soak(options: argparse.Namespace) -> int:
    """Disturb trainings for hours; returns the exit code."""
    deadline, number, faults = time.monotonic() + 3600 * options.soak, 0, 0
    wrong, kinds = list[str](), (*USUAL, ADD, REMOVE)
    recoveries: list[float] = []
    while number == 0 or time.monotonic() < deadline:
        ranks = options.ranks[number % len(options.ranks)]
        options.seed = number
        late: list[Event] = []

        def look(event: Event, late: list[Event] = late) -> None:
            limit_s = HUNG_S + (10 * HANG_S if event.kind == STOP else 0.0)
            if event.next_s is not None and event.next_s > limit_s:
                late.append(event)

        found = disturb(question(options, ranks, "sync", "respawn", kinds, options.kills), look)
        number, faults = number + 1, faults + len(found.events)
        recoveries += found.recoveries_s
        unnamed = [
            f"{event.kind} of {event.ranks} was not named" for event in found.events if not event.named
        ]
        problems = [*found.broken, *unnamed, *(f"{one.kind} cost {one.next_s:.1f} s" for one in late)]
        problems += [f"lost without a fault: {alarm.why}" for alarm in found.alarms]
        if not found.broken:
            apart = None if found.twin is None else found.twin.apart
            if apart is None or apart > ROUNDED:
                problems.append(f"its final weights are {apart} apart from those of an undisturbed one")
        wrong += problems
        print(
            f"training {number}: {ranks} ranks, {len(found.events)} faults; {problems or 'all well'}",
            flush=True,
        )
        if found.code:
            print(*found.said, sep="", file=sys.stderr)
    middle, high = ms(recoveries)
    said = f"{faults} faults in {number} trainings; next step after {middle} ms, p95 {high} ms"
    print(f"{said}; {len(wrong)} wrong")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="with servers: NAME:NUMBER")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES][1:])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.2, help="the mean time between two faults, in s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--storm", type=int, metavar="KILLS")
    parser.add_argument("--soak", type=float, metavar="HOURS")
    options = parser.parse_args()
    print(describe_machine())
    if options.soak is not None:
        return soak(options)
    if options.storm is not None:
        storm(options)
        return 0
    if options.cost:
        cost(options)
        return 0
    if options.quick:
        options.strategies, options.kills, options.epochs = ["sync"], 10, 1
    losses(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
