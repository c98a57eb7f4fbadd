"""Jobs: the work of a command's ranks. Needs no torch: the ranks import it.

A command derives its own job from `Job`, in a module that needs no torch either, and names in `entry` the
function that every rank calls with it:

    class VerifyJob(Job):               launching process     run(VerifyJob(config, dtype="float64"))
        entry = "...follow:work"        each rank             work(comm, pickled VerifyJob)
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from tutti.errors import BadOption
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Placement, place_ranks
from tutti.model_parallel.layout import Layout, parse_layout, ranks_of
from tutti.run.config import OBJECT, TrainConfig, flag
from tutti.run.pickled import Pickled


@dataclass(frozen=True)
class Recipe:
    """A configuration, and the Python objects behind its names."""

    config: TrainConfig
    objects: dict[str, Pickled] = field(default_factory=dict, kw_only=True)  # by field of `config`

    def given(self, field: str) -> Any:
        """Return the caller's object for a field of the configuration, or else its value."""
        value = getattr(self.config, field)
        if field in self.objects:
            try:
                return self.objects[field].load()
            except (ImportError, AttributeError) as error:
                raise BadOption(
                    f"{field} '{value}' cannot be brought to the ranks: {error}; define it in the script "
                    "itself, or in a module that can be imported from there"
                ) from error
        if isinstance(value, str) and value.startswith(OBJECT):
            raise BadOption(
                f"{field} was a Python object of a script ('{value.removeprefix(OBJECT)}'), which this "
                f"configuration cannot bring back; run that script again, name one with {flag(field)}, or "
                "give a model again: tutti.load(run, model=...)"
            )
        return value


@dataclass(frozen=True)
class Job(Recipe):
    """The work of a command's ranks."""

    entry: ClassVar[str]  # "package.module:function", which gets the communicator and the pickled job
    announced: ClassVar[bool] = True  # the plan is printed in one line, unless the job is quiet

    quiet: bool = field(default=False, kw_only=True)  # print nothing

    def placement(self) -> Placement:
        """Return the ranks to start."""
        config = self.config
        workers, free = config.workers, config.workers == "auto" and config.hosts is None
        if config.parallel is not None:
            asked = ranks_of(config.parallel)
            workers = str(asked) if free and asked is not None else workers
        elif free and (config.device == "cuda" or config.strategy == "solo"):
            workers = "1"
        placement = place_ranks(workers, config.threads, hosts=config.hosts, servers=config.servers)
        if config.parallel is not None:
            layout_of(config, placement.workers)
            return placement
        alone = workers == "auto" and placement.launcher is Launcher.ALONE
        # One batch over all workers: each needs a sample of it.
        if alone and config.strategy in ("auto", "sync") and placement.workers > config.batch_size:
            placement = place_ranks(config.batch_size, config.threads, servers=config.servers)
        if config.device == "cuda" and placement.workers > 1:
            raise BadOption(
                f"--device cuda is for one worker, not {placement.workers}; use -n 1, or --device cpu"
            )
        return placement

    def check(self, placement: Placement) -> None:
        """Refuse what this command cannot do; must not need torch."""


J = TypeVar("J", bound=Job)


def load_job(payload: bytes, kind: type[J]) -> J:
    """Return the job, of this kind, in a rank's payload."""
    job = pickle.loads(payload)
    assert isinstance(job, kind)
    return job


def layout_of(config: TrainConfig, ranks: int) -> Layout | None:
    """Return the layout of one model over the ranks that hold it together; None: each has a whole model."""
    if config.parallel is None:
        return None
    return parse_layout(config.parallel, config.parallel_options, ranks)
