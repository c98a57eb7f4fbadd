"""With one worker every strategy is plain torch, where its paper does not say otherwise."""

from __future__ import annotations

import warnings

import pytest

from tests.own_loop.jobs import Refused, differences, run_plain
from tests.own_loop.loops import LOOPS
from tests.own_loop.worlds import Worlds
from tutti.parameter_server.base import Centre
from tutti.strategies import STRATEGIES, DiLoCo, Local, Strategy, Sync

PULLED = "easgd_sync"
"""A single worker is pulled towards its centre, as its paper says."""

ALIKE: tuple[Strategy, ...] = (
    *(one() for name, one in STRATEGIES.items() if name != PULLED and Centre not in one.needs),
    Local(every=1),
    DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0),
    Sync(collective="ring"),
    Sync(reduce="adasum"),
)

TRIED = (
    "the_usual_loop",
    "gradients_are_never_zeroed",
    "accumulation_of_uneven_micro_batches",
    "clipping_by_norm",
    "adversaries_zeroed_by_optimizer",
    "unfreezing",
    "state_of_the_optimizer_is_read",
    "going_back_to_a_checkpoint",
    "a_closure",
    "a_gradient_scaler_and_one_overflow_of_a_fused_optimizer",
    "a_sparse_embedding_with_adagrad",
)


def _name(strategy: Strategy) -> str:
    changed = [
        f"{key}={value}"
        for key, value in strategy.options().items()
        if value != getattr(type(strategy)(), key)
    ]
    return "-".join([strategy.name, *changed])


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [pytest.param(one, loop, id=f"{_name(one)}-{loop}") for one in ALIKE for loop in TRIED],
)
def test_one_worker_ends_as_with_plain_torch(worlds: Worlds, strategy: Strategy, loop: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run_plain(LOOPS[loop])
    (found,) = worlds.run(LOOPS[loop], 1, strategy)
    if isinstance(found, BaseException):
        raise found
    assert not isinstance(found, Refused), found.sentence
    assert differences(found, wanted) == []
