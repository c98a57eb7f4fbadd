"""`tutti watch` for runs on several hosts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import command
from tutti.cli.main import main
from tutti.records.run_folder import RunFolder

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
def test_each_host_is_sampled_and_its_ranks_write_heartbeats(
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
