"""Each loop ends as with plain torch on one process, on one, two and three ranks."""

from __future__ import annotations

import warnings

import pytest

from tests.own_loop.jobs import Outcome, Refused, differences, run_plain
from tests.own_loop.known import REFUSED, REFUSED_BY_MESSAGES, REFUSED_LATER
from tests.own_loop.loops import LOOPS
from tests.own_loop.worlds import Worlds
from tutti.errors import BadOption
from tutti.strategies import Strategy, Sync

_plain: dict[str, Outcome] = {}


def plain(name: str) -> Outcome:
    if name not in _plain:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _plain[name] = run_plain(LOOPS[name])
    return _plain[name]


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in LOOPS for size in (1, 3)])
def test_loop_ends_as_with_plain_torch(worlds: Worlds, name: str, size: int) -> None:
    _compare(worlds, name, size, Sync())


@pytest.mark.parametrize("name", LOOPS)
def test_loop_ends_as_with_plain_torch_where_gradients_go_round_a_ring(worlds: Worlds, name: str) -> None:
    """This is the only one on two ranks: they share batches out as three do, and gradients another way."""
    _compare(worlds, name, 2, Sync(collective="ring"), name in REFUSED_BY_MESSAGES)


def _compare(worlds: Worlds, name: str, size: int, strategy: Strategy, refused: bool = False) -> None:
    wanted = plain(name)
    for rank, found in enumerate(worlds.run(LOOPS[name], size, strategy)):
        if size in REFUSED_LATER.get(name, ()):
            assert isinstance(found, BadOption)
            continue
        if isinstance(found, BaseException):
            raise found
        if refused or size in REFUSED.get(name, ()):
            assert isinstance(found, Refused)
            assert found.kind == "BadOption"
        else:
            assert not isinstance(found, Refused), found.sentence
            assert differences(found, wanted, f"rank {rank}") == []
