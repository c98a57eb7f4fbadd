"""The question of a simulation, and the job that answers it. Needs no torch."""

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
from tutti.run.config import DEFAULT_EPOCHS, OF_LONG_RUNS, TrainConfig
from tutti.run.jobs import Job
from tutti.studies.crossing import with_options
from tutti.studies.simulate.machine import Machine

REPLAYED: Final = 200
"""Steps of each worker whose timing alone is simulated, when no length is given."""

DECIDED: Final = (
    *("strategy", "strategy_options", "workers", "hosts", "servers", "levels", "server_period", "parallel"),
    *("parallel_options", "threads", "device", "cuda_graph", "validate", "callbacks", "log", "out", "split"),
    *(name for name in OF_LONG_RUNS if name not in ("weights", "skip_nonfinite")),
)
"""The options of a run that a simulation decides, or has no use for."""


@dataclass(frozen=True)
class Way:
    """A strategy with options of its own.

    Attributes:
        name: in the table.
        strategy: its name.
        options: fields of a `TrainConfig`; an option of the strategy is called "strategy.every".
    """

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Way:
        """Return the way that a text such as "diloco:every=20:lr=0.1" means."""
        words = text.split(":")
        given = [word for word in words if "=" in word]
        name = ":".join(word for word in words if "=" not in word)
        options: dict[str, Any] = {}
        if not names_object(name):
            STRATEGIES.check(name)
        own = () if names_object(name) else STRATEGIES.options(name)
        known = [one.name for one in fields(TrainConfig) if one.name not in DECIDED]
        for word in given:
            key, _, value = word.partition("=")
            key = key.replace("-", "_")
            if key not in (*own, *known) and not names_object(name):
                raise UnknownName("option", key, own, of=f"the strategy '{name}'")
            options[key if key in known else f"strategy.{key}"] = _value(value)
        return cls(text, name, options)


@dataclass(frozen=True)
class Question:
    """What is simulated.

    Attributes:
        ways: to train.
        workers: numbers of them, each with each way.
        machine: the hosts.
        scaling: "weak": the batch size is that of each worker; "strong": of all workers together.
        timing: simulate the time alone, without gradients.
        goal: a value of the first metric whose time is looked up; None: of none.
    """

    ways: Sequence[Way]
    workers: Sequence[int]
    machine: Machine
    scaling: str = WEAK
    timing: bool = False
    goal: float | None = None

    def __post_init__(self) -> None:
        for name, given in (("strategies", self.ways), ("workers", self.workers)):
            if not given:
                raise BadOption(f"nothing to simulate; give --{name} at least one value")
        if min(self.workers) < 1:
            raise BadOption(f"--workers has {min(self.workers)}; the smallest possible is 1")
        if self.scaling not in SCALINGS:
            raise UnknownName("value", self.scaling, SCALINGS, of="--scaling")
        if self.timing and self.goal is not None:
            raise BadOption("--goal needs real gradients; leave --timing out")


@dataclass(frozen=True)
class SimulateJob(Job):
    """A simulation; its configuration is what all ways have in common."""

    entry: ClassVar[str] = "tutti.studies.simulate.work:work"
    announced: ClassVar[bool] = False

    question: Question
    calibrate: str | None = None  # a file to write, of this machine

    @override
    def placement(self) -> Placement:
        # Each rank simulates some of the rows. To time the model here, all cores are to be busy.
        timed = self.question.machine.flops_per_s is None
        rows = len(self.question.ways) * len(self.question.workers)
        cores = allowed_cores().usable
        return place_ranks(cores if timed else min(cores, rows), self.config.threads)

    def config_of(self, way: Way, workers: int, together: bool, servers: int) -> TrainConfig:
        """Return the configuration of one simulated run."""
        config = with_options(self.config.as_json(), {**way.options, "strategy": way.strategy})
        whole = config.batch_size
        own = max(1, whole // workers) if self.question.scaling == STRONG else whole
        batch = (whole if self.question.scaling == STRONG else own * workers) if together else own
        config = replace(config, workers=str(workers), servers=servers, batch_size=batch)
        if config.epochs is None and config.steps is None:
            length = {"steps": REPLAYED} if self.question.timing else {"epochs": DEFAULT_EPOCHS}
            config = replace(config, **length)
        return config


def _value(text: str) -> Any:
    """Return the JSON value of a text, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
