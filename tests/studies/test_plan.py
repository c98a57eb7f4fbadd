"""Plans: the ranks that measure, on virtual ranks, and the use of their results."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption, BadRunFolder, UserError
from tutti.launch.busy_cores import ThreadTimes
from tutti.launch.cores import Cores, allowed_cores
from tutti.launch.placement import Placement
from tutti.run.config import TrainConfig
from tutti.studies.autotune import candidates, measure, race
from tutti.studies.autotune import plan as planning
from tutti.studies.autotune.candidates import Candidate, Choices
from tutti.studies.autotune.plan import RESTART_S, PlanJob, plan, planned
from tutti.studies.autotune.race import Entry, Timing
from tutti.studies.autotune.recommendation import Recommendation
from tutti.studies.autotune.twins import Twins

MLP = TrainConfig(model="mlp", model_options={"hidden": [16]})
CNN = TrainConfig(model="cnn", model_options={"channels": [4, 4], "hidden": 8})


@pytest.fixture(autouse=True)
def short_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each candidate one short turn: virtual clocks stand still, so no budget is ever used up."""
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    monkeypatch.setattr(planning, "processor_flags", lambda: {"amx_bf16"})
    monkeypatch.setattr(race, "ROUNDS", 1)
    monkeypatch.setattr(race, "TURN_S", (0.02, 0.02))


class Flattened(nn.Module):
    """Works in the plain layout alone, like all models with `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.outputs = nn.Linear(4 * 6 * 6, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outputs(self.features(inputs).view(len(inputs), -1))


class SingleGradient(nn.Module):
    """Has no gradient in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.outputs(inputs.flatten(1))
        if found.requires_grad:
            found.register_hook(self.refuse)
        return found

    def refuse(self, gradient: Tensor) -> None:
        if gradient.dtype is torch.float64:
            raise RuntimeError("not implemented for 'Double'")


def rehearsed(
    config: TrainConfig,
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (2, 1)),
    dared: tuple[str, ...] = (),
    precisions: tuple[str, ...] = ("fp32",),
    layouts: tuple[str, ...] = ("contiguous", "channels_last"),
    budget_s: float = 1000.0,
    for_run: bool = False,
) -> Recommendation:
    """Return the recommendation of virtual ranks."""
    choices = Choices(shapes, precisions, layouts, (config.batch_size,))
    job = PlanJob(config, choices, dared, allowed_cores(), budget_s, for_run, quiet=True)

    def rank(comm: Communicator) -> Recommendation | None:
        return measure.work(comm, pickle.dumps(job))

    first, *others = VirtualWorld(ranks=max(size for size, _ in choices.shapes)).run(rank)
    assert others == [None] * len(others)
    assert first is not None
    return first


def job_of(budget_s: float = 20.0, for_run: bool = True, **options: object) -> PlanJob:
    config = replace(MLP, batch_size=64, **options)  # type: ignore[arg-type]
    choices = Choices(((1, 1),), ("fp32",), ("contiguous",), (64,))
    return PlanJob(config, choices, (), allowed_cores(), budget_s, for_run)


@pytest.mark.parametrize(
    ("options", "update_s", "allowed_s"),
    [
        ({"epochs": 6}, 0.003, 0.05 * 6 * 938 * 0.003 - RESTART_S),
        ({"epochs": 6, "goal": 0.99, "monitor": "val_accuracy"}, 0.003, 0.05 * 6 * 938 * 0.003 - RESTART_S),
        ({"steps": 5000}, 0.003, 0.05 * 5000 * 0.003 - RESTART_S),
        ({}, 0.003, 0.05 * 20 * 938 * 0.003 - RESTART_S),
        ({"epochs": 6}, 1.0, 20.0),
        ({"epochs": 6, "budget_s": 5.0}, 1.0, 5.0),
        ({"steps": 50}, 0.003, 0.05 * 50 * 0.003 - RESTART_S),
        ({"steps": 50, "for_run": False}, 0.003, 20.0),
    ],
)
def test_measuring_takes_at_most_the_budget_and_a_twentieth_of_the_run(
    options: dict[str, Any], update_s: float, allowed_s: float
) -> None:
    assert job_of(**options).allowance_s(60_000, update_s) == pytest.approx(allowed_s)


@pytest.mark.parametrize(("steps", "measured"), [(5, 1), (10**9, 4)])
def test_a_short_run_takes_the_first_way_and_a_long_one_measures_all(steps: int, measured: int) -> None:
    found = rehearsed(replace(CNN, steps=steps), for_run=True)
    assert sum(way.rate is not None for way in found.ways) == measured
    assert (found.pick is found.ways[0] and not found.pick.turns) is (measured == 1)
    assert ("the most likely way; no time was left" in found.why()[0]) is (measured == 1)


def test_every_way_is_measured_on_its_ranks() -> None:
    found = rehearsed(CNN)
    assert {way.candidate for way in found.ways} == {
        Candidate(ranks, 1, "fp32", layout, 32)
        for ranks in (1, 2)
        for layout in ("contiguous", "channels_last")
    }
    assert all(way.steps for way in found.ways)
    assert found.pick.rate


def test_the_layout_of_a_model_without_convolutions_is_no_choice() -> None:
    assert {way.candidate.layout for way in rehearsed(MLP).ways} == {"contiguous"}


def test_other_precisions_are_measured_beside_the_pick() -> None:
    found = rehearsed(MLP, dared=("bf16",))
    assert found.others[0].candidate == found.pick.candidate
    assert {way.candidate.precision for way in found.others[1:]} == {"bf16"}
    assert all(way.rate for way in found.others)


def test_a_precision_without_time_to_measure_is_named() -> None:
    found = rehearsed(MLP, dared=("bf16",), budget_s=0.0)
    assert found.why()[-1] == "bf16 is not chosen: not measured: no time left"


def test_several_precisions_may_compete() -> None:
    found = rehearsed(MLP, precisions=("fp32", "fp64"))
    assert {way.candidate.precision for way in found.ways} == {"fp32", "fp64"}


@pytest.mark.parametrize(
    ("model", "config", "field", "unfit", "message"),
    [
        (Flattened, CNN, "layout", "channels_last", "view size is not compatible"),
        (SingleGradient, MLP, "precision", "fp64", "the model's training step cannot take"),
    ],
)
def test_a_layout_or_precision_that_the_model_cannot_take_is_named_and_another_is_picked(
    monkeypatch: pytest.MonkeyPatch,
    model: type[nn.Module],
    config: TrainConfig,
    field: str,
    unfit: str,
    message: str,
) -> None:
    prepare = measure.prepare_task
    monkeypatch.setattr(measure, "prepare_task", lambda *given: replace(prepare(*given), module=model()))
    found = rehearsed(config, precisions=("fp32",) if config is CNN else ("fp64", "fp32"))
    failed = [way for way in found.ways if way.problem is not None]
    assert [getattr(way.candidate, field) for way in failed] == [unfit] * 2
    assert message in str(failed[0].problem)
    assert getattr(found.pick.candidate, field) != unfit


def test_a_training_that_diverges_is_measured() -> None:
    found = rehearsed(replace(MLP, optimizer="sgd", lr=1e30))
    assert found.pick.rate


def test_an_error_of_the_model_is_raised_by_the_plan() -> None:
    with pytest.raises(UserError, match="unknown model 'mlpp'"):
        rehearsed(replace(MLP, model="mlpp"))
    with pytest.raises(UserError, match="unknown option 'evry' of the strategy"):
        rehearsed(replace(MLP, strategy_options={"evry": 2}))


def test_cores_threads_and_random_numbers_are_restored() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = os.sched_getaffinity(0), torch.get_rng_state()
        rehearsed(MLP, shapes=((2, 1),))
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == (before[0], 3)
        assert torch.equal(torch.get_rng_state(), before[1])
    finally:
        torch.set_num_threads(threads)


def test_each_way_gets_the_cores_and_threads_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    threads: list[int] = []
    monkeypatch.setattr(measure, "bind", lambda cpus: bound.append(tuple(cpus)))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)))
    monkeypatch.setattr(f"{__name__}.allowed_cores", lambda: cores)
    rehearsed(MLP, shapes=((1, 4), (2, 2)))
    assert {(2, 3, 6, 7), tuple(range(8))} <= set(bound)
    assert {2, 4} <= set(threads)


def caught(
    monkeypatch: pytest.MonkeyPatch, *ways: tuple[Candidate, float], waited: float = 0.0
) -> list[tuple[PlanJob, Placement]]:
    """Catch the jobs that are started; each finds these ways at these speeds."""
    jobs: list[tuple[PlanJob, Placement]] = []

    def start(entry: str, payload: bytes, chosen: Placement, *_: object, **__: object) -> Recommendation:
        assert entry == "tutti.studies.autotune.measure:work"
        jobs.append((pickle.loads(payload), chosen))
        turns = [(one, dict.fromkeys(range(1, 6), rate)) for one, rate in ways]
        entries = [Entry(one, Timing(1, 32, 1.0), rates, 9) for one, rates in turns]
        return Recommendation(entries, allowed_s=1.0, samples=3200, waited=waited)

    monkeypatch.setattr("tutti.run.start.start", start)
    monkeypatch.setattr(planning, "allowed_cores", lambda: Cores(((0,), (1,), (2,), (3,))))
    return jobs


FAST = Candidate(2, 2, "fp32", "channels_last", 32)
SLOW = Candidate(1, 4, "fp32", "contiguous", 32)


def test_the_ranks_of_the_largest_way_are_started_once_and_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = caught(monkeypatch, (FAST, 2.0), (SLOW, 1.0))
    found = plan(CNN, budget_s=33)
    ((job, chosen),) = jobs
    assert (chosen.workers, chosen.cores, chosen.warnings) == (4, (), ())
    assert (job.budget_s, job.for_run) == (33, False)
    assert (job.choices.shapes, job.dared) == (((1, 1), (1, 4), (2, 2), (4, 1)), ("bf16",))
    assert found.pick.candidate == FAST
    assert found.seconds >= 0


def test_the_waiting_times_of_all_ranks_count() -> None:
    after = (ThreadTimes(1.5, 0.0), ThreadTimes(1.5, 1.0), None)

    def rank(comm: Communicator) -> float:
        return measure.share_waited(comm, ThreadTimes(0.5, 0.0), after[comm.rank])

    assert VirtualWorld(ranks=3).run(rank) == [pytest.approx(1 / 3)] * 3


@pytest.mark.parametrize(("waited", "warned"), [(0.1, False), (0.4, True)])
def test_a_plan_on_a_busy_machine_warns_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waited: float, warned: bool
) -> None:
    jobs = caught(monkeypatch, (FAST, 1e6), waited=waited)
    plan(CNN)
    expected = "tutti: warning: ranks waited 40% of the time for a core"
    assert capsys.readouterr().err.startswith(expected) is warned
    planned_config(CNN)
    assert len(jobs) == 1 + warned


@pytest.mark.parametrize(
    ("fixed", "precisions", "dared"),
    [((), ("fp32", "bf16"), ()), (("precision",), (), ()), (("workers",), (), ("bf16",))],
)
def test_another_precision_is_tried_only_if_none_was_given(
    monkeypatch: pytest.MonkeyPatch,
    fixed: tuple[str, ...],
    precisions: tuple[str, ...],
    dared: tuple[str, ...],
) -> None:
    jobs = caught(monkeypatch, (FAST, 1.0))
    plan(CNN, fixed, precisions=precisions)
    assert jobs[0][0].dared == dared


@pytest.mark.parametrize(
    ("flags", "device", "dared"),
    [
        ({"avx2", "avx512f"}, "cpu", ()),
        ({"avx512_bf16"}, "cpu", ("bf16",)),
        ({"asimd", "bf16"}, "cpu", ("bf16",)),
        (set(), "cpu", ("bf16",)),
        ({"avx2"}, "cuda", ("bf16",)),
    ],
)
def test_another_precision_is_tried_only_if_it_can_be_fast(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], device: str, dared: tuple[str, ...]
) -> None:
    jobs = caught(monkeypatch, (FAST, 1.0))
    monkeypatch.setattr(planning, "processor_flags", lambda: flags)
    plan(replace(CNN, device=device))
    assert jobs[0][0].dared == dared


def planned_config(config: TrainConfig, *fixed: str, fresh: bool = False) -> TrainConfig:
    with planned(config, fixed, 20, fresh=fresh) as (found, _):
        return found


def damage(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content)


@pytest.mark.parametrize(
    ("change", "fresh", "again"),
    [
        (None, False, False),
        (None, True, True),
        (damage(""), False, True),
        (damage("[1, 2]"), False, True),
        (damage('{"pick": {"ranks": 2}}'), False, True),
        (lambda file: file.write_text(file.read_text().replace('"ranks": 2', '"ranks": 3')), False, True),
        (lambda file: file.write_text(file.read_text().replace('"ranks": 2', '"ranks": "x"')), False, True),
        (lambda file: file.write_bytes(b"\xff\x00"), False, True),
        (Path.unlink, False, True),
    ],
)
def test_a_plan_is_remembered_until_it_is_damaged_or_a_fresh_plan_is_requested(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: Callable[[Path], object] | None,
    fresh: bool,
    again: bool,
) -> None:
    caught(monkeypatch, (FAST, 1e6))
    assert planned_config(CNN).workers == "2"
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    if change is not None:
        change(file)
    jobs = caught(monkeypatch, (SLOW, 1e6))
    capsys.readouterr()
    found = planned_config(CNN, fresh=fresh)
    assert (found.workers, found.threads) == (("1", 4) if again else ("2", 2))
    assert bool(jobs) is again
    line = r"plan: 2 ranks x 2 threads, fp32, channels_last: remembered from \d{4}-\d\d-\d\d; --plan fresh "
    assert bool(re.match(line, capsys.readouterr().out)) is not again
    assert planned_config(CNN).workers == found.workers  # The last plan is remembered.


@pytest.mark.parametrize(("epochs", "again"), [(1, False), (2, False), (50, True)])
def test_a_run_that_allows_a_much_longer_measurement_measures_again(
    monkeypatch: pytest.MonkeyPatch, epochs: int, again: bool
) -> None:
    # 100 updates an epoch, each of 0.5 s: a twentieth of an epoch is 2.5 s, and 1 s was allowed before.
    jobs = caught(monkeypatch, (FAST, 64.0))
    planned_config(replace(CNN, epochs=1))
    planned_config(replace(CNN, epochs=epochs) if epochs != 2 else replace(CNN, steps=150))
    assert len(jobs) == 1 + again


def test_a_plan_is_remembered_for_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = caught(monkeypatch, (FAST, 64.0))
    plan(CNN)
    planned_config(replace(CNN, epochs=1))
    plan(CNN)
    assert len(jobs) == 2


def test_training_uses_the_pick_and_keeps_the_users_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = caught(monkeypatch, (replace(FAST, batch_size=64), 2.0))
    config = planned_config(replace(CNN, workers="2", batch_size=64, lr=0.1), "workers", "batch_size", "lr")
    assert (config.workers, config.threads, config.layout, config.lr) == ("2", 2, "channels_last", 0.1)
    assert (jobs[0][0].choices.shapes, jobs[0][0].dared, jobs[0][0].quiet) == (((2, 2),), ("bf16",), True)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "plan: measuring for at most 5% of the run, and 20 s"
    assert said[1].startswith("plan: measured 1 combination in ")


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = caught(monkeypatch, (FAST, 1.0))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadRunFolder, match="is not empty"):
        planned_config(replace(CNN, out=str(tmp_path)))
    assert jobs == []


@pytest.mark.parametrize("follows", [True, False])
def test_a_faster_precision_is_picked_if_its_loss_follows(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    real, asked = measure.Rehearsal.measure, list[object]()

    def faster(self: measure.Rehearsal, one: Candidate, steps: int) -> Timing:
        found = real(self, one, steps)
        return replace(found, seconds=0.001 * steps if one.precision == "bf16" else 0.1 * steps)

    def trained(
        job: object, comm: object, task: object, pair: tuple[Candidate, ...], updates: int, is_late: object
    ) -> Twins:
        asked.append((pair, updates))
        return Twins("bf16", updates, 2.3, (0.5, 0.6, 0.7), (0.5, 0.6, 0.7) if follows else (1.5, 1.6, 1.7))

    monkeypatch.setattr(race, "ROUNDS", 3)
    monkeypatch.setattr(measure.Rehearsal, "measure", faster)
    monkeypatch.setattr(measure, "short_trainings", trained)
    found = rehearsed(replace(MLP, steps=60), dared=("bf16",), layouts=("contiguous",))
    alone = Candidate(1, len(allowed_cores().physical), "bf16", "contiguous", 32)
    assert asked == [((replace(alone, precision="fp32"), alone), 60)]
    assert found.pick.candidate.precision == ("bf16" if follows else "fp32")


@pytest.mark.parametrize(
    ("options", "budget", "message"),
    [
        ({"hosts": "a:2,b:2"}, 50.0, "leave --hosts out"),
        ({"servers": 1}, 50.0, "leave --servers out"),
        ({"parallel": "tensor"}, 50.0, "leave --parallel out"),
        ({"strategy": "hogwild"}, 50.0, "use 'tutti compare'"),
        ({}, 0.0, "--budget is 0"),
        ({}, float("nan"), "--budget is nan"),
    ],
)
def test_impossible_plans_are_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], budget: float, message: str
) -> None:
    jobs = caught(monkeypatch)
    with pytest.raises(BadOption, match=message):
        plan(replace(CNN, **options), budget_s=budget)  # type: ignore[arg-type]
    assert not jobs


def test_a_plan_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
    with pytest.raises(BadOption, match="run it without mpirun"):
        plan(CNN)


def test_a_process_is_bound_with_all_its_threads(tmp_path: Path) -> None:
    torch.ones(100_000).sum()  # wakes torch's own threads
    from tutti.launch.cores import bind

    before = os.sched_getaffinity(0)
    try:
        bind({min(before)})
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(min(before),)}
    finally:
        bind(before)
