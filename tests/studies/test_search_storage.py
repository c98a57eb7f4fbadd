"""Studies in a journal, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from tests.preloaded import command
from tests.studies.meeting_model import MEETS
from tests.studies.postgres import postgres
from tutti.cli.main import main
from tutti.errors import BadOption
from tutti.records.farm_folder import FarmFolder
from tutti.studies.search.objectives import aims_of
from tutti.studies.search.storage import PLACE, open_study_of, without_password

AIMS = aims_of(["accuracy"])

MODEL = f"{Path(__file__).parent / 'meeting_model.py'}:build"

WORDS = [
    *("tune", MODEL, "--space.lr", "log:1e-3..1", "--space.model.hidden", "[[4],[8,4]]", "--trials", "6"),
    *("--epochs", "3", "--pruner", "asha", "--ahead", "3", "--batch-size", "128", "--blocks", "1"),
]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="pip install 'tutti[postgresql]'")
    with postgres() as url:
        yield url


def trials(study: optuna.Study) -> list[tuple[object, ...]]:
    """What a study has of each trial."""
    return [(one.number, one.params, one.state, one.values, one.intermediate_values) for one in study.trials]


@pytest.mark.timeout(300)
def test_launches_that_share_a_study_in_postgresql_make_the_trials_of_one_alone(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = tmp_path / "shared"
    words = [*WORDS, "--out", str(farm), "--resume", "--storage", database]
    program, place = [*command(), *words], tmp_path / "meeting"
    place.mkdir()

    def launched(name: str) -> subprocess.Popen[str]:
        environment = {**os.environ, MEETS: str(place / name)}
        return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment)

    with launched("killed") as killed, launched("other") as other:
        assert killed.stdout is not None
        # Whichever of the two has done it.
        assert any(" finished; " in line for line in killed.stdout)
        killed.kill()
        assert other.stdout is not None
        said = other.stdout.read()
        assert other.wait() == 0
    assert "secret" not in said
    assert f"study: 'shared' in postgresql://tester@/postgres?host={database.partition('host=')[2]}" in said
    assert main([*WORDS, "--out", str(tmp_path / "alone")]) == 0
    alone = trials(open_study_of(FarmFolder.open(tmp_path / "alone"), AIMS))
    assert trials(open_study_of(FarmFolder.open(farm), AIMS)) == alone
    assert {one[2].name for one in alone} == {"COMPLETE", "PRUNED"}  # type: ignore[attr-defined]
    events = FarmFolder.open(farm).events().records
    assert len({one.launch for one in events}) == 2
    # The page is made from the database; where it is, the folder says.
    capsys.readouterr()
    assert main(["report", str(farm)]) == 0
    assert "best: trial " in capsys.readouterr().out
    assert "secret" not in (farm / PLACE).read_text()


@pytest.mark.parametrize("storage", ["journal", "sqlite"])
def test_a_study_in_the_folder_is_found_again_and_is_one_of_optuna(storage: str, tmp_path: Path) -> None:
    folder = FarmFolder.begin(tmp_path / "farm", "tune", {})
    study = open_study_of(folder, AIMS, storage)
    trial = study.ask({"lr": optuna.distributions.FloatDistribution(1e-4, 1, log=True)})
    trial.report(0.1 + 0.2, 1)
    study.tell(trial, 1 / 3)
    assert trials(open_study_of(folder, AIMS)) == trials(study)
    assert trials(study)[0][3:] == ([1 / 3], {1: 0.1 + 0.2})
    with pytest.raises(BadOption, match=f"is in {storage}, not in postgresql://me@here/db; leave"):
        open_study_of(folder, AIMS, "postgresql://me:secret@here/db")


def test_a_study_of_another_search_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    first = FarmFolder.begin(tmp_path / "one" / "farm", "tune", {})
    open_study_of(first, AIMS, url)
    for path in ("one", "two"):
        # In another folder of the same name, and in one that was removed.
        (tmp_path / path / "farm" / PLACE).unlink(missing_ok=True)
        folder = FarmFolder.begin(tmp_path / path / "farm", "tune", {}, resume=True)
        with pytest.raises(BadOption, match=r"'farm' in sqlite.*studies\.db is that of another search"):
            open_study_of(folder, AIMS, url)


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("sqllite", "give journal or sqlite, or the URL"),
        ("postgres://me:secret@here/db", "cannot be opened: .*give journal, sqlite, or a URL"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file"),
        ("mysql://me:secret@here/db", "needs a driver"),
    ],
)
def test_storages_that_cannot_be_opened(storage: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=said) as caught:
        open_study_of(FarmFolder.begin(tmp_path, "tune", {}), AIMS, storage)
    assert "secret" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert without_password("cannot reach postgresql+psycopg://me:p:w@h:5432/db now") == (
        "cannot reach postgresql+psycopg://me@h:5432/db now"
    )
    assert without_password("postgresql:///db?host=/tmp/x") == "postgresql:///db?host=/tmp/x"
