"""Jets in HDF5 files: asynchronous training with parameter servers, and a hyper-parameter search.

    pip install 'tutti[data,plots,tune]'
    python examples/physicist.py [--epochs 8] [--jets 5000] [--trials 6] [--out physicist.svg]

The jets are simulated: one spray of particles, or two (a heavy particle that has decayed). They are stored in
several HDF5 files; a text file lists those of each part. The lesson: docs/lessons/physicist.md
"""

import argparse
import tempfile
from pathlib import Path

import h5py
import numpy as np
import tutti
from tutti.launch.cores import allowed_cores

CORES = allowed_cores().usable
PARTICLES = 20
FILES = {"train": 4, "test": 1}
OPTIONS = {
    "data_options": {"features": "jets", "labels": "labels"},
    "batch_size": 64,
    "threads": 1,
    "quiet": True,
}
RANKS = {"workers": 2, "servers": 1}  # three ranks: the server keeps the weights
WAYS = {
    "Downpour": {"strategy": tutti.Downpour(), **RANKS},
    "EASGD": {"strategy": tutti.EASGD(every=4), **RANKS},
    "GEM": {"strategy": tutti.GEM(), "optimizer": "sgd", "lr": 0.01, **RANKS},
    "EASGD, two levels": {"strategy": tutti.EASGD(every=4), "levels": 2, "server_period": 4, **RANKS},
}


def jets(random, count):
    """Return the momentum and two angles of each particle, and labels: 1 for two sprays, 0 for one."""
    labels = random.integers(0, 2, count)
    axis = random.normal(0, 0.25, (count, 1, 2)) * labels[:, None, None]
    side = random.choice([-1, 1], (count, PARTICLES, 1))
    angles = side * axis + random.normal(0, 0.15, (count, PARTICLES, 2))
    momenta = random.dirichlet(np.full(PARTICLES, 0.5), count)[:, :, None]
    return np.concatenate([momenta, angles], axis=2).astype("f4"), labels


def write(folder, count):
    """Write the HDF5 files, and the list of those of each part."""
    (folder / "files").mkdir()
    random = np.random.default_rng(0)
    for part, files in FILES.items():
        names = [f"{part}-jets-{number}.h5" for number in range(files)]
        for name in names:
            with h5py.File(folder / "files" / name, "w") as file:
                file["jets"], file["labels"] = jets(random, count // sum(FILES.values()))
        (folder / f"{part}.txt").write_text("".join(f"files/{name}\n" for name in names))


def train(way, folder, epochs):
    result = tutti.train("jets", str(folder), epochs=epochs, metrics="accuracy,auc", **OPTIONS, **WAYS[way])
    curve, seconds, test = [], 0.0, result.summary.test.metrics
    for record in result.history:
        seconds += record.seconds["total"]
        curve.append({"way": way, "seconds": seconds, "auc": record.validation.metrics["auc"]})
    staleness = np.mean([rank.staleness_mean or 0.0 for rank in result.history[-1].ranks])
    print(f"{way:>18}: {result.summary.seconds:5.1f} s, test accuracy {test['accuracy']:.3f},", end=" ")
    print(f"AUC {test['auc']:.3f}, staleness {staleness:.1f}")
    return curve


def search(folder, epochs, trials, out):
    """Search on blocks of three ranks: two workers and a server, which needs little of a core."""
    space = {"lr": "log:1e-4..3e-2", "strategy.every": [1, 4, 16]}
    ranks = {"block": 3, "servers": 1, "blocks": max(1, CORES // 2)}
    fixed = {"strategy": "easgd", "epochs": epochs, "out": str(out), **ranks, **OPTIONS}
    result = tutti.tune("jets", str(folder), space, trials=trials, **fixed)
    print(f"best of {trials} trials: {result.best}, accuracy {result.values['accuracy']:.3f}")
    return result.trials


def draw(curves, trials, out):
    import altair as alt

    below, points = alt.Legend(orient="bottom", columns=2), alt.Scale(zero=False)
    lines = alt.Chart(alt.Data(values=curves)).mark_line(point=True).properties(width=330, height=240)
    left = lines.encode(
        alt.X("seconds:Q", title="time, s"),
        alt.Y("auc:Q", title="validation AUC", scale=points),
        alt.Color("way:N", sort=None, title=None, legend=below),
    )
    dots = alt.Chart(alt.Data(values=trials)).mark_point(filled=True, size=80, opacity=1)
    rates = alt.Axis(values=[k * 10.0**e for e in range(-4, -1) for k in (1, 3)], format="~e")
    right = dots.properties(width=330, height=240).encode(
        alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log"), axis=rates),
        alt.Y("accuracy:Q", title="validation accuracy", scale=points),
        alt.Color("every:N", title="batches between exchanges", legend=alt.Legend(orient="bottom")),
    )
    chart = alt.hconcat(left, right, spacing=30).resolve_scale(color="independent")
    chart = chart.configure(background="#ffffff", padding=14).configure_axis(labelFlush=False)
    chart.configure_legend(columnPadding=18).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--jets", type=int, default=5000)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--out", default="physicist.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.jets)
        curves = [row for way in WAYS for row in train(way, folder, args.epochs)]
        trials = search(folder, args.epochs, args.trials, folder / "search")
    draw(curves, [{**row, "every": row["strategy.every"]} for row in trials], args.out)
    print(f"written: {args.out}")
