"""The recorded communication of workers."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.errors import BadOption
from tutti.strategies import named
from tutti.strategies.gossip import links
from tutti.strategies.noloco import partner_of
from tutti.studies.simulate.pattern import CommPattern
from tutti.studies.simulate.peers import partners

MODEL = 1_000_000
"""The parameters of a model, of 4 bytes each."""


def pattern(name: str, servers: int = 0, **options: Any) -> CommPattern:
    return CommPattern(named(name)(**options), "sgd", MODEL, servers)


@pytest.mark.parametrize(
    ("name", "options", "rph", "expected"),
    [
        ("sync", {}, 2, ["barrier host 0", "all_reduce lane 2000000", "barrier host 0"]),
        ("sync", {"collective": "mpi"}, 1, ["all_reduce all 4000000", "barrier host 0"]),
        ("sync", {"compress": "bf16"}, 1, ["barrier host 0", "all_gather lane 20000000", "barrier host 0"]),
        ("local", {"every": 1}, 2, ["all_reduce all 4000000"]),
        ("diloco", {"every": 1, "compress": "e3m0"}, 1, ["all_gather all 5078125"]),
        ("gossip", {}, 1, ["exchange all 4000000"]),
        ("noloco", {"every": 1}, 1, ["exchange all 8000000"]),
    ],
)
def test_bytes_are_those_of_the_model(
    name: str, options: dict[str, Any], rph: int, expected: list[str]
) -> None:
    (step,) = pattern(name, **options).steps([rph] * 10, 100).repeated
    assert [f"{one.kind} {one.group} {one.nbytes:.0f}" for one in step.operations] == expected


def test_steps_repeat_after_the_first_ones() -> None:
    steps = pattern("local", every=4, after=2).steps([1] * 4, 100)
    meets = [bool(steps[number].operations) for number in range(18)]
    assert meets == [True, True, *[False, False, False, True] * 4]


def test_requests_go_to_each_server() -> None:
    steps = pattern("easgd", servers=2, every=3).steps([1] * 4, 9)
    kinds = [(one.kind, one.peer) for one in steps[3].operations]
    assert kinds == [(kind, peer) for kind in ("send", "recv") for peer in (0, 1) for _ in range(2)]
    assert [steps[number].operations for number in (4, 5)] == [(), ()]
    sent = sum(one.nbytes for one in steps[3].operations if one.kind == "send")
    assert sent == pytest.approx(4 * MODEL, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "servers", "options"),
    [
        ("adpsgd", 0, {}),
        ("lazy", 1, {}),
        ("paramserver", 1, {}),
        ("sync", 0, {"compress": "power_sgd"}),
        ("sync", 0, {"collective": "ring"}),
        ("local", 0, {"inside": "sync"}),
    ],
)
def test_communication_that_depends_on_data_or_time_is_refused(
    name: str, servers: int, options: dict[str, Any]
) -> None:
    with pytest.raises(BadOption, match="with real gradients"):
        pattern(name, servers, **options).steps([2, 2], 1)


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("graph", ["ring", "exponential", "shift_one", "noloco"])
def test_partners_are_those_of_the_strategies(graph: str, size: int) -> None:
    strategy = named("noloco")(seed=4) if graph == "noloco" else named("gossip")(graph=graph)
    for turn in range(3):
        found = partners(strategy, size, turn)
        for rank in range(size):
            other = partner_of(rank, size, turn + 1, 4)
            pair = [] if other is None else [(other, other)]
            expected = pair if graph == "noloco" else links(graph, rank, size, turn)
            assert [(to[rank], to.index(rank)) for to in found if to[rank] >= 0] == expected
