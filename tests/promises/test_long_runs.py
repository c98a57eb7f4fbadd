"""Runs that lose ranks, are stopped, grow, shrink, or fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.promises.command import (
    LIMIT_S,
    apart,
    history,
    json_lines,
    program,
    run,
    sha256,
    started,
    summary,
    torch_program,
    wait_until,
    weights_sha256,
)

pytestmark = pytest.mark.timeout(400)

TRAIN = "tutti train mlp --precision fp64 --epochs 4 --lr 0.003"

CALLBACKS = """
import os, signal, time
from pathlib import Path
import tutti

HERE = Path(__file__).parent

class Observer(tutti.Callback):
    def step(self, course):
        (HERE / f"rank-{course.rank}").write_text(str(os.getpid()))
        self.act(course)

class Killed(Observer):
    "Rank 1 is killed in step 57, once."
    def act(self, course):
        note = HERE / "killed"
        if course.rank == 1 and course.step == 57 and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)

class Slow(Observer):
    "Goes slowly from step 57 on, while the file armed is there, so that there is time to do something."
    def act(self, course):
        if course.step >= 57 and (HERE / "armed").exists():
            (HERE / "here").touch()
            time.sleep(0.05)

class Hung(Observer):
    def act(self, course):
        if course.rank == 1 and course.step == 20:
            self.never_comes_back()
    def never_comes_back(self):
        while True:
            time.sleep(1)

class Endless(Observer):
    "Ends the run once it has three ranks."
    def act(self, course):
        if course.ranks == 3:
            course.stop("there are three ranks")

class Unequal(tutti.Callback):
    "The model takes 10 ms for each sample on rank 1."
    def begin(self, course):
        if course.rank == 1:
            course.model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.01 * len(inputs[0])))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "faults.py").write_text(CALLBACKS)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(f"{TRAIN} -n 2 --out run", folder)
    return folder / "run"


# Promise 20
def test_a_run_whose_rank_is_killed_ends_with_the_very_weights_of_an_undisturbed_one(
    folder: Path, undisturbed: Path
) -> None:
    said = run(f"{TRAIN} -n 2 --callbacks faults.py:Killed --on-failure respawn --out run", folder)
    assert re.search(r"lost rank 1\b.*SIGKILL", said.out + said.err)
    assert (folder / "killed").exists()
    assert weights_sha256(folder / "run") == weights_sha256(undisturbed)
    assert summary(folder / "run")["world"]["ranks"] == 2


# Promise 20
def test_a_run_goes_on_with_one_rank_fewer_to_the_same_weights(folder: Path, undisturbed: Path) -> None:
    run(f"{TRAIN} -n 3 --callbacks faults.py:Killed --on-failure shrink --out run", folder)
    assert apart(folder / "run", undisturbed) < 1e-12
    assert summary(folder / "run")["world"]["ranks"] == 2
    assert [len(epoch["ranks"]) for epoch in history(folder / "run")][-1] == 2


# Promises 20 and 34
def test_without_on_failure_a_killed_rank_is_named_and_ends_the_run(folder: Path) -> None:
    said = run(f"{TRAIN} -n 2 --callbacks faults.py:Killed", folder, code=1)
    assert re.search(r"rank 1\b.*SIGKILL", said.err)


# Promise 20
def test_a_rank_that_hangs_is_named_with_its_stack(folder: Path) -> None:
    said = run(f"{TRAIN} -n 2 --callbacks faults.py:Hung --hang-timeout 2s", folder, code=1)
    assert "never_comes_back" in said.err
    assert re.search(r"lost rank 1\b", said.err)
    assert not re.search(r"lost rank 0\b", said.err)


# Promise 20
def test_a_slow_rank_gets_less_work(folder: Path) -> None:
    options = "--balance speed --batch-size 32 --epochs 2 --callbacks faults.py:Unequal --out run"
    run(f"tutti train mlp -n 2 {options}", folder)
    for epoch in history(folder / "run"):
        fast, slow = (rank["samples"] for rank in epoch["ranks"])
        assert fast + slow == epoch["train"]["samples"] == 1294
        assert slow < fast / 2


# Promise 21
def test_a_running_training_gets_another_number_of_ranks(folder: Path) -> None:
    options = "--steps 10000000 --on-failure respawn --callbacks faults.py:Endless --out run"
    with started(f"tutti train mlp -n 1 {options}", folder) as training:
        wait_until((folder / "rank-0").exists)
        run("tutti resize run -n 3", folder)
        said = training.communicate(timeout=LIMIT_S)
    assert training.returncode == 0, said
    assert summary(folder / "run")["world"]["ranks"] == 3
    assert len(history(folder / "run")[-1]["ranks"]) == 3
    assert len(json_lines(folder / "run" / "starts.jsonl")) == 2


def stopped_by_sigterm(folder: Path) -> None:
    """A run of two ranks that has saved its state in the middle of an epoch, when it was asked to stop."""
    (folder / "armed").touch()
    options = '--callbacks faults.py:Slow --checkpoint "20 steps" --out run'
    with started(f"{TRAIN} -n 2 {options}", folder) as training:
        wait_until((folder / "here").exists)
        training.send_signal(signal.SIGTERM)
        out, err = training.communicate(timeout=LIMIT_S)
    assert training.returncode == 75, out + err
    (folder / "armed").unlink()
    assert not (folder / "run" / "weights.safetensors").exists()


# Promise 9
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_that_was_stopped_in_mid_epoch_resumes_on_any_number_of_ranks(
    folder: Path, undisturbed: Path, ranks: int
) -> None:
    stopped_by_sigterm(folder)
    step = int(os.readlink(folder / "run" / "checkpoints" / "latest").removeprefix("step-"))
    assert step >= 57
    assert step % 41
    run(f"tutti train --resume run --trust -n {ranks}", folder)
    assert summary(folder / "run")["steps"] == 164
    if ranks == 2:
        assert weights_sha256(folder / "run") == weights_sha256(undisturbed)
    else:
        assert apart(folder / "run", undisturbed) < 1e-12


# Promise 9
def test_a_damaged_checkpoint_is_found_by_its_sha256_and_the_one_before_is_taken(
    folder: Path, undisturbed: Path
) -> None:
    stopped_by_sigterm(folder)
    checkpoints = sorted((folder / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) > 1
    newest = checkpoints[-1]
    manifest = (newest / "manifest.json").read_text()
    files = [file for file in newest.iterdir() if file.name != "manifest.json"]
    assert all(sha256(file) in manifest for file in files)
    damaged = newest / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    said = run("tutti train --resume run --trust", folder)
    assert newest.name in said.out + said.err
    assert weights_sha256(folder / "run") == weights_sha256(undisturbed)


# Promise 9
def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    run('tutti train mlp -n 2 --steps 100 --checkpoint "10 steps" --keep 2 --out run', tmp_path)
    kept = sorted(
        int(one.name.removeprefix("step-")) for one in (tmp_path / "run/checkpoints").glob("step-*")
    )
    assert kept[-1] == 100
    assert 2 <= len(kept) <= 3


# Promise 22
def test_validation_beside_training_gives_the_figures_of_a_pause(tmp_path: Path) -> None:
    figures = """
def validated(how):
    # One worker, whose training does not depend on timing.
    history = tutti.train("mlp", "digits", validate=how, workers=1, strategy="downpour", epochs=3, seed=0,
                          precision="fp64", quiet=True).history
    return [[one.validation.samples, one.validation.loss] for one in history]

print(json.dumps([validated(how) for how in ("pause", "background")]))
"""
    pause, *beside = program(torch_program(figures), tmp_path).figures
    assert [samples for samples, _ in pause] == [144] * 3
    for found in beside:
        assert [samples for samples, _ in found] == [144] * 3
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in pause], rel=1e-12)


# Promise 27
def test_a_run_ends_early_and_its_figures_go_everywhere(tmp_path: Path) -> None:
    options = "--epochs 50 --monitor val_accuracy --goal 0.8 --log tensorboard,mlflow --out runs/one"
    run(f"tutti train mlp -n 2 {options}", tmp_path)
    epochs = history(tmp_path / "runs/one")
    reached = [epoch["validation"]["metrics"]["accuracy"] >= 0.8 for epoch in epochs]
    assert reached == [False] * (len(epochs) - 1) + [True]
    assert summary(tmp_path / "runs/one")["ended_early"]
    rows = (tmp_path / "runs/one/history.csv").read_text().splitlines()
    assert "validation/accuracy" in rows[0]
    assert len(rows) == 1 + len(epochs)
    assert list((tmp_path / "runs/one/tensorboard").rglob("events.*"))
    assert (tmp_path / "runs/mlruns/mlflow.db").stat().st_size > 0


# Promise 34
def test_the_traceback_of_the_rank_that_failed_comes_last(tmp_path: Path) -> None:
    fails = (
        "import tutti\n"
        "comm = tutti.init()\n"
        "if comm.rank == 1:\n"
        "    raise RuntimeError('no more')\n"
        "comm.barrier()\n"
    )
    (tmp_path / "fails.py").write_text(fails)
    said = run("tutti run -n 2 fails.py", tmp_path, code=1)
    last = [line for line in said.err.splitlines() if line.strip()][-1]
    assert "RuntimeError: no more" in last
    assert "line 4" in said.err


# Promise 34
@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("train mlp --epohcs 3", "--epochs"),
        ("train mlp --strategy hogwilt", "hogwild"),
        ("train mlp --model.hiden 5", "hidden"),
    ],
)
def test_a_wrong_word_is_told_the_nearest_right_one(tmp_path: Path, words: str, nearest: str) -> None:
    said = run(f"tutti {words}", tmp_path, code=2)
    assert nearest in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs").exists()


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Promise 34
def test_no_process_outlives_a_launcher_that_is_killed(folder: Path) -> None:
    ranks = [folder / f"rank-{rank}" for rank in range(2)]
    options = "--steps 10000000 --callbacks faults.py:Endless --out run"
    with started(f"tutti train mlp -n 2 {options}", folder) as training:
        wait_until(lambda: all(note.exists() and note.read_text() for note in ranks))
        processes = [int(note.read_text()) for note in ranks]
        session = training.pid
        training.kill()
        training.communicate(timeout=LIMIT_S)
    wait_until(lambda: not any(map(lives, processes)))
    wait_until(lambda: subprocess.run(["pgrep", "--session", str(session)], capture_output=True).returncode)


LISTENING = """
import os
from pathlib import Path
import psutil, tutti

class Sockets(tutti.Callback):
    "Notes what each process of the job listens at."
    def end(self, course):
        top = psutil.Process()
        while top.parent() is not None and top.parent().pid != int(os.environ["ABOVE"]):
            top = top.parent()
        job = [top, *top.children(recursive=True)]
        found = [repr(one) for process in job for one in process.net_connections("inet")]
        (Path(__file__).parent / f"found-{course.rank}").write_text("\\n".join([str(len(job)), *found]))
"""


# Promise 35
def test_nothing_listens_on_one_host(tmp_path: Path) -> None:
    (tmp_path / "listening.py").write_text(LISTENING)
    options = "--steps 5 --callbacks listening.py:Sockets"
    for extra in ("", "--parallel tensor"):
        run(f"real tutti train mlp -n 2 {options} {extra}", tmp_path, ABOVE=str(os.getpid()))
        for rank in range(2):
            count, *found = (tmp_path / f"found-{rank}").read_text().splitlines()
            assert int(count) >= 3
            assert not found
            (tmp_path / f"found-{rank}").unlink()


# Promise 35
def test_a_foreign_run_folder_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "Path(__file__).with_name('it-ran').touch()\n"
        "def make(outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    run("tutti train hostile.py:make --steps 2 -n 1 --out run", tmp_path)
    (tmp_path / "it-ran").unlink()
    config = tmp_path / "run" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "seed": 7})
    )  # not as the run has written it
    for command in ("tutti evaluate run", "tutti train --config run", "tutti predict run -o p.csv"):
        said = run(command, tmp_path, code=2)
        assert "hostile.py" in said.err
        assert "--trust" in said.err
        assert not (tmp_path / "it-ran").exists()
    run("tutti evaluate run --trust", tmp_path)
    assert (tmp_path / "it-ran").exists()


# Promise 30
@pytest.mark.mpi
def test_mpirun_and_torchrun_start_the_ranks_that_tutti_starts(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = "train mlp --steps 20 --threads 1 --precision fp64"
    launchers = {
        "own": f"tutti {words} -n 2",
        "mpirun": f"mpirun -n 2 tutti {words}",
        "hosts": f"tutti {words} --hosts localhost:2",
        "torchrun": f"torchrun --standalone --nproc-per-node 2 -m tutti {words}",
    }
    for name, line in launchers.items():
        run(f"{line} --out {name}", tmp_path)
        assert summary(tmp_path / name)["world"]["ranks"] == 2
    assert len({weights_sha256(tmp_path / name) for name in launchers}) == 1


# Promises 13 and 30
@pytest.mark.mpi
def test_two_levels_of_parameter_servers_train_under_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    options = "--strategy downpour --servers 1 --levels 2 --server-period 2 --epochs 3 --out run"
    run(f"mpirun -n 3 tutti train mlp {options}", tmp_path)
    found = summary(tmp_path / "run")
    assert found["test"]["metrics"]["accuracy"] > 0.7
    assert len(history(tmp_path / "run")[-1]["ranks"]) == 2
