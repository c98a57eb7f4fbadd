"""Hogwild and parallel cross-validation: speed-up, use of the cores, and accuracy of each class.

    python examples/hogwild_and_folds.py [--data fashion-mnist] [--epochs 2] [--folds 4] [--out FILE.svg]

Hogwild parallelises one training run: workers update shared weights without locks. Cross-validation trains
independent folds in parallel. The lesson: docs/lessons/hogwild-and-folds.md
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
    """Return the CPU seconds of this process and its descendants."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def measure(name, function, *arguments):
    """Call a function that returns the accuracy of each class; time it, and measure the use of the cores."""
    cpu, began = cpu_seconds(), time.perf_counter()
    accuracies = function(*arguments)
    seconds = time.perf_counter() - began
    busy = (cpu_seconds() - cpu) / seconds / CORES
    print(f"{name:>22}: {seconds:6.1f} s, cores {busy:4.0%} busy, worst class {min(accuracies):.1%}")
    return {"way": name, "seconds": seconds, "busy": busy, "classes": accuracies}


def one_training(strategy, workers, args):
    result = train("mlp", args.data, strategy=strategy, workers=workers, epochs=args.epochs, **OPTIONS)
    return result.summary.test.class_accuracy()


def folds(blocks, args):
    with tempfile.TemporaryDirectory() as out:
        options = {"epochs": args.epochs, "out": out + "/folds", **OPTIONS}
        result = cross_validate("mlp", args.data, cv=args.folds, blocks=blocks, **options)
        return next(iter(result.scores.values())).class_accuracy()


def draw(rows, out):
    import altair as alt

    way, no_labels = alt.Y("way:N", sort=None, title=None), alt.Y("way:N", sort=None, axis=None)
    bars = alt.Chart(alt.Data(values=rows)).mark_bar().properties(width=270, height=alt.Step(24))
    speed_up = alt.X("speed-up:Q", title="speed-up", axis=alt.Axis(tickCount=5))
    percent = alt.Axis(format="%", tickCount=5)
    busy = alt.X("busy:Q", title="use of the cores", axis=percent, scale=alt.Scale(domain=[0, 1]))
    above = alt.hconcat(bars.encode(speed_up, way), bars.encode(busy, no_labels), spacing=20)
    classes = [
        {"way": row["way"], "class": k, "accuracy": a} for row in rows for k, a in enumerate(row["classes"])
    ]
    base = alt.Chart(alt.Data(values=classes)).encode(alt.X("class:O", axis=alt.Axis(labelAngle=0)), way)
    scale = alt.Scale(scheme="blues", domain=[0.4, 1])
    cells = base.mark_rect().encode(alt.Color("accuracy:Q", scale=scale, legend=None))
    white = alt.condition("datum.accuracy > 0.8", alt.value("white"), alt.value("black"))
    numbers = base.mark_text().encode(text=alt.Text("accuracy:Q", format=".0%"), color=white)
    below = (cells + numbers).properties(width=560, height=alt.Step(24), title="test accuracy of each class")
    chart = alt.vconcat(above, below).configure(background="#ffffff", padding=14)
    chart.configure_axis(labelFlush=False).save(out)


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
    train("mlp", args.data, workers=n, steps=1, **OPTIONS)  # warm up: later ranks start with torch imported
    rows = [measure("1 worker", one_training, "solo", 1, args)]
    rows += [measure(f"{name}, {n} workers", one_training, name, n, args) for name in ("sync", "hogwild")]
    rows += [measure(f"{args.folds} folds, {k} at a time", folds, k, args) for k in (1, n)]
    for row in rows:
        row["speed-up"] = rows[0 if "worker" in row["way"] else 3]["seconds"] / row["seconds"]
    draw(rows, args.out)
    print(f"written: {args.out}")
