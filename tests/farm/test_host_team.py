"""Tests of a farm under mpirun, on one host and on two."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tests.other_user import as_another_user, needs_another_user
from tests.preloaded import command
from tutti.errors import BadOption, UserError
from tutti.farm import host_team
from tutti.farm.host_team import HostTeam, job_name
from tutti.launch.launcher import LaunchContext, Launcher
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.launches import Launch

CV = ["cv", "mlp", "--data", "digits", "--folds", "4", "--epochs", "1", "--model.hidden", "8"]


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
def test_each_host_has_one_launch_and_all_print_the_same_scores(hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "farm"
    words = [*command(), *CV, "--blocks", "1", "--threads", "1", "--out", str(out)]
    done = hosts.mpirun({"a": 2, "b": 1}, words)
    assert done.returncode == 0, done.stderr
    folder = FarmFolder.open(out)
    beats = folder.launches.beats().values()
    assert sorted(beat.host for beat in beats) == ["a", "b"]
    assert len({beat.job for beat in beats}) == 1
    assert {folder.state(name) for name in folder.plan.jobs} == {JobState.FINISHED}
    assert Counter(one.job for one in folder.events().records if one.event == "began") == Counter(
        [f"mlp/none/fold-{fold}" for fold in range(4)]
    )
    scores = [line.strip() for line in done.stdout.splitlines() if " 4  " in line and "mlp/none  " in line]
    assert len(scores) == 2, done.stdout
    assert len(set(scores)) == 1


def test_a_host_that_does_not_see_the_farm_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_team, "MEET_S", 0.0)
    other = HostTeam(True, False, "job", True)
    with pytest.raises(BadOption, match="needs --out"):
        other.wait_for_farm(None)
    with Launch(tmp_path, "another"), pytest.raises(BadOption, match="a file system that all hosts share"):
        other.wait_for_farm(str(tmp_path))
    with Launch(tmp_path, "job"):
        other.wait_for_farm(str(tmp_path))


def test_the_name_of_a_job_is_its_launchers() -> None:
    assert job_name({"PMIX_NAMESPACE": "prterun-a-7@1"}) == "prterun-a-7@1"
    assert job_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}) == "7.0"
    assert job_name({"SLURM_JOB_ID": "7"}) == ""


def _place(local_size: int) -> LaunchContext:
    return LaunchContext(Launcher.MPIRUN, 0, local_size, 0, local_size)


@needs_another_user
def test_processes_of_another_user_are_none_of_the_host_and_keep_none_out() -> None:
    address = f"\0tutti-farm-test-{os.getpid()}"

    def besiege() -> None:
        for _ in range(30):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one, suppress(ConnectionError):
                one.connect(address)
                one.send(b"no core")

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        gathered = pool.submit(host_team._gather, stack, address, _place(2))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
            while there.connect_ex(address):
                assert not gathered.done()
            with as_another_user(besiege) as besieger:
                besieger.result()
            there.send(b"7 9")
            assert gathered.result(30) == os.sched_getaffinity(0) | {7, 9}


@needs_another_user
def test_a_name_that_another_user_has_taken_is_said_by_both_sides() -> None:
    address = f"\0tutti-farm-squatted-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(address)
        with as_another_user(squatter.listen) as listens:
            listens.result()
            with ExitStack() as stack, pytest.raises(UserError, match="has the name under which"):
                host_team._gather(stack, address, _place(2))
            before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
            try:
                with pytest.raises(UserError, match="has the name under which"):
                    host_team._sleep_beside(address)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
