"""Learning-rate schedules by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from tutti.errors import BadOption, UnknownName
from tutti.optim.schedules import schedule


def sgd(lr: float = 1.0) -> optim.Optimizer:
    return optim.SGD([nn.Parameter(torch.zeros(2))], lr=lr, momentum=0.9)


def rates(name: str, updates: int, **options: object) -> list[float]:
    """The rate of each update of a run, and the one after the last."""
    optimizer = sgd()
    made = schedule(name, optimizer, updates, options)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(updates):
        optimizer.step()
        made.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def halve(step: int) -> float:
    return 0.5**step


@pytest.mark.parametrize("name", ["OneCycleLR", "one_cycle", "onecycle", "one-cycle", "onecyclelr"])
def test_one_cycle_has_its_peak_at_the_runs_rate_and_lasts_the_run(name: str) -> None:
    found = rates(name, 20)
    assert max(found) == pytest.approx(1.0, abs=0.02)
    assert found[0] == pytest.approx(1 / 25)
    assert found[19] == pytest.approx(1 / 250_000)


@pytest.mark.parametrize("name", ["cosine", "CosineAnnealingLR", "cosine_annealing"])
def test_cosine_ends_at_zero_with_the_run(name: str) -> None:
    found = rates(name, 10)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[10] == pytest.approx(0.0, abs=1e-12)


def test_warm_restarts_twice_in_a_run_each_cycle_twice_as_long() -> None:
    found = rates("warm", 70)
    assert [step for step in range(70) if found[step] == 1.0] == [0, 10, 30]
    assert found[69] < 0.01
    equal = rates("CosineAnnealingWarmRestarts", 30)
    assert [step for step in range(30) if equal[step] == 1.0] == [0, 10, 20]
    own = rates("warm", 12, T_0=4, T_mult=1)
    assert [step for step in range(12) if own[step] == 1.0] == [0, 4, 8]


def test_linear_falls_to_zero_over_the_run() -> None:
    assert rates("linear", 4) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_constant_is_no_schedule() -> None:
    assert schedule("constant", sgd(), 10) is None
    with pytest.raises(UnknownName, match="unknown option 'factor' of the schedule 'constant'"):
        schedule("constant", sgd(), 10, {"factor": 0.5})


def test_a_function_is_named_by_its_module() -> None:
    assert rates("lambda", 2, lr_lambda="tests.optim.test_schedules:halve") == pytest.approx([1.0, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("one_cylce", {}, UnknownName, "did you mean 'one_cycle'"),
        ("cosine", {"eta_mn": 1}, UnknownName, "did you mean 'eta_min'"),
        ("step", {}, BadOption, "needs the option 'step_size'"),
        ("one_cycle", {"pct_start": 3}, BadOption, "cannot be made with .*pct_start.* for 10 updates"),
        ("one_cycle", {"last_epoch": 3}, BadOption, "is set by the run; leave it out"),
        ("plateau", {"factor": 2.0}, BadOption, "cannot be made with .*factor"),
        ("SequentialLR", {}, BadOption, "is made from other schedulers"),
        ("tests.optim.test_schedules:halve", {}, BadOption, "expected a subclass of torch's LRScheduler"),
    ],
)
def test_wrong_schedules_are_refused(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        schedule(name, sgd(), 10, options)
