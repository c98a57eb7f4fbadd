"""A trained run, found by its folder or by one of its checkpoints. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadRunFolder
from tutti.records.farm_folder import FARM
from tutti.records.run_folder import CONFIG, WEIGHTS, RunFolder, TrainedOn, run_of
from tutti.run.config import TrainConfig

ELSEWHERE: Final[dict[str, Any]] = {
    "split": None,
    "predictions": False,
    "weights": None,
    "strategy": "auto",
    "strategy_options": {},
    "parallel": None,
    "parallel_options": {},
    "workers": "auto",
    "threads": None,
    "hosts": None,
    "servers": 0,
    "levels": 1,
    "server_period": None,
}
"""The fields of a run's configuration that differ when its model is used."""

UNUSED: Final = frozenset(vars(TrainConfig())) - {"model", "model_options"}
"""The fields of a run's configuration that do not affect its model."""


@dataclass(frozen=True)
class TrainedRun:
    """A run whose model is in use."""

    folder: Path
    config: TrainConfig  # of the training
    data: TrainedOn  # as the model saw them
    weights: Path  # a place for `tutti.exports.sources.read_from`


def find_run(
    place: str | Path, trust: bool = False, weights: str | None = None, replaced: Collection[str] = ()
) -> TrainedRun:
    """Find a trained run; for an unfinished one take the newest good checkpoint."""
    path = Path(place)
    if (path / FARM).is_file() and not (path / CONFIG).is_file():
        raise BadRunFolder(f"{path} is a farm, of many runs; give the folder of one of them, in {path}/jobs")
    of_run, inside = run_of(path)
    folder = RunFolder.open(of_run)
    if weights is None and inside:
        weights = str(path)
    if weights is None and not folder.has(WEIGHTS) and not folder.resumable:
        raise BadRunFolder(f"{folder.unfinished}, so it has no weights yet; {folder.next_step}")
    config = TrainConfig.read(folder.path, trust, replaced)
    return TrainedRun(folder.path, config, folder.read(TrainedOn), Path(weights or folder.path))
