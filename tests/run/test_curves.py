"""The picture of a run's course."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import cast

import pytest

from tutti.records.run import EpochRecord
from tutti.run.curves import curves

vl_convert = pytest.importorskip("vl_convert")


@pytest.mark.parametrize(("epochs", "ticks"), [(1, ["1"]), (3, ["1", "2", "3"]), (20, [*"02468", "10"])])
def test_the_axis_of_epochs_has_each_number_once(epochs: int, ticks: list[str]) -> None:
    history = [
        cast(
            "EpochRecord",
            SimpleNamespace(epoch=epoch, train=SimpleNamespace(loss=0.5, metrics={}), validation=None),
        )
        for epoch in range(1, epochs + 1)
    ]
    svg = vl_convert.vegalite_to_svg(curves(history).to_dict())
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", svg.partition(">epoch<")[0])
    assert [*dict.fromkeys(shown)][: len(ticks)] == ticks
    assert epochs == 1 or len(shown) == len({*shown})
