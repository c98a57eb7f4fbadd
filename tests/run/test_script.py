"""A program of the user's on the ranks of this machine: how it ends is how the command ends."""

from __future__ import annotations

import atexit
import re
from pathlib import Path

import pytest

from tutti.errors import PeerLost, RankFailed
from tutti.run.script import run_program

BEGINNING = """
import atexit, os, sys, threading
import tutti

comm = tutti.init()
second = comm.rank == 1
"""

AFTER_THE_LAST_LINE = {
    "thread": "def late():\n    threading.main_thread().join()\n    os._exit(5)\n"
    "if second: threading.Thread(target=late).start()",
    "atexit": "if second: atexit.register(os._exit, 5)",
}


def run(folder: Path, program: str, workers: int = 2) -> int:
    path = folder / "program.py"
    path.write_text(BEGINNING + program)
    return run_program(str(path), [], str(workers), 1, None)


@pytest.mark.parametrize("what", AFTER_THE_LAST_LINE)
def test_a_rank_is_not_done_before_what_follows_its_last_line(what: str, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="exited with code 5") as caught:
        run(tmp_path, AFTER_THE_LAST_LINE[what])
    assert caught.value.ranks == [1]


def test_a_single_rank_leaves_exit_functions_to_its_process(tmp_path: Path) -> None:
    called: list[int] = []
    atexit.register(called.append, 1)
    try:
        run(tmp_path, "atexit.register(len, '')", workers=1)
        assert not called
    finally:
        atexit.unregister(called.append)


def test_an_open_executor_or_a_closed_output_is_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"""
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(lambda: None).result()
open({str(tmp_path)!r} + f"/{{comm.rank}}", "w").close()
sys.stdout.close()
sys.exit()
"""
    assert run(tmp_path, program) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "program.py"}
    assert "Error" not in capfd.readouterr().err


def test_a_program_that_has_closed_its_output_is_heard_nevertheless(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run(tmp_path, "sys.stdout.close(); sys.stderr.close()\nif second: raise ValueError('seven')")
    assert caught.value.rank == 1
    assert caught.value.traceback.rstrip().endswith("ValueError: seven")


def test_a_traceback_begins_in_the_program(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run(tmp_path, "if second: sys.exit(3)\ncomm.barrier()")
    frames = re.findall(r'File "(.*?)"', caught.value.traceback)
    assert frames == [str(tmp_path / "program.py")]
    assert caught.value.traceback.rstrip().endswith("SystemExit: 3")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_program_that_has_saved_and_stopped_is_no_failure(tmp_path: Path, workers: int) -> None:
    assert run(tmp_path, "sys.exit(75)", workers) == 75


IN_CPP = """
import os, signal, torch
torch.distributed.init_process_group({backend!r})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
while True:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize("backend", ["tutti", "gloo"])
def test_a_killed_rank_is_named_though_torch_fails_in_the_others(backend: str, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"killed by signal 9 \(SIGKILL\)") as caught:
        run(tmp_path, IN_CPP.format(backend=backend))
    assert caught.value.ranks == [1]
