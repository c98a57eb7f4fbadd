"""Wherever ranks die, those after them end with the right weights; `tests.run.recovery` explores more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.run.recovery import Kill, explore, explore_recovery, operations, run

KINDS = ("sync", "diloco", "hogwild")
"""One strategy of each pace."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Vectors this short are no work for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ranks", "policy", "stride"), [(2, "respawn", 17), (3, "shrink", 37), (1, "grow", 5), (2, "grow", 23)]
)
@pytest.mark.parametrize("strategy", KINDS)
def test_a_death_at_any_operation_leaves_the_right_weights(
    strategy: str, ranks: int, policy: str, stride: int
) -> None:
    assert explore(strategy, ranks, policy, stride) >= 3


@pytest.mark.parametrize(
    ("strategy", "ranks", "policy"),
    [
        *[("sync", 4, "shrink"), ("diloco", 4, "respawn"), ("hogwild", 4, "shrink")],
        *[("sync", 2, "grow"), ("diloco", 2, "grow"), ("hogwild", 2, "grow")],
    ],
)
def test_a_second_death_while_others_take_over_leaves_the_right_weights(
    strategy: str, ranks: int, policy: str
) -> None:
    first = list(operations(strategy, ranks))[-9]
    assert explore_recovery(strategy, ranks, policy, first, stride=13) >= 3


def test_the_first_copy_is_all_or_nothing() -> None:
    begun = run("sync", 2, "respawn").operations[0]
    found = {run("sync", 2, "respawn", [Kill(0, number)]).crews[1][1] for number in range(begun[1], begun[2])}
    assert found == {None, 1}
