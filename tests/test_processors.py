"""The tests that are run with the kernels of other processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processors import NUMERIC, QUICK

TREE = Path(__file__).parent.parent


@pytest.mark.parametrize("name", sorted({*NUMERIC, *QUICK}))
def test_what_is_run_with_other_kernels_exists(name: str) -> None:
    assert (TREE / name).exists()
