"""Each loop ends on three ranks as with plain torch on one process, or is refused."""

from __future__ import annotations

import warnings

import pytest

from tests.own_loop.jobs import Refused, differences, run_plain
from tests.own_loop.loops import LOOPS
from tests.own_loop.worlds import Worlds
from tutti.errors import BadOption

REFUSED = (
    "backward_with_create_graph",
    "an_embedding_with_a_largest_norm",
    "weights_that_are_assigned",
    "batches_of_graphs",
    "batches_that_another_thread_fetches",
    "one_backward_of_all_batches",
    "a_loader_inside_another",
    "steps_inside_the_backward_pass",
)
"""Loops that are refused before the first update."""

REFUSED_LATER = (
    "a_layer_that_is_replaced",
    "a_layer_that_is_added",
    "one_backward_of_two_uneven_loaders",
    "the_next_batch_is_fetched_ahead",
)
"""Loops that are refused after updates that were right."""


@pytest.mark.parametrize("name", LOOPS)
def test_loop_ends_as_with_plain_torch(worlds: Worlds, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run_plain(LOOPS[name])
    for rank, found in enumerate(worlds.run(LOOPS[name], 3)):
        if name in REFUSED_LATER:
            assert isinstance(found, BadOption)
            continue
        if isinstance(found, BaseException):
            raise found
        if name in REFUSED:
            assert isinstance(found, Refused)
            assert found.kind == "BadOption"
        else:
            assert not isinstance(found, Refused), found.sentence
            assert differences(found, wanted, f"rank {rank}") == []
