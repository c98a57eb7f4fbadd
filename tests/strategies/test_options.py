"""Values that hyper-parameters of strategies may not have."""

from __future__ import annotations

import math

import pytest

from tutti.errors import BadOption
from tutti.strategies import EASGD, DiLoCo, Local


@pytest.mark.parametrize("value", [0, True, 2.0, "2", None])
def test_a_count_is_a_whole_number_from_its_least(value: object) -> None:
    with pytest.raises(BadOption, match="'every'"):
        Local(every=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, math.inf, False, "0.5", None])
def test_a_share_is_a_number_between_its_bounds(value: object) -> None:
    with pytest.raises(BadOption, match="'momentum'"):
        EASGD(momentum=value)  # type: ignore[arg-type]


def test_a_refusal_names_an_upper_bound_where_there_is_one() -> None:
    with pytest.raises(BadOption, match=r"a number above 0$"):
        DiLoCo(outer_lr=-1.0)
    with pytest.raises(BadOption, match=r"a number from 0 to below 1$"):
        DiLoCo(outer_momentum=1.0)
