"""What the strategies' options are where nobody gives them: what their pages and sources say."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from tutti.strategies import STRATEGIES

DEFAULTS: dict[str, dict[str, object]] = {
    "adpsgd": {"graph": "all", "every": 1, "seed": 0},
    "diloco": {"every": 20, "outer_lr": 0.7, "outer_momentum": 0.9},
    "downpour": {
        "push_every": 1,
        "pull_every": 1,
        "side": "centre",
        "staleness": "none",
        "strength": None,
        "decay": 0.95,
    },
    "easgd": {"every": 10, "force": 0.9},
    "easgd_sync": {"every": 10, "force": 0.9},
    "gem": {"momentum": 0.9, "amplification": 1.0, "least": 0.0, "most": 5.0},
    "gossip": {"graph": "ring", "every": 1},
    "hogwild": {},
    "lazy": {"slack": 3, "threshold": 0.0, "memory": 10},
    "local": {"every": 8, "after": 0},
    "paramserver": {"quorum": 1.0},
    "solo": {},
    "sync": {
        "every": 1,
        "collective": "native",
        "reduce": "mean",
        "compress": "none",
        "keep": 0.01,
        "rank": 2,
        "compress_inside": False,
    },
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_that_nobody_gives(name: str) -> None:
    assert name in DEFAULTS, f"add a row for '{name}' to DEFAULTS"
    assert asdict(STRATEGIES[name]()) == DEFAULTS[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_option_says_what_it_is(name: str) -> None:
    for option in fields(STRATEGIES[name]):
        assert option.metadata["help"], option.name
