"""Which batches the workers of a strategy get, and when they are evaluated."""

from __future__ import annotations

from tutti.comm.base import Communicator
from tutti.data import Batches, Part, Queue
from tutti.errors import BadOption
from tutti.parameter_server.base import Centre
from tutti.run.config import TrainConfig
from tutti.strategies import STRATEGIES, Strategy
from tutti.strategies.base import Pace
from tutti.training.balance import SpeedBalance

WORKERS = {
    Pace.TOGETHER: "make each update together, from one batch",
    Pace.ABREAST: "have batches of their own and make every step at the same time",
    Pace.FREE: "have batches of their own and wait for nobody",
}
"""What the workers of a strategy do, in words."""

FITTING = {
    "balance": {"speed": Pace.TOGETHER, "queue": Pace.FREE},
    "validate": {"distributed": Pace.FREE, "background": Pace.FREE},
}
"""Which pace the values of an option need; others fit any."""

REMEDIES = {
    "balance": {
        Pace.TOGETHER: "--balance speed",
        Pace.ABREAST: "--balance none",
        Pace.FREE: "--balance queue",
    },
    "validate": dict.fromkeys(Pace, "--validate pause"),
}
"""What fits a pace."""


def check_pace(config: TrainConfig, strategy: Strategy) -> None:
    """Refuse a way to deal batches or to validate that the strategy's workers cannot use.

    Raises:
        BadOption: the message names what fits.
    """
    for option, fitting in FITTING.items():
        value = getattr(config, option)
        needed = fitting.get(value, strategy.pace)
        if needed is not strategy.pace:
            fit = ", ".join(sorted(name for name, kind in STRATEGIES.items() if kind.pace is needed))
            given = f"'{strategy.name}'" if config.parallel is None else f"--parallel {config.parallel}"
            other = ", or such a strategy" if config.parallel is None else ""
            raise BadOption(
                f"--{option} {value} is for strategies whose workers {WORKERS[needed]} ({fit}), but those of "
                f"{given} {WORKERS[strategy.pace]}; use {REMEDIES[option][strategy.pace]}{other}"
            )


def check_device(config: TrainConfig, strategy: Strategy) -> None:
    """Refuse a strategy whose workers reach each other's weights in the CPU's memory alone.

    Raises:
        BadOption: the device is another.
    """
    if config.device != "cpu" and Centre in strategy.needs:
        raise BadOption(
            f"strategy '{strategy.name}' keeps its centre in the CPU's memory, and --device is "
            f"'{config.device}'; use --strategy solo there, or --device cpu"
        )


def deal(
    config: TrainConfig, strategy: Strategy, part: Part, comm: Communicator
) -> tuple[Batches | Queue, SpeedBalance | None]:
    """The batches of this rank, and what keeps them balanced, as the configuration says (collective)."""
    own = strategy.pace is not Pace.TOGETHER
    size = config.batch_size
    batches = Batches(part, size, comm.rank, comm.size, strategy.passes, config.seed, own=own)
    if config.balance == "queue":
        return Queue(batches, comm.counter().add), None
    return batches, SpeedBalance(batches, comm) if config.balance == "speed" else None
