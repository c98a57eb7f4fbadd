"""Elastic averaging, in numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from tutti.parameter_server.rules import attract
from tutti.strategies.easgd_sync import gather


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_worker_and_centre_go_towards_each_other() -> None:
    # d = 0.25 * (10 - 2) = 2
    worker, centre = scalar(10.0), scalar(2.0)
    attract(worker, centre, 0.25)
    assert (worker.item(), centre.item()) == (8.0, 4.0)


def test_the_centre_goes_towards_the_mean() -> None:
    # (1 - 0.5) * 2 + 0.5 * (4 + 8) / 2 = 4
    centre = scalar(2.0)
    gather(centre, scalar(12.0), workers=2, force=0.5)
    assert centre.item() == 4.0


def test_the_synchronous_rule_is_every_workers_pull_at_once() -> None:
    workers, centre = [scalar(4.0), scalar(8.0), scalar(-3.0)], scalar(1.0)
    total, once = sum(workers, scalar(0.0)), centre.clone()
    for worker in workers:
        before = scalar(1.0)
        attract(worker.clone(), before, 0.9 / 3)
        once += before - 1.0
    gather(centre, total, 3, 0.9)
    assert centre.item() == pytest.approx(once.item())
