"""The faults, and the script by which they follow each other. No torch."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tutti.errors import BadOption, UnknownName

KILL: Final = "kill"
KILL_FIRST: Final = "kill-first"
KILL_TWO: Final = "kill-two"
KILL_AGAIN: Final = "kill-again"
STOP: Final = "stop"
SLOW: Final = "slow"
ADD: Final = "add"
REMOVE: Final = "remove"
FULL_DISK: Final = "full-disk"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        about: what is done.
        losses: how often the run has to go on without a rank.
        victims: how many ranks are lost by it.
        least: the fewest ranks that it takes.
        asked: it comes only if its name was given.
    """

    about: str
    losses: int = 1
    victims: int = 1
    least: int = 1
    asked: bool = False


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        KILL: Kind("a rank is killed (SIGKILL)"),
        KILL_FIRST: Kind("rank 0 is killed"),
        KILL_TWO: Kind("two ranks are killed at the same time", victims=2, least=2),
        KILL_AGAIN: Kind(
            "a rank is killed, and one of the new ranks before its first step", losses=2, victims=2
        ),
        STOP: Kind("a rank is stopped (SIGSTOP), for --hang-timeout to find"),
        SLOW: Kind("a rank runs for a quarter of the time, for 2 s", losses=0, victims=0),
        ADD: Kind(
            "one more rank is asked for (tutti resize), up to two more than at first",
            losses=0,
            victims=0,
            asked=True,
        ),
        REMOVE: Kind("one rank fewer is asked for", losses=0, victims=0, least=2, asked=True),
        FULL_DISK: Kind(
            "the ranks can write no file for 2 s, by a limit on their size (RLIMIT_FSIZE): no disk is filled",
            losses=0,
            victims=0,
            asked=True,
        ),
    }
)
"""The kinds of faults by their names."""

USUAL: Final = tuple(name for name, kind in KINDS.items() if not kind.asked)
"""The kinds that come if none are named."""


@dataclass(frozen=True)
class Moment:
    """A line of the script.

    Attributes:
        pause_s: seconds of undisturbed training before it.
        kind: of the fault.
        draw: a number in [0, 1) that chooses the rank.
    """

    pause_s: float
    kind: str
    draw: float


def check_kinds(names: Collection[str]) -> None:
    """Refuse what is no kind of fault.

    Raises:
        BadOption: there is no name.
        UnknownName: a name is none.
    """
    if not names:
        raise BadOption(f"--events names no fault; leave it out, or name some of: {', '.join(KINDS)}")
    for name in names:
        if name not in KINDS:
            raise UnknownName("fault", name, KINDS, of="--events")


def moments(seed: int, every_s: float, kinds: Collection[str]) -> Iterator[Moment]:
    """Yield the lines of the script, without end if there are kinds; they depend on the arguments alone.

    Args:
        seed: of the random numbers.
        every_s: the mean of the pauses, which are between half and one and a half of it.
        kinds: the kinds, each as likely as the others.
    """
    chance, names = random.Random(seed), sorted(kinds)
    while names:
        yield Moment(chance.uniform(0.5, 1.5) * every_s, chance.choice(names), chance.random())
