"""The share of the steps of a training that failures of hosts leave."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tutti.strategies.base import Pace

HOUR_S = 3600.0


@dataclass(frozen=True)
class Failures:
    """Random, independent failures of hosts, and their cost.

    Raises:
        ValueError: `hours_between` or `checkpoint_every_s` is not above 0, or a time is below 0.
    """

    hours_between: float  # the mean between two failures of a host
    repair_s: float  # until a failed host is repaired or replaced
    checkpoint_every_s: float  # checkpoints are written while ranks train
    restart_s: float  # from a failure until ranks train again, if no host is missing

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = field.name in ("hours_between", "checkpoint_every_s")
            if not (value > 0 if positive else value >= 0):
                raise ValueError(
                    f"{field.name} is {value}; expected {'more than 0' if positive else '0 or more'}"
                )


def goodput(failures: Failures, pace: Pace, hosts: int, servers: int) -> float:
    """Return the share of useful steps, 0 to 1, in the mean of a long run.

    A failure of any host stops synchronous workers. After the restart they repeat the steps since the last
    checkpoint. With M seconds between two failures and T between two checkpoints the share is

        T / (M e^(restart / M) (e^(T / M) - 1))

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22, equation 13; a checkpoint itself takes no time here.

    Under the pace FREE all workers stop like that if a host with a server fails. Otherwise only the workers
    of the failed host stop, until it is repaired and they have restarted: M / (M + repair + restart) of their
    time is left, with M of one host. Servers are on the hosts in turn.
    """
    between_s = failures.hours_between * HOUR_S
    if pace is not Pace.FREE:
        return _of_all(failures, between_s / hosts)
    stopping = min(servers, hosts)
    available = between_s / (between_s + failures.repair_s + failures.restart_s)
    return available * (_of_all(failures, between_s / stopping) if stopping else 1.0)


def _of_all(failures: Failures, between_s: float) -> float:
    checkpoint, restart = failures.checkpoint_every_s / between_s, failures.restart_s / between_s
    if checkpoint + restart > math.log(1e300):  # no checkpoint is ever reached
        return 0.0
    return checkpoint / (math.exp(restart) * math.expm1(checkpoint))
