"""Tests of `--hosts` for a farm: launches on hosts that share its folder, of which some are lost."""

from __future__ import annotations

import os
import signal
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from tutti.cli.engines import work_on_hosts
from tutti.errors import BadOption, TuttiError
from tutti.farm import hosts as farm_hosts
from tutti.farm.host_team import FARM_HOST, FARM_JOB, HostTeam, team_of_host
from tutti.farm.hosts import run_on_hosts
from tutti.launch import launcher
from tutti.launch.mpirun import Mpirun
from tutti.launch.placement import Host

MPIRUN = """\
#!/bin/sh
test "$1 $3 $4 $5" = "-hosts -n 1 -genvlist" || exit 9
export HOST=${2%:1} PMI_SIZE=1 PMI_RANK=0 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1
shift 6
exec "$@"
"""
LOST = (
    "PRTE has lost communication with a remote daemon.\\n\\n  Remote daemon: [prterun-a-7@0,1] on node b\\n"
)
A, B = Host("a", 1), Host("b", 1)


@pytest.fixture(autouse=True)
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of mpirun, to which every host is this one."""
    path = tmp_path / "mpirun"
    path.write_text(MPIRUN)
    path.chmod(0o755)
    monkeypatch.setattr(farm_hosts, "find_mpirun", lambda: Mpirun(str(path), own=False, open_mpi=False))


def _run(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> int:
    """Run scripts as the launches of the hosts a and b."""
    monkeypatch.setattr(farm_hosts, "PROGRAM", ("sh", "-c", 'eval "$1"', "sh"))
    return run_on_hosts((A, B), [[script] for script in scripts])


def test_a_launch_knows_its_place_among_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_ours", None)
    for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1" if "SIZE" in name else "0")
    monkeypatch.setenv(FARM_JOB, "job")
    monkeypatch.setenv("PMIX_NAMESPACE", "of one host")
    monkeypatch.setenv(FARM_HOST, "0/2")
    with team_of_host() as first:
        monkeypatch.setattr(launcher, "_ours", None)
        monkeypatch.setenv(FARM_HOST, "1/2")
        with team_of_host() as second:
            pass
    assert (first, second) == (HostTeam(True, True, "job", True), HostTeam(True, False, "job", True))


def test_who_is_lost_is_told_and_the_next_one_is_heard(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = "echo from $HOST $TUTTI_FARM_HOST; echo a warning >&2; sleep 0.2"
    assert _run(monkeypatch, "echo from $HOST; kill -9 $$", other) == 0
    said, warned = capfd.readouterr()
    assert said.splitlines()[-1] == "from b 1/2"
    assert "b: a warning\n" in warned
    assert "tutti: warning: host a is lost (exit code -9); the others go on without it" in warned
    # Open MPI's exit code is 0 then.
    assert _run(monkeypatch, "sleep 0.2; echo done; exit 1", f"printf '{LOST}' >&2") == 1
    said, warned = capfd.readouterr()
    assert said == "done\n"
    assert "host b is lost; the others" in warned
    # One that has failed says nothing of the farm.
    assert _run(monkeypatch, "exit 1", "sleep 0.2; echo all is done") == 0
    assert capfd.readouterr().out == "all is done\n"
    with pytest.raises(TuttiError, match="no host has come to the end of the farm"):
        _run(monkeypatch, "exit 3", "exit 4")


def test_what_the_first_host_finds_wrong_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, "echo unknown model >&2; exit 2", "sleep 100") == 2


def test_a_host_that_is_silent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(farm_hosts, "LAST_S", 0.0)
    assert _run(monkeypatch, "exit 0", "sleep 100") == 0
    assert "b: not done after 0 s, though the farm is; it is ended" in capfd.readouterr().err


def test_a_request_to_stop_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pipes = [tmp_path / "a", tmp_path / "b"]
    for pipe in pipes:
        os.mkfifo(pipe)

    def ask() -> None:
        for pipe in pipes:
            pipe.read_text()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    script = f"trap 'echo $HOST saved >&2; kill $!; exit 75' USR1; sleep 100 & echo >{tmp_path}/$HOST; wait"
    assert _run(monkeypatch, script, script) == 75
    assert {"a: a saved", "b: b saved"} <= {*capfd.readouterr().err.splitlines()}


def test_the_words_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def note(hosts: Sequence[Host], words: Sequence[Sequence[str]]) -> int:
        seen.extend(words)
        return 0

    monkeypatch.setattr(farm_hosts, "run_on_hosts", note)
    given = Namespace(hosts="a:6,b", on="here", out="farm", dry_run=False, block=3, blocks=None)
    given.command_line = ("cv", "mlp", "--hosts", "a:6,b")
    assert work_on_hosts(given) == 0
    assert seen == [
        [*given.command_line, "--hosts", "", "--blocks", "2"],
        [*given.command_line, "--hosts", ""],
    ]
    wrong = {
        "needs --out": {"out": None},
        "leave one of them out": {"on": "slurm"},
        "give one of them": {"blocks": 1},
        "a multiple": {"block": 4},
        "is not a host": {"hosts": "a;b"},
    }
    for why, change in wrong.items():
        with pytest.raises(BadOption, match=why):
            work_on_hosts(Namespace(**{**vars(given), **change}))
