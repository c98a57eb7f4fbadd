"""Programs do with tutti what they do with gloo, and only the name of the backend changes."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.ecosystem.jobs import mpirun, python, torchrun
from tests.ecosystem.outcomes import BACKENDS, assert_same_on_every_rank
from tests.mpi.mpirun import needs_mpirun

pytestmark = pytest.mark.timeout(400)

DATA_PARALLEL = (
    "plain",
    "small_buckets_that_are_the_gradients",
    "static_graph",
    "unused_parameters",
    "gradients_accumulated_without_exchange",
    "buffers_of_rank_0",
    "uneven_inputs",
    "uneven_inputs_of_model_and_optimizer",
    "uneven_inputs_that_shall_end_training",
    "halves_on_the_wire",
    "bfloats_on_the_wire",
    "low_rank_on_the_wire",
    "local_steps",
    "a_hook_that_raises",
    "callbacks_that_exchange_again",
    "sharded_optimizer",
    "samples_by_rank",
    "objects",
)
MODEL_PARALLEL = (
    "sharded",
    "sharded_in_bfloat16",
    "sharded_saved_and_loaded_as_one_file",
    "tensor_parallel",
    "pipeline_that_fills_and_drains",
    "pipeline_one_forward_one_backward",
    "mesh_in_two_dimensions",
    "tensors_dealt_anew",
    "collectives_with_gradients",
    "checkpoint_of_shards",
    "checkpoint_beside_training",
    "checkpoint_by_another_process",
)


def outcomes(
    start: Callable[..., subprocess.CompletedProcess[str]], program: str, checks: Sequence[str], folder: Path
) -> Path:
    """The folder with the outcomes of a job that ran these checks of the program with all backends."""
    done = start(program, str(folder), "+".join(BACKENDS), ",".join(checks))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; pip install 'tutti[bench]'")


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


def test_ranks_that_the_program_spawns(tmp_path):
    check = "checkpoint_of_one_rank_read_by_all"
    assert_same_on_every_rank(outcomes(python, "spawned.py", [check], tmp_path), check)


@needs("lightning")
def test_lightning_trains_and_validates_alike(tmp_path):
    check = "train_and_validate"
    assert_same_on_every_rank(outcomes(python, "with_lightning.py", [check], tmp_path), check)


@needs("accelerate")
def test_accelerate_trains_and_gathers_alike(tmp_path):
    check = "train_and_gather"
    assert_same_on_every_rank(outcomes(torchrun, "with_accelerate.py", [check], tmp_path), check)
