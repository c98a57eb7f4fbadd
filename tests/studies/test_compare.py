"""Comparisons: their combinations, the order of the runs, and failures."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.processes import wait_for_files
from tests.preloaded import command
from tutti.cli.main import main
from tutti.errors import EXIT_INTERRUPTED, BadOption, RankFailed, UnknownName
from tutti.records.comparison import STRONG, WEAK, ComparisonFolder
from tutti.records.run import Summary, World
from tutti.reports.page import PAGE
from tutti.reports.scaling import is_baseline
from tutti.run.config import TrainConfig
from tutti.studies.compare import Question, compare, config_of, plan_comparison

pytestmark = pytest.mark.usefixtures("nothing_beside")

CONFIG = TrainConfig(model="mlp", batch_size=32, epochs=1)

SUMMARY = Summary(None, None, 10, 1, 5, 160, 2.0, 80.0, World(2, 1, 1), {}, "2026-01-30T18:00:00+00:00")


def question(**changes: Any) -> Question:
    values: dict[str, Any] = {"config": CONFIG, "strategies": ["solo", "sync", "easgd"], "workers": [1, 2]}
    return Question(**{**values, **changes})


def test_solo_is_the_baseline_with_one_thread_and_with_all() -> None:
    found = plan_comparison(question(), cores=4).combinations
    assert [(one.name, one.workers, one.threads) for one in found] == [
        ("solo, 1 thread", 1, 1),
        ("solo, 4 threads", 1, 4),
        ("sync, 1 worker", 1, 2),
        ("sync, 2 workers", 2, 2),
        ("easgd, 1 worker", 1, 2),
        ("easgd, 2 workers", 2, 2),
    ]
    alone = plan_comparison(question(workers=[1]), cores=1).combinations
    assert [one.name for one in alone] == ["solo, 1 thread", "sync, 1 worker", "easgd, 1 worker"]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [(STRONG, {"solo": 32, "sync": 32, "easgd": 16}), (WEAK, {"solo": 32, "sync": 64, "easgd": 32})],
)
def test_strong_scaling_fixes_the_batch_of_all_workers_and_weak_scaling_that_of_each(
    scaling: str, expected: dict[str, int]
) -> None:
    asked = question(workers=[2], scalings=[scaling])
    found = plan_comparison(asked, cores=2).combinations
    assert {one.strategy: config_of(asked, one, 0).batch_size for one in found} == expected


def test_both_scalings_have_different_folders() -> None:
    found = plan_comparison(question(scalings=[STRONG, WEAK]), cores=2).combinations
    assert len({one.folder for one in found}) == len({one.name for one in found}) == len(found) == 12


def test_a_sweep_crosses_every_value_with_every_combination() -> None:
    asked = question(
        strategies=["sync"], workers=[2], sweep={"batch_size": [32, 64], "strategy.every": [1, 4]}
    )
    found = plan_comparison(asked, cores=2).combinations
    configs = [config_of(asked, one, 0) for one in found]
    found_options = [(c.batch_size, c.strategy_options["every"]) for c in configs]
    assert found_options == [(32, 1), (32, 4), (64, 1), (64, 4)]
    assert found[1].name == "sync, 2 workers, batch_size=32, strategy.every=4"


def test_an_option_may_be_for_one_strategy_alone() -> None:
    asked = question(own={"easgd": {"lr": 0.5, "strategy.every": 3}})
    for one in plan_comparison(asked, cores=2).combinations:
        config = config_of(asked, one, 0)
        assert config.lr == (0.5 if one.strategy == "easgd" else None)
        assert config.strategy_options == ({"every": 3} if one.strategy == "easgd" else {})


def test_every_combination_runs_on_every_device_but_threads_differ_only_on_the_cpu() -> None:
    asked = question(strategies=["solo", "sync"], workers=[1], devices=["cpu", "cuda"])
    found = plan_comparison(asked, cores=2).combinations
    assert [one.name for one in found] == [
        "solo, 1 thread",
        "solo, 2 threads",
        "sync, 1 worker",
        "solo, cuda",
        "sync, 1 worker, cuda",
    ]
    assert [config_of(asked, one, 0).device for one in found] == ["cpu", "cpu", "cpu", "cuda", "cuda"]
    assert found[3].folder == "solo-cuda"


def test_layouts_are_compared_on_every_number_of_ranks_that_they_leave_open() -> None:
    asked = question(
        strategies=["solo"],
        workers=[1, 2, 4],
        layouts=["tensor", "pipeline=2", "data=2,sharded=2"],
        sweep={"parallel.schedule": ["gpipe", "1f1b"], "batch_size": [32]},
    )
    found = plan_comparison(asked, cores=4).combinations
    assert [(one.name, one.workers, one.threads, one.way) for one in found[2:]] == [
        ("tensor=2, batch_size=32", 2, 1, "tensor, batch_size=32"),
        ("tensor=4, batch_size=32", 4, 1, "tensor, batch_size=32"),
        ("pipeline=2, schedule=gpipe, batch_size=32", 2, 1, "pipeline, schedule=gpipe, batch_size=32"),
        ("pipeline=2, schedule=1f1b, batch_size=32", 2, 1, "pipeline, schedule=1f1b, batch_size=32"),
        ("data=2,sharded=2, batch_size=32", 4, 1, "data,sharded, batch_size=32"),
    ]
    assert found[-1].folder == "data-2-sharded-2-batch_size-32"
    configs = [config_of(asked, one, 0) for one in found]
    assert [(c.parallel, c.parallel_options, c.workers) for c in configs[-3:]] == [
        ("pipeline=2", {"schedule": "gpipe"}, "2"),
        ("pipeline=2", {"schedule": "1f1b"}, "2"),
        ("data=2,sharded=2", {}, "4"),
    ]
    # The options of layouts do not repeat the baselines.
    assert [one.name for one in found[:2]] == [
        "solo, 1 thread, batch_size=32",
        "solo, 4 threads, batch_size=32",
    ]
    assert all(is_baseline(found[0], one) for one in found)


def test_an_option_may_be_for_one_layout_alone() -> None:
    own = {"pipeline": {"parallel.microbatches": 8, "lr": 0.5}}
    asked = question(strategies=["sync"], workers=[2], layouts=["pipeline", "tensor"], own=own)
    configs = [config_of(asked, one, 0) for one in plan_comparison(asked, cores=2).combinations]
    found = [(c.lr, c.parallel_options) for c in configs]
    assert found == [(None, {}), (0.5, {"microbatches": 8}), (None, {})]


def test_repeats_take_turns_and_have_the_same_seeds(tmp_path: Path) -> None:
    asked = question(config=replace(CONFIG, seed=7), strategies=["solo", "sync"], workers=[2], repeats=2)
    seen: list[tuple[str, int]] = []
    comparison = plan_comparison(asked, cores=2)

    def train(config: TrainConfig) -> Summary:
        seen.append((config.strategy, config.seed))
        return SUMMARY

    compare(asked, comparison, tmp_path, lambda _: None, train)
    assert seen == [(name, seed) for seed in (7, 8) for name in ("solo", "solo", "sync")]


def test_a_run_that_fails_leaves_its_error_and_the_others_run(tmp_path: Path) -> None:
    def train(config: TrainConfig) -> Summary:
        if config.strategy == "sync":
            raise RankFailed(1, "ValueError: broken")
        return finish(config)

    asked = question(workers=[2], repeats=1)
    comparison = plan_comparison(asked, cores=2)
    said: list[str] = []
    compare(asked, comparison, tmp_path, said.append, train)
    assert said[3].startswith("  trained 5 steps")
    assert said[4] == "3 of 4: sync, 2 workers, repeat 1"
    assert said[5] == "  failed: ValueError: broken"
    for one in comparison.combinations:
        run = ComparisonFolder(tmp_path).run(one, 0)
        assert (run.error() is not None) == (one.strategy == "sync")
        assert run.finished == (one.strategy != "sync")
    failed = ComparisonFolder(tmp_path).run(comparison.combinations[2], 0)
    assert "ValueError: broken" in (failed.error() or "")


def test_a_resumed_comparison_makes_only_the_missing_runs(tmp_path: Path) -> None:
    asked = question(strategies=["sync", "easgd"], workers=[2], repeats=2)
    comparison = plan_comparison(asked, cores=2)
    seen: list[str | None] = []

    def interrupted(config: TrainConfig) -> Summary:
        if len(seen) == 3:
            Path(config.out or "").mkdir(parents=True)
            (Path(config.out or "") / "history.jsonl").write_text("{}\n")
            raise KeyboardInterrupt
        seen.append(config.out)
        return finish(config)

    with pytest.raises(KeyboardInterrupt):
        compare(asked, comparison, tmp_path, lambda _: None, interrupted)
    again: list[str | None] = []

    def train(config: TrainConfig) -> Summary:
        assert not Path(config.out or "").exists()
        again.append(config.out)
        return SUMMARY

    compare(asked, comparison, tmp_path, lambda _: None, train)
    assert len(again) == 1
    assert again[0] not in seen


def finish(config: TrainConfig) -> Summary:
    """Write the folder of a finished run, and return its summary."""
    assert config.out is not None
    Path(config.out).mkdir(parents=True)
    (Path(config.out) / "summary.json").write_text("{}")
    return SUMMARY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": []}, "nothing to compare"),
        ({"devices": []}, "give --devices at least one value"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"workers": [0, 1]}, "--workers has 0"),
        ({"goal": 90.0}, "--goal is 90.0"),
        ({"config": replace(CONFIG, metrics="top5"), "goal": 0.9}, "accuracy is not among --metrics top5"),
        ({"sweep": {"device": ["cpu", "cuda"]}}, "give --devices instead"),
        ({"config": replace(CONFIG, validation=0.0), "goal": 0.9}, "give --validation a share above 0"),
        ({"own": {"gem": {"lr": 1.0}}}, "--for gem: 'gem' is not among"),
        ({"sweep": {"parallel": ["tensor"]}}, "give --parallel instead"),
        ({"layouts": ["tensor"], "workers": [1]}, "tensor on 1 rank leaves nothing to share"),
        ({"layouts": ["data=2,tensor"], "workers": [3]}, "2 x 1 ranks, and there are 3"),
        ({"layouts": ["tensor"], "devices": ["cpu", "cuda"]}, "computes on the CPU"),
        (
            {"layouts": ["tensor"], "strategies": ["sync"], "config": replace(CONFIG, balance="speed")},
            "--parallel tensor=2 does not go with --balance speed",
        ),
        ({"strategies": ["sync"], "workers": [1, 64]}, "cannot be split over 64 ranks"),
        ({"config": replace(CONFIG, validate="background")}, "batches of their own"),
        ({"sweep": {"parallel.schedule": ["gpipe"]}}, "but no --parallel; name one"),
    ],
)
def test_impossible_questions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption) as caught:
        plan_comparison(question(**changes), cores=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"strategies": ["synk"]}, UnknownName),
        ({"config": replace(CONFIG, metrics="acuracy")}, UnknownName),
        ({"devices": ["cpu", "cud"]}, UnknownName),
        ({"sweep": {"batchsize": [1]}}, UnknownName),
        ({"sweep": {"strategy.evry": [1]}, "strategies": ["sync"]}, UnknownName),
        ({"sweep": {"batch_size": ["x"]}}, BadOption),
        ({"own": {"easgd": {"strategy.every": 0}}}, BadOption),
        ({"layouts": ["tensr"]}, UnknownName),
        ({"layouts": ["tensor"], "sweep": {"parallel.schedule": ["gpipe"]}}, UnknownName),
        ({"layouts": ["pipeline"], "workers": [2], "sweep": {"parallel.schedule": ["gpip"]}}, UnknownName),
    ],
)
def test_unknown_strategies_and_options_are_refused_before_any_run(
    changes: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        plan_comparison(question(**changes), cores=2)


def test_missing_data_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.setenv("TUTTI_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "mlp", "--data", "mnist", "--steps", "1"]) == 2
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("lacks the train images and labels")) == ("", 1)


def test_a_rank_of_mpirun_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadOption, match="run it without mpirun"):
        plan_comparison(question(), cores=2)


def test_a_comparison_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    words = ["compare", "mlp", "--strategies", "easgd", "-n", "2", "--repeats", "1"]
    words += ["--epochs", "1", "--goal", "0.2", "--out", str(out), "--for", "easgd:strategy.every=2"]
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert "1 of 1: easgd, 2 workers" in shown.out
    line = next(line for line in shown.out.splitlines() if line.strip().startswith("easgd, 2 workers"))
    cores, seconds = line.split()[3], float(line.split()[4])
    assert cores == "2"
    assert seconds > 0
    comparison = ComparisonFolder(out).read()
    assert len(comparison.combinations) == 1
    run = ComparisonFolder(out).run(comparison.combinations[0], 0).path
    assert (run / "summary.json").exists()
    assert TrainConfig.read(run).strategy_options["every"] == 2
    assert main([*words, "--resume"]) == 0
    shown = capfd.readouterr()
    assert "repeat" not in shown.out.split("way to train")[0].replace("repeats", "")
    assert main(words) == 2
    assert "go on with what is in it by --resume" in capfd.readouterr().err
    assert main([*words, "--resume", "--lr", "0.5"]) == 2
    assert "has a comparison with other options" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "two"], "--workers is 'two'"),
        (["--scaling", "week"], "did you mean 'weak'?"),
        (["--sweep", "batch_size"], "--sweep is 'batch_size'"),
        (["--for", "lr=1"], "--for is 'lr=1'"),
        (["--resume"], "--resume needs --out"),
        (["--strategies", "synk"], "did you mean 'sync'?"),
        (["--metrics", "acuracy"], "did you mean 'accuracy'?"),
        (["--devices", "cuda,cpus"], "did you mean 'cpu'?"),
        (["--device", "cpu"], "unknown option '--device'; did you mean '--devices'?"),
        (["--model", "mlp"], "unknown option '--model'"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compare", *words]) == 2
    assert message in capfd.readouterr().err


def test_a_missing_device_fails_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so nothing fails")
    words = ["compare", "mlp", "--strategies", "solo", "--repeats", "1", "--epochs", "1"]
    assert main([*words, "--devices", "cpu,cuda", "--out", str(tmp_path / "found")]) == 1
    shown = capfd.readouterr().out
    assert "solo, cuda failed: --device is 'cuda', but torch finds no GPU here: " in shown
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("solo, 1 thread")]
    assert float(line.split()[4]) > 0
    assert '<tr class="failed"><td>solo, cuda (0 of 1 runs)</td>' in (tmp_path / "found" / PAGE).read_text()


def test_ctrl_c_during_a_training_ends_the_whole_comparison(tmp_path: Path) -> None:
    out = tmp_path / "found"
    words = ["compare", "mlp", "--strategies", "sync,easgd", "-n", "1", "--repeats", "1"]
    words += ["--epochs", "1000000", "--out", str(out)]
    with subprocess.Popen(
        [*command(), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            wait_for_files([out / "sync-1-worker" / "0" / "history.jsonl"])
            os.killpg(job.pid, signal.SIGINT)
            said, errors = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == EXIT_INTERRUPTED, errors
    assert said.splitlines()[-1].startswith("stopped: ")
    assert f"--resume --out {out}" in said
    assert "failed" not in said
    assert "2 of 2" not in said
