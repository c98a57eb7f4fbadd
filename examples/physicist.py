"""Jets in HDF5 files: masters and workers, masters of masters, and a search on blocks of ranks.

    pip install 'tutti[data,plots,tune]'
    python examples/physicist.py [--epochs 8] [--jets 5000] [--trials 6] [--out physicist.svg]

The jets are made here: one spray of particles, or two (a heavy particle that has decayed). They lie in
several HDF5 files, which text files list, as physicists keep them. The lesson: docs/lessons/physicist.md
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
DATA = {
    "data_options": {"features": "jets", "labels": "labels"},
    "batch_size": 64,
    "threads": 1,
    "quiet": True,
}
MASTER = {"workers": 2, "servers": 1}  # two workers, and a rank that keeps the centre
WAYS = {
    "Downpour": {"strategy": tutti.Downpour(), **MASTER},
    "EASGD": {"strategy": tutti.EASGD(every=4), **MASTER},
    "GEM": {"strategy": tutti.GEM(), "optimizer": "sgd", "lr": 0.01, **MASTER},
    "EASGD, two levels": {"strategy": tutti.EASGD(every=4), "levels": 2, "server_period": 4, **MASTER},
}


def jets(random, count):
    """Particles of jets: momentum, and two angles from the jet's axis; and which jets have two sprays."""
    labels = random.integers(0, 2, count)
    axis = random.normal(0, 0.25, (count, 1, 2)) * labels[:, None, None]
    side = random.choice([-1, 1], (count, PARTICLES, 1))
    angles = side * axis + random.normal(0, 0.15, (count, PARTICLES, 2))
    momenta = random.dirichlet(np.full(PARTICLES, 0.5), count)[:, :, None]
    return np.concatenate([momenta, angles], axis=2).astype("f4"), labels


def write(folder, count):
    """HDF5 files, and for each part a list of them."""
    (folder / "files").mkdir()
    random = np.random.default_rng(0)
    for part, files in FILES.items():
        names = [f"{part}-jets-{number}.h5" for number in range(files)]
        for name in names:
            with h5py.File(folder / "files" / name, "w") as file:
                file["jets"], file["labels"] = jets(random, count // sum(FILES.values()))
        (folder / f"{part}.txt").write_text("".join(f"files/{name}\n" for name in names))


def train(way, folder, epochs):
    result = tutti.train("jets", str(folder), epochs=epochs, metrics="accuracy,auc", **DATA, **WAYS[way])
    found, test = [], result.summary.test
    for record in result.history:
        passed = sum(one.seconds["total"] for one in result.history[: record.epoch])
        found.append({"way": way, "seconds": passed, "auc": record.validation.metrics["auc"]})
    late = [rank.staleness_mean or 0.0 for rank in result.history[-1].ranks]
    print(
        f"{way:>18}: {result.summary.seconds:5.1f} s, test accuracy {test.metrics['accuracy']:.3f}, auc"
        f" {test.metrics['auc']:.3f}; what a worker sends is {np.mean(late):.1f} updates late"
    )
    return found


def search(folder, epochs, trials, out):
    """Search on blocks of three ranks each: two workers, and their master, which needs no core of its own."""
    space = {"lr": "log:1e-4..3e-2", "strategy.every": [1, 4, 16]}
    chosen = {"strategy": "easgd", "block": 3, "servers": 1, "blocks": max(1, CORES // 2)}
    chosen |= {"epochs": epochs, "out": str(out)}
    found = tutti.tune("jets", str(folder), space, trials=trials, **chosen, **DATA)
    print(f"best of {trials} trials: {found.best}, accuracy {found.values['accuracy']:.3f}")
    return found.trials


def draw(courses, trials, out):
    import altair as alt

    base = alt.Chart(alt.Data(values=courses)).mark_line(point=True).properties(width=330, height=240)
    auc = alt.Y("auc:Q", title="area under the ROC curve (validation)", scale=alt.Scale(zero=False))
    ways = base.encode(alt.X("seconds:Q"), auc, alt.Color("way:N", sort=None, title="masters and workers"))
    dots = (
        alt.Chart(alt.Data(values=trials)).mark_point(filled=True, size=80).properties(width=250, height=240)
    )
    rate = alt.X(
        "lr:Q",
        title="learning rate of a trial",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~e", labelOverlap="greedy", labelSeparation=8),
    )
    right = alt.Y("accuracy:Q", scale=alt.Scale(zero=False))
    found = dots.encode(rate, right, alt.Color("every:N", title=["batches between", "exchanges"]))
    chart = alt.hconcat(ways, found).resolve_scale(color="independent")
    # Fonts of browsers are wider than the one by which the room for words is reckoned.
    room = {"left": 14, "top": 14, "right": 40, "bottom": 14}
    chart.configure(background="#ffffff", padding=room).save(out)


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
        courses = [row for way in WAYS for row in train(way, folder, args.epochs)]
        trials = search(folder, args.epochs, args.trials, folder / "search")
    draw(courses, [{**row, "every": row["strategy.every"]} for row in trials], args.out)
    print(f"written: {args.out}")
