"""The classroom network on Fashion-MNIST, in every way that this machine has, each stage timed.

    python examples/classroom.py [--data digits] [--epochs 3] [--out classroom.svg]

A network with one hidden layer of 100 sigmoids is trained alone, by processes, by MPI, with its weights
split, and on a GPU, each time from the same first weights. The lesson: docs/lessons/classroom.md
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
    "alone": {"workers": 1, "threads": 1},
    "2 processes": {"workers": 2, "threads": 1},
    "2 MPI ranks": {"workers": 2, "threads": 1, "hosts": "localhost:2"},
    "split weights": {"workers": 2, "threads": 1, "parallel": "tensor"},
    "GPU": {"workers": 1, "device": "cuda"},
}
STAGES = ["extract", "transform", "load", "start", "train", "evaluate"]


def prepare(data, folder):
    """Extract the pictures, transform them to numbers around 0, and load them into a folder of NPY files."""
    marks = [time.perf_counter()]
    found = open_data(data, HostCommunicator.alone(), validation=0.0)
    marks.append(time.perf_counter())
    parts = {"train": found.train, "test": found.test}
    pixels = {name: part.inputs.float().flatten(1) for name, part in parts.items()}
    mean, deviation = pixels["train"].mean(), pixels["train"].std()
    pixels = {name: (values - mean) / deviation for name, values in pixels.items()}
    marks.append(time.perf_counter())
    for name, part in parts.items():
        np.save(folder / f"x_{name}.npy", pixels[name].numpy())
        np.save(folder / f"y_{name}.npy", part.targets.numpy())
    marks.append(time.perf_counter())
    return pixels["train"].shape[1], dict(zip(STAGES, np.diff(marks).tolist(), strict=False))


def missing(options):
    """Say what a way needs and this machine has not."""
    if "hosts" in options and find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "torch finds no GPU" if "device" in options and not torch.cuda.is_available() else None


def run(way, folder, first, epochs):
    """Train; the seconds of the other stages, and the model."""
    options = {"epochs": epochs, "batch_size": 128, "lr": 0.003, "precision": "fp64", **WAYS[way]}
    began = time.perf_counter()
    result = tutti.train(copy.deepcopy(first), str(folder), quiet=True, **options)
    whole = time.perf_counter() - began
    evaluating = sum(record.seconds["validation"] for record in result.history)
    training = result.summary.seconds - evaluating
    seconds = {"start": whole - training - evaluating, "train": training, "evaluate": evaluating}
    return seconds, result.summary.test.metrics["accuracy"], result.model[0].weight


def draw(rows, out):
    import altair as alt

    bars = alt.Chart(alt.Data(values=rows)).mark_bar().properties(width=560, height=alt.Step(26))
    where = alt.Y("way:N", sort=None, title=None)
    stages = alt.Color("stage:N", sort=STAGES, title="stage")
    chart = bars.encode(alt.X("sum(seconds):Q", title="seconds"), where, stages, order="place:Q")
    chart.configure(background="#ffffff", padding=14).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="classroom.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    rows, wanted = [], None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape, prepared = prepare(args.data, folder)
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(shape, 100), nn.Sigmoid(), nn.Linear(100, 10)).double()
        # From here on the ranks of this program have torch imported; those of mpirun import it each time.
        warm_up = {"workers": 2, "threads": 1, "steps": 1, "precision": "fp64", "quiet": True}
        tutti.train(copy.deepcopy(first), str(folder), **warm_up)
        for way, options in WAYS.items():
            if why := missing(options):
                print(f"{way:>13}: left out, as {why}")
                continue
            seconds, accuracy, weight = run(way, folder, first, args.epochs)
            wanted = weight if wanted is None else wanted
            seconds = prepared | seconds
            rows += [
                {"way": way, "stage": s, "place": STAGES.index(s), "seconds": seconds[s]} for s in STAGES
            ]
            print(f"{way:>13}:", *(f"{stage} {seconds[stage]:.2f} s," for stage in STAGES), end=" ")
            apart = (weight - wanted).abs().max().item()
            print(f"accuracy {accuracy:.4f}, weights {apart:.0e} from those of one process")
    draw(rows, args.out)
    print(f"written: {args.out}")
