"""A small training in which something goes wrong on rank 1: the variable FAULT of the environment says what.

What is named nowhere here befalls the training from outside: see `benchmarks/attribution.py`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti

FAULT = os.environ.get("FAULT", "")
STEP = int(os.environ.get("FAULT_STEP", "12"))
"""The step behind which it happens, once."""

armed = False
"""True in the rank that it befalls, from that step on."""


class Failing(torch.autograd.Function):
    """The identity, whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("a fault")


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 16), nn.Linear(16, 2)
        self.fixed.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.fixed(inputs)))
        if armed and self.training:
            hidden = self.fault(hidden)
        return self.last(hidden)

    def fault(self, hidden: Tensor) -> Tensor:
        if FAULT == "exception in model":
            raise ValueError("a fault")
        if FAULT == "exception in backward":
            return Failing.apply(hidden)
        if FAULT == "memory by RLIMIT_AS":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
            torch.ones(1 << 28)
        if FAULT == "hang in model":
            dwell()
        return hidden


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    if armed and FAULT == "exception in loss":
        raise ValueError("a fault")
    found = functional.cross_entropy(outputs, targets, reduction="none")
    return found * torch.nan if armed and FAULT == "NaN in the loss of one rank" else found


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Points of the plane on two sides of a line; rank 0 reads them."""
    if FAULT == "exception in data":
        raise ValueError("a fault")
    inputs = np.random.default_rng(0).standard_normal((400, 4)).astype(np.float32)
    return inputs, (inputs[:, 0] > 0).astype(np.int64)


def change(inputs: Tensor, targets: Tensor, random: object) -> tuple[Tensor, Tensor]:
    """Leave a training batch as it is."""
    if armed and FAULT == "exception in augmentation":
        raise ValueError("a fault")
    if armed and FAULT == "hang in augmentation":
        dwell()
    return inputs, targets


def dwell() -> None:
    """Never return."""
    threading.Event().wait()


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def wait_for_a_file_system() -> None:
    pipe = Path(os.environ["FAULT_FOLDER"], "pipe")
    os.mkfifo(pipe)
    os.close(os.open(pipe, os.O_RDONLY))


def compute_for_ever() -> None:
    while True:
        pass


def recurse() -> None:
    recurse()


class Faulty(tutti.Callback):
    """Lets a step take at least 20 ms, and one thing go wrong."""

    def step(self, course: tutti.Course) -> None:
        global armed
        time.sleep(0.02)
        if course.step == STEP and FAULT == "run folder deleted" and course.rank == 0:
            shutil.rmtree(Path(os.environ["FAULT_FOLDER"], "run"))
        happened = Path(os.environ["FAULT_FOLDER"], "happened")
        if course.step != STEP or course.rank != 1 or happened.exists():
            return
        happened.touch()
        armed = True
        match FAULT:
            case "sys.exit(3)":
                sys.exit(3)
            case "os._exit(3)":
                os._exit(3)
            case "os._exit(0)":
                os._exit(0)
            case "exception in callback":
                raise ValueError("a fault")
            case "exception in thread":
                threading.Thread(target=int, args=("no number",)).start()
            case "KeyboardInterrupt":
                raise KeyboardInterrupt
            case "RecursionError":
                recurse()
            case "memory by control group":
                Path(os.environ["FAULT_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
                np.ones(1 << 28).sum()
            case "too many files":
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                self.files = [os.open(__file__, os.O_RDONLY) for _ in range(100)]
            case "hang in callback":
                dwell()
            case "hang with the GIL held":
                hold_the_gil()
            case "hang in a file system":
                wait_for_a_file_system()
            case "hang in an endless loop":
                compute_for_ever()
            case "another collective":
                from tutti.launch.world import join

                join().barrier()
            case "NaN in the weights of one rank":
                with torch.no_grad():
                    course.model.last.weight.fill_(torch.nan)
            case "clock set back":
                real = time.time
                time.time = lambda: real() - 7200  # type: ignore[assignment]
