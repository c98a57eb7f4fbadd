"""A farm on two hosts, each with a name and a network of its own."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import interpreter
from tutti.records.farm_folder import FarmFolder
from tutti.studies.cross_validation.study import findings_of

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, needs_mpirun, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("on_hosts.py")
WORDS = ["cv", "mlp", "--data", "digits", "--folds", "4", "--steps", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as made:
        yield made


def _tutti(hosts: Hosts, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the first host, whose launches on both come with torch imported."""
    setting = f"TUTTI_MPIRUN_ARGS={shlex.join(hosts.mpirun_arguments)}"
    launch = [*interpreter(starts_ranks=True), str(PROGRAM), "launch"]
    start = [*interpreter(), str(PROGRAM), json.dumps(launch)]
    return hosts.run(["env", setting, *start, *words])


def test_a_launch_on_each_host_works_on_one_farm(hosts: Hosts, tmp_path: Path) -> None:
    farm = tmp_path / "farm"
    done = _tutti(hosts, *WORDS, "--hosts", "a:1,b:1", "--out", str(farm))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    folder = FarmFolder.open(farm)
    assert {one.host for one in folder.launches.beats().values()} == {"a", "b"}
    found = findings_of(folder)
    assert (found.left, found.failed, len(found.scores["mlp/none"].folds)) == (0, {}, 4)
    # Each job was one launch's.
    ended = [event.job for event in folder.events().records if event.event == "ended"]
    assert sorted(ended) == sorted(set(ended))
    assert len(ended) == 4
