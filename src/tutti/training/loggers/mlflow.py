"""A run in MLflow: on the server or in the store that MLFLOW_TRACKING_URI names, else in a local data base.

    runs/mlruns/mlflow.db      the runs of all run folders in `runs`
    runs/mlruns/artifacts/     what else MLflow keeps of them
    runs/RUN/mlflow.txt        the number of the run there, which goes on when the training run does

The experiment is "tutti", or what MLFLOW_EXPERIMENT_NAME names; the run is named like the run folder.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tutti.records.files import replace_file
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import MLFLOW
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
    _has_earlier = False

    @classmethod
    def needs(cls) -> Sequence[str]:
        """Return the packages that it needs; a server of MLflow has its data base elsewhere."""
        packages = ("mlflow", "sqlalchemy", "alembic")
        return packages[:1] if os.environ.get(URI, "").startswith("http") else packages

    def begin(self, config: Json) -> None:
        """Make the run, or go on with the one that the run folder names."""
        # A training run reports to nobody unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = self._folder.path.absolute()
        local, there = None if os.environ.get(URI) else path.parent / "mlruns", set[str]()
        with _quiet():
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            client = MlflowClient(None if local is None else f"sqlite:///{local / 'mlflow.db'}")
            if (path / MLFLOW).is_file():
                self._run = (path / MLFLOW).read_text(encoding="utf-8").strip()
                client.update_run(self._run, status="RUNNING")
                self._has_earlier = True
                there = set(client.get_run(self._run).data.params)
            else:
                name = os.environ.get(EXPERIMENT, "tutti")
                found = client.get_experiment_by_name(name)
                place = None if local is None else (local / "artifacts").as_uri()
                number = client.create_experiment(name, place) if found is None else found.experiment_id
                made = client.create_run(str(number), tags={FOLDER_TAG: str(path)}, run_name=path.name)
                self._run = str(made.info.run_id)
                replace_file(path / MLFLOW, self._run.encode() + b"\n")
            # MLflow has one value of a parameter: where a run goes on with another, it has the first.
            given = hyper_parameters(config).items()
            params = [Param(name, str(value)) for name, value in given if name not in there]
            client.log_batch(self._run, params=params)
        self._client = client

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Write the figures of earlier epochs, unless the run has them."""
        if not self._has_earlier:
            super().go_on(records)

    def epoch(self, record: EpochRecord) -> None:
        """Write the figures; their step is that of the weight update."""
        self._step = record.step
        self._write(figures_of(record))

    def end(self, summary: Summary | None) -> None:
        """Write the figures of the test part, and how the run ended."""
        if summary is not None and self._run:
            self._write(evaluation_figures("test", summary.test))
        self._terminate("FAILED" if summary is None else "FINISHED")

    def stop(self) -> None:
        """Write that somebody has stopped the run."""
        self._terminate("KILLED")

    def _terminate(self, status: str) -> None:
        if self._client is not None:
            with _quiet():
                self._client.set_terminated(self._run, status)

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
