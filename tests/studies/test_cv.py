"""`tutti cv` on farms."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from html import escape
from pathlib import Path

import numpy as np
import pytest

from tests.farm import killed as killed_program
from tests.preloaded import interpreter
from tutti.cli import cv
from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_pool
from tutti.farm.coordinator import FarmOutcome
from tutti.farm.jobs import FarmJob
from tutti.records.farm_folder import SPLITS, FarmFolder, JobState
from tutti.records.predictions import Predictions
from tutti.records.run_folder import PREDICTIONS, RunFolder, TrainedOn
from tutti.records.splits import read_split
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.result import CrossValidated
from tutti.studies.cross_validation.splits import splitter_of
from tutti.studies.cross_validation.study import CrossValidation
from tutti.studies.samples import look_at
from tutti.studies.score import Score
from tutti.studies.search.space import space_of
from tutti.studies.search.study import Search

HERE = Path(__file__)
MODELS = HERE.with_name("cv_models.py")
SAMPLES = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images of three classes, in groups of four."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    draw = np.random.default_rng(0)
    targets = np.arange(SAMPLES) % 3
    inputs = (
        draw.integers(0, 200, (SAMPLES, 8, 8), dtype=np.uint8) + 20 * targets.astype(np.uint8)[:, None, None]
    )
    np.savez(path, x=inputs, y=targets, person=np.arange(SAMPLES) // 4)
    return str(path)


def _leave_out_page(patch: pytest.MonkeyPatch) -> None:
    """A page takes seconds: one test makes it."""
    patch.setattr(cv, "write_cv_page", lambda folder, found: folder.path / "report.html")


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    _leave_out_page(monkeypatch)


def _words(data: str, out: Path, *further: str) -> list[str]:
    common = ["--data", data, "--folds", "3", "--epochs", "2", "--batch-size", "16", "--threads", "1"]
    return ["cv", f"mlp,{MODELS}:linear", "--schedule", "none,cosine", *common, "--out", str(out), *further]


def _predictions(farm: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(farm)): path.read_bytes()
        for path in sorted(farm.glob("jobs/**/predictions.npz"))
    }


@pytest.fixture(scope="module")
def farm(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of two models and two schedules, on one block."""
    out = tmp_path_factory.mktemp("farms") / "one"
    with pytest.MonkeyPatch.context() as patch:
        _leave_out_page(patch)
        assert main(_words(data, out, "--blocks", "1")) == 0
    return out


def test_a_farm_has_all_runs_and_tables(farm: Path) -> None:
    folder = FarmFolder.open(farm)
    names = {f"{m}/{s}/fold-{k}" for m in ("mlp", "linear") for s in ("none", "cosine") for k in range(3)}
    assert set(folder.plan.jobs) == names
    assert {folder.state(name) for name in names} == {JobState.FINISHED}
    # A fold has the same seed for all models.
    assert all(config["seed"] == int(name[-1]) for name, config in folder.plan.jobs.items())
    with np.load(folder.splits) as file:
        assert sum(key.startswith("train-") for key in file) == 3
    found = CrossValidated.read(folder)
    assert (found.left, found.failed) == (0, {})
    assert len(found.comparison) == 6
    assert {tuple(one.samples) for one in found.scores.values()} == {(40, 40, 40)}
    assert (farm / "scores.csv").read_text().count("mean") == 4
    comparison = (farm / "compare.csv").read_text()
    assert "no significant difference" in comparison or "better" in comparison


def test_each_fold_has_its_own_scale_for_all_candidates(farm: Path) -> None:
    scales: dict[str, set[object]] = {}
    for job in FarmFolder.open(farm).plan.jobs:
        seen = RunFolder(farm / "jobs" / job).read(TrainedOn)
        scales.setdefault(job.rpartition("/")[2], set()).add((seen.mean, seen.std))
    assert [len(found) for found in scales.values()] == [1, 1, 1]
    assert len(set.union(*scales.values())) == 3


def test_blocks_and_order_change_no_bit(farm: Path, data: str, tmp_path: Path) -> None:
    words = _words(data, tmp_path / "two", "--blocks", "2")
    words[1:4] = [f"{MODELS}:linear,mlp", "--schedule", "cosine,none"]
    assert main(words) == 0
    assert _predictions(tmp_path / "two") == _predictions(farm)


def test_a_killed_farm_resumes_to_the_same_bits(farm: Path, data: str, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    words = [" finished; 1 of 12 jobs done", *_words(data, out, "--blocks", "2")]
    killed = subprocess.run([*interpreter(starts_ranks=True), killed_program.__file__, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    before = _predictions(out)
    assert 1 <= len(before) < 12
    assert main(_words(data, out, "--blocks", "2", "--resume")) == 0
    assert _predictions(out) == _predictions(farm)


def test_an_ordinary_run_repeats_a_fold(farm: Path, tmp_path: Path) -> None:
    config = str(farm / "jobs/mlp/cosine/fold-2/config.json")
    assert main(["train", "--config", config, "--out", str(tmp_path / "run")]) == 0
    ours, theirs = (farm / "jobs/mlp/cosine/fold-2"), tmp_path / "run"
    assert (ours / "predictions.npz").read_bytes() == (theirs / "predictions.npz").read_bytes()


def test_a_function_makes_the_same_data_for_all_folds(tmp_path: Path) -> None:
    program, calls = tmp_path / "own.py", tmp_path / "calls"
    program.write_text(
        "import numpy as np\n"
        "def make():\n"
        f"    with open({str(calls)!r}, 'a') as file: file.write('x')\n"
        "    x = np.random.normal(size=(60, 4)).astype('float32')\n"
        "    return x, (x[:, 0] > 0).astype('int64')\n"
    )
    words = ["mlp", "--data", f"{program}:make", "--steps", "2", "--threads", "1"]
    farm = tmp_path / "farm"
    assert main(["cv", *words, "--folds", "3", "--seed", "4", "--out", str(farm)]) == 0
    # Once for the splits, once for all blocks.
    assert calls.read_text() == "xx"
    alone = ["-n", "1", "--split", f"{farm}/splits.npz:1", "--seed", "5", "--predictions"]
    assert main(["train", *words, *alone, "--out", str(tmp_path / "run")]) == 0
    found = [Predictions.read(one / PREDICTIONS) for one in (farm / "jobs/mlp/none/fold-1", tmp_path / "run")]
    assert (found[0].outputs == found[1].outputs).all()


def test_a_fold_that_fails_fails_alone(data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = _words(data, tmp_path / "farm", "--model.fold", "fold-1")
    words[1:4] = [f"{MODELS}:FailsOn", "--schedule", "none"]
    assert main(words) == 1
    said = capfd.readouterr().out
    failure = "a job of FailsOn/none failed: ArithmeticError: no model for this fold"
    assert failure in said
    assert "2 of 3" in said
    assert f"report: {tmp_path / 'farm' / 'report.html'}" in said
    folder = FarmFolder.open(tmp_path / "farm")
    assert "raise ArithmeticError" in (RunFolder(folder.job("FailsOn/none/fold-1")).error() or "")
    assert CrossValidated.read(folder).scores["FailsOn/none"].missing == [1]
    assert main(["report", str(folder.path)]) == 0
    assert failure in capfd.readouterr().out


def test_a_dry_run_prints_the_jobs(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--group-by", "person", "--sweep", "lr=0.1,0.2"]
    assert main(_words(data, tmp_path / "farm", *words)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "24 jobs: 8 candidates x 3 folds"
    assert said[1] == "fold 0: 80 samples to train on, 40 held out"
    assert said[4] == "mlp/none/lr=0.1"
    assert not (tmp_path / "farm").exists()


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (("--folds", "50", "--stratified"), "cannot split these 120 samples"),
        (("--folds", "1"), "number of folds is 1"),
        (("--split", "x:0"), "--split"),
        (("--score", "accurcy"), "did you mean 'accuracy'"),
        (("--score", "mine.py:hits"), "write mine.py:hits:higher or mine.py:hits:lower"),
        (("--score", "mine.py:hits:lower"), "there is no"),
        (("--optimizer", "adamm"), "did you mean 'adam"),
        (("--sweep", "model.hiden=3"), "did you mean 'hidden'"),
        (("--group-by", "persons"), "no array 'persons'"),
        (("--block", "4096"), "--block is 4096"),
        (("--job-timeout", "soon"), "--job-timeout is 'soon'"),
    ],
)
def test_bad_input(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], further: tuple[str, ...], message: str
) -> None:
    assert main(_words(data, tmp_path / "farm", *further)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "farm").exists()


def test_the_column_that_groups_a_table_is_no_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    persons = [f"p{number // 3}" for number in range(24)]
    rows = (f"{number / 24},{-number},{person},{number % 2}" for number, person in enumerate(persons))
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,person,label", *rows]) + "\n")
    words = ["cv", "mlp", "--data", str(table), "--folds", "2", "--epochs", "1", "--threads", "1"]
    farm = tmp_path / "farm"
    assert main([*words, "--group-by", "person", "--out", str(farm)]) == 0
    assert not capsys.readouterr().err
    folder = FarmFolder.open(farm)
    for number in range(2):
        split = read_split(folder.splits, number, 24, folder.plan.question["fingerprint"])
        held_out, trained = ({persons[row] for row in part} for part in (split.test, split.train))
        assert len(held_out) == len(trained) == 4
        assert not held_out & trained
    seen = RunFolder(folder.job("mlp/none/fold-0")).read(TrainedOn)
    assert seen.columns == ("a", "b")
    assert main([*words, "--group-by", "persons", "--out", str(tmp_path / "other")]) == 2
    assert "has no column 'persons' (--group-by)" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"group": "person"}], ids=["classes", "groups"])
def test_folds_leave_out_the_test_part_of_a_run_with_the_same_seed(
    data: str, tmp_path: Path, options: dict[str, object]
) -> None:
    job = FarmJob("", TrainConfig(model="mlp", data=data, data_options=options, test=0.25, seed=3))
    searched = Search(job.config, space_of({"lr": [0.1, 0.2]}), [Score("loss", False)], folds=3)
    pool = VirtualWorld(1).run(
        lambda comm: open_pool(data, comm, options).divided(comm, 0.1, 3, test=0.25).test
    )
    tested = set(pool[0].rows.tolist())
    samples = look_at([job], 1)
    validated = CrossValidation({"mlp": job}, splitter_of(3, grouped=bool(options)), {}, options.get("group"))
    searched.begin(samples, str(tmp_path / "farm"))
    of_search = [read_split(tmp_path / "farm" / SPLITS, k, SAMPLES, samples.fingerprint) for k in range(3)]
    for split in [*validated.splits(samples), *of_search]:
        assert {*range(SAMPLES)} - {*split.train, *split.test} == tested
        assert len(tested) == SAMPLES / 4 - (SAMPLES / 4) % 4 * bool(options)
        assert not options or not {*split.train // 4} & {*split.test // 4}
    trained = [*validated.jobs(3, tmp_path)["mlp"], *searched.jobs(tmp_path, 0, {"lr": 0.1})]
    assert {one.config.test for one in trained} == {0.0}


def test_a_stopped_farm_prints_how_to_continue(
    farm: Path, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = FarmOutcome("its time limit is over", 1.0, 1.0, 1, Counter())
    monkeypatch.setattr(cv, "train_shown", lambda *_: (outcome, None))
    assert main(_words(data, farm, "--resume", "--time-limit", "1s")) == 75
    expected = f"stopped: its time limit is over; continue with the same command and --resume --out {farm}"
    assert expected in capsys.readouterr().out


def test_the_farm_of_another_question_is_refused(
    farm: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words(data, farm)) == 2
    assert "go on with what is in it by --resume" in capsys.readouterr().err
    assert main(_words(data, farm, "--resume", "--lr", "0.5")) == 2
    assert "by lr" in capsys.readouterr().err
    assert main(_words(data, farm, "--resume", "--seed", "5")) == 2
    assert "seed is 5 (was 0)" in capsys.readouterr().err


def test_the_page_has_all_figures(farm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair", reason="needs the extra 'plots'")
    assert main(["report", str(farm), "--out", str(tmp_path)]) == 0
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    drawn = {"folds", "blocks", "confusion"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.svg")} >= drawn
    page = (tmp_path / "report.html").read_text()
    found = CrossValidated.read(FarmFolder.open(farm))
    assert all(escape(one.sentence) in page for one in found.comparison)
    assert all(name in page for name in found.scores)


def test_a_farm_can_be_watched(farm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(farm)]) == 0
    assert "12 of 12 jobs done, 0 running" in capsys.readouterr().out
