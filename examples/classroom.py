"""A small network on Fashion-MNIST, trained sequentially and in parallel; each stage is timed.

    python examples/classroom.py [--data digits] [--epochs 3] [--out classroom.svg]

The network has one hidden layer of 100 sigmoids. All runs begin with the same weights.
The lesson: docs/lessons/classroom.md
"""

import argparse
import copy
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import tutti
from torch import nn
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import open_data

WAYS = {
    "sequential": {"workers": 1, "threads": 1},
    "2 processes": {"workers": 2, "threads": 1},
    "2 MPI ranks": {"workers": 2, "threads": 1, "hosts": "localhost:2"},
    "split weights": {"workers": 2, "threads": 1, "parallel": "tensor"},
    "GPU": {"workers": 1, "device": "cuda"},
}
STAGES = ["extract", "transform", "load", "start", "train", "evaluate"]


def prepare(data, folder):
    """Read the images, standardise the pixels, and write them into a folder of NPY files."""
    times = [time.perf_counter()]
    images = open_data(data, HostCommunicator.alone(), validation=0.0)
    times.append(time.perf_counter())
    parts = {"train": images.train, "test": images.test}
    pixels = {name: part.inputs.float().flatten(1) for name, part in parts.items()}
    mean, std = pixels["train"].mean(), pixels["train"].std()
    pixels = {name: (values - mean) / std for name, values in pixels.items()}
    times.append(time.perf_counter())
    for name, part in parts.items():
        np.save(folder / f"x_{name}.npy", pixels[name].numpy())
        np.save(folder / f"y_{name}.npy", part.targets.numpy())
    times.append(time.perf_counter())
    return pixels["train"].shape[1], dict(zip(STAGES, np.diff(times).tolist(), strict=False))


def missing(options):
    """Return what this machine lacks for a run with these options."""
    if "hosts" in options and find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "torch finds no GPU" if "device" in options and not torch.cuda.is_available() else None


def run(way, folder, initial, epochs):
    """Train; return the seconds of each stage, the test accuracy and the weights of the first layer."""
    options = {"epochs": epochs, "batch_size": 128, "lr": 0.003, "precision": "fp64", **WAYS[way]}
    began = time.perf_counter()
    result = tutti.train(copy.deepcopy(initial), str(folder), quiet=True, **options)
    total = time.perf_counter() - began
    evaluate = sum(record.seconds["validation"] for record in result.history)
    train = result.summary.seconds - evaluate
    seconds = {"start": total - train - evaluate, "train": train, "evaluate": evaluate}
    return seconds, result.summary.test.metrics["accuracy"], result.model[0].weight


def draw(rows, out):
    import altair as alt

    bars = alt.Chart(alt.Data(values=rows)).mark_bar().properties(width=600, height=alt.Step(26))
    seconds = alt.X("sum(seconds):Q", title="time, s")
    stage = alt.Color("stage:N", sort=STAGES, title=None, legend=alt.Legend(orient="bottom"))
    chart = bars.encode(seconds, alt.Y("way:N", sort=None, title=None), stage, order="place:Q")
    chart = chart.configure(background="#ffffff", padding=14).configure_axis(labelFlush=False)
    chart.configure_legend(columnPadding=18).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="classroom.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    rows, reference = [], None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs, prepared = prepare(args.data, folder)
        torch.manual_seed(0)
        initial = nn.Sequential(nn.Linear(inputs, 100), nn.Sigmoid(), nn.Linear(100, 10)).double()
        # Warm up: later ranks start with torch already imported, except those of mpirun.
        warm_up = {"workers": 2, "threads": 1, "steps": 1, "precision": "fp64", "quiet": True}
        tutti.train(copy.deepcopy(initial), str(folder), **warm_up)
        print(f"{'seconds:':>13}", *(f"{stage:>9}" for stage in STAGES), " accuracy  difference")
        for way, options in WAYS.items():
            if why := missing(options):
                print(f"{way:>13} skipped: {why}")
                continue
            seconds, accuracy, weights = run(way, folder, initial, args.epochs)
            reference = weights if reference is None else reference
            seconds = prepared | seconds
            rows += [
                {"way": way, "stage": s, "place": STAGES.index(s), "seconds": seconds[s]} for s in STAGES
            ]
            difference = (weights - reference).abs().max().item()
            print(f"{way:>13}", *(f"{seconds[stage]:9.2f}" for stage in STAGES), end="")
            print(f"{accuracy:10.4f}{difference:12.0e}")
    draw(rows, args.out)
    print(f"written: {args.out}")
