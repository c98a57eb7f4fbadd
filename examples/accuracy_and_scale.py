"""How training scales to 256 virtual workers, and what that costs in accuracy.

    python examples/accuracy_and_scale.py [--workers 4,16,64,256] [--epochs 10] [--out accuracy-and-scale.svg]

The gradients are real, the clock is virtual: a sample takes a millisecond, a message alpha + n beta. All runs
see the same number of samples; each worker takes 4 a step. The lesson: docs/lessons/ring-tree-server.md
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import nn
from tutti import Clip, Downpour, ParamServer, Sync
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, open_data
from tutti.errors import NotFinite
from tutti.launch.cores import allowed_cores
from tutti.strategies import place
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.run_parts import Schedule, Workers
from tutti.training.trainer import Trainer

WAYS = {
    "synchronous, ring": Sync(collective="ring"),
    "synchronous, tree": Sync(collective="tree"),
    "synchronous, server": ParamServer(),
    "asynchronous, server": Downpour(),
}


def program(comm, strategy, data, epochs):
    """One worker, or the server; the clock at the end of training, and the test accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    replica = place(model, comm, strategy.home)
    if comm.servers is not None and comm.servers.serving:
        return strategy.serve(comm.servers, replica, optimizer, Clip())
    objective = Objective(LOSSES["cross_entropy"], [METRICS["accuracy"]])
    own = isinstance(strategy, Downpour)  # then a batch is one worker's, else it is divided
    batches = Batches(data.train, 4 if own else 4 * comm.size, comm.rank, comm.size, own=own)
    worker = strategy.worker(replica, comm, optimizer, Clip())
    workers = Workers(comm, replica, worker, optimizer, seconds_per_sample=1e-3)
    Trainer(workers, objective, Schedule(batches, epochs)).fit()
    return comm.clock(), evaluate(model, data.test, comm, objective).total(comm).metrics["accuracy"]


def measure(epochs, name, count):
    torch.set_num_threads(1)
    strategy, data = WAYS[name], open_data("digits", HostCommunicator.alone(), validation=0.0)
    world = VirtualWorld(count, ranks_per_host=1, servers=0 if isinstance(strategy, Sync) else 1)
    try:
        seconds, accuracy = world.run(program, strategy, data, epochs)[0]
    except NotFinite:
        seconds, accuracy = None, 0.1  # diverged: no better than guessing
    end = "diverged" if seconds is None else f"{seconds:.3f} s"
    print(f"{name:>20}, {count:3} workers: accuracy {accuracy:.3f}, {end}", flush=True)
    return {"way": name, "workers": count, "accuracy": accuracy, "seconds": seconds}


def draw(rows, out):
    import altair as alt

    workers = alt.X("workers:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(tickCount=9))
    base = alt.Chart(alt.Data(values=rows)).mark_line(point=True).properties(width=330, height=220)
    legend = alt.Legend(orient="bottom", labelLimit=240)
    base = base.encode(workers, color=alt.Color("way:N", sort=None, title="updates", legend=legend))
    right = alt.Y(
        "accuracy:Q",
        title=["test accuracy", "(synchronous: one line)"],
        axis=alt.Axis(format="%"),
        scale=alt.Scale(domain=[0, 1]),
    )
    speed = alt.Y("speed-up:Q", scale=alt.Scale(type="log", base=2), title="speed-up over one worker")
    chart = alt.hconcat(base.encode(speed), base.encode(right), spacing=30)
    chart = chart.configure(background="#ffffff", padding=14).configure_axis(labelFlush=False)
    chart.configure_legend(columnPadding=18).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="4,16,64,256", help="beside one")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--out", default="accuracy-and-scale.svg", help="picture to write: .svg, .png or .html"
    )
    args = parser.parse_args()
    counts = [int(count) for count in args.workers.split(",")]
    one = measure(args.epochs, "synchronous, tree", 1)
    rows = [{**one, "way": name} for name in WAYS]  # all ways are the same for one worker
    runs = [(name, count) for name in WAYS for count in counts]
    with ProcessPoolExecutor(allowed_cores().usable) as pool:  # a virtual cluster is one process
        rows += pool.map(partial(measure, args.epochs), *zip(*runs, strict=True))
    draw([{**row, "speed-up": row["seconds"] and one["seconds"] / row["seconds"]} for row in rows], args.out)
    print(f"written: {args.out}")
