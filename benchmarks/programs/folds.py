"""A cross-validation by hand, one fold after the other: python folds.py QUESTION THREADS

QUESTION is a `Question` in JSON. folds_with_joblib.py trains by the same `train`. Both print as JSON when
each job began and ended, and its accuracy.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch._dynamo  # Else the first optimizer imports it, for a second or more.
from sklearn.model_selection import KFold
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tutti import models
from tutti.optim.schedules import schedule


class Job(NamedTuple):
    """One training run."""

    model: str
    schedule: str
    fold: int


class Done(NamedTuple):
    """A job that has come to its end."""

    began: float
    ended: float
    accuracy: float


@dataclass(frozen=True)
class Question:
    """A cross-validation; `data` is an NPZ file with x_train and y_train."""

    data: str
    models: list[str]
    schedules: list[str]
    folds: int
    epochs: int
    batch_size: int
    cores: int

    def jobs(self) -> list[Job]:
        return [Job(*each) for each in product(self.models, self.schedules, range(self.folds))]

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.data) as file:
            return file["x_train"], file["y_train"].astype(np.int64)

    def split(self, fold: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
        return list(KFold(self.folds, shuffle=True, random_state=0).split(np.arange(samples)))[fold]


class Fold(NamedTuple):
    """The samples of a fold, their pixels scaled by the mean and deviation of its training part."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor


def open_fold(question: Question, fold: int, images: np.ndarray, labels: np.ndarray) -> Fold:
    train_rows, held_rows = question.split(fold, len(labels))
    inputs = torch.from_numpy(images[train_rows]).float()
    held = torch.from_numpy(images[held_rows]).float()
    deviation, mean = torch.std_mean(inputs)
    for part in (inputs, held):
        part.sub_(mean).div_(deviation)
    return Fold(inputs, torch.from_numpy(labels[train_rows]), held, torch.from_numpy(labels[held_rows]))


def build(job: Job, inputs: Tensor) -> nn.Module:
    torch.manual_seed(job.fold)
    return models.build(job.model, tuple(inputs.shape[1:]), 10, {})


def optimizer_of(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), fused=True)


def schedule_of(question: Question, job: Job, optimizer: optim.Optimizer, samples: int) -> LRScheduler | None:
    updates = question.epochs * -(-samples // question.batch_size)
    return schedule(job.schedule, optimizer, updates)


def train(question: Question, job: Job, images: np.ndarray, labels: np.ndarray, threads: int) -> Done:
    """Train as one would by hand, and validate after each epoch."""
    began = time.time()
    torch.set_num_threads(threads)
    fold = open_fold(question, job.fold, images, labels)
    model = build(job, fold.inputs)
    optimizer = optimizer_of(model)
    rate = schedule_of(question, job, optimizer, len(fold.targets))
    found = 0.0
    for _ in range(question.epochs):
        model.train()
        for rows in torch.randperm(len(fold.targets)).split(question.batch_size):
            optimizer.zero_grad()
            cross_entropy(model(fold.inputs[rows]), fold.targets[rows]).backward()
            optimizer.step()
            if rate is not None and not isinstance(rate, ReduceLROnPlateau):
                rate.step()
        model.eval()
        with torch.no_grad():
            outputs = model(fold.held_inputs)
        found = (outputs.argmax(1) == fold.held_targets).double().mean().item()
        if isinstance(rate, ReduceLROnPlateau):
            rate.step(cross_entropy(outputs, fold.held_targets).item())
    return Done(began, time.time(), found)


def read_question(path: str) -> Question:
    return Question(**json.loads(Path(path).read_text()))


def tell(done: list[Done]) -> None:
    """Print what `farm.py` reads: the last line of the program."""
    print(json.dumps([one._asdict() for one in done]), flush=True)


def main() -> None:
    question, threads = read_question(sys.argv[1]), int(sys.argv[2])
    images, labels = question.samples()
    tell([train(question, job, images, labels, threads) for job in question.jobs()])


if __name__ == "__main__":
    main()
