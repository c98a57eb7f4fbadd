"""A look at the samples that are to be split. Runs on a rank."""

from __future__ import annotations

from tutti import models
from tutti.comm.base import Communicator
from tutti.data import DataSet
from tutti.data.columns import Stored
from tutti.data.contents import Contents
from tutti.data.opening import SamplePool
from tutti.data.rows import Array, Rows
from tutti.data.sources import read_source
from tutti.errors import UserError
from tutti.run.build import given_data, outputs_for, seeded
from tutti.run.checks import check_recipe
from tutti.run.jobs import load_job
from tutti.run.train_job import TrainJob
from tutti.studies.cross_validation.samples_job import Samples, SamplesJob


def work(comm: Communicator, payload: bytes) -> Samples:
    """Check the candidates, and read the targets (entry point of the rank).

    Raises:
        UserError: a candidate has an option that cannot be used, or the data cannot be read.
    """
    return samples_of(load_job(payload, SamplesJob))


def samples_of(job: SamplesJob, contents: Contents[Stored[Rows], Array] | None = None) -> Samples:
    """Check the candidates, and look at the targets.

    Args:
        job: what to look at.
        contents: the data, if they have been read already.

    Raises:
        UserError: a candidate has an option that cannot be used, or the data cannot be read.
    """
    for one in job.candidates:
        check_recipe(one, job.ranks)
    if contents is None:
        with seeded(job.config.seed):
            given, options = given_data(job)
            contents = read_source(given, options)
    pool = SamplePool.outline(contents)
    for one in job.candidates:
        _refuse_unfit(one, pool.dataset)
    _, targets = contents.parts["train"]
    return Samples(
        contents.name, targets, contents.classes, contents.labels, pool.fingerprint, contents.groups
    )


def _refuse_unfit(job: TrainJob, dataset: DataSet) -> None:
    """Refuse a model with options that it does not have, or that is not for such inputs.

    Raises:
        UserError: it is.
    """
    with seeded(job.config.seed):
        try:
            models.build(job.given("model"), dataset.shape, outputs_for(dataset), job.config.model_options)
        except UserError:
            raise
        except Exception:
            # The program's own error: its jobs fail by it, with the traceback in their folders.
            return
