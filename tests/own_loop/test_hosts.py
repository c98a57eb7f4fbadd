"""Loops end as with plain torch under mpirun too, on the ranks of one host and of two."""

from __future__ import annotations

import pytest

from tests.mpi.mpirun import mpirun, needs_mpirun, results

TRIED = (
    "the_usual_loop",
    "gradients_are_never_zeroed",
    "accumulation_of_uneven_micro_batches",
    "heads_in_turn_with_adam",
    "adversaries_zeroed_by_optimizer",
    "going_back_to_a_checkpoint",
    "unfreezing",
    "clipping_by_norm",
    "hooks_on_parameters_that_scale",
    "gradients_of_each_sample",
    "a_closure",
    "a_sparse_embedding_with_adagrad",
    "noise_on_the_weights",
    "labels_that_are_ignored",
)


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_loops_end_as_with_plain_torch_under_mpirun(hosts: str) -> None:
    done = mpirun(len(hosts), "own_loops.py", hosts, *TRIED)
    found = results(done)
    assert found == [{"hosts": len(set(hosts)), "loops": {name: [] for name in TRIED}}] * len(hosts), (
        done.stderr
    )
