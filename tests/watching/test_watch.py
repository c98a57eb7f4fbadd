"""`tutti watch`: its display, its end, and a real run with a stopped rank."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.launch.processes import wait_for_files, wait_until_gone
from tests.preloaded import command
from tests.watching.seen import NOW, beat, epoch, summary, usage, write_run
from tutti.cli.main import main
from tutti.records.checkpoints import FOLDER as CHECKPOINTS
from tutti.records.checkpoints import MANIFEST, step_folder
from tutti.records.heartbeat import FAILED, FINISHED
from tutti.records.json_lines import append_line
from tutti.records.run import RunStart, World
from tutti.records.run_folder import RunFolder
from tutti.watching.follow import Clock, follow
from tutti.watching.health import SILENT_S

PATIENCE_S = 90.0


def now(rank: int, **other: object) -> object:
    """Return the heartbeat of a rank that trains now."""
    moment = time.time()
    return beat(rank, **{"time": moment, "moved": moment, "began": moment - 100.0, **other})


def test_once_shows_a_running_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = replace(usage("running", "running"), time=time.time())
    folder = write_run(tmp_path / "run", now(0), now(1), epochs=2, usage=fresh)
    assert main(["watch", str(folder), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mlp on digits, hogwild, 2 ranks, running, epoch 2/4, step 1,000 of 2,000, 1:40 left" in shown
    assert "75.00%" in shown
    assert "1001" in shown
    assert "100 MiB" in shown


def test_the_time_left_of_a_resumed_run_counts_from_its_resumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = replace(usage("running", "running"), time=time.time())
    folder = write_run(tmp_path / "run", now(0), now(1), epochs=2, usage=fresh)
    RunFolder(folder).append(RunStart("now", World(3)))
    RunFolder(folder).append(RunStart("now", World(2), 900, ("momenta",)))
    assert main(["watch", str(folder), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "step 1,000 of 2,000, 16:40 left, resumed after step 900 on 2 ranks" in shown
    assert "what starts over: momenta" in shown


def test_a_stopped_run_is_shown_with_the_command_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "my run", now(0, state=FINISHED), now(1, state=FINISHED), epochs=2)
    place = step_folder(folder / CHECKPOINTS, 1000)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("{}")
    assert main(["watch", str(folder), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 ranks, stopped, epoch" in shown
    assert f"continue it by: tutti train --resume '{folder}'" in shown
    assert "failed" not in shown


def test_a_finished_run_is_shown_and_the_command_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", beat(0, state=FINISHED), epochs=3, finished=True)
    assert main(["watch", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "finished after 0:08, test loss 0.2500  accuracy 87.50%" in shown
    assert "epoch 3/4  loss 0.1667  accuracy 75.00%  validation loss 0.1667" in shown


def test_a_rank_that_was_killed_is_shown_as_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = now(0, state=FAILED, error="PeerLost: lost rank 1")
    folder = write_run(tmp_path / "run", failed, now(1, time=time.time() - 1.0))
    assert main(["watch", str(folder), "--once"]) == 1
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0]: line[3] for line in shown if line[1:2] == ["a"]} == {"0": "failed", "1": "gone"}


def followed(folder: Path, *events: Callable[[], None], terminal: bool = False) -> tuple[bool, str]:
    """Follow a run, with an event between two readings; return whether it finished, and the output."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    left, seconds = list(events), [NOW]

    def sleep(_: float) -> None:
        seconds[0] += 1.0
        left.pop(0)()

    stream = Terminal()
    finished = follow(folder, SILENT_S, stream, Clock(lambda: seconds[0], sleep))
    return finished, stream.getvalue()


def finish(folder: Path) -> None:
    RunFolder(folder).write(summary(2))


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_followed_from_an_empty_folder_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    run.mkdir()

    def begin() -> None:
        run.rmdir()
        write_run(run, beat(0), beat(1))

    def train() -> None:
        append_line(run / "history.jsonl", epoch(1))
        for rank in (0, 1):
            RunFolder(run).write_heartbeat(beat(rank, time=NOW + 2.0))

    finished, shown = followed(run, begin, train, lambda: finish(run), terminal=terminal)
    assert finished
    assert "waiting for records" in shown
    assert "2 ranks, running" in shown
    assert "finished" in shown


def test_without_a_terminal_nothing_is_printed_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", beat(0), beat(1, time=NOW - 11.0), epochs=1)
    finished, shown = followed(run, lambda: None, lambda: None, lambda: finish(run))
    assert finished
    assert shown.count("epoch 1/4  loss") == 1
    assert shown.count("rank 1 has been silent for") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--silent-after", "1"], "give at least 2"), (["--onec"], "did you mean '--once'?")],
)
def test_wrong_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(write_run(tmp_path / "run", beat(0))), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_waits_for_a_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(_: float) -> None:
        finish(write_run(tmp_path / "run", beat(0), epochs=1))

    monkeypatch.setattr("tutti.watching.follow.Clock", partial(Clock, sleep=begin))
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 2
    assert "does not exist; give the folder that 'tutti train' writes" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "run")]) == 0


def test_watching_needs_neither_torch_nor_mpi_nor_numpy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", beat(0, state=FINISHED), epochs=1, finished=True)
    program = (
        "import sys\nfor name in ('torch', 'mpi4py', 'numpy'): sys.modules[name] = None\n"
        "from tutti.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "watch", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def once(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tutti", "watch", str(folder), "--once"]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def until(folder: Path, said: str, code: int) -> None:
    """Watch until the output has this text, with this exit code."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = once(folder)
        if said in done.stdout and done.returncode == code:
            return
        assert time.monotonic() < deadline, done


@pytest.mark.timeout(300)
def test_a_stopped_rank_of_a_real_run_is_named_until_it_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "mlp", "--epochs", "100000", "-n", "2"]
    process = subprocess.Popen(
        [*command(), *words, "--out", str(folder)], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        wait_for_files([folder / "ranks/1.json"], PATIENCE_S)
        until(folder, "2 ranks, running, epoch", code=0)
        stopped = RunFolder(folder).heartbeats().records[1].process
        os.kill(stopped, signal.SIGSTOP)
        until(folder, "rank 1 is stopped in step", code=1)
        os.kill(stopped, signal.SIGCONT)
        until(folder, "2 ranks, running, epoch", code=0)
        processes = [one.process for one in RunFolder(folder).heartbeats().records]
        process.kill()
        assert wait_until_gone(processes) == []
        until(folder, "the run failed after", code=1)
    finally:
        process.kill()
        process.wait()
