"""Runs across ranks that mpirun starts, on one host and on two, as they are seen from outside."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import command
from tutti.cli.main import main
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.run_folder import RunFolder
from tutti.run import recording

TRAIN = ["train", "mlp", "--epochs", "1", "--model.hidden", "16"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as made:
        yield made


@pytest.mark.mpi
@pytest.mark.cluster
@pytest.mark.timeout(240)
@needs_mpirun
def test_each_host_that_sees_the_folder_is_sampled_and_its_ranks_leave_signs(
    hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    left_out = ("--allow-run-as-root", "--oversubscribe")
    settings = shlex.join([word for word in hosts.mpirun_arguments if word not in left_out])
    train = [*command(), *TRAIN, "--hosts", "a:1,b:2", "--out", str(out)]
    done = hosts.run(["env", f"TUTTI_MPIRUN_ARGS={settings}", *train])
    assert done.returncode == 0, done.stderr
    assert [(beat.rank, beat.host) for beat in RunFolder(out).heartbeats().records] == [
        (0, "a"),
        (1, "b"),
        (2, "b"),
    ]
    assert [path.name for path in RunFolder(out).usage_files()] == ["usage.jsonl", "usage-b.jsonl"]
    sampled = {record.host: [rank.rank for rank in record.ranks] for record in RunFolder(out).usage().records}
    assert sampled == {"a": [0], "b": [1, 2]}
    assert main(["watch", str(out), "--once"]) == 0
    assert "3 ranks, finished" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "mlp", "digits")
    made.write_config({})
    return made


def seen_by_two(folder: RunFolder) -> list[RunFolder | None]:
    """The folder that rank 0 has made, as the two ranks see it."""

    def program(comm: Communicator) -> RunFolder | None:
        return recording._seen(comm, folder if comm.rank == 0 else None)

    return VirtualWorld(2).run(program)


def no_file(mark: tuple[int, ...]) -> tuple[int, ...]:
    raise FileNotFoundError


def another_file(mark: tuple[int, ...]) -> tuple[int, ...]:
    return mark[0] + 1, *mark[1:]


@pytest.mark.parametrize("elsewhere", [no_file, another_file])
def test_a_rank_that_does_not_see_the_folder_is_not_misled_by_another_one(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> None:
    marks = [recording._mark(folder.path)]

    def mark(path: Path) -> tuple[int, ...]:
        return marks.pop() if marks else elsewhere(found)

    found = marks[0]
    monkeypatch.setattr(recording, "_mark", mark)
    assert seen_by_two(folder) == [folder, None]
