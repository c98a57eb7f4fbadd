"""The parameter centre's update with Adam, everything counted, beside torch's fused Adam alone and NumPy.

    python benchmarks/centre.py [--parameters 1000000] [--rounds 9]

The sides, in one process with one thread, in turn, `rounds` times `--updates` updates, medians:

    fused Adam   torch's fused kernel alone, on one vector of weights and one of gradients
    centre       a worker's exchange in shared memory: lock, read the message, update, write the reply, unlock
    NumPy        Adam as one writes it down, with a copy of the message in and of the weights out

Wanted: the centre at most 1.3 times the fused kernel alone, and at least 4 times faster than NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import nn, optim

from measure import describe_machine, interleave, table
from tutti.comm.shm.communicator import HostCommunicator
from tutti.parameter_server.rules import OptimizerRule
from tutti.parameter_server.shared_memory import SharedCentre, slots_for
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place

MOST_OF_FUSED, LEAST_OF_NUMPY = 1.3, 4.0


class Vector(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(length))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side")
    parser.add_argument("--updates", type=int, default=40, help="updates in one measurement")
    parser.add_argument("--workers", type=int, default=2, help="the centre is cut as for so many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    updates = {
        "fused Adam": fused(args.parameters),
        "centre": centre(args.parameters, args.workers),
        "NumPy": numpy_adam(args.parameters),
    }
    sides = {name: _timed(update, args.updates) for name, update in updates.items()}
    measured = interleave(sides, args.rounds)
    times = {name: median(values) for name, values in measured.items()}
    rows = [
        (name, f"{1e3 * time:.3f}", f"{time / times['fused Adam']:.2f}", f"{times['NumPy'] / time:.1f}")
        for name, time in times.items()
    ]
    print(describe_machine())
    print(f"{args.parameters} parameters in fp32, one thread, median of {args.rounds} x {args.updates}\n")
    print(table(["side", "ms per update", "of fused Adam", "times NumPy's speed"], rows))
    share, speed = times["centre"] / times["fused Adam"], times["NumPy"] / times["centre"]
    print(f"\nthe centre takes {share:.2f} times as long as the kernel alone (wanted: {MOST_OF_FUSED})")
    print(f"the centre is {speed:.1f} times as fast as NumPy (wanted: {LEAST_OF_NUMPY})")


def _timed(update: Callable[[], None], count: int) -> Callable[[], float]:
    def run() -> float:
        began = perf_counter()
        for _ in range(count):
            update()
        return (perf_counter() - began) / count

    return run


def fused(length: int) -> Callable[[], None]:
    weights = nn.Parameter(torch.randn(length))
    weights.grad = torch.randn(length)
    return optim.Adam([weights], lr=1e-3, fused=True).step


def centre(length: int, workers: int) -> Callable[[], None]:
    comm = HostCommunicator.alone()
    module = Vector(length)
    replica = place(module, comm, WeightPlacement.PRIVATE)
    message = [torch.randn_like(flat.grads) for flat in replica.flats]
    # The message is kept: what is measured is the centre's work, not the clearing of the worker's gradient.
    rule = OptimizerRule(optim.Adam(module.parameters(), lr=1e-3), replica, message, keep=True)
    joined = SharedCentre(comm, replica.flats, rule, parts=slots_for(replica.flats, workers))
    reply = [flat.weights for flat in replica.flats]

    def update() -> None:
        joined.exchange(message, reply)

    return update


def numpy_adam(length: int) -> Callable[[], None]:
    generator = np.random.default_rng(0)
    weights, message = (generator.standard_normal(length, dtype=np.float32) for _ in range(2))
    mean, square, step = np.zeros_like(weights), np.zeros_like(weights), 0
    reply = np.empty_like(weights)

    def update() -> None:
        nonlocal mean, square, weights, step
        step += 1
        gradient = message.copy()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        corrected = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        weights = weights - 1e-3 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
        reply[:] = weights

    return update


if __name__ == "__main__":
    main()
