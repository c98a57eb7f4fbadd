"""Every strategy does what strategies must do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contracts.strategy import CHECKS, NAMES
from tutti.strategies import STRATEGIES, Strategy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_virtual_ranks(check: Callable[[type[Strategy]], None], name: str) -> None:
    check(STRATEGIES[name])
