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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tutti.records.files import replace_file
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import MLFLOW
from tutti.registry import part
from tutti.training.loggers.base import Logger, evaluation_figures, figures_of, hyper_parameters

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

URI: Final = "MLFLOW_TRACKING_URI"
"""The environment variable with another store than a local data base."""

EXPERIMENT: Final = "MLFLOW_EXPERIMENT_NAME"
"""The environment variable with another experiment than "tutti"."""

FOLDER_TAG: Final = "tutti.run_folder"
"""The tag with the path of the run folder, which has the weights and all records."""


LOSS: Final = "train/loss"
"""The figure by which epochs that were written before are known again."""


@part("mlflow")
class MlFlow(Logger):
    """A run of MLflow, with the hyper-parameters, the figures after each epoch and those of the test part."""

    _client: MlflowClient | None = None
    _run, _step = "", 0
    _known: Mapping[int, float] = {}
    """The losses that are there already, of a run that goes on, by their step."""

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
        with _quiet():
            local = None if os.environ.get(URI) else path.parent / "mlruns"
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(None if local is None else f"sqlite:///{local / 'mlflow.db'}")
            earlier = self._earlier(path / MLFLOW)
            if earlier is None:
                tags = {FOLDER_TAG: str(path)}
                experiment = self._experiment(None if local is None else local / "artifacts")
                made = self._client.create_run(experiment, tags=tags, run_name=path.name)
                self._run = str(made.info.run_id)
                replace_file(path / MLFLOW, self._run.encode() + b"\n")
            else:
                self._run = str(earlier.info.run_id)
                self._client.update_run(self._run, status="RUNNING")
                found = self._client.get_metric_history(self._run, LOSS)
                self._known = {one.step: one.value for one in found}
            # MLflow has one value of a parameter: where a run goes on with another, it has the first.
            there = set() if earlier is None else set(earlier.data.params)
            given = hyper_parameters(config).items()
            params = [Param(name, str(value)) for name, value in given if name not in there]
            self._client.log_batch(self._run, params=params)

    def epoch(self, record: EpochRecord) -> None:
        """Write the figures, unless they are there; their step is that of the weight update."""
        self._step, figures = record.step, figures_of(record)
        if self._known.get(record.step) != figures[LOSS]:
            self._write(figures)

    def end(self, summary: Summary | None) -> None:
        """Write the figures of the test part, and how the run ended."""
        if summary is not None and self._run:
            self._write(evaluation_figures("test", summary.test))
        self._terminate("FAILED" if summary is None else "FINISHED")

    def stop(self) -> None:
        """Write that somebody has stopped the run."""
        self._terminate("KILLED")

    def _terminate(self, status: str) -> None:
        if self._client is not None and self._run:
            with _quiet():
                self._client.set_terminated(self._run, status)

    def _earlier(self, place: Path) -> Run | None:
        """Return the run of this folder that a file names; None: there is none, or it is not here any more.

        A copy of a run folder is another run.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        assert self._client is not None
        if not place.is_file():
            return None
        try:
            found = self._client.get_run(place.read_text(encoding="utf-8").strip())
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return None
        same = os.path.realpath(found.data.tags.get(FOLDER_TAG, "")) == os.path.realpath(place.parent)
        return found if same and found.info.lifecycle_stage == "active" else None

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
