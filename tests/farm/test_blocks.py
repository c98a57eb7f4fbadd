"""Tests of farms on the blocks of this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tutti
from tests.farm.job_list import JobList
from tutti.errors import BadOption
from tutti.farm.block_main import PRUNED
from tutti.farm.block_placement import place_blocks
from tutti.farm.blocks import HostPool
from tutti.farm.coordinator import EpochEnded, Happening, JobBegan, JobEnded
from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.farm.work import work_on
from tutti.launch.cores import Cores
from tutti.records.farm_folder import THREADS, FarmFolder, JobState
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.run.config import TrainConfig

TINY = TrainConfig(model="mlp", model_options={"hidden": [4]}, data="digits", steps=2, batch_size=8)
BAD = Path(__file__).with_name("misbehaving.py")


def _job(name: str, **changed: object) -> FarmJob:
    return FarmJob(name, TINY.changed(changed))


def _bad(name: str, **options: object) -> FarmJob:
    return _job(name, model=f"{BAD}:{name}", model_options=options)


def _farm(path: Path, resume: bool = False) -> FarmFolder:
    return FarmFolder.begin(path, "test", {}, resume=resume)


def _work(
    folder: FarmFolder, jobs: Sequence[FarmJob], **settings: object
) -> tuple[dict[str, JobOutcome], list[Happening]]:
    source, told = JobList(jobs), list[Happening]()
    work_on(folder, source, threads=1, listener=told.append, **settings)  # type: ignore[arg-type]
    return source.outcomes, told


@pytest.fixture(scope="module")
def mixed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[FarmFolder, dict[str, JobOutcome], list[Happening]]:
    """A farm of two blocks, some of whose jobs go wrong."""
    folder = _farm(tmp_path_factory.mktemp("farm") / "farm")
    wrong = [_bad(name) for name in ("raising", "starving", "dying", "leaving")]
    good = [_job(f"mlp/seed-{seed}", seed=seed) for seed in range(4)]
    mistaken = _job("mistaken", optimizer="adamm")
    jobs = [one for pair in zip(wrong, good, strict=True) for one in pair] + [mistaken]
    return folder, *_work(folder, jobs, blocks=2)


Mixed = tuple[FarmFolder, dict[str, JobOutcome], list[Happening]]


def test_jobs_that_go_wrong_fail_alone(mixed: Mixed) -> None:
    folder, outcomes, told = mixed
    good = [f"mlp/seed-{seed}" for seed in range(4)]
    assert {name: outcomes[name].state for name in good} == dict.fromkeys(good, JobState.FINISHED)
    why = {name: one.why for name, one in outcomes.items() if one.state is JobState.FAILED}
    assert set(why) == {"raising", "starving", "dying", "leaving", "mistaken"}
    assert why["raising"] == "ArithmeticError: no model today"
    assert "RuntimeError" in why["starving"]
    assert "killed by signal 9 (SIGKILL)" in why["dying"]
    assert "exited with code 0 before it was done" in why["leaving"]
    assert "did you mean 'adam'" in why["mistaken"] or "did you mean 'adamw'" in why["mistaken"]
    traceback = RunFolder(folder.job("raising")).error()
    assert traceback is not None
    assert 'raise ArithmeticError("no model today")' in traceback
    assert {name: folder.state(name) for name in outcomes} == {n: o.state for n, o in outcomes.items()}
    assert [
        sorted(one.job.name for one in told if isinstance(one, kind)) for kind in (JobBegan, JobEnded)
    ] == [sorted(outcomes)] * 2
    assert sorted(one.job.name for one in told if isinstance(one, EpochEnded)) == good


def test_what_happened_is_on_record(mixed: Mixed) -> None:
    folder, outcomes, _ = mixed
    records = folder.events().records
    assert sorted(one.job for one in records if one.event == "began") == sorted(outcomes)
    ended = {one.job: one for one in records if one.event == "ended"}
    assert {name: one.state for name, one in ended.items()} == {n: o.state.value for n, o in outcomes.items()}
    assert "SIGKILL" in ended["dying"].why
    assert {one.block for one in records} == {0, 1}


def test_a_job_is_an_ordinary_run(mixed: Mixed, tmp_path: Path) -> None:
    folder, outcomes, _ = mixed
    alone = tutti.train(
        "mlp", "digits", model_options={"hidden": [4]}, steps=2, batch_size=8, seed=3, workers=1, threads=1,
        quiet=True, out=str(tmp_path / "alone"),
    )  # fmt: skip
    job = folder.job("mlp/seed-3")
    ours, theirs = load_file(job / "weights.safetensors"), load_file(tmp_path / "alone/weights.safetensors")
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert outcomes["mlp/seed-3"].summary is not None
    assert outcomes["mlp/seed-3"].summary.test == alone.summary.test
    assert "2 steps" in (job / "log.txt").read_text()
    assert not (job / "usage.jsonl").exists()


def test_finished_jobs_are_taken_as_they_are_and_failed_ones_tried_again(mixed: Mixed) -> None:
    folder, outcomes, _ = mixed
    repaired = _job("raising")
    again, told = _work(folder, [_job("mlp/seed-0", seed=0), repaired], blocks=1)
    assert [one.job.name for one in told if isinstance(one, JobBegan)] == ["raising"]
    assert again["mlp/seed-0"].summary == outcomes["mlp/seed-0"].summary
    assert again["raising"].state is JobState.FINISHED
    assert RunFolder(folder.job("raising")).error() is None
    # Threads decide the order in which torch adds up.
    assert folder.settled(THREADS) == folder.settle(THREADS, 4) == 1
    with pytest.raises(BadOption, match="have had 1 each so far"):
        work_on(folder, JobList([]), blocks=1, threads=2)
    with pytest.raises(BadOption, match=r"and was 1 for all jobs of .* so far; give --block 1 "):
        work_on(folder, JobList([]), block=2, blocks=1)


def test_a_job_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hangs = _farm(tmp_path / "farm"), tmp_path / "hangs"
    # Time passes once the job hangs, and never again: the next one may be slow.
    monkeypatch.setattr(HostPool, "now", lambda pool: 1000.0 * hangs.exists())
    jobs = [_bad("hanging", note=str(hangs)), _job("next")]
    outcomes, _ = _work(folder, jobs, blocks=1, job_timeout_s=0.1)
    assert "not done after 0.1 s" in outcomes["hanging"].why
    assert outcomes["next"].state is JobState.FINISHED


def test_a_block_of_several_ranks(tmp_path: Path) -> None:
    folder = _farm(tmp_path / "farm")
    jobs = [_bad("raising_on_rank_1"), _job("sync"), _job("served", strategy="easgd", servers=1)]
    jobs.insert(1, _job("all_served", strategy="easgd", servers=2))
    counted = {"data": f"{BAD}:counted", "data_options": {"folder": str(tmp_path)}}
    jobs.append(_job("wide", precision="fp64", **counted))
    outcomes, _ = _work(folder, jobs, block=2, blocks=1)
    assert "--servers is 2, but the block has 2 ranks" in outcomes["all_served"].why
    assert outcomes["all_served"].state is folder.state("all_served") is JobState.FAILED
    assert outcomes["raising_on_rank_1"].why == "ArithmeticError: no model here"
    alone = tutti.train(
        "mlp",
        "digits",
        model_options={"hidden": [4]},
        steps=2,
        batch_size=8,
        workers=2,
        threads=1,
        quiet=True,
    )
    summary = outcomes["sync"].summary
    assert summary is not None
    assert summary.test == alone.summary.test
    assert summary.world.ranks == 2
    assert outcomes["served"].state is JobState.FINISHED
    weights = load_file(folder.job("wide") / "weights.safetensors")
    assert {str(one.dtype) for one in weights.values()} == {"torch.float64"}


def test_data_are_read_once_for_all_jobs_that_see_the_same(tmp_path: Path) -> None:
    data = {"data": f"{BAD}:counted", "data_options": {"folder": str(tmp_path)}}
    jobs = [_job(f"job-{number}", lr=0.1 * (1 + number), **data) for number in range(4)]
    folder = _farm(tmp_path / "farm")
    _work(folder, jobs, blocks=2)
    assert (tmp_path / "reads").read_text() == "read\n"
    # This one draws others: with another seed it would not be the same run.
    outcomes, _ = _work(_farm(tmp_path / "other"), [_job("other", seed=1, **data)], block=2, blocks=1)
    assert (tmp_path / "reads").read_text() == "read\n" * 2
    alone = tutti.train(
        "mlp", data["data"], data_options=data["data_options"], model_options={"hidden": [4]}, steps=2,
        batch_size=8, seed=1, workers=2, threads=1, quiet=True,
    )  # fmt: skip
    assert outcomes["other"].summary is not None
    assert outcomes["other"].summary.validation == alone.summary.validation


class Pruner(JobList):
    """Ends each job with its second epoch."""

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Tell whether it is the second."""
        return record.epoch == 2


@pytest.mark.parametrize("block", [1, 2])
def test_a_source_ends_prunable_jobs_after_an_epoch(tmp_path: Path, block: int) -> None:
    config = TINY.changed({"epochs": 4, "batch_size": 256})
    short = config.changed({"epochs": 1})
    source = Pruner(
        [
            FarmJob("pruned", config, prunable=True),
            # Nobody waits for the answer to its only epoch.
            FarmJob("short", short, prunable=True),
            FarmJob("whole", config),
        ]
    )
    work_on(_farm(tmp_path / "farm"), source, block=block, blocks=1, threads=1)
    summaries = {name: outcome.summary for name, outcome in source.outcomes.items()}
    assert {name: one and one.epochs for name, one in summaries.items()} == {
        "pruned": 2,
        "short": 1,
        "whole": 4,
    }
    assert {name: one and one.ended_early for name, one in summaries.items()} == {
        "pruned": PRUNED,
        "short": None,
        "whole": None,
    }


def test_a_request_saves_all_jobs_which_can_be_resumed(tmp_path: Path) -> None:
    longer = {"steps": None, "epochs": 12, "batch_size": 16}
    jobs = [_job(f"job-{seed}", seed=seed, **longer) for seed in range(3)]
    whole, stopped = _farm(tmp_path / "whole"), _farm(tmp_path / "stopped")
    _work(whole, jobs, blocks=1)
    source = JobList(jobs)

    def interrupt(what: Happening) -> None:
        if isinstance(what, EpochEnded) and what.record.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = work_on(stopped, source, blocks=1, threads=1, listener=interrupt)
    assert outcome.stopped == "it was asked to"
    assert {name: one.state for name, one in source.outcomes.items()} == {"job-0": JobState.STOPPED}
    assert [stopped.state(job.name) for job in jobs] == [JobState.STOPPED] + [JobState.WAITING] * 2
    outcomes, _ = _work(_farm(tmp_path / "stopped", resume=True), jobs, blocks=2)
    assert {one.state for one in outcomes.values()} == {JobState.FINISHED}
    for job in jobs:
        ours, theirs = (load_file(one.job(job.name) / "weights.safetensors") for one in (stopped, whole))
        assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert len((stopped.job("job-0") / "starts.jsonl").read_text().splitlines()) == 2


def test_the_number_of_blocks_follows_the_cores() -> None:
    cores = Cores(tuple((cpu,) for cpu in range(12)))
    placement, count = place_blocks(2, None, None, None, cores=cores)
    assert (count, placement.ranks, placement.threads) == (6, 12, 1)
    # Seven jobs on six blocks take two waves, as on four.
    placement, count = place_blocks(2, None, None, 7, cores=cores)
    assert (count, placement.ranks, placement.threads) == (4, 8, 1)
    assert place_blocks(1, None, 3, None, cores=cores)[1] == 4
    assert place_blocks(1, None, None, 3, cores=cores)[0].threads == 4
    with pytest.raises(BadOption, match="--block is 13, but this host has 12 cores"):
        place_blocks(13, None, None, None, cores=cores)
    with pytest.raises(BadOption, match="--blocks is 0"):
        place_blocks(1, 0, None, None, cores=cores)
