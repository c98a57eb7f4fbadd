"""`sync` on real processes of this machine follows plain torch."""

from __future__ import annotations

from typing import cast

import pytest

from tests.strategies.entries import CASES
from tests.strategies.test_sync import TOLERANCE
from tutti.launch.placement import Placement
from tutti.launch.start import start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, 3])
def test_processes_agree_with_plain_torch_with_each_other_and_with_themselves(workers: int) -> None:
    found = cast(
        dict[str, tuple[float, bool, bool]],
        start("tests.strategies.entries:follow", b"", Placement(workers, threads=1)),
    )
    assert found.keys() == CASES.keys()
    for name, (distance, ranks_agree, runs_agree) in found.items():
        assert distance < TOLERANCE[CASES[name].dtype], name
        assert ranks_agree, name
        assert runs_agree, name
