"""Train for some seconds and print samples/s: steady.py WAY MODEL SECONDS, started as `busy.py` says."""

from __future__ import annotations

import sys
from time import monotonic

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti
from tutti import models

BATCH = 128
WARM_UP = 0.4
"""The share of the seconds that is not counted: a run needs some to see that its cores are busy."""


class Rate(tutti.Callback):
    """Prints the samples per second of a run, and ends it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.counted = seconds, 0.0, None

    def step(self, course) -> None:
        now = monotonic()
        self.began = self.began or now
        if self.counted is None and now - self.began > WARM_UP * self.seconds:
            self.counted = course.step, now
        if now - self.began > self.seconds and course.rank == 0 and self.seconds:
            step, since = self.counted
            print("samples/s", BATCH * (course.step - step) / (now - since), flush=True)
            self.seconds = 0
            course.stop("it has been timed")


def main(way: str, model: str, seconds: float) -> None:
    torch.manual_seed(0)
    module = models.build(model, (1, 28, 28), 10, {})
    inputs, targets = torch.randn(20 * BATCH, 1, 28, 28), torch.randint(10, (20 * BATCH,))
    if way.isdecimal():
        data = inputs.numpy(), targets.numpy()
        rate = Rate(seconds)
        tutti.train(
            module,
            data,
            workers=int(way),
            epochs=10**6,
            batch_size=BATCH,
            validation=0.0,
            quiet=True,
            callbacks=rate,
        )
        return
    rank, ranks = tutti.init().rank, tutti.init().size
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    if way == "ddp":
        dist.init_process_group("tutti")
        module = DistributedDataParallel(module)
        batches = [(some.chunk(ranks)[rank], labels.chunk(ranks)[rank]) for some, labels in batches]
    elif way == "own_loop":
        module, optimizer = tutti.distribute(module, optimizer)
    rate, course = Rate(seconds), Steps(rank)
    while rate.seconds and not course.over:
        for some, labels in tutti.shard(batches) if way == "own_loop" else batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(some), labels).backward()
            optimizer.step()
            course.step += 1
            rate.step(course)
        course.over = bool(tutti.total(torch.tensor(float(not rate.seconds))))


class Steps:
    """The steps of an own loop, as `Rate` looks at them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step, self.over = rank, 0, False

    def stop(self, why: str) -> None:
        self.over = True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
