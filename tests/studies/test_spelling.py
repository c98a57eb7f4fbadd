"""Messages of the commands over many runs, as a caller in Python reads them."""

from __future__ import annotations

import pytest

from tutti.studies.spelling import CV, TUNE, spelled


@pytest.mark.parametrize(
    ("options", "message", "wanted"),
    [
        (TUNE, "give --folds 3 or the like", "give folds 3 or the like"),
        (TUNE, "--pruner asha compares epochs", "pruner asha compares epochs"),
        (TUNE, "--space.lr is a range; give --space FILE", "space['lr'] is a range; give space FILE"),
        (TUNE, "give --space.model.hidden 64", "give space['model.hidden'] 64"),
        (TUNE, "the same command with --resume", "the same command with resume=True"),
        (CV, "--folds is 5; leave --stratified out", "cv is 5; leave the stratified splitter out"),
        (CV, "give --block 2, or --blocks 1", "give workers 2, or blocks 1"),
        (CV, "--foldsx --block-size a--folds", "--foldsx --block-size a--folds"),
    ],
)
def test_options_are_spelled_as_arguments(options: dict[str, str], message: str, wanted: str) -> None:
    assert spelled(message, options) == wanted
