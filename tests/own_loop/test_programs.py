"""Programs drawn at random end as with plain torch, on one, two and three ranks.

`TUTTI_PROGRAMS=1000` tries so many, others each time; by default a few are tried, always the same.
"""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.own_loop.jobs import Refused, differences, run_plain
from tests.own_loop.known import BROKEN_PARTS
from tests.own_loop.programs import Program, programs
from tests.own_loop.worlds import Worlds

WANTED = int(os.environ.get("TUTTI_PROGRAMS", "0"))

_settings = settings(
    max_examples=WANTED or 40,
    derandomize=not WANTED,
    database=None,
    deadline=None,
    print_blob=False,
    phases=[Phase.generate, Phase.shrink] if WANTED else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0 if WANTED else 120)
@_settings
@given(program=programs(without=BROKEN_PARTS))
def test_programs_end_as_with_plain_torch(worlds: Worlds, program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run_plain(program.run)
    for size in (1, 2, 3):
        for rank, found in enumerate(worlds.run(program.run, size)):
            if isinstance(found, BaseException):
                raise found
            assert not isinstance(found, Refused), found.sentence
            assert differences(found, wanted, f"rank {rank} of {size}") == []
