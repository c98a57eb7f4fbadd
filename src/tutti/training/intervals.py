"""Lengths of time, intervals and averages, as users write them. Needs no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from tutti.errors import BadOption

UNITS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
"""Seconds of each unit, the largest first."""

OFF: Final = "off"

AUTO: Final = "auto"
"""The default interval."""

_AUTO_S: Final = 600.0
_LENGTH: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([dhms])\s*")
_AVERAGE: Final = re.compile(r"(ema|swa):(0|0?\.[0-9]+)")
_COUNT: Final = re.compile(r"([0-9]{1,15})?\s*(step|epoch)s?")


def seconds_of(text: str, flag: str, or_else: str = "") -> float:
    """Parse a length of time, such as 3h50m, 90s or 2d, for the option `flag`.

    The error message suggests `or_else` as another value.
    """
    whole = str(text).strip()  # a caller in Python may give a number
    seconds = sum(float(number) * UNITS[unit] for number, unit in _LENGTH.findall(whole))
    if _LENGTH.sub("", whole) or not 0 < seconds < math.inf:
        such = "such as 3h50m, 90s or 2d" + (f", or {or_else}" if or_else else "")
        raise BadOption(f"{flag} is '{text}'; give a length of time above 0 with its units, {such}")
    return seconds


@dataclass(frozen=True)
class Every:
    """An interval, either of seconds of training, of steps or of epochs."""

    seconds: float | None = None
    steps: int | None = None
    epochs: int | None = None

    @classmethod
    def parse(cls, text: str, flag: str) -> Every | None:
        """Parse an interval for the option `flag`: "10m", "500 steps", "every epoch", "auto"; None: "off"."""
        given = text.strip()
        if given == OFF:
            return None
        if given == AUTO:
            return cls(seconds=_AUTO_S)
        given = given.removeprefix("every ").strip()
        counted = _COUNT.fullmatch(given)
        if counted is None and _LENGTH.match(given):
            return cls(seconds=seconds_of(given, flag))
        if counted is None:
            raise BadOption(
                f"{flag} is '{text}'; give an interval, such as 10m, '500 steps' or '1 epoch', or off"
            )
        count = int(counted[1] or 1)
        if count < 1:
            raise BadOption(f"{flag} is '{text}'; give at least '1 {counted[2]}', or off")
        return cls(steps=count) if counted[2] == "step" else cls(epochs=count)

    def is_over(self, seconds: float, steps: int, epochs: int) -> bool:
        """Return whether it is over after these seconds, steps and epochs."""
        pairs = (self.seconds, seconds), (self.steps, steps), (self.epochs, epochs)
        return any(most is not None and passed >= most for most, passed in pairs)


class Averaging(NamedTuple):
    """An average of the weights: "ema" with its decay, or "swa" with the share of the run where it starts."""

    kind: str
    number: Fraction

    @classmethod
    def parse(cls, text: str) -> Averaging:
        """Parse the value of `--average`."""
        match = _AVERAGE.fullmatch(text)
        if match is None:
            raise BadOption(
                f"--average is '{text}'; give a decay below 1, such as ema:0.999, or the share of the run at "
                "which the average begins, such as swa:0.75"
            )
        return cls(match[1], Fraction(match[2]))
