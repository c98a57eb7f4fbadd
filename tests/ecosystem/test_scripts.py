"""Programs do with tutti what they do with gloo, and only the name of the backend changes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.ecosystem.jobs import mpirun, torchrun
from tests.ecosystem.outcomes import BACKENDS, assert_same_on_every_rank
from tests.mpi.mpirun import needs_mpirun

pytestmark = pytest.mark.timeout(400)

DATA_PARALLEL = (
    "plain",
    "small_buckets_that_are_the_gradients",
    "unused_parameters",
    "gradients_accumulated_without_exchange",
    "uneven_inputs",
    "halves_on_the_wire",
    "low_rank_on_the_wire",
    "callbacks_that_exchange_again",
    "sharded_optimizer",
    "objects",
)
MODEL_PARALLEL = ("mesh_in_two_dimensions", "checkpoint_of_shards")


def outcomes(
    start: Callable[..., subprocess.CompletedProcess[str]], program: str, checks: Sequence[str], folder: Path
) -> Path:
    """The folder with the outcomes of a job that ran these checks of the program with all backends."""
    done = start(program, str(folder), "+".join(BACKENDS), ",".join(checks))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> Path:
    return outcomes(torchrun, "data_parallel.py", DATA_PARALLEL, tmp_path_factory.mktemp("torchrun"))


@pytest.mark.parametrize("check", DATA_PARALLEL)
def test_data_parallel_under_torchrun(under_torchrun, check):
    assert_same_on_every_rank(under_torchrun, check)


@pytest.fixture(scope="module")
def under_mpirun(tmp_path_factory) -> Path:
    return outcomes(mpirun, "model_parallel.py", MODEL_PARALLEL, tmp_path_factory.mktemp("mpirun"))


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize("check", MODEL_PARALLEL)
def test_model_parallel_under_mpirun(under_mpirun, check):
    assert_same_on_every_rank(under_mpirun, check)
