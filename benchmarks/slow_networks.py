"""Strategies for slow networks, side by side, by virtual workers.

    python benchmarks/slow_networks.py [--workers 8,32] [--seeds 3] [--samples 30000] [--jobs 2]

Workers are virtual: gradients and exchanges are real, time is a clock that passes take `PASS_S` of, give or
take a tenth, and the links what their bandwidth says. Each worker is a host of its own. Learning: all
strategies see the same number of samples. Cost: a model of `PARAMETERS` numbers whose gradients are random.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from statistics import mean
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn

from measure import table
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import Fault, VirtualWorld
from tutti.data.sources import read_source
from tutti.errors import PeerLost
from tutti.models import MODELS
from tutti.optim import build
from tutti.parameter_server.base import Centre
from tutti.replica import Replica
from tutti.strategies import Clip, Strategy, named, place
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred

PASS_S: Final = 0.025
"""Virtual seconds of a forward and backward pass."""
PARAMETERS: Final = 1_000_000
ROUND: Final = 256
"""Samples that all workers together train on in a step of each."""
LATENCY_S: Final = 0.02
CONTEXT: Final = 32
MBITS: Final = (10, 100, 1000)


@dataclass(frozen=True)
class Task:
    """Samples, and a model to be trained on them."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    module: Callable[[], nn.Module]
    lr: float


@dataclass(frozen=True)
class Recipe:
    """How a strategy is trained here; what is not said is its default."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    lr: float = 0.002

    def made(self) -> Strategy:
        return named(self.strategy)(**self.options)


H: Final = {"every": 20}
HALF: Final = {**H, "outer_momentum": 0.5}
RECIPES: Final = {
    "sync": Recipe("sync"),
    "sync top-k": Recipe("sync", {"compress": "top_k"}),
    "local": Recipe("local", H),
    "local DES-LOC": Recipe("local", {**H, "first_moment_every": 60, "second_moment_every": 120}),
    "diloco": Recipe("diloco", HALF),
    "diloco streaming": Recipe("diloco", {**HALF, "fragments": 4, "delay": 3, "mixing": 0.5}),
    "diloco streaming e3m0": Recipe(
        "diloco", {**HALF, "fragments": 4, "delay": 3, "mixing": 0.5, "compress": "e3m0"}
    ),
    "sparseloco": Recipe("sparseloco", {**H, "keep": 0.03}),
    "noloco": Recipe("noloco", HALF),
    "async_diloco": Recipe("async_diloco", HALF),
}


def world(strategy: Strategy, workers: int, mbit: float, faults: list[Fault] | None = None) -> VirtualWorld:
    """Workers on hosts of their own, and a server where the strategy has a centre."""
    network = Network(LATENCY_S, mbit * 125_000)
    servers = int(Centre in strategy.needs)
    return VirtualWorld(workers, 1, network, faults or [], servers=servers)


def trained(comm: Communicator, recipe: Recipe, module: nn.Module, steps: int, loss: Any, lr: float) -> Any:
    """Train a rank's model; returns its worker, or None on a server."""
    strategy = recipe.made()
    optimizer = build(recipe.optimizer, [*module.parameters()], lr)
    if comm.servers is not None and comm.servers.serving:
        assert isinstance(strategy, Centred)
        strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return None
    worker = strategy.worker(place(module, comm, strategy.home), comm, optimizer, Clip())
    worker.share = 1 / comm.size if strategy.pace is Pace.TOGETHER else 1.0
    pace = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        comm.compute(PASS_S * (0.9 + 0.2 * float(torch.rand((), generator=pace))))
        (loss(step) * worker.share).backward()
        worker.step()
    return worker


# What is learned.


@cache
def pictures() -> Task:
    """CIFAR-10, in deviations; 5,000 of its test samples."""
    parts = read_source("cifar10", {}).parts
    inputs, targets = (
        [torch.tensor(numpy.asarray(parts[name][which])) for name in ("train", "test")] for which in (0, 1)
    )
    mean, deviation = inputs[0].float().mean(), inputs[0].float().std()
    train, test = ((one.float() - mean) / deviation for one in inputs)
    module = partial(MODELS.named("cnn"), tuple(train.shape[1:]), 10, channels=[16, 32])
    return Task(train, targets[0].long(), test[:5000], targets[1].long()[:5000], module, 0.002)


@cache
def text() -> Task:
    """The next character of Python's documentation, from the 32 before it; the last tenth is the test."""
    import pydoc_data.topics

    words = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    codes = torch.tensor(list(words))
    windows = codes.unfold(0, CONTEXT + 1, 1)
    border = len(windows) * 9 // 10
    test = windows[border + CONTEXT :: 10]
    module = partial(MODELS.named("transformer"), (CONTEXT,), 128, width=64, vocabulary=128, dropout=0.0)
    return Task(windows[:border, :-1], windows[:border, -1], test[:, :-1], test[:, -1], module, 0.005)


TASKS: Final = {"cifar10": pictures, "text": text}


def learn(name: str, recipe: Recipe, workers: int, seed: int, samples: int) -> float:
    """Train all workers on a task; the accuracy on its test samples, in percent."""
    torch.set_num_threads(1)
    task = TASKS[name]()
    steps = samples * (2 if name == "text" else 1) // ROUND
    drawn = torch.Generator().manual_seed(seed)
    order = torch.randint(len(task.inputs), (steps, workers, ROUND // workers), generator=drawn)

    def program(comm: Communicator) -> float | None:
        torch.manual_seed(seed)
        module = task.module()

        def loss(step: int) -> Tensor:
            rows = order[step, comm.rank]
            return nn.functional.cross_entropy(module(task.inputs[rows]), task.targets[rows])

        worker = trained(comm, recipe, module, steps, loss, task.lr)
        if worker is None:
            return None
        worker.finish()
        if comm.rank:
            return None
        with torch.no_grad():
            right = module.eval()(task.test_inputs).argmax(1) == task.test_targets
        return 100 * float(right.float().mean())

    return next(found for found in world(recipe.made(), workers, 1000).run(program) if found is not None)


# What it costs.


class Numbers(nn.Module):
    """A model of `PARAMETERS` numbers in layers, with random gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(PARAMETERS // 10) for _ in range(10))
        self.gradients = [torch.randn(PARAMETERS // 10) for _ in range(10)]

    def forward(self) -> Tensor:
        pairs = zip(self.layers, self.gradients, strict=True)
        return torch.stack([layer @ gradient for layer, gradient in pairs]).sum()


@dataclass(frozen=True)
class Cost:
    """Bytes sent by a worker in a step, the share of its time in which it computes, memory in weights."""

    bytes_sent: float
    utilisation: float
    memory: float


def cost(recipe: Recipe, workers: int, mbit: float, steps: int) -> Cost:
    """Measure `steps` steps of each worker."""
    torch.set_num_threads(1)
    before = tensors()  # of the tasks

    def program(comm: Communicator) -> tuple[float, float, float] | None:
        torch.manual_seed(comm.rank)
        module = Numbers()
        worker = trained(comm, recipe, module, steps, lambda step: module(), recipe.lr)
        if worker is None:
            return None
        sent, seconds = worker.traffic.bytes_sent / steps, comm.clock()
        memory = (tensors() - before) / workers / (4 * PARAMETERS) if comm.rank == 0 else 0.0
        worker.finish()
        return sent, steps * PASS_S / seconds, memory

    found = [one for one in world(recipe.made(), workers, mbit).run(program) if one is not None]
    return Cost(mean(one[0] for one in found), mean(one[1] for one in found), found[0][2])


def tensors() -> int:
    """Bytes of all tensors of this process."""
    storages = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


def loses(recipe: Recipe, workers: int) -> str:
    """Say what the others do when a worker is killed in the middle."""
    strategy = recipe.made()

    def program(comm: Communicator) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        worker = trained(comm, recipe, module, 200, lambda step: module(torch.ones(4, 8)).sum(), recipe.lr)
        if worker is not None:
            worker.finish()

    cluster = world(strategy, workers, 1000, [Fault(1, operation=8)])
    try:
        cluster.run(program)
    except PeerLost:
        return "stops the others"
    assert cluster.lost == [1]
    return "costs nothing"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="8,32")
    parser.add_argument("--strategies", default=",".join(RECIPES), help="comma-separated rows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--samples", type=int, default=30_000, help="that each training takes; of text twice as many"
    )
    parser.add_argument("--steps", type=int, default=120, help="of a measurement of cost")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    args = parser.parse_args()
    tables = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for workers in map(int, args.workers.split(",")):
            rows = []
            for name in args.strategies.split(","):
                recipe = RECIPES[name]
                learned = [
                    [
                        pool.submit(learn, task, recipe, workers, seed, args.samples)
                        for seed in range(args.seeds)
                    ]
                    for task in TASKS
                ]
                costs = [pool.submit(cost, recipe, workers, mbit, args.steps) for mbit in MBITS]
                accuracy = [mean(one.result() for one in runs) for runs in learned]
                measured = [one.result() for one in costs]
                shares = [f"{one.utilisation:.1%}" for one in measured]
                cells = [f"{measured[0].bytes_sent:,.0f}", *shares, *(f"{one:.1f}" for one in accuracy)]
                rows.append([name, *cells, f"{measured[0].memory:.1f}", loses(recipe, workers)])
                print(*rows[-1], sep="  ", flush=True)
            head = ["strategy", "bytes", *(f"{mbit} Mbit/s" for mbit in MBITS)]
            head += [*(f"{task} %" for task in TASKS), "memory", "a loss"]
            tables.append(f"{workers} workers:\n\n{table(head, rows)}\n")
    print("", *tables, sep="\n")


if __name__ == "__main__":
    main()
