"""A run in MLflow: on the server or in the store that MLFLOW_TRACKING_URI names, else in a local data base.

    runs/mlruns/mlflow.db      the runs of all run folders in `runs`
    runs/mlruns/artifacts/     what else MLflow keeps of them

The experiment is "tutti", or what MLFLOW_EXPERIMENT_NAME names; the run is named like the run folder.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Summary
from tutti.registry import part
from tutti.training.loggers.base import Logger, evaluation_figures, figures_of, hyper_parameters

if TYPE_CHECKING:
    from mlflow import MlflowClient

URI: Final = "MLFLOW_TRACKING_URI"
"""The environment variable with another store than a local data base."""

EXPERIMENT: Final = "MLFLOW_EXPERIMENT_NAME"
"""The environment variable with another experiment than "tutti"."""

FOLDER_TAG: Final = "tutti.run_folder"
"""The tag with the path of the run folder, which has the weights and all records."""


@part("mlflow")
class MlFlow(Logger):
    """A run of MLflow, with the hyper-parameters, the figures after each epoch and those of the test part."""

    _client: MlflowClient | None = None
    _run, _step = "", 0

    @classmethod
    def needs(cls) -> Sequence[str]:
        """Return the packages that it needs; a server of MLflow has its data base elsewhere."""
        packages = ("mlflow", "sqlalchemy", "alembic")
        return packages[:1] if os.environ.get(URI, "").startswith("http") else packages

    def begin(self, config: Json) -> None:
        """Make the run."""
        # A training run reports to nobody unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = self._folder.path.absolute()
        with _quiet():
            local = None if os.environ.get(URI) else path.parent / "mlruns"
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(None if local is None else f"sqlite:///{local / 'mlflow.db'}")
            tags = {FOLDER_TAG: str(path)}
            experiment = self._experiment(None if local is None else local / "artifacts")
            made = self._client.create_run(experiment, tags=tags, run_name=path.name)
            self._run = str(made.info.run_id)
            params = [Param(name, str(value)) for name, value in hyper_parameters(config).items()]
            self._client.log_batch(self._run, params=params)

    def epoch(self, record: EpochRecord) -> None:
        """Write the figures; their step is that of the weight update."""
        self._step = record.step
        self._write(figures_of(record))

    def end(self, summary: Summary | None) -> None:
        """Write the figures of the test part, and how the run ended."""
        if self._client is None or not self._run:
            return
        if summary is not None:
            self._write(evaluation_figures("test", summary.test))
        with _quiet():
            self._client.set_terminated(self._run, "FAILED" if summary is None else "FINISHED")

    def _experiment(self, artifacts: Path | None) -> str:
        """Return the number of the experiment, made if need be."""
        assert self._client is not None
        name = os.environ.get(EXPERIMENT, "tutti")
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = None if artifacts is None else artifacts.as_uri()
        return str(self._client.create_experiment(name, artifact_location=place))

    def _write(self, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        assert self._client is not None, "a logger begins first"
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, self._step) for name, value in figures.items()]
        with _quiet():
            self._client.log_batch(self._run, metrics=metrics)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's messages about its tables, and SQLAlchemy's warnings of coming removals."""
    logger = logging.getLogger("mlflow")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated")
            yield
    finally:
        logger.setLevel(before)
