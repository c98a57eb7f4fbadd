"""Staleness in Downpour, and remedies: accuracy and virtual time with 1 to 256 workers.

    pip install 'tutti[plots]'
    python staleness.py [--workers 1,4,16,64,256] [--epochs 20] [--out staleness.svg]

The gradients are real, the clock is virtual; the same seed gives the same picture. All runs compute the same
number of gradients, so twice the workers need half the time, but their gradients are staler. A run that
diverges has no time.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, open_data
from tutti.errors import NotFinite
from tutti.strategies import Clip, Downpour, place
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.run_parts import Schedule, Workers
from tutti.training.trainer import Trainer

REMEDIES = {
    "none": Downpour(),
    "inverse": Downpour(staleness="inverse"),
    "delay compensated": Downpour(staleness="delay_compensated"),
    "delay compensated, adaptive": Downpour(staleness="delay_compensated_adaptive"),
}
SECONDS_PER_SAMPLE = 1e-3


def run(comm, strategy, data, epochs, lr):
    """Train as one worker; return the test accuracy and the mean staleness."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    replica = place(model, comm, strategy.home)
    objective = Objective(LOSSES["cross_entropy"], [METRICS["accuracy"]])
    worker = strategy.worker(replica, comm, optimizer, Clip())
    # No two workers have the same speed.
    seconds = SECONDS_PER_SAMPLE * (1 + 0.2 * ((comm.rank * 0.618) % 1))
    workers = Workers(comm, replica, worker, optimizer, seconds_per_sample=seconds)
    batches = Batches(data.train, 4, comm.rank, comm.size, own=True)
    history = Trainer(workers, objective, Schedule(batches, epochs)).fit()
    stale = [rank.staleness_mean or 0.0 for record in history for rank in record.ranks]
    accuracy = evaluate(model, data.test, comm, objective).total(comm).metrics["accuracy"]
    return accuracy, sum(stale) / len(stale)


def measure(workers, remedy, data, epochs, lr):
    world = VirtualWorld(workers)
    found = {"workers": workers, "remedy": remedy}
    try:
        accuracy, staleness = world.run(run, REMEDIES[remedy], data, epochs, lr)[0]
    except NotFinite:
        return {**found, "accuracy": 0.1, "virtual seconds": None, "staleness": None}  # diverged: guessing
    return {**found, "accuracy": accuracy, "virtual seconds": world.seconds, "staleness": staleness}


def draw(found, out):
    import altair as alt

    workers = alt.X("workers:O", axis=alt.Axis(labelAngle=0))
    legend = alt.Legend(orient="bottom", labelLimit=240)
    remedy = alt.Color("remedy:N", sort=[*REMEDIES], title="remedy", legend=legend)
    lines = alt.Chart(alt.Data(values=found)).mark_line(point=True).encode(workers, remedy)
    percent = alt.Axis(format="%", tickCount=5)
    accuracy = alt.Y("accuracy:Q", title="test accuracy", axis=percent, scale=alt.Scale(domain=[0, 1]))
    decades = alt.Axis(values=[0.1, 1, 10, 100])
    seconds = alt.Y("virtual seconds:Q", title="virtual time, s", axis=decades, scale=alt.Scale(type="log"))
    chart = lines.encode(accuracy).properties(width=380) | lines.encode(seconds).properties(width=380)
    chart.configure(background="#ffffff", padding=14).configure_legend(columnPadding=18).save(out)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", default="staleness.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = open_data("digits", HostCommunicator.alone(), validation=0.0)
    found = []
    for workers in map(int, args.workers.split(",")):
        for remedy in REMEDIES:
            found.append(measure(workers, remedy, data, args.epochs, args.lr))
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in found[-1].values()))
    draw(found, args.out)
    print(f"written: {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
