"""Hogwild and parallel k-fold: how busy the cores are, how much faster it is, and what each class gets.

    python examples/hogwild_and_folds.py [--data fashion-mnist] [--epochs 2] [--folds 4] [--out FILE.svg]

Hogwild uses the cores inside of one training: workers move one vector of weights without locks. K-fold uses
them beside each other: every fold is a training of its own. The lesson: docs/lessons/hogwild-and-folds.md
"""

import argparse
import tempfile
import time

import psutil
from tutti import cross_validate, train
from tutti.launch.cores import allowed_cores

CORES = allowed_cores().usable
OPTIONS = {"batch_size": 64, "lr": 0.001, "precision": "fp64", "threads": 1, "quiet": True}


def cpu_seconds():
    """CPU seconds of this process and of all that it has started."""
    me = psutil.Process()
    times = [one.cpu_times() for one in (me, *me.children(recursive=True))]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def measured(name, call, *arguments):
    """Seconds, and the share of all cores that was used meanwhile."""
    cpu, began = cpu_seconds(), time.perf_counter()
    accuracies = call(*arguments)
    seconds = time.perf_counter() - began
    busy = (cpu_seconds() - cpu) / seconds / CORES
    print(f"{name:>22}: {seconds:6.1f} s, cores {busy:4.0%} busy, least accurate class {min(accuracies):.1%}")
    return {"way": name, "seconds": seconds, "busy": busy, "classes": accuracies}


def one_training(strategy, workers, args):
    result = train("mlp", args.data, strategy=strategy, workers=workers, epochs=args.epochs, **OPTIONS)
    return result.summary.test.class_accuracy()


def folds(blocks, args):
    with tempfile.TemporaryDirectory() as out:
        chosen = {"epochs": args.epochs, "out": out + "/farm", **OPTIONS}
        found = cross_validate("mlp", args.data, cv=args.folds, blocks=blocks, **chosen)
        return next(iter(found.scores.values())).class_accuracy()


def draw(rows, out):
    import altair as alt

    lane = alt.Y("way:N", sort=None, title=None)
    bars = alt.Chart(alt.Data(values=rows)).mark_bar().properties(width=190, height=alt.Step(24))
    speed = bars.encode(alt.X("speed-up:Q", title="times as fast as one worker"), lane)
    busy = alt.X(
        "busy:Q", title="share of the cores used", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])
    )
    known = [
        {"way": row["way"], "class": k, "right": a} for row in rows for k, a in enumerate(row["classes"])
    ]
    cells = alt.Chart(alt.Data(values=known)).mark_rect().properties(width=394, height=alt.Step(24))
    colour = alt.Color(
        "right:Q",
        title="recognised",
        scale=alt.Scale(scheme="viridis", domain=[0.5, 1]),
        legend=alt.Legend(format="%"),
    )
    chart = alt.hconcat(
        speed, bars.encode(busy, alt.Y("way:N", sort=None, title=None, axis=None)), spacing=14
    )
    chart = alt.vconcat(chart, cells.encode(alt.X("class:O", axis=alt.Axis(labelAngle=0)), lane, colour))
    chart.configure(background="#ffffff", padding=14).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=CORES)
    parser.add_argument(
        "--out", default="hogwild-and-folds.svg", help="picture to write: .svg, .png or .html"
    )
    args = parser.parse_args()
    n = args.workers
    train("mlp", args.data, workers=n, steps=1, **OPTIONS)  # from here on the ranks have torch imported
    rows = [measured("1 worker", one_training, "solo", 1, args)]
    rows += [measured(f"{way}, {n} workers", one_training, way, n, args) for way in ("sync", "hogwild")]
    rows += [measured(f"{args.folds} folds, {k} at a time", folds, k, args) for k in (1, n)]
    for row in rows:
        row["speed-up"] = rows[0 if "worker" in row["way"] else 3]["seconds"] / row["seconds"]
    draw(rows, args.out)
    print(f"written: {args.out}")
