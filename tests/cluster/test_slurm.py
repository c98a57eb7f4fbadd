"""Training under a real Slurm: srun, batch scripts, job arrays, requeueing, scancel, a node that is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tutti
from tests.cluster import slurm as real
from tests.cluster.slurm import Slurm, wait_until
from tests.cluster.waiting_model import WAITS_FOR
from tutti.records.farm_folder import FarmFolder, JobState

_MISSING = real.why_not()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.serial,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "Slurm is here"),
]

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"
MODEL = f"{Path(__file__).with_name('waiting_model.py')}:build"
TRAINING = f"{MODEL} --data digits --epochs 2 --batch-size 500 --threads 1"
IN_THE_EXAMPLES = "cnn --data mnist --epochs 500"
TUTTI = (sys.executable, "-P", "-m", "tutti")
TWO_TASKS = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
PLACES = (
    sys.executable,
    "-P",
    "-c",
    "from tutti.launch.placement import place_ranks as p; print(p().describe())",
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as cluster:
        command = cluster.folder / "tutti"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tutti "$@"\n')
        command.chmod(0o755)
        for path in SCRIPTS.glob("*.sbatch"):
            text = path.read_text()
            assert IN_THE_EXAMPLES in text, path
            (cluster.folder / path.name).write_text(text.replace(IN_THE_EXAMPLES, TRAINING))
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the examples' training on two ranks of one host that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    tutti.train(MODEL, "digits", epochs=2, batch_size=500, workers=2, threads=1, out=str(folder), quiet=True)
    return load_file(folder / "weights.safetensors")


def same_weights(slurm: Slurm, name: str, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(slurm.folder / "runs" / name / "weights.safetensors")
    return all(torch.equal(found[key], value) for key, value in expected.items())


def said(slurm: Slurm, name: str, job: int) -> str:
    return (slurm.folder / f"{name}-{job}.txt").read_text()


def test_the_doctor_sees_the_ranks_of_both_nodes(slurm: Slurm) -> None:
    done = slurm.run(["srun", "--mpi=pmix", *TWO_TASKS, "--cpus-per-task=2", *TUTTI, "doctor", "--mpi"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2, started by srun; MPI sees 2" in done.stdout
    assert "host a" in done.stdout
    assert "host b" in done.stdout
    assert "nothing is wrong" in done.stdout


def test_a_training_whose_ranks_do_not_see_each_other_is_refused(slurm: Slurm) -> None:
    done = slurm.run(["srun", "--mpi=none", *TWO_TASKS, *TUTTI, "train", *TRAINING.split()])
    assert "srun started 2 ranks, but MPI sees 1" in done.stderr
    assert "--hosts slurm" in done.stderr
    assert "a: task 0: Exited with exit code 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_srun_in_an_allocation_of_salloc_starts_ranks(slurm: Slurm) -> None:
    placed = slurm.run(["salloc", *TWO_TASKS, "srun", *PLACES])
    assert placed.stdout.splitlines() == ["2 ranks, started by srun"] * 2, placed.stderr


def test_an_allocation_without_mpirun_is_told_of_srun(slurm: Slurm, tmp_path: Path) -> None:
    # An environment of its own, without the wheel's mpirun, over the same packages.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    # What is installed for development is not among them.
    sources = Path(tutti.__file__).parents[1]
    settings = {
        "PYTHONPATH": f"{slurm.environment.get('PYTHONPATH', '')}:{sources}:{packages}",
    }
    # Not /usr/bin either, where Debian's mpirun may be.
    without = f"PATH={python.parent}"
    words = [
        "salloc",
        "--nodes=2",
        "env",
        without,
        str(python),
        "-P",
        "-m",
        "tutti",
        "train",
        "--hosts",
        "slurm",
    ]
    done = slurm.run(words, settings)
    assert "mpirun, which is not here" in done.stderr
    assert "srun --mpi=pmix" in done.stderr


def test_srun_trains_over_two_nodes_as_one_host_does(
    slurm: Slurm, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = slurm.submit("--job-name=both", *TWO_TASKS, "train.sbatch")
    assert slurm.wait_for(job)["JobState"] == "COMPLETED", said(slurm, "both", job)
    assert "2 ranks x 1 thread, started by srun" in said(slurm, "both", job)
    assert same_weights(slurm, "both", undisturbed)


def test_mpirun_trains_on_the_nodes_of_the_allocation(
    slurm: Slurm, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = slurm.submit("--job-name=within", *TWO_TASKS, "mpirun.sbatch")
    assert slurm.wait_for(job)["JobState"] == "COMPLETED", said(slurm, "within", job)
    assert "2 ranks x 1 thread on 2 hosts (a: 1, b: 1), started by mpirun" in said(slurm, "within", job)
    assert same_weights(slurm, "within", undisturbed)


def test_a_job_array_trains_the_folds(slurm: Slurm) -> None:
    farm = slurm.folder / "farm"
    words = ["cv", "mlp", "--data", "digits", "--folds", "2", "--steps", "2", "--out", str(farm)]
    done = slurm.run([*TUTTI, *words, "--on", "slurm", "--blocks", "2", "--threads", "1"])
    assert done.returncode == 0, done.stderr
    jobs = [f"mlp/none/fold-{fold}" for fold in (0, 1)]

    def trained() -> bool:
        folder = FarmFolder.open(farm)
        return [folder.state(job) for job in jobs] == [JobState.FINISHED] * 2

    wait_until(trained, lambda: "\n".join(file.read_text() for file in farm.glob("slurm-*.txt")))


def test_scancel_leaves_nothing_on_any_node(slurm: Slurm) -> None:
    waits = f"--export=ALL,{WAITS_FOR}={slurm.folder}/cancelled"
    job = slurm.submit("--job-name=cancelled", *TWO_TASKS, waits, "train.sbatch")
    wait_until((slurm.folder / "cancelled.reached").exists, lambda: said(slurm, "cancelled", job))
    slurm.run(["scancel", str(job)])
    assert slurm.wait_for(job)["JobState"] == "CANCELLED"

    def left() -> list[str]:
        return [line for node in ("a", "b") for line in slurm.tasks_on(node) if "runs/cancelled" in line]

    wait_until(lambda: not left(), lambda: f"left: {left()}")


def test_a_job_at_the_end_of_its_time_is_queued_again_and_trains_to_the_same_weights(
    slurm: Slurm, undisturbed: dict[str, torch.Tensor]
) -> None:
    waits = f"--export=ALL,{WAITS_FOR}={slurm.folder}/told"
    options = ("--job-name=told", "--time=60", "--signal=B:USR1@600", "--cpus-per-task=2", waits)
    job = slurm.submit(*options, "one-node.sbatch", "-n", "2")
    wait_until((slurm.folder / "told.reached").exists, lambda: said(slurm, "told", job))
    # Its end is nearer now than the ten minutes of the signal, which comes within half a minute.
    slurm.run(["scontrol", "update", f"JobId={job}", "TimeLimit=8"])
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", lambda: said(slurm, "told", job))
    slurm.run(["scontrol", "update", f"JobId={job}", "TimeLimit=60"])
    assert slurm.wait_for(job)["JobState"] == "COMPLETED", said(slurm, "told", job)
    assert "saving, then stopping" in said(slurm, "told", job)
    assert same_weights(slurm, "told", undisturbed)


def test_a_job_whose_node_is_lost_is_queued_again_and_trains_to_the_same_weights(
    slurm: Slurm, undisturbed: dict[str, torch.Tensor]
) -> None:
    gone = slurm.folder / "gone"
    options = ("--job-name=lost", *TWO_TASKS, f"--export=ALL,{WAITS_FOR}={gone}")
    job = slurm.submit(*options, "train.sbatch", "--checkpoint", "1 steps")
    wait_until(Path(f"{gone}.reached").exists, lambda: said(slurm, "lost", job))
    slurm.cut_off("b")
    wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", lambda: said(slurm, "lost", job))
    assert not [line for line in slurm.tasks_on("a") if "runs/lost" in line]
    gone.touch()
    slurm.join_again("b")
    ended = slurm.wait_for(job)
    assert ended["JobState"] == "COMPLETED", said(slurm, "lost", job)
    assert same_weights(slurm, "lost", undisturbed)
