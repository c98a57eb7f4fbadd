"""`sync` on real processes of this machine follows plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.comm.ranks import World
from tests.strategies.entries import CASES, follow
from tests.strategies.sequential import distance, sequential
from tests.strategies.test_sync import TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, 3])
def test_processes_agree_with_plain_torch_with_each_other_and_with_themselves(workers: int) -> None:
    with World(workers, cores=2) as processes:
        found = processes.run(follow)
    for name, case in CASES.items():
        first = found[0][name][0]
        assert distance(first, sequential(case)) < TOLERANCE[case.dtype], name
        for one in found:
            for weights in one[name]:
                assert torch.equal(weights, first), name
