"""Simulations: their rows, their output, and refusals."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests.promises.command import run
from tutti.cli.main import main
from tutti.comm.network import Network
from tutti.comm.shm.communicator import HostCommunicator
from tutti.run.config import TrainConfig
from tutti.studies.simulate import advice, work
from tutti.studies.simulate.machine import INCLUDED, Machine, machine_of, read_machine
from tutti.studies.simulate.question import AdviseJob, SimulateJob, SimulateQuestion, Way
from tutti.studies.simulate.result import SimulatedRow, Simulation
from tutti.studies.simulate.step_times import StepTimes

EVEN = Machine("even", "a test, 2026", 1, "1gbit,10us", "64gbit,1us", flops_per_s=1e8)
"""Hosts of one rank; all steps take the same time."""

SMALL: dict[str, Any] = {"model_options": {"hidden": [16]}, "batch_size": 8, "steps": 12, "quiet": True}
FLOPS = 3 * 2 * (64 * 16 + 16 * 10)  # of a sample
PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10


def simulate(**given: Any) -> list[SimulatedRow]:
    """Return the rows of a small simulation."""
    return [*tutti.simulate("mlp", "digits", **{"machine": EVEN, **SMALL, **given}).rows]


@pytest.mark.parametrize("timing", [False, True])
def test_a_step_takes_the_time_of_its_operations_and_of_the_all_reduce(timing: bool) -> None:
    alone, four = simulate(strategies=["sync"], workers=[1, 4], timing=timing)
    step_s = FLOPS * 8 / 1e8
    sum_s = Network(10e-6, 1.25e8).all_reduce_s([1] * 4, 4 * PARAMETERS)
    assert alone.seconds == pytest.approx(12 * step_s)
    assert four.seconds == pytest.approx(12 * (step_s + sum_s), rel=0.03)
    assert four.computes == pytest.approx(step_s / (step_s + sum_s), rel=0.03)
    assert (alone.samples, four.samples, four.hosts) == (12 * 8, 12 * 8 * 4, 4)
    assert four.bytes_per_step == pytest.approx(4 * PARAMETERS * 2 * 3 / 4, rel=0.01)
    assert ("accuracy" in four.metrics) is not timing


def test_a_simulation_can_be_repeated_and_asynchronous_workers_are_stale() -> None:
    given: dict[str, Any] = {"strategies": ["easgd:every=1", tutti.DiLoCo(every=4)], "workers": [3]}
    uneven = replace(EVEN, speeds=(1.0, 0.5), spread=(0.8, 1.0, 1.6))
    rows = simulate(machine=uneven, **given)
    assert rows == simulate(machine=uneven, **given)
    assert [row.way for row in rows] == ["easgd:every=1", "diloco"]
    assert rows[0].staleness > 0
    assert rows[0].rate != simulate(machine=EVEN, **given)[0].rate


def test_parts_are_given_as_for_a_training() -> None:
    parts: dict[str, Any] = {"optimizer": torch.optim.SGD, "schedule": "cosine", "lr": 0.1}
    (row,) = simulate(strategies=["sync"], workers=[2], loss=torch.nn.functional.cross_entropy, **parts)
    assert [row] == simulate(strategies=["sync"], workers=[2], **{**parts, "optimizer": "sgd"})
    assert [row] != simulate(strategies=["sync"], workers=[2], **{**parts, "schedule": None})
    with pytest.raises(tutti.BadOption, match="knows optimizers by name or class"):
        simulate(optimizer=lambda some: torch.optim.SGD(some), timing=True)


def test_strategies_of_one_class_are_named_by_the_options_in_which_they_differ() -> None:
    ways: list[Any] = ["sync", tutti.DiLoCo(every=4), tutti.DiLoCo(every=8)]
    found = tutti.simulate("mlp", "digits", machine=EVEN, strategies=ways, workers=[1], timing=True, **SMALL)
    assert [*found.stops()] == ["sync", "diloco:every=4", "diloco:every=8"]


@pytest.mark.parametrize("timing", [False, True])
def test_a_fast_host_waits_at_the_end(timing: bool) -> None:
    uneven = replace(EVEN, speeds=(1.0, 0.5))
    (row,) = simulate(strategies=["easgd"], workers=[2], timing=timing, machine=uneven)
    assert row.computes == pytest.approx((1 + 2) / (2 * 2), rel=0.05)


def test_strong_scaling_divides_the_batch_and_epochs_have_the_same_samples_for_any_number() -> None:
    length: dict[str, Any] = {"steps": None, "epochs": 1, "timing": True}
    for way in ("sync", "diloco"):
        alone, four = simulate(strategies=[way], workers=[1, 4], scaling="strong", **length)
        assert alone.samples == pytest.approx(four.samples, rel=0.02)
        assert four.computes * four.seconds == pytest.approx(alone.seconds / 4, rel=0.02)
        few = simulate(strategies=[way], workers=[1, 9], scaling="strong", **length)[1]
        assert "a batch of 8 samples cannot be split over 9" in few.error


def test_a_row_that_cannot_be_simulated_has_an_error() -> None:
    given: dict[str, Any] = {"strategies": ["diloco:every=8"], "workers": [1, 2, 16], "timing": True}
    few = simulate(**given, steps=7)
    assert [row.error[:24] for row in few] == ["", "workers exchange nothing", "workers exchange nothing"]
    assert Simulation(few).stops() == {"diloco:every=8": None}
    errors = [row.error for row in simulate(**given, scaling="strong")]
    assert errors[:2] == ["", ""]
    assert "a batch of 8 samples cannot be split over 16 workers" in errors[2]


def test_the_table_compares_with_its_first_row_and_prints_equal_errors_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [SimulatedRow("a", 1, 1, 10, 1.0), SimulatedRow("b", 2, 2, 30, 1.0)]
    errors = [SimulatedRow("lazy", size, 1, error="why") for size in (2, 8)]
    Simulation([*rows, *errors]).show(sys.stdout)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines[1:3]] == ["1.0", "3.0"]
    assert "not simulated: lazy with 2, 8 workers: why" in lines


def test_a_simulation_prints_its_assumptions_and_its_duration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "measured_steps", lambda *_: StepTimes((0.5, 0.5)))
    monkeypatch.setattr(work, "share_waited", lambda *_: 0.5)
    machine = replace(machine_of(None, "1gbit,1ms", price_per_hour=3.0), ranks_per_host=2)
    question = SimulateQuestion([Way.parse("sync"), Way.parse("solo")], [8, 8, 2], machine)
    job = SimulateJob(TrainConfig("mlp", {"hidden": [16]}, batch_size=8, steps=3), question)
    comm = HostCommunicator.alone()
    work.work(comm, pickle.dumps(job)).show(sys.stdout)
    comm.close()
    printed, warned = capsys.readouterr()
    assert "waited 50% of the time for a core" in warned
    assert "2 simulated trainings take about 30 s" in printed  # 2 and 8 workers, 3 steps, 0.5 s, twice
    assert "2 workers on a host, 1gbit,1ms between hosts; steps take 500 ms with 8 samples, timed" in printed
    assert "at 3 for a host and hour" in printed
    assert printed.count("not simulated: solo") == 2
    assert "sync pays up to" in printed or "sync stops paying" in printed


def test_failures_reduce_the_rate_and_raise_the_cost() -> None:
    whole, failing = (
        simulate(strategies=["sync"], workers=[4], timing=True, price=36.0, machine=machine)[0]
        for machine in (EVEN, replace(EVEN, hours_between=10.0))
    )
    assert whole.cost == pytest.approx(4 * 36 * whole.seconds / 3600)
    assert failing.goodput < whole.goodput == 1
    assert failing.cost == pytest.approx(whole.cost / failing.goodput)
    assert failing.rate == pytest.approx(whole.rate * failing.goodput)


@pytest.mark.parametrize(
    ("rates", "hosts", "stop"),
    [
        ([10, 20, 40, 80], [1, 2, 4, 8], None),
        ([10, 13, 16.9, 21.97], [1, 1, 1, 1], None),  # 30 % for each doubling
        ([10, 20, 24, 48], [1, 2, 4, 8], 4),  # 20 %
        ([10, 13, 16.9, 21.97], [1, 2, 4, 8], 4),  # samples cost 2.4 times as much
        ([0, 0, 0], [1, 2, 4], 2),  # failures leave no step
    ],
)
def test_a_way_stops_paying_if_doubling_adds_little_or_samples_cost_twice_as_much(
    rates: list[float], hosts: list[int], stop: int | None
) -> None:
    rows = [
        SimulatedRow("sync", 2**at, count, int(rate * 100), 100.0)
        for at, (rate, count) in enumerate(zip(rates, hosts, strict=True))
    ]
    assert Simulation(rows).stops() == {"sync": stop}


def test_the_command_prints_a_table_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    record, figure = tmp_path / "rows.json", tmp_path / "rows.svg"
    line = f"simulate mlp --machine eight-a100 --timing --json {record} --figure {figure} --steps 4"
    assert main([*line.split(), "--strategies", "solo,sync,diloco:every=2", "--workers", "1,8,64"]) == 0
    printed = capsys.readouterr().out
    assert "strategy 'solo' runs on 1 worker, not 64" in printed
    assert "sync stops paying at 8 workers" in printed
    found = json.loads(record.read_text())
    assert found["stops"]["sync"] == 8
    assert len(found["rows"]) == 9
    assert all(row["cost"] > 0 for row in found["rows"] if not row["error"])
    assert figure.read_text().startswith("<svg")


def test_a_calibrated_machine_can_be_read(tmp_path: Path) -> None:
    line = "tutti simulate mlp --strategies sync --workers 1,2 --steps 2 --calibrate here.toml"
    assert "sync " in run(line, tmp_path).out
    machine = read_machine(str(tmp_path / "here.toml"))
    assert machine.flops_per_s is not None
    assert machine.flops_per_s > 1e6
    assert all(one <= other for one, other in pairwise(machine.spread))


def test_a_machine_can_be_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    own: dict[str, Any] = {"price_per_hour": 3.6, "speeds": (1.0, 0.5), "samples_per_s": 2e3}
    machine = replace(EVEN, flops_per_s=1.25e16, hours_between=1e3, **own)
    file.write_text(machine.written())
    assert read_machine(str(file)) == machine


@pytest.mark.parametrize("name", INCLUDED)
def test_an_included_machine_names_its_source_with_a_year(name: str) -> None:
    assert any(word.strip(";,.").isdecimal() for word in read_machine(name).source.split())


NEEDED = 'name = "a"\nsource = "b, 2026"\nranks_per_host = 2\n[network]\nbetween = "1gbit,1us"\n'
INSIDE = 'inside = "1gbit,1us"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NEEDED, "has no 'inside'; add it"),
        (NEEDED + INSIDE + "[compute]\nflops = 1e9\n", "unknown key 'flops'"),
        (NEEDED + INSIDE + "[failurs]\nrepair_s = 9\n", "unknown section 'failurs'.*mean 'failures'"),
        (NEEDED + INSIDE + "[compute]\nspread = [1.0, 0.5]\n", "'spread' in the machine's file"),
        (NEEDED + INSIDE + "[failures]\nhours_between = 0\n", "is 0; give a number above 0"),
        (NEEDED.replace("1us", "-1us") + INSIDE, "the network of machine 'a'"),
        ("name = ", "cannot read the machine's file"),
    ],
)
def test_a_wrong_machine_file_is_one_clear_message(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(text)
    with pytest.raises(tutti.UserError, match=message):
        read_machine(str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--network 0gbit,50us", "the network of machine 'this machine'"),
        ("--network fast", "the network of machine"),
        ("--network 1gbit,1us,torus:2x2 --workers 64 --machine two-cores", "which has 4 hosts"),
        ("--machine eight-v10", "unknown machine 'eight-v10'; did you mean 'eight-v100'?"),
        ("--price 0", "--price is 0.0"),
        ("--strategies sink", "unknown strategy 'sink'; did you mean 'sync'?"),
        ("--strategies diloco:evry=3", "unknown option 'evry' of the strategy 'diloco'"),
        ("--strategies ,", "nothing to simulate"),
        ("--workers 0", "--workers is [0]"),
        ("--workers 1,two", "--workers is '1,two'"),
        ("--scaling sideways", "unknown value 'sideways' of --scaling"),
        ("--json no/file.json", "cannot write --json no/file.json"),
        ("--calibrate here.toml --machine eight-v100", "--calibrate times this machine"),
        ("--strategies hogwild --workers 64 --machine eight-v100", "needs one memory for all workers"),
        ("--strategies adpsgd --workers 64 --machine eight-v100 --timing", "without --timing"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "mlp", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_too_many_workers_for_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "free_bytes", lambda: 100 * PARAMETERS * 4 * 5)
    with pytest.raises(tutti.BadOption, match="101 virtual workers of"):
        simulate(strategies=["sync"], workers=[101])
    assert simulate(strategies=["sync"], workers=[20], steps=1)[0].workers == 20


def test_advice_picks_the_least_loss_in_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advice, "measured_steps", lambda *_: StepTimes((1e-3, 1e-3)))
    monkeypatch.setattr(HostCommunicator, "clock", lambda _: 0.0)  # The budget lasts.
    config = TrainConfig("mlp", {"hidden": [16]}, batch_size=8, lr=0.01, epochs=50)
    slow = machine_of(EVEN, "10mbit,1ms")
    job = AdviseJob(config, SimulateQuestion([], [4], slow), None, (), 4.0, quiet=True)
    comm = HostCommunicator.alone()
    found = advice.work(comm, pickle.dumps(job))
    rows = {row.way: row for row in found.simulation.rows}
    assert rows.keys() >= {"sync:batch_size=8", "sync:batch_size=16", "diloco:every=8", "sparseloco:every=8"}
    assert found.pick.rate > 2 * rows["sync:batch_size=8"].rate
    assert found.pick.loss == min(row.loss for row in rows.values())
    assert found.config.strategy == found.pick.way.partition(":")[0]
    with pytest.raises(tutti.BadOption, match="give --budget"):
        advice.work(comm, pickle.dumps(replace(job, budget_s=0.1, quiet=False)))
    assert "timing a step of 8 samples" in capsys.readouterr().out
    clock = count(step=100)
    monkeypatch.setattr(HostCommunicator, "clock", lambda _: float(next(clock)))
    cut = advice.work(comm, pickle.dumps(job))
    comm.close()
    trained, *left_out = cut.simulation.rows
    assert cut.pick == trained
    assert all("--budget" in row.error for row in left_out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts 8 -n 4", "leave --workers out"),
        ("--hosts 8 --strategy noloco", "--strategy is not for simulated hosts"),
        ("--hosts 8 --strategy.every 5", "--strategy"),
        ("--hosts 8 --exhaustive", "--exhaustive is not"),
        ("--network 1gbit,1us", "give their number, such as --hosts 8"),
    ],
)
def test_advice_refuses_options_that_it_decides(words: str, message: str, capsys: Any) -> None:
    assert main(["plan", "mlp", *words.split()]) == 2
    assert message in capsys.readouterr().err
