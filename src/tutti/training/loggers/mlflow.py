"""A run in MLflow: on the server or in the store of MLFLOW_TRACKING_URI, else in a local database.

    runs/mlruns/mlflow.db      the runs of all run folders in `runs`
    runs/mlruns/artifacts/     MLflow's artifacts
    runs/RUN/mlflow.txt        the id of the run there; a resumed run continues it

The experiment is MLFLOW_EXPERIMENT_NAME, or "tutti"; the run is named like the run folder.
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
from tutti.training.loggers import Logger, evaluation_figures, figures_of, hyper_parameters

if TYPE_CHECKING:
    from mlflow import MlflowClient

URI: Final = "MLFLOW_TRACKING_URI"

FOLDER_TAG: Final = "tutti.run_folder"
"""The tag with the path of the run folder."""


@part("mlflow")
class MlFlow(Logger):
    """A run of MLflow, with the hyper-parameters, the figures after each epoch and those of the test part."""

    _client: MlflowClient
    _run, _step = "", 0
    _has_earlier = False

    @classmethod
    def needs(cls) -> Sequence[str]:
        """Return the packages that it needs; with a server only mlflow itself."""
        packages = ("mlflow", "sqlalchemy", "alembic")
        return packages[:1] if os.environ.get(URI, "").startswith("http") else packages

    def begin(self, config: Json) -> None:
        """Create the run, or continue the one that the run folder names."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = self._folder.path.absolute()
        local, known = None if os.environ.get(URI) else path.parent / "mlruns", set[str]()
        with _quiet():
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            client = MlflowClient(None if local is None else f"sqlite:///{local / 'mlflow.db'}")
            if (path / MLFLOW).is_file():
                self._run = (path / MLFLOW).read_text(encoding="utf-8").strip()
                client.update_run(self._run, status="RUNNING")
                self._has_earlier = True
                known = set(client.get_run(self._run).data.params)
            else:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tutti")
                experiment = client.get_experiment_by_name(name)
                place = None if local is None else (local / "artifacts").as_uri()
                number = (
                    client.create_experiment(name, place) if experiment is None else experiment.experiment_id
                )
                made = client.create_run(str(number), tags={FOLDER_TAG: str(path)}, run_name=path.name)
                self._run = str(made.info.run_id)
                replace_file(path / MLFLOW, self._run.encode() + b"\n")
            # MLflow refuses a second value of a parameter.
            given = hyper_parameters(config).items()
            params = [Param(name, str(value)) for name, value in given if name not in known]
            client.log_batch(self._run, params=params)
        self._client = client

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Write the figures of earlier epochs, unless the run has them."""
        if not self._has_earlier:
            super().go_on(records)

    def epoch(self, record: EpochRecord) -> None:
        """Write the figures at the step of the weight update."""
        self._step = record.step
        self._write(figures_of(record))

    def end(self, summary: Summary | None) -> None:
        """Write the figures of the test part, and the run's final status."""
        if summary is not None:
            self._write(evaluation_figures("test", summary.test))
        self._terminate("FAILED" if summary is None else "FINISHED")

    def stop(self) -> None:
        """Mark the run as stopped."""
        self._terminate("KILLED")

    def _terminate(self, status: str) -> None:
        if self._run:
            with _quiet():
                self._client.set_terminated(self._run, status)

    def _write(self, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, self._step) for name, value in figures.items()]
        with _quiet():
            self._client.log_batch(self._run, metrics=metrics)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's messages about its tables, and SQLAlchemy's deprecation warnings."""
    logger = logging.getLogger("mlflow")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated")
            yield
    finally:
        logger.setLevel(before)
