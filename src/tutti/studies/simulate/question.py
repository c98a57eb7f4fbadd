"""What is simulated: ways to train, numbers of workers, and a kind of host. Needs no torch."""

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
"""Steps of each worker whose timing alone is simulated, when no length is given."""

DECIDED: Final = (
    *("strategy", "strategy_options", "workers", "hosts", "servers", "levels", "server_period", "parallel"),
    *("parallel_options", "threads", "device", "cuda_graph", "validate", "callbacks", "log", "out"),
    *(name for name in OF_LONG_RUNS if name not in ("weights", "skip_nonfinite")),
)
"""The options of a run that a simulation decides, or has no use for."""

_FREE: Final = [one.name for one in fields(TrainConfig) if one.name not in DECIDED]


@dataclass(frozen=True)
class Way:
    """A way to train: a strategy, with fields of a `TrainConfig`, or "strategy.every" for its own options."""

    name: str  # in the table
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Way:
        """Return the way that a text such as "diloco:every=20:lr=0.1" means.

        Raises:
            UnknownName: there is no such strategy, or it has no such option.
        """
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
    """Ways to train, each with each number of workers, on hosts of a kind.

    With "weak" scaling the batch size is that of each worker, with "strong" of all workers together. With
    `timing` there are no gradients.
    """

    ways: Sequence[Way]
    workers: Sequence[int]
    machine: Machine
    scaling: str = WEAK
    timing: bool = False

    def __post_init__(self) -> None:
        if min(self.workers, default=0) < 1:
            raise BadOption(f"--workers is {self.workers}; give numbers of at least 1, such as 1,8,64")
        if self.scaling not in SCALINGS:
            raise UnknownName("value", self.scaling, SCALINGS, of="--scaling")


@dataclass(frozen=True)
class SimulateJob(Job):
    """A simulation; its configuration is what all ways have in common."""

    entry: ClassVar[str] = "tutti.studies.simulate.work:work"
    announced: ClassVar[bool] = False

    question: SimulateQuestion
    calibrate: str | None = None  # the file of this machine, to be written

    @override
    def placement(self) -> Placement:
        # Ranks divide the rows among them. Where the model is timed, all cores are to be busy.
        question, cores = self.question, allowed_cores().usable
        rows = len(question.ways) * len(question.workers)
        timed = question.machine.flops_per_s is None
        return place_ranks(cores if timed or not rows else min(cores, rows))

    def config_of(self, way: Way, workers: int, servers: int, together: bool) -> TrainConfig:
        """Return the configuration of a simulated run; workers may make each update `together`.

        Raises:
            BadOption: the batch of all workers has no sample for each.
        """
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
    """A choice of strategy, local steps and batch size for some hosts, by short simulated trainings."""

    entry: ClassVar[str] = "tutti.studies.simulate.advice:work"

    batch_sizes: Sequence[int] = ()  # of a worker's step, to choose from
    budget_s: float = 50.0  # seconds for the trainings
