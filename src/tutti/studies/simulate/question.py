"""The question of a simulation: ways to train, numbers of workers, and a kind of host. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final

from typing_extensions import override

from tutti.errors import BadOption, UnknownName
from tutti.launch.cores import allowed_cores
from tutti.launch.placement import Placement, place_ranks
from tutti.load_object import names_object
from tutti.parts import STRATEGIES
from tutti.records.comparison import SCALINGS, STRONG, WEAK
from tutti.run.config import OF_LONG_RUNS, TrainConfig
from tutti.run.jobs import Job
from tutti.studies.crossing import with_options
from tutti.studies.simulate.machine import Machine

REPLAYED: Final = 200
"""The default steps of each worker, if the time alone is simulated."""

DECIDED: Final = (
    *("strategy", "strategy_options", "workers", "hosts", "servers", "levels", "server_period", "parallel"),
    *("parallel_options", "threads", "device", "cuda_graph", "validate", "callbacks", "log", "out"),
    *(name for name in OF_LONG_RUNS if name not in ("weights", "skip_nonfinite")),
)
"""The options of a run that a simulation decides, or does not use."""

_FREE: Final = [one.name for one in fields(TrainConfig) if one.name not in DECIDED]


@dataclass(frozen=True)
class Way:
    """A strategy with options: fields of `TrainConfig`, or options of the strategy ("strategy.every")."""

    name: str  # in the table
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Way:
        """Parse a text such as "diloco:every=20:lr=0.1"."""
        words = text.split(":")
        name = ":".join(word for word in words if "=" not in word)
        if not names_object(name):
            STRATEGIES.check(name)
        options: dict[str, Any] = {}
        for key, equals, value in (word.partition("=") for word in words):
            key = key.replace("-", "_")
            if equals and key not in _FREE and not names_object(name):
                STRATEGIES.check_options(name, [key])
            if equals:
                options[key if key in _FREE else f"strategy.{key}"] = _value(value)
        return cls(text, name, options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class SimulateQuestion:
    """Ways to train, each with each number of workers, on one kind of host."""

    ways: Sequence[Way]
    workers: Sequence[int]
    machine: Machine
    scaling: str = WEAK  # the batch size is that of each worker; STRONG: of all workers together
    timing: bool = False  # the time alone, without gradients

    def __post_init__(self) -> None:
        if min(self.workers, default=0) < 1:
            raise BadOption(f"--workers is {self.workers}; give numbers of at least 1, such as 1,8,64")
        if self.scaling not in SCALINGS:
            raise UnknownName("value", self.scaling, SCALINGS, of="--scaling")


@dataclass(frozen=True)
class SimulateJob(Job):
    """A simulation; its configuration is shared by all ways."""

    entry: ClassVar[str] = "tutti.studies.simulate.work:work"
    announced: ClassVar[bool] = False

    question: SimulateQuestion
    calibrate: str | None = None  # the file to write this machine to

    @override
    def placement(self) -> Placement:
        # Ranks divide the rows among them. All cores are busy while the model is timed.
        question, cores = self.question, allowed_cores().usable
        rows = len(question.ways) * len(question.workers)
        timed = question.machine.flops_per_s is None
        return place_ranks(cores if timed or not rows else min(cores, rows))

    def config_of(self, way: Way, workers: int, servers: int, together: bool) -> TrainConfig:
        """Return the configuration of a simulated run, whose workers may make each update `together`."""
        config = with_options(self.config.as_json(), {**way.options, "strategy": way.strategy})
        batch, steps = config.batch_size, config.steps
        if self.question.scaling == WEAK and together:
            batch *= workers
        elif self.question.scaling == STRONG and not together:
            if batch < workers:
                raise BadOption(
                    f"a batch of {batch} samples cannot be split over {workers:,} workers; use --batch-size "
                    f"{workers} or more"
                )
            batch //= workers
        if self.question.timing and config.epochs is None:
            steps = steps or REPLAYED
        return replace(config, workers=str(workers), servers=servers, batch_size=batch, steps=steps)


@dataclass(frozen=True)
class AdviseJob(SimulateJob):
    """The choice of strategy, local steps and batch size for some hosts, by short simulated trainings."""

    entry: ClassVar[str] = "tutti.studies.simulate.advice:work"

    batch_sizes: Sequence[int] = ()  # of a worker's step, to choose from
    budget_s: float = 50.0  # seconds for the trainings
